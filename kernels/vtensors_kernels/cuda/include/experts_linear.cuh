#pragma once
// The kernel experts_linear_*: every pair's row of activations times the matrix of its expert, for the format of
// weights that the source has included (weights_*.cuh) and under the name VT_FUNCTION.
//
//   VT_EPILOGUE 0   out[pair, :] = silu(gate) * up of W[expert] @ x[token], paired rows, rounded once
//   VT_EPILOGUE 1   out[pair, :] = W[expert] @ x[pair], float32
//
// W: all experts' matrices one after the other, each of N rows, a multiple of 16 (gate and up in turns of 8). A
// pair's result is the same bits whatever other pairs there are: experts_stream.cuh says in which order it is summed.
//
// Where `grouped` is null a block is of a pair and computes all pairs of its expert if that pair is the first of them
// (up to kMostPairs pairs in all, kTileTokens at a time; a token alone has each of its experts once); else it is of an
// item that group_experts has listed. Pairs of an expert outside 0 .. experts - 1 are not computed.
// Grid: x ceil(row tiles of an expert / tiles_per_block), y `bound` (the pairs, or the most items that there may be)
// + ceil(M / kTileTokens) where there is a shared expert. Block: kThreads. Dynamic shared memory: tiles_per_block *
// (kSegments * kTokenTiles * 512 + 64) bytes. x and out 16-byte aligned. Arch: sm_80 and newer.
//
// Its dependents are launched after its own wait, so that what came before this kernel (the choice of experts above
// all) is there when they start: epilogue 1, which is a dependent of epilogue 0, asks for weights before it waits for x
// wherever a block need not look through the choice for its expert. Epilogue 0 does so for the shared expert, whose
// place is no choice.

#include "include/experts_stream.cuh"

#include "include/experts_items.cuh"
#include "include/row_values.cuh"
#include "include/staged_copies_ptx.cuh"

#ifndef VT_EPILOGUE
#define VT_EPILOGUE 0
#endif
#ifndef VT_BLOCKS_PER_SM
#define VT_BLOCKS_PER_SM 2
#endif
static_assert(VT_EPILOGUE == 0 || VT_EPILOGUE == 1, "VT_EPILOGUE is 0 or 1");
constexpr int kSegmentBytes = kTokenTiles * 512;  // of the sums of a segment of a row tile

// Compilers for newer targets spill two words of the forms of four segments where two blocks an SM are asked for.
constexpr int kBlocksPerSm = VT_ARCH >= 1000 && VT_SEGMENTS == 4 ? 1 : VT_BLOCKS_PER_SM;

extern "C" __global__ __launch_bounds__(kThreads, kBlocksPerSm) void VT_FUNCTION(
    const unsigned char* __restrict__ blocks,  // [all experts' row tiles, ceil(K / 128), kBlockBytes]
    const float* __restrict__ row_scale,       // [16 * all experts' row tiles]
    const unsigned short* x,                   // [M or pairs, K] bf16 or f16; as ptx.cuh says of what kernels write
    const int* chosen,                         // [M, top] experts; of a token alone read early (experts_early_ptx.cuh)
    const int* grouped,                        // of group_experts, read early, or null
    void* __restrict__ out,                    // [pairs, N / 2] bf16 or f16, or [pairs, N] float32
    int m, int top,
    int experts,                               // without the shared one
    int n, int k,
    int bound,                                 // blocks in y of chosen experts
    int tiles_per_block)
{
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned short lists[kWarps][kMostPairs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int index = static_cast<int>(blockIdx.y), pairs = m * top;
  const bool early = index >= bound || (VT_EPILOGUE == 1 && (grouped != nullptr || m == 1));
  const auto wait = [] {
    wait_for_predecessors();
    launch_dependents();
  };
  if (!early) wait();

  unsigned short* list = lists[warp];
  Item item;
  if (index >= bound)
    item = shared_item(index - bound, m, top, experts);
  else if (grouped != nullptr)
    item = listed_item(grouped, index, bound);
  else if (m == 1)
    item = lone_item(chosen, index);
  else
    item = found_item(chosen, index, pairs, list, lane);
  if (index < bound && (item.expert < 0 || item.expert >= experts)) {
    if (early) wait_for_predecessors();  // no kernel is complete before those that it follows
    return;
  }
  const bool is_listed = item.listed != nullptr, consecutive = index >= bound || (m == 1 && !is_listed);
  const auto pair_of = [&](int i) {
    return consecutive ? item.first + i : is_listed ? item.listed[i] : static_cast<int>(list[i]);
  };

  const int tiles = n / kTileRows, first_tile = blockIdx.x * tiles_per_block;
  const int own_tiles = min(tiles_per_block, tiles - first_tile);
  const int segment = warp % kSegments, turn = warp / kSegments;
  const Columns columns(k, segment);
  const long long expert_tile = static_cast<long long>(item.expert) * tiles + first_tile;
  const int units = (own_tiles - turn + kUnits - 1) / kUnits;
  const unsigned sums_at = shared_address(memory), scales_at = sums_at + tiles_per_block * kSegments * kSegmentBytes;
  const long long to_next = static_cast<long long>(kUnits * columns.steps - columns.length) * kBlockBytes;
  // Where this lane's sums of eight tokens go: rows g, g + 8 of tokens 2 c, 2 c + 1; four lines of two tokens further,
  // a turn is whole.
  unsigned places[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    places[j] = kept(sums_at + (turn * kSegments + segment) * kSegmentBytes + sum_offset(2 * c + j % 2, g + j / 2 * 8));

  for (int done = 0; done < item.count; done += kTileTokens) {
    const int count = min(kTileTokens, item.count - done);
    if (done > 0) __syncthreads();
    multiply_units(
        units, columns, lane,
        [&] { return blocks + ((expert_tile + turn) * columns.steps + columns.first) * kBlockBytes; },
        [&](int, const unsigned char* at) { return at + to_next; },
        [&] {
          // The block's scales of rows, sixteen a tile.
          const float* scales = row_scale + expert_tile * kTileRows;
          for (int i = threadIdx.x; i < 4 * own_tiles && done == 0; i += kThreads)
            copy_or_zero<16>(scales_at + 16 * i, scales + 4 * i, true);
          commit_copies();
          if (early) wait();
        },
        [&](const unsigned short*(&to)[kTokenTiles]) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            // A column without a token multiplies the last one again; its sums are not used.
            const int pair = pair_of(done + min(8 * t + g, count - 1));
            const int row = VT_EPILOGUE == 1 ? pair : pair >= pairs ? pair - pairs : pair / top;
            to[t] = x + static_cast<long long>(row) * k + columns.first * kStepColumns + 32 * c;
          }
        },
        [&](int, const unsigned short*(&at)[kTokenTiles]) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) at[t] -= columns.length * kStepColumns;
        },
        [&](int i, const Sums& sums) {
          const unsigned to = i * (kUnits * kSegments * kSegmentBytes);
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
            for (int j = 0; j < 4; ++j)
              store_shared_float(places[j] + to + t * 512, sums[0][t][j] + sums[1][t][j]);
        });
    wait_copies<0>();
    __syncthreads();

    // Lane 4 t + j takes rows 4 j .. of token t of eight.
    for (int task = warp; task < own_tiles * kTokenTiles; task += kWarps) {
      const int tile = task / kTokenTiles, token = task % kTokenTiles * 8 + g;
      const float4 scale = load_shared_float4(scales_at + 64 * tile + 16 * c);
      float4 parts[kSegments];
#pragma unroll
      for (int s = 0; s < kSegments; ++s)
        parts[s] = load_shared_float4(sums_at + (tile * kSegments + s) * kSegmentBytes + sum_offset(token, 4 * c));
      const float4 sum = add_tree<kSegments>(parts);
      const float y[4] = {scaled_sum(sum.x, scale.x), scaled_sum(sum.y, scale.y), scaled_sum(sum.z, scale.z),
                          scaled_sum(sum.w, scale.w)};
#if VT_EPILOGUE == 0
      float up[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) up[i] = __shfl_xor_sync(~0u, y[i], 2);
      if (token < count && c < 2) {
        unsigned short* to = static_cast<unsigned short*>(out) +
                             static_cast<long long>(pair_of(done + token)) * (n / 2) + (first_tile + tile) * 8 + 4 * c;
        *reinterpret_cast<uint2*>(to) = make_uint2(narrow_pair(swiglu(y[0], up[0]), swiglu(y[1], up[1])),
                                                   narrow_pair(swiglu(y[2], up[2]), swiglu(y[3], up[3])));
      }
#else
      if (token < count) {
        float* to = static_cast<float*>(out) + static_cast<long long>(pair_of(done + token)) * n +
                    (first_tile + tile) * kTileRows + 4 * c;
        *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
      }
#endif
    }
  }
}
