// One new token of each sequence: its key and value enter the cache, its query attends to all tokens so far.
//
// out[b, h] = sum_s softmax_s(scale * q . k_s) v_s * sigmoid(gate), of query heads h that share a key-value head
// h / (heads / kv_heads); q and k are normed and turned first (attention_heads.cuh). float32 between the 16-bit
// operands, and one rounding; the weights of the softmax enter the products as two operands each, so that they lose
// nothing there.
//
// A block has up to kHeads query heads of one key-value head of one sequence and takes the splits of its tokens
// blockIdx.x, + gridDim.x, ... A page's keys and values are on their way to shared memory while the queries are
// prepared, the next page's from where this one's have been read. Of a page of 64, a warp makes the scores of the 16
// tokens 16 w .. and adds up its own dimensions of the values of all tokens: warps exchange scores, once a page, and
// nothing else. A sequence of one split is finished here, the sums of others by paged_attention_combine. A row's bits
// depend on its own tokens and their number alone.
//
// Tokens beyond `positions[b]` are never read. A padding row has position 0 and page 0, which nothing else uses.
// Shapes: heads / kv_heads any integer, rotary even, <= D. Grid: x splits at a time, y kv_heads * ceil(heads /
// kv_heads / kHeads), z B. Block: kThreads. Shared memory: dynamic, Shared, which the launcher computes alike. Arch:
// all; dependent launch from sm_90 on. Alignment: pages, `parts` and `tops` 16 bytes.

#include "include/attention_softmax.cuh"
#include "include/attention_splits.cuh"

constexpr int kWarps = kPageTokens / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kOwnHeads = kHeads / kWarps;  // whose queries a warp prepares
constexpr int kBlocksPerSm = kRowBytes == 512 ? 3 : 4;
constexpr int kScoreRow = kPageTokens + 4;  // 4 more keep the lanes of a store apart in the banks

// Shared memory of a block.
struct Shared {
  alignas(16) unsigned char keys[kWarps][16 * kRowBytes];  // of a page, as Keys copies them
  alignas(16) unsigned char values[kPageTokens * kRowBytes];
  alignas(16) unsigned short queries[kHeads * kDim];       // as query_place says
  alignas(16) unsigned char fresh[2][kRowBytes];           // the new token's key and value as stored
  union {
    alignas(16) float scores[2][kHeads][kScoreRow];        // of a page, in turns
    unsigned short turning[kHeads + 1][kDim];              // before: queries and the new key to be turned
  };
};
static_assert(sizeof(Shared) == 130 * kRowBytes + 2 * kHeads * kDim +
                                    (18 * kDim > 8 * kHeads * kScoreRow ? 18 * kDim : 8 * kHeads * kScoreRow),
              "the launcher's shared_bytes");

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
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int shared_heads = heads / kv_heads, tiles = (shared_heads + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int first_head = kv_head * shared_heads + tile * kHeads;
  const int own_heads = min(kHeads, shared_heads - tile * kHeads);
  const long long row = blockIdx.z;
  const unsigned short* own_q = q + row * q_stride;
  const int* pages = page_table + row * table_stride;
  const bool makes_new = warp >= kWarps - 2, is_key = warp == kWarps - 2;

  launch_dependents();
  float q_gains[kMostOfLane], k_gains[kMostOfLane];
  load_gain(q_gains, q_gain, kDim, lane);
  load_gain(k_gains, is_key ? k_gain : nullptr, kDim, lane);
  wait_for_predecessors();

  // What is read is on its way before any of it is used, so that few loads wait for others: the page is the block's
  // first wherever splits have one, and all of its number lie in the table. A warp prepares two queries, of which the
  // second may lack; in the block that meets the new token the last warps make its key and value.
  const int position = positions[row];
  const int likely = pages[min(static_cast<int>(blockIdx.x), most_splits - 1)];
  Head own[kOwnHeads], fresh;
#pragma unroll
  for (int i = 0; i < kOwnHeads; ++i)
    own[i].load(own_q + static_cast<long long>(first_head + min(warp + kWarps * i, own_heads - 1)) * q_head, kDim, lane);
  if (makes_new) fresh.load((is_key ? k + row * k_stride : v + row * v_stride) + kv_head * kDim, kDim, lane);
  const Splits splits = splits_of(position + 1, fine);
  if (blockIdx.x >= splits.count) return;

  // The pages of this block's splits, in order: `page` is before splits.all_pages while there are any.
  int split = blockIdx.x, page = split * splits.pages;
  const auto page_number = [&](int at) { return at < splits.all_pages ? pages[at] : 0; };
  const unsigned of_keys = kept(warp * 16 * kRowBytes + Keys::offset(g, c));
  const unsigned of_values = kept(Values::offset(warp, g, c));
  const auto own_of = [&](const unsigned char* all, int number, unsigned offset) {
    return all + (static_cast<long long>(number) * kv_heads + kv_head) * (kPageTokens * kRowBytes) + offset;
  };
  unsigned char* key_stage = shared.keys[warp] + lane * kKeyUnit;
  unsigned char* value_stage = shared.values + (warp * 512 + lane) * kValueUnit;
  // One group of copies each, without any where the sequence has no such page.
  const auto copy_keys = [&](int number, int at) {
    if (at < splits.all_pages)
      Keys::copy(shared_address(key_stage), own_of(k_pages, number, of_keys),
                 position - at * kPageTokens - 16 * warp, g);
    commit_copies();
  };
  const auto copy_values = [&](int number, int at) {
    if (at < splits.all_pages && warp < kValueWarps)
      Values::copy(shared_address(value_stage), own_of(v_pages, number, of_values), position - at * kPageTokens, c);
    commit_copies();
  };

  int number = page == static_cast<int>(blockIdx.x) ? likely : pages[page];
  copy_keys(number, page);
  copy_values(number, page);
  const Turn turn(cos_sin + static_cast<long long>(position) * rotary, rotary, kDim, lane);
  const int last = splits.count - 1, of_last = last < gridDim.x ? last : last % gridDim.x;
  const bool has_new = makes_new && blockIdx.x == of_last;
  const int newest = has_new ? pages[splits.all_pages - 1] : 0;

  if (q_gain != nullptr)
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) own[i].norm(q_gains, eps, kDim);
  if (k_gain != nullptr && has_new && is_key) fresh.norm(k_gains, eps, kDim);
  if (rotary) {
    const auto put = [&](const Head& head, int place) {
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        if (32 * i >= rotary) break;
        shared.turning[place][lane + 32 * i] = narrow(head.x[i]);
      }
    };
    const auto rotate = [&](Head& head, int place) {
      head.rotate(turn, [&](int d) { return widen(shared.turning[place][d]); }, kDim, lane);
    };
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) put(own[i], warp + kWarps * i);
    if (has_new && is_key) put(fresh, kHeads);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) rotate(own[i], warp + kWarps * i);
    if (has_new && is_key) rotate(fresh, kHeads);
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
        ((static_cast<long long>(newest) * kv_heads + kv_head) * kPageTokens + position % kPageTokens) * kDim;
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
  for (int turns = 0; page < splits.all_pages; ++turns) {
    const int place = position - page * kPageTokens;  // of the new token, if the page has it; old ones before it
    float(&scores)[kHeads][kScoreRow] = shared.scores[turns % 2];

    wait_copies<1>();
    const int before = place - 16 * warp;
    float made[4] = {};
    if (before >= 0) {
      Keys keys;
      keys.load(key_stage);
      if (before < 16) keys.replace(before, shared.fresh[0], g, c);
      keys.scores(made, shared.queries + 8 * lane);
    }
    copy_keys(number, next);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scores[2 * c + i % 2][16 * warp + g + i / 2 * 8] =
          g + i / 2 * 8 > before ? __uint_as_float(0xff800000u) : made[i];
    // Who writes these scores again, two pages on, has met here once more, after they were read.
    __syncthreads();

    float weights[kPageTokens / 16][4];
#pragma unroll
    for (int j = 0; j < kPageTokens / 16; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 both = *reinterpret_cast<const float2*>(&scores[g][16 * j + Values::token(2 * i, c)]);
        weights[j][2 * i] = both.x, weights[j][2 * i + 1] = both.y;
      }
    weigh(running, weights, factor, c);
    wait_copies<1>();
    if (warp < kValueWarps)
#pragma unroll
      for (int j = 0; j < kPageTokens / 16; ++j) {
        if (16 * j > place) break;
        unsigned upper[2], lower[2];
        as_operands(weights[j], upper, lower);
        Values values;
        values.load(value_stage + 4 * j * 32 * kValueUnit);
        if (place < 16 * (j + 1)) values.replace(place - 16 * j, shared.fresh[1], warp, g, c);
        values.add(running.sums, upper, lower);
      }
    copy_values(number, next);

    if (next_split != split) {
      float weight = running.weight, column_weights[2];
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2)
        weight = __fadd_rn(weight, __shfl_xor_sync(0xffffffffu, weight, distance));
      of_columns(column_weights, weight, c);
      if (splits.count > 1 && warp == 0 && c == 0 && g < own_heads)
        *reinterpret_cast<float2*>(tops + 2 * ((row * heads + first_head + g) * most_splits + split)) =
            make_float2(__fmul_rn(running.top, factor), weight);
      const int first = Values::first_dim(warp, g);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * c + j >= own_heads || warp >= kValueWarps) break;
        const int head = first_head + 2 * c + j;
        if (splits.count > 1) {
          float* to = parts + ((row * heads + head) * most_splits + split) * kDim + first;
#pragma unroll
          for (int a = 0; a < kOwnSteps; ++a)
            *reinterpret_cast<float2*>(to + 2 * a) = make_float2(running.sums[a][j], running.sums[a][2 + j]);
        } else {
          const unsigned short* gates = own_q + head * static_cast<long long>(q_head) + kDim + first;
          unsigned short* to = out + (row * heads + head) * kDim + first;
#pragma unroll
          for (int d = 0; d < kUnitDims; ++d) {
            float value =
                __fmul_rn(__fdividef(running.sums[d / 2][d % 2 * 2 + j], column_weights[j]), v_scale);
            if (q_head > kDim) value = __fmul_rn(value, sigmoid(widen(gates[d])));
            to[d] = narrow(value);
          }
        }
      }
      running.reset();
    }
    page = next, split = next_split;
    next = advanced(page, next_split);
    number = page_number(next);
  }
}
