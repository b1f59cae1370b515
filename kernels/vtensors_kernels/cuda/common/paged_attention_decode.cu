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
// nothing else. paged_attention_stream does the same where bulk copies bring a cache of 16 bits, and its sums are these
// bit for bit. A sequence of one split is finished here, the sums of others by paged_attention_combine. A row's bits
// depend on its own tokens and their number alone.
//
// Tokens beyond `positions[b]` are never read. A padding row has position 0 and page 0, which nothing else uses.
// Shapes: heads / kv_heads any integer, rotary even, <= D. Grid: x splits at a time, y kv_heads * ceil(heads /
// kv_heads / kHeads), z B. Block: kThreads. Shared memory: dynamic, Shared, which the launcher computes alike. Arch:
// all; dependent launch from sm_90 on. Alignment: pages, `parts` and `tops` 16 bytes.

#include "include/attention_block.cuh"

static_assert(kWarps == kPageTokens / 16, "a warp makes the scores of 16 tokens of a page");
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
  const BlockHeads block(heads, kv_heads);
  const long long row = blockIdx.z, row_head = row * heads + block.first;
  const unsigned short* own_q = q + row * q_stride + static_cast<long long>(block.first) * q_head;
  const int* pages = page_table + row * table_stride;

  launch_dependents();
  NewToken fresh(q_gain, k_gain, warp, lane);
  wait_for_predecessors();

  // What is read is on its way before any of it is used, so that few loads wait for others: the page is the block's
  // first wherever splits have one, and all of its number lie in the table.
  const int position = positions[row];
  const int likely = pages[min(static_cast<int>(blockIdx.x), most_splits - 1)];
  fresh.load(own_q, q_head, block.own, k + row * k_stride + block.kv_head * kDim,
             v + row * v_stride + block.kv_head * kDim);
  const Splits splits = splits_of(position + 1, fine);
  if (blockIdx.x >= splits.count) return;

  // The pages of this block's splits, in order: `page` is before splits.all_pages while there are any.
  int split = blockIdx.x, page = split * splits.pages;
  const auto page_number = [&](int at) { return at < splits.all_pages ? pages[at] : 0; };
  const unsigned of_keys = kept(warp * 16 * kRowBytes + Keys::offset(g, c));
  const unsigned of_values = kept(Values::offset(warp, g, c));
  const auto own_of = [&](const unsigned char* all, int number, unsigned offset) {
    return all + (static_cast<long long>(number) * kv_heads + block.kv_head) * (kPageTokens * kRowBytes) + offset;
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
  const bool has_new = fresh.makes_new && blockIdx.x == of_last;
  const int newest = has_new ? pages[splits.all_pages - 1] : 0;

  fresh.prepare(turn, shared.turning, q_gain != nullptr, k_gain != nullptr, eps, has_new);
  fresh.put_queries(shared.queries, block.own);
  if (has_new) {
    const long long at =
        ((static_cast<long long>(newest) * kv_heads + block.kv_head) * kPageTokens + position % kPageTokens) * kDim;
    fresh.put_new(reinterpret_cast<Stored*>(shared.fresh[fresh.is_key ? 0 : 1]),
                  reinterpret_cast<Stored*>(fresh.is_key ? k_pages : v_pages) + at, block.tile == 0,
                  fresh.is_key ? k_scale : v_scale);
  }
  __syncthreads();

  const Results results{own_q, out + row_head * kDim, parts + row_head * most_splits * kDim,
                        tops + row_head * most_splits * 2, block.own, q_head, most_splits, factor, v_scale};
  Running<1> running;
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
        values.add(running.sums[0], upper, lower);
      }
    copy_values(number, next);

    if (next_split != split) {
      results.put(running, split, splits.count, warp, g, c);
      running.reset();
    }
    page = next, split = next_split;
    next = advanced(page, next_split);
    number = page_number(next);
  }
}
