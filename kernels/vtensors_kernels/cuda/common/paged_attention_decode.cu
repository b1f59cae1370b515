// One new token of each sequence: its key and value enter the cache, its query attends to all tokens so far.
//
// out[b, h] = sum_s softmax_s(scale * q . k_s) v_s * sigmoid(gate), of query heads h that share a key-value head
// h / (heads / kv_heads); q and k are normed and turned first (attention_heads.cuh). float32 between the 16-bit operands, and one
// rounding; the weights of the softmax enter the products as two operands each, so that they lose nothing there.
//
// A block has up to kHeads query heads of one key-value head of one sequence and takes the splits of its tokens
// blockIdx.x, + gridDim.x, ... The 16 tokens 16 w .. of each page of 64 belong to warp w, straight from memory into
// registers; the warps' sums are added in order, once a split. A sequence of one split is finished here, the sums of
// others by paged_attention_combine. A row's bits depend on its own tokens and their number alone.
//
// Tokens beyond `positions[b]` are never read. A padding row has position 0 and page 0, which nothing else uses.
// Shapes: heads / kv_heads any integer, rotary even, <= D. Grid: x splits at a time, y kv_heads * ceil(heads /
// kv_heads / kHeads), z B. Block: kThreads. Shared memory: static. Arch: all; dependent launch from sm_90 on.
// Alignment: pages 16 bytes, `parts` 4.

#include "include/attention_splits.cuh"
#include "include/attention_tokens.cuh"

constexpr int kWarps = kPageTokens / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kOwnHeads = kHeads / kWarps;  // whose queries a warp prepares
constexpr int kBlocksPerSm = kDim == 256 ? 2 : kDim == 128 ? 3 : 4;
constexpr int kSumRow = 2 * kDim + 4;  // two heads side by side; 4 more keep the lanes of a store apart in the banks

static_assert(kHeads / 2 * kSumRow >= (kOwnHeads + 1) * kDim, "a warp turns its heads where its sums will be");

// Shared memory of a block.
struct Shared {
  alignas(16) unsigned short queries[kHeads * kDim];       // as query_place says
  alignas(16) unsigned char fresh[2][kRowBytes];           // the new token's key and value as stored
  alignas(16) float sums[kWarps][kHeads / 2][kSumRow];     // of a split: [D][2 heads]; before, a warp's for turning
  float tops[kWarps][kHeads], weights[kWarps][kHeads];     // the largest score, the sum of the softmax's weights
  float shrinks[kWarps][kHeads], top[kHeads], weight[kHeads];  // of merge_tops
};

// What the warp has added up: columns 2 c and 2 c + 1 are this lane's heads.
struct Running {
  float top[2], weight[2], sums[kSteps][4];  // weight: of this lane's tokens alone
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int j = 0; j < 2; ++j) top[j] = __uint_as_float(0xff800000u), weight[j] = 0.0f;
#pragma unroll
    for (int a = 0; a < kSteps; ++a)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[a][i] = 0.0f;
  }
};

// scores of tokens g and g + 8, minus infinity where there is no token -> the softmax's weights against the new top.
__device__ __forceinline__ void weigh(Running& running, float (&scores)[4], float factor) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = fmaxf(scores[j], scores[2 + j]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
    top = fmaxf(top, running.top[j]);
    const float shrink = exp2f(__fmul_rn(running.top[j] - top, factor));
    running.top[j] = top;
    scores[j] = exp2f(__fmul_rn(scores[j] - top, factor));
    scores[2 + j] = exp2f(__fmul_rn(scores[2 + j] - top, factor));
    running.weight[j] = __fmaf_rn(running.weight[j], shrink, __fadd_rn(scores[j], scores[2 + j]));
#pragma unroll
    for (int a = 0; a < kSteps; ++a) {
      running.sums[a][j] = __fmul_rn(running.sums[a][j], shrink);
      running.sums[a][2 + j] = __fmul_rn(running.sums[a][2 + j], shrink);
    }
  }
}

// The weights as operands: tokens 2 c, 2 c + 1 and 2 c + 8, 2 c + 9 of head g; rounded, and what that has lost.
__device__ __forceinline__ void as_operands(const float (&weights)[4], int g, int c, unsigned (&upper)[2],
                                            unsigned (&lower)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned pair = narrow_pair(weights[2 * i], weights[2 * i + 1]);
    const unsigned lost = narrow_pair(__fsub_rn(weights[2 * i], widen(pair & 0xffffu)),
                                      __fsub_rn(weights[2 * i + 1], widen(pair >> 16)));
    upper[i] = turned(pair, g, c);
    lower[i] = turned(lost, g, c);
  }
}

// Hands the warp's sums of a split over. factor: of the tops, to powers of two.
__device__ __forceinline__ void deliver(Shared& shared, const Running& running, float factor, int warp, int g, int c) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float weight = running.weight[j];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      weight = __fadd_rn(weight, __shfl_xor_sync(0xffffffffu, weight, distance));
    if (g == 0) {
      shared.tops[warp][2 * c + j] = __fmul_rn(running.top[j], factor);
      shared.weights[warp][2 * c + j] = weight;
    }
  }
#pragma unroll
  for (int a = 0; a < kSteps; ++a)
    *reinterpret_cast<float4*>(&shared.sums[warp][c][2 * sum_dim(a, g)]) =
        make_float4(running.sums[a][0], running.sums[a][1], running.sums[a][2], running.sums[a][3]);
}

// One head: the tops' maximum, the weights' sum, and what each warp's sums are multiplied by.
__device__ __forceinline__ void merge_tops(Shared& shared, int head) {
  float top = shared.tops[0][head], weight = 0.0f;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared.tops[w][head]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float shrink = exp2f(shared.tops[w][head] - top);
    weight = __fmaf_rn(shared.weights[w][head], shrink, weight);
    shared.shrinks[w][head] = shrink;
  }
  shared.top[head] = top;
  shared.weight[head] = weight;
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocksPerSm) void paged_attention_decode(
    const unsigned short* q,     // [B, heads * q_head] bf16 or f16; as ptx.cuh says of what earlier kernels write
    const unsigned short* k,     // [B, kv_heads * D]
    const unsigned short* v,     // [B, kv_heads * D]
    unsigned char* k_pages,      // [pages, kv_heads, 64, D] Stored
    unsigned char* v_pages,      // [pages, kv_heads, 64, D] Stored
    const int* page_table,       // [B, table_stride] page numbers
    const int* positions,        // [B] of the new token
    const float* cos_sin,        // [positions, rotary] or null
    const float* q_gain,         // [D] or null
    const float* k_gain,         // [D] or null
    unsigned short* out,         // [B, heads * D]
    float* parts,                // [B, heads, most_splits, D] sums of splits
    float* tops,                 // [B, heads, most_splits, 2] their largest score, as a power of 2, and weight
    float eps,                   // of the norms
    float factor,                // of a score, as a power of 2: scale * log2(e) * k_scale
    float k_scale, float v_scale,  // of VT_FP8
    int q_stride, int k_stride, int v_stride, int table_stride,
    int heads, int kv_heads,
    int q_head,                  // D, or 2 D: the gate lies behind each query
    int rotary,
    int fine,                    // of splits_of
    int most_splits)
{
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int shared_heads = heads / kv_heads, tiles = (shared_heads + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int first_head = kv_head * shared_heads + tile * kHeads;
  const int own_heads = min(kHeads, shared_heads - tile * kHeads);
  const long long row = blockIdx.z;
  const unsigned short* own_q = q + row * q_stride;

  launch_dependents();
  float q_gains[kMostOfLane], k_gains[kMostOfLane];
  load_gain(q_gains, q_gain, kDim, lane);
  load_gain(k_gains, warp == kWarps - 2 ? k_gain : nullptr, kDim, lane);
  wait_for_predecessors();

  // This warp's heads: two queries, of which the second may lack; and in the block that meets the new token, whose
  // key and value the last warps make. What is read is on its way before any of it is used.
  Head own[kOwnHeads], fresh;
#pragma unroll
  for (int i = 0; i < kOwnHeads; ++i)
    own[i].load(own_q + (first_head + min(warp + kWarps * i, own_heads - 1)) * static_cast<long long>(q_head), kDim, lane);
  const int position = positions[row];
  const Splits splits = splits_of(position + 1, fine);
  if (blockIdx.x >= splits.count) return;
  const int* pages = page_table + row * table_stride;

  // The pages of this block's splits, in order: `page` is before splits.all_pages while there are any.
  int split = blockIdx.x, page = split * splits.pages;
  const auto page_number = [&](int at) { return at < splits.all_pages ? pages[at] : 0; };
  const unsigned of_keys = kept(warp * 16 * kRowBytes + Keys::offset(g, c));
  const unsigned of_values = kept(warp * 16 * kRowBytes + Values::offset(g, c));
  const auto own_of = [&](const unsigned char* all, int number, unsigned offset) {
    return all + (static_cast<long long>(number) * kv_heads + kv_head) * (kPageTokens * kRowBytes) + offset;
  };
  // Old tokens among this warp's of a page: below 1 where there are none.
  const auto old_tokens = [&](int at) { return position - at * kPageTokens - warp * 16; };

  Keys keys;
  Values values;
  int number = page_number(page);
  const bool has_new = warp >= kWarps - 2 && blockIdx.x == (splits.count - 1) % gridDim.x, is_key = warp == kWarps - 2;
  const Turn turn(cos_sin + static_cast<long long>(position) * rotary, rotary, kDim, lane);
  if (has_new) fresh.load((is_key ? k + row * k_stride : v + row * v_stride) + kv_head * kDim, kDim, lane);
  keys.load(own_of(k_pages, number, of_keys), old_tokens(page), g);
  values.load(own_of(v_pages, number, of_values), old_tokens(page), c);

  if (q_gain != nullptr)
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) own[i].norm(q_gains, eps, kDim);
  if (k_gain != nullptr && has_new && is_key) fresh.norm(k_gains, eps, kDim);
  if (rotary) {
    float* stage = shared.sums[warp][0];
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) own[i].put(stage + i * kDim, kDim, lane);
    if (has_new && is_key) fresh.put(stage + kOwnHeads * kDim, kDim, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) own[i].rotate(turn, stage + i * kDim, kDim, lane);
    if (has_new && is_key) fresh.rotate(turn, stage + kOwnHeads * kDim, kDim, lane);
  }
#pragma unroll
  for (int i = 0; i < kOwnHeads; ++i) {
    const int head = warp + kWarps * i;
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j)
      shared.queries[32 * head + query_place(lane + 32 * j)] = head < own_heads ? narrow(own[i].x[j]) : 0;
  }
  if (has_new) {
    const long long at =
        ((static_cast<long long>(pages[position / kPageTokens]) * kv_heads + kv_head) * kPageTokens +
         position % kPageTokens) * kDim;
    Stored* cache = reinterpret_cast<Stored*>(is_key ? k_pages : v_pages) + at;
    Stored* to = reinterpret_cast<Stored*>(shared.fresh[is_key ? 0 : 1]);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const Stored stored = to_stored(fresh.x[i], is_key ? k_scale : v_scale);
      to[lane + 32 * i] = stored;
      if (tile == 0) cache[lane + 32 * i] = stored;
    }
  }
  __syncthreads();

  Running running;
  running.reset();
  const auto advanced = [&](int at, int& of_split) {
    if (++at == min((of_split + 1) * splits.pages, splits.all_pages)) {
      of_split += gridDim.x;
      at = of_split * splits.pages;
    }
    return at;
  };
  int next_split = split, next = advanced(page, next_split);
  number = page_number(next);
  while (page < splits.all_pages) {
    const int before = old_tokens(page);  // the place of the new token, if it is one of these 16
    const int next_tokens = next < splits.all_pages ? old_tokens(next) : 0;
    float scores[4];
    if (before >= 0) {
      if (before < 16) keys.replace(before, shared.fresh[0], g, c);
      keys.scores(scores, shared.queries + 8 * lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (g + i / 2 * 8 > before) scores[i] = __uint_as_float(0xff800000u);
    }
    keys.load(own_of(k_pages, number, of_keys), next_tokens, g);
    if (before >= 0) {
      unsigned upper[2], lower[2];
      weigh(running, scores, factor);
      as_operands(scores, g, c, upper, lower);
      if (before < 16) values.replace(before, shared.fresh[1], g, c);
      values.add(running.sums, upper, lower);
    }
    values.load(own_of(v_pages, number, of_values), next_tokens, c);

    if (next_split != split) {
      deliver(shared, running, factor, warp, g, c);
      running.reset();
      __syncthreads();
      if (threadIdx.x < kHeads) merge_tops(shared, threadIdx.x);
      __syncthreads();
      for (int item = threadIdx.x; item < kHeads / 2 * kDim; item += kThreads) {
        const int pair = item / kDim, d = item % kDim;
        if (2 * pair >= own_heads) break;
        float sum[2] = {};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float2 both = *reinterpret_cast<const float2*>(&shared.sums[w][pair][2 * d]);
          sum[0] = __fmaf_rn(both.x, shared.shrinks[w][2 * pair], sum[0]);
          sum[1] = __fmaf_rn(both.y, shared.shrinks[w][2 * pair + 1], sum[1]);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int head = first_head + 2 * pair + j;
          if (2 * pair + j >= own_heads) break;
          if (splits.count == 1) {
            float value = __fmul_rn(__fdividef(sum[j], shared.weight[2 * pair + j]), v_scale);
            if (q_head > kDim)
              value = __fmul_rn(value, sigmoid(widen(own_q[head * static_cast<long long>(q_head) + kDim + d])));
            out[(row * heads + head) * kDim + d] = narrow(value);
          } else {
            const long long at = (row * heads + head) * most_splits + split;
            parts[at * kDim + d] = sum[j];
            if (d == 0) tops[2 * at] = shared.top[2 * pair + j], tops[2 * at + 1] = shared.weight[2 * pair + j];
          }
        }
      }
      __syncthreads();
    }
    page = next, split = next_split;
    next = advanced(page, next_split);
    number = page_number(next);
  }
}
