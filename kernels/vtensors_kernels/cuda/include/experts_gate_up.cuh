#pragma once
// The kernel experts_gate_up_*: the activations of up to 32 tokens' experts, for the format of weights that the source
// has included (format_*.cuh) and under the name VT_FUNCTION.
//
//   out[pair, :] = silu(gate) * up of W[expert] @ x[token], paired rows, rounded once
//
// W: all experts' matrices one after the other, each of N rows, a multiple of 16 (gate and up in turns of 8). A pair's
// result is the same bits whatever other pairs there are, and those of experts_linear_*: experts_pieces.cuh says in
// which order it is summed.
//
// The row tiles of all items (experts_lists.cuh), one after the other, are cut into as many equal ranges as there are
// blocks: every block reads as much, wherever its range begins, and its rings go on over the borders of items. kSplit
// warps share a row tile and join their sums in shared memory.
//
// Shapes: m <= kMostTokens, m * top <= kMostPairs, K of VT_STEPS column steps. Grid: any number of blocks. Block:
// kThreads. Dynamic shared memory: kWarps * (stages * kStageBytes + 1024) bytes. x and out 16-byte aligned. Arch: sm_80
// and newer. Its dependents are launched after its own wait (experts_early_ptx.cuh).

#include "include/experts_pieces.cuh"

#include "include/experts_lists.cuh"
#include "include/row_values.cuh"

constexpr int kSumBytes = 512;  // of a warp's sums of a row tile

// A row tile of an item.
struct Unit {
  int item, tile;
  __device__ __forceinline__ Unit(int index, int tiles) : item(index / tiles), tile(index - item * tiles) {}
  __device__ __forceinline__ void advance(int tiles) {
    tile += kGroups;
    while (tile >= tiles) {
      tile -= tiles;
      ++item;
    }
  }
};

extern "C" __global__ __launch_bounds__(kThreads, VT_BLOCKS_PER_SM) void VT_FUNCTION(
    const unsigned char* __restrict__ blocks,  // [all experts' row tiles, VT_STEPS, kBlockBytes]
    const float* __restrict__ row_scale,       // [16 * all experts' row tiles]
    const unsigned short* x,                   // [M, K] bf16 or f16; as ptx.cuh says of what kernels write
    const int* chosen,                         // [M, top] experts, likewise
    unsigned short* __restrict__ out,          // [pairs, N / 2] bf16 or f16
    int m, int top,
    int experts,                               // without the shared one
    int shared,                                // 1: there is one
    int n, int k,
    int stages)                                // of a warp's ring
{
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Choice choice;
  __shared__ unsigned long long barriers[kWarps * kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int group = warp / kSplit, share = warp % kSplit, tiles = n / kTileRows, pairs = m * top;
  const unsigned ring_bytes = stages * kStageBytes;
  const unsigned sums = shared_address(memory) + kWarps * ring_bytes + group * (2 * kSplit * kSumBytes);
  const unsigned own_barriers = shared_address(barriers + warp * stages);
  init_ring(own_barriers, stages, lane);
  clear_choice(choice, experts);
  __syncthreads();
  wait_for_predecessors();
  launch_dependents();
  const OwnChoices own_choices(chosen, m, top);
  const int items = list_experts(choice, own_choices, m, experts, shared != 0);

  const int all = items * tiles;
  const int first = static_cast<int>(static_cast<long long>(all) * blockIdx.x / gridDim.x) + group;
  const int last = static_cast<int>(static_cast<long long>(all) * (blockIdx.x + 1) / gridDim.x);
  const int units = max(0, last - first + kGroups - 1) / kGroups;
  const Piece piece(share);
  Unit fetched(first, tiles), multiplied = fetched;
  fetched.tile -= kGroups;  // an advance comes before each
  const auto tile_of = [&](const Unit& unit) {
    return static_cast<long long>(choice.expert[unit.item]) * tiles + unit.tile;
  };
  const auto next_piece = [&] {
    fetched.advance(tiles);
    const long long tile = tile_of(fetched);
    return PieceAddress{blocks + (tile * kSteps + piece.first) * kBlockBytes, row_scale + tile * kTileRows};
  };
  Ring<decltype(next_piece)> ring(shared_address(memory) + warp * ring_bytes, own_barriers, stages, piece, units, lane,
                                  next_piece);
  list_pairs(choice, own_choices, items, m, top, shared != 0);

  const BlockReader reader(lane);
  Activations own_x(piece, k, lane);
  int item = -1, count = 0;
  for (int i = 0; i < units; ++i, multiplied.advance(tiles)) {
    if (item != multiplied.item) {
      item = multiplied.item;
      count = choice.count[item];
      // A column without a token multiplies the last one again; its sums are not used.
      const int pair = choice.pairs[item][min(g, count - 1)];
      own_x.set(x + static_cast<long long>(pair >= pairs ? pair - pairs : pair / top) * k, piece, lane);
    }
    ring.wait();
    const int tile = multiplied.tile;
    const auto store = [&](int token, int row, float gate, float up) {
      out[static_cast<long long>(choice.pairs[item][token]) * (n / 2) + tile * 8 + row] = narrow(swiglu(gate, up));
    };
    float total[4];
    if constexpr (kSplit == 1) {
      const float upper = ring.scale(g), lower = ring.scale(g + 8);
      multiply_piece(total, ring, piece, reader, own_x, lane);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        if (2 * c + odd < count)
          store(2 * c + odd, g, scaled_sum(total[odd], upper), scaled_sum(total[2 + odd], lower));
    } else {
      const int row = lane % kTileRows;
      const float scale = ring.scale(row);
      multiply_piece(total, ring, piece, reader, own_x, lane);
      const unsigned own_sums = sums + i % 2 * (kSplit * kSumBytes), to = own_sums + share * kSumBytes;
      if (2 * c < count) {
#pragma unroll
        for (int j = 0; j < 4; ++j) store_shared_float(to + sum_offset(2 * c + j % 2, g + j / 2 * 8), total[j]);
      }
      sync_threads_of(1 + group, 32 * kSplit);
      // Two tokens a warp at a time, the warps in turn the first.
      for (int two = (share + i) % kSplit; 2 * two < count; two += kSplit) {
        const int token = 2 * two + lane / kTileRows;
        float parts[kSplit];
#pragma unroll
        for (int s = 0; s < kSplit; ++s)
          parts[s] = __uint_as_float(load_shared_32(own_sums + s * kSumBytes + sum_offset(token, row)));
#pragma unroll
        for (int width = 1; width < kSplit; width *= 2)
#pragma unroll
          for (int s = 0; s < kSplit; s += 2 * width) parts[s] = parts[s] + parts[s + width];
        const float y = scaled_sum(parts[0], scale), up = __shfl_xor_sync(~0u, y, 8);
        if (token < count && row < 8) store(token, row, y, up);
      }
    }
  }
}
