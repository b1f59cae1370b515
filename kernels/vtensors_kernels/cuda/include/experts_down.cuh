#pragma once
// The kernel experts_down_*: a token's output from its experts' activations, for the format of weights that the source
// has included (weights_*.cuh) and under the name VT_FUNCTION.
//
//   out[t] = sum_s weight[t, s] * (W[chosen[t, s]] @ act[t * top + s])  (+ weight * W[experts] @ act[M * top + t] of a
//            shared expert, or + weight * shared[t])  (+ residual[t])
// in float32, slot after slot, rounded once: bit for bit what experts_linear_* and experts_finish give.
//
// Shapes: N a multiple of 16; top + 1 <= kMostSlots. Grid: x N / 16, y M. Block: kThreads. Shared memory: static.
// Arch: sm_80 and newer.

#include "include/experts_stream.cuh"

#include "include/experts_combine.cuh"

constexpr int kMostSlots = 16;
static_assert(kTokenTiles == 1 && kMostSlots * kTileRows <= 2 * kThreads, "one token; two values a thread at most");

#ifndef VT_BLOCKS_PER_SM
#define VT_BLOCKS_PER_SM 2
#endif

extern "C" __global__ __launch_bounds__(kThreads, VT_BLOCKS_PER_SM) void VT_FUNCTION(
    const unsigned char* __restrict__ blocks,  // [all experts' row tiles, ceil(K / 128), kBlockBytes]
    const float* __restrict__ row_scale,       // [16 * all experts' row tiles]
    const unsigned short* act,                 // [pairs, K] bf16 or f16; as ptx.cuh says of what kernels write
    const int* chosen,                         // [M, top], likewise
    const float* weights,                      // [M, top], likewise
    const unsigned short* gate,                // [M] logits of the shared expert's weight, likewise, or null
    const unsigned short* shared,              // [M, N], likewise, or null
    const unsigned short* residual,            // [M, N], likewise, or null
    unsigned short* __restrict__ out,          // [M, N]
    int m, int top,
    int experts,                               // without the shared one
    int slots,                                 // top, or top + 1 with a shared expert among the matrices
    int n, int k)
{
  __shared__ float sums[kMostSlots][kSegments][kTileRows];
  __shared__ float values[kMostSlots][kTileRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int tile = blockIdx.x, token = blockIdx.y, tiles = n / kTileRows;
  const int segment = warp % kSegments, turn = warp / kSegments;
  const Columns columns(k, segment);
  launch_dependents();
  wait_for_predecessors();

  // Lane s has the expert of slot s.
  int mine = experts;
  if (lane < top) mine = chosen[token * top + lane];
  if (lane < top && (mine < 0 || mine >= experts)) mine = 0;
  const int units = (slots - turn + kUnits - 1) / kUnits;
  const auto block_of = [&](int i) {
    const long long expert = __shfl_sync(~0u, mine, turn + i * kUnits);
    return blocks + ((expert * tiles + tile) * columns.steps + columns.first) * kBlockBytes;
  };
  const auto row_of = [&](int i) {
    const int slot = turn + i * kUnits, pair = slot < top ? token * top + slot : m * top + token;
    return act + static_cast<long long>(pair) * k + columns.first * kStepColumns + 32 * c;
  };
  if (units > 0)
    multiply_units(
        units, columns, lane, [&] { return block_of(0); },
        [&](int i, const unsigned char*) { return block_of(i) + 16 * lane; },
        [&](const unsigned short*(&to)[1]) { to[0] = row_of(0); },
        [&](int i, const unsigned short*(&at)[1]) { at[0] = row_of(i); },
        [&](int i, const Sums& found) {
          // All columns are the same token.
          if (c == 0) {
            sums[turn + i * kUnits][segment][g] = found[0][0][0] + found[1][0][0];
            sums[turn + i * kUnits][segment][g + 8] = found[0][0][2] + found[1][0][2];
          }
        });

  // This thread's values: a row of a slot each.
  float scales[2], slot_weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = threadIdx.x + i * kThreads, slot = at / kTileRows;
    scales[i] = slot_weights[i] = 0.f;
    if (slot >= slots) continue;
    slot_weights[i] = slot_weight(weights, chosen, gate, token, slot, top, experts);
    int expert = slot < top ? chosen[token * top + slot] : experts;
    if (slot < top && (expert < 0 || expert >= experts)) expert = 0;
    scales[i] = row_scale[(static_cast<long long>(expert) * tiles + tile) * kTileRows + at % kTileRows];
  }
  const int row = tile * kTileRows + threadIdx.x;
  const long long to = static_cast<long long>(token) * n + row;
  float besides = 0.f, before = 0.f, weight = 0.f;
  if (threadIdx.x < kTileRows) {
    if (shared != nullptr) {
      besides = widen(shared[to]);
      weight = slot_weight(weights, chosen, gate, token, top, top, experts);
    }
    if (residual != nullptr) before = widen(residual[to]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = threadIdx.x + i * kThreads, slot = at / kTileRows;
    if (slot >= slots) continue;
    float parts[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) parts[s] = sums[slot][s][at % kTileRows];
    values[slot][at % kTileRows] = weighted(scaled_sum(add_segments(parts), scales[i]), slot_weights[i]);
  }
  __syncthreads();
  if (threadIdx.x >= kTileRows) return;
  float sum = values[0][threadIdx.x];
  for (int slot = 1; slot < slots; ++slot) sum = added(sum, values[slot][threadIdx.x]);
  if (shared != nullptr) sum = added(sum, weighted(besides, weight));
  if (residual != nullptr) sum = added(sum, before);
  out[to] = narrow(sum);
}
