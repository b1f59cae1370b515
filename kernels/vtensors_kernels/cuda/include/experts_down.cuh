#pragma once
// The kernel experts_down_*: a token's output from its experts' activations, for the format of weights that the source
// has included (weights_*.cuh) and under the name VT_FUNCTION.
//
//   out[t] = sum_s weight[t, s] * (W[chosen[t, s]] @ act[t * top + s])  (+ weight * W[experts] @ act[M * top + t] of a
//            shared expert, or + weight * shared[t])  (+ residual[t])
// in float32, slot after slot, rounded once: bit for bit what experts_linear_* and experts_finish give.
//
// It is launched behind the experts_linear_* that writes act and launches its dependents after its own wait: so all
// else is there before this kernel's wait, and the first weights are on their way when act comes.
//
// Shapes: N a multiple of 16, K of 8; top + 1 <= kMostSlots; tiles_per_block <= kThreads / 16. Grid: x
// ceil(N / 16 / tiles_per_block), y M. Block: kThreads. Dynamic shared memory: slots * (2 * K + 64 * tiles_per_block *
// (1 + kSegments)) bytes. act 16-byte aligned. Arch: sm_80 and newer.

#include "include/experts_stream.cuh"

#include "include/experts_combine.cuh"
#include "include/staged_copies_ptx.cuh"

constexpr int kMostSlots = 16;
static_assert(kTokenTiles == 1, "one token");

#ifndef VT_BLOCKS_PER_SM
#define VT_BLOCKS_PER_SM 2
#endif

// A row tile of the block and a slot of the token: a unit of the warps. Those of a tile come one after the other.
struct TileSlot {
  int tile, slot, slots;
  __device__ __forceinline__ TileSlot(int turn, int of_tile) : tile(0), slot(turn), slots(of_tile) { wrap(); }
  __device__ __forceinline__ void advance() {
    slot += kUnits;
    wrap();
  }
  __device__ __forceinline__ void wrap() {
    while (slot >= slots) {
      slot -= slots;
      ++tile;
    }
  }
};

extern "C" __global__ __launch_bounds__(kThreads, VT_BLOCKS_PER_SM) void VT_FUNCTION(
    const unsigned char* __restrict__ blocks,  // [all experts' row tiles, ceil(K / 128), kBlockBytes]
    const float* __restrict__ row_scale,       // [16 * all experts' row tiles]
    const unsigned short* act,                 // [pairs, K] bf16 or f16; as ptx.cuh says of what kernels write
    const int* chosen,                         // [M, top]; read early, like all that follow
    const float* weights,                      // [M, top]
    const unsigned short* gate,                // [M] logits of the shared expert's weight, gate_stride apart, or null
    const unsigned short* shared,              // [M, N] or null
    const unsigned short* residual,            // [M, N] or null
    unsigned short* __restrict__ out,          // [M, N]
    long long gate_stride,
    int m, int top,
    int experts,                               // without the shared one
    int slots,                                 // top, or top + 1 with a shared expert among the matrices
    int n, int k,
    int tiles_per_block)
{
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float slot_weights[kMostSlots + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int first_tile = blockIdx.x * tiles_per_block, token = blockIdx.y, tiles = n / kTileRows;
  const int own_tiles = min(tiles_per_block, tiles - first_tile);
  const int segment = warp % kSegments, turn = warp / kSegments;
  const Columns columns(k, segment);
  unsigned short* acts = reinterpret_cast<unsigned short*>(memory);              // [slots, K]
  float* scales = reinterpret_cast<float*>(acts + slots * k);                    // [tiles, slots, 16]
  float* sums = scales + tiles_per_block * slots * kTileRows;                    // [tiles, slots, kSegments, 16]
  launch_dependents();

  // Lane s has the expert of slot s.
  int mine = experts;
  if (lane < top) mine = load_early(chosen + token * top + lane);
  if (lane < top && (mine < 0 || mine >= experts)) mine = 0;
  TileSlot fetched(turn, slots), multiplied = fetched;
  const auto block_of = [&](const TileSlot& at) {
    const long long expert = __shfl_sync(~0u, mine, at.slot);
    return blocks + ((expert * tiles + first_tile + at.tile) * columns.steps + columns.first) * kBlockBytes;
  };
  const auto activations_of = [&](const TileSlot& at) {
    return acts + at.slot * k + columns.first * kStepColumns + 32 * c;
  };

  // This thread's row of the output, and what goes into it besides.
  const int row = first_tile * kTileRows + threadIdx.x;
  const bool has_row = threadIdx.x < own_tiles * kTileRows;
  const long long to = static_cast<long long>(token) * n + row;
  float besides = 0.f, before = 0.f;
  const auto start = [&] {
    // Four lanes copy the scales of a slot's row tile.
    for (int i = 8 * warp; i < own_tiles * slots; i += 8 * kWarps) {
      const int unit = min(i + g, own_tiles * slots - 1), tile = unit / slots;
      const long long expert = __shfl_sync(~0u, mine, unit - tile * slots);
      const float* from = row_scale + (expert * tiles + first_tile + tile) * kTileRows;
      if (unit == i + g) copy_or_zero<16>(shared_address(scales + unit * kTileRows + 4 * c), from + 4 * c, true);
    }
    commit_copies();
    const unsigned short* own_gate = gate == nullptr ? nullptr : gate + token * gate_stride;
    if (threadIdx.x <= top)
      slot_weights[threadIdx.x] = slot_weight(weights, chosen, own_gate, token, threadIdx.x, top, experts);
    if (has_row && shared != nullptr) besides = widen(load_early(shared + to));
    if (has_row && residual != nullptr) before = widen(load_early(residual + to));

    wait_for_predecessors();
    for (int slot = warp; slot < slots; slot += kWarps) {
      const int pair = slot < top ? token * top + slot : m * top + token;
      const unsigned short* from = act + static_cast<long long>(pair) * k;
      for (int at = 8 * lane; at < k; at += 8 * 32)
        copy_or_zero<16>(shared_address(acts + slot * k + at), from + at, true);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  };
  multiply_units(
      (own_tiles * slots - turn + kUnits - 1) / kUnits, columns, lane, [&] { return block_of(fetched); },
      [&](int, const unsigned char*) {
        fetched.advance();
        return block_of(fetched) + 16 * lane;
      },
      start, [&](const unsigned short*(&at)[1]) { at[0] = activations_of(multiplied); },
      [&](int, const unsigned short*(&at)[1]) {
        multiplied.advance();
        at[0] = activations_of(multiplied);
      },
      [&](int i, const Sums& found) {
        // All columns are the same token.
        float* own = sums + ((turn + i * kUnits) * kSegments + segment) * kTileRows;
        if (c == 0) {
          own[g] = found[0][0][0] + found[1][0][0];
          own[g + 8] = found[0][0][2] + found[1][0][2];
        }
      });
  __syncthreads();
  if (!has_row) return;

  const int first = threadIdx.x / kTileRows * slots, own_row = threadIdx.x % kTileRows;
  float sum = 0.f;
#pragma unroll 4
  for (int slot = 0; slot < slots; ++slot) {
    float parts[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) parts[s] = sums[((first + slot) * kSegments + s) * kTileRows + own_row];
    const float scaled = scaled_sum(add_segments(parts), scales[(first + slot) * kTileRows + own_row]);
    const float one = weighted(scaled, slot_weights[slot]);
    sum = slot == 0 ? one : added(sum, one);
  }
  if (shared != nullptr) sum = added(sum, weighted(besides, slot_weights[top]));
  if (residual != nullptr) sum = added(sum, before);
  out[to] = narrow(sum);
}
