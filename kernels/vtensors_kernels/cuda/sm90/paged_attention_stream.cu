// One new token of each sequence, as paged_attention_decode, over a cache of 16 bits that bulk copies bring.
//
// The arguments, the sums and their bits are paged_attention_decode's. What differs is who does what: each warp of a
// block takes whole splits, blockIdx.x + gridDim.x * warp, + gridDim.x * kWarps, ..., all 64 tokens and all of D. Tiles
// of 16 tokens come through a ring of its own (attention_tiles.cuh), so that keys of the next page are on their way
// while values of this one are added up, and no warp waits for another after the queries have been prepared. A lane
// has all dimensions of its heads: more registers, of which the weights of a page leave some free by going through
// shared memory. An H200 gets 3.8 TB/s of a long cache so, where blocks that meet once a page get 2.7.
//
// Grid, block, alignment: as there; about as many blocks as a device takes at once are best. Shared memory: dynamic,
// Shared, which the launcher computes alike; VT_SLOTS is chosen for it. Arch: with bulk copies, sm_90 on.

#include "include/attention_block.cuh"
#include "include/attention_tiles.cuh"

static_assert(!VT_FP8, "a cache of FP8 is paged_attention_decode's");
constexpr int kScoreRow = kPageTokens + 4;  // 4 more keep the lanes of a store apart in the banks

// Shared memory of a block.
struct Shared {
  Rings<kWarps> rings;
  alignas(16) unsigned short queries[kHeads * kDim];       // as query_place says
  alignas(16) unsigned char fresh[2][kRowBytes];           // the new token's key and value as stored
  union {
    alignas(16) float scores[kWarps][kHeads][kScoreRow];   // of a page, then its weights as operands
    unsigned short turning[kHeads + 1][kDim];              // before: queries and the new key to be turned
  };
};
static_assert(sizeof(Shared) == kWarps * kSlots * (kSlotBytes + 8) + 2 * kHeads * kDim + 2 * kRowBytes +
                                    4 * kWarps * kHeads * kScoreRow,
              "the launcher's shared_bytes");

extern "C" __global__ __launch_bounds__(kThreads, 2) void paged_attention_stream(
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
  Ring ring(shared.rings, warp, lane);
  NewToken fresh(q_gain, k_gain, warp, lane);
  wait_for_predecessors();

  // What is read is on its way before any of it is used, so that few loads wait for others: the page is the warp's
  // first wherever splits have one, and all of its number lie in the table.
  const int position = positions[row];
  int split = blockIdx.x + gridDim.x * warp;
  const int likely = pages[min(split, most_splits - 1)];
  fresh.load(own_q, q_head, block.own, k + row * k_stride + block.kv_head * kDim,
             v + row * v_stride + block.kv_head * kDim);
  const Splits splits = splits_of(position + 1, fine);
  if (blockIdx.x >= splits.count) return;

  // The pages of this warp's splits, in order: `page` is before splits.all_pages while there are any.
  int page = split * splits.pages;
  const auto page_number = [&](int at) { return at < splits.all_pages ? pages[at] : 0; };
  // Begins to copy a tile of page `at`, if the sequence has that page; of its tokens the new one is not in the cache.
  const auto fill = [&](unsigned slot, int number, int at, int tile) {
    if (at >= splits.all_pages) return;
    const bool of_keys = tile < kPageTiles;
    const int first = kTileTokens * (tile % kPageTiles);
    const long long token = (static_cast<long long>(number) * kv_heads + block.kv_head) * kPageTokens + first;
    ring.fill(slot, (of_keys ? k_pages : v_pages) + token * kRowBytes, of_keys,
              max(0, min(kTileTokens, position - at * kPageTokens - first)));
  };
  int number = page == split ? likely : page_number(page);
#pragma unroll 1
  for (int s = 0; s < kSlots; ++s) fill(s, number, page, s);

  const Turn turn(cos_sin + static_cast<long long>(position) * rotary, rotary, kDim, lane);
  const bool has_new = fresh.makes_new && blockIdx.x == (splits.count - 1) % gridDim.x;
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
  Running<kValueWarps> running;
  running.reset();
  const auto advanced = [&](int at, int& of_split) {
    if (++at == min((of_split + 1) * splits.pages, splits.all_pages)) {
      of_split += gridDim.x * kWarps;
      at = of_split * splits.pages;
    }
    return at;
  };
  int next_split = split, next = advanced(page, next_split), next_number = page_number(next);
  float(&scores)[kHeads][kScoreRow] = shared.scores[warp];
  uint4* const operands = reinterpret_cast<uint4*>(&scores[0][0]) + lane;
  // The tile has been read: its slot takes the one that is kSlots further on, maybe of the next page. Lanes meet here
  // between their operands of one page and the scores of the next, which lie there too.
  const auto passed = [&](int tile) {
    __syncwarp();
    const bool later = tile + kSlots >= kTiles;
    fill(ring.slot, later ? next_number : number, later ? next : page, (tile + kSlots) % kTiles);
    ring.pass();
  };
  while (page < splits.all_pages) {
    const int place = position - page * kPageTokens;  // of the new token, if the page has it; old ones before it
#pragma unroll
    for (int j = 0; j < kPageTiles; ++j) {
      const int before = place - kTileTokens * j;
      Keys keys;
      ring.wait();
      ring.load(keys, g, c);
      passed(j);
      if (before >= 0 && before < kTileTokens) replace_key(keys, before, shared.fresh[0], g, c);
      float made[4];
      keys.scores(made, shared.queries + 8 * lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[2 * c + i % 2][kTileTokens * j + key_token(g, i / 2)] =
            key_token(g, i / 2) > before ? __uint_as_float(0xff800000u) : made[i];
    }
    __syncwarp();
    float weights[kPageTiles][4];
#pragma unroll
    for (int j = 0; j < kPageTiles; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 both = *reinterpret_cast<const float2*>(&scores[g][kTileTokens * j + Values::token(2 * i, c)]);
        weights[j][2 * i] = both.x, weights[j][2 * i + 1] = both.y;
      }
    __syncwarp();
    weigh(running, weights, factor, c);
#pragma unroll
    for (int j = 0; j < kPageTiles; ++j) {
      unsigned upper[2], lower[2];
      as_operands(weights[j], upper, lower);
      operands[32 * j] = make_uint4(upper[0], upper[1], lower[0], lower[1]);  // this lane's own
    }
#pragma unroll
    for (int j = 0; j < kPageTiles; ++j) {
      const int before = place - kTileTokens * j;
      Values values[kValueWarps];
      ring.wait();
      ring.load(values, g, c);
      passed(kPageTiles + j);
      if (before < 0) continue;
      if (before < kTileTokens) end_values(values, before, shared.fresh[1], g, c);
      const uint4 both = operands[32 * j];
      const unsigned upper[2] = {both.x, both.y}, lower[2] = {both.z, both.w};
#pragma unroll
      for (int w = 0; w < kValueWarps; ++w) values[w].add(running.sums[w], upper, lower);
    }
    if (next_split != split) {
      results.put(running, split, splits.count, 0, g, c);
      running.reset();
    }
    page = next, split = next_split, number = next_number;
    next = advanced(page, next_split);
    next_number = page_number(next);
  }
}
