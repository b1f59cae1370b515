#pragma once
// The kernel experts_outputs_*: up to 32 tokens' outputs from their experts' activations, for the format of weights
// that the source has included (format_*.cuh) and under the name VT_FUNCTION.
//
//   out[t] = sum_s weight[t, s] * (W[chosen[t, s]] @ act[t * top + s])  (+ weight * W[experts] @ act[M * top + t] of a
//            shared expert, or + weight * shared[t])  (+ residual[t])
// in float32, slot after slot, rounded once: bit for bit what experts_linear_* and experts_finish give.
//
// A block has row tiles of its own and reads those of every expert, so that all that a token's outputs are summed from
// is in its shared memory. A warp has a row tile of an item (experts_lists.cuh) at a time.
//
// It is launched behind the kernel that writes act, which launches its dependents after its own wait: so all else is
// there before this kernel's wait, and the first weights are on their way when act comes. What it reads of that, it
// asks for at once, before anything waits for any of it: often no block runs before the last of act is written.
//
// Shapes: m <= kMostTokens, m * top <= kMostPairs, N a multiple of 16, K of VT_STEPS column steps. Grid: ceil(N / 16 /
// tiles_per_block). Block: kThreads. Dynamic shared memory: kWarps * stages * kStageBytes + 64 * tiles_per_block * M *
// slots + 4 * M * (top + 1) bytes. act 16-byte aligned. Arch: sm_80 and newer.

#include "include/experts_pieces.cuh"

#include "include/experts_lists.cuh"
#include "include/experts_combine.cuh"

static_assert(kSplit == 1, "a warp has whole rows");
// Outputs of a thread whose other addends are read before the wait: all, of a row tile; its slots' weights.
constexpr int kAhead = (kMostTokens * kTileRows + kThreads - 1) / kThreads;
constexpr int kOwnSlots = (kMostPairs + kMostTokens + kThreads - 1) / kThreads;

// What was loaded early, widened here and not where it was loaded, which would wait there.
__device__ __forceinline__ float widen_kept(unsigned v) { return widen(static_cast<unsigned short>(kept(v))); }

extern "C" __global__ __launch_bounds__(kThreads, VT_BLOCKS_PER_SM) void VT_FUNCTION(
    const unsigned char* __restrict__ blocks,  // [all experts' row tiles, VT_STEPS, kBlockBytes]
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
    int tiles_per_block,
    int stages)                                // of a warp's ring
{
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Choice choice;
  __shared__ unsigned long long barriers[kWarps * kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  const int tiles = n / kTileRows, first_tile = blockIdx.x * tiles_per_block;
  const int own_tiles = min(tiles_per_block, tiles - first_tile);
  const bool has_shared = slots > top;
  const unsigned ring_bytes = stages * kStageBytes;
  float* sums = reinterpret_cast<float*>(memory + kWarps * ring_bytes);  // [own_tiles, pairs, 16], not yet weighted
  float* slot_weights = sums + tiles_per_block * m * slots * kTileRows;  // [M, top + 1]
  launch_dependents();

  const OwnChoices own_choices(chosen, m, top);
  float own_weights[kOwnSlots];
  unsigned own_gates[kOwnSlots];
#pragma unroll
  for (int j = 0; j < kOwnSlots; ++j) {
    const int i = threadIdx.x + j * kThreads, token = i / (top + 1), slot = i - token * (top + 1);
    if (token < m && slot < top) own_weights[j] = load_early(weights + token * top + slot);
    if (token < m && slot == top && gate != nullptr) own_gates[j] = load_early_apart(gate + token * gate_stride);
  }
  // Output i of the block: rows of its tiles side by side, token after token.
  const int width = own_tiles * kTileRows;
  const auto place_of = [&](int i) {
    const int token = i / width;
    return static_cast<long long>(token) * n + first_tile * kTileRows + i - token * width;
  };
  unsigned besides[kAhead], before[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (threadIdx.x + j * kThreads >= m * width) break;
    const long long place = place_of(threadIdx.x + j * kThreads);
    if (shared != nullptr) besides[j] = load_early_apart(shared + place);
    if (residual != nullptr) before[j] = load_early_apart(residual + place);
  }

  const unsigned own_barriers = shared_address(barriers + warp * stages);
  init_ring(own_barriers, stages, lane);
  clear_choice(choice, experts);
  __syncthreads();
  const int items = list_experts(choice, own_choices, m, experts, has_shared);

  const Piece piece(0);
  const int units = max(0, own_tiles * items - warp + kWarps - 1) / kWarps;
  // Of the items of a row tile, then of the next.
  const auto advance = [&](int& tile, int& item) {
    item += kWarps;
    while (item >= items && tile < own_tiles) {
      item -= items;
      ++tile;
    }
  };
  const auto tile_of = [&](int tile, int item) {
    return static_cast<long long>(choice.expert[item]) * tiles + first_tile + tile;
  };
  int fetched_tile = 0, fetched = warp - kWarps;  // an advance comes before each
  const auto next_piece = [&] {
    advance(fetched_tile, fetched);
    const long long place = tile_of(fetched_tile, fetched);
    return PieceAddress{blocks + place * kSteps * kBlockBytes, row_scale + place * kTileRows};
  };
  Ring<decltype(next_piece)> ring(shared_address(memory) + warp * ring_bytes, own_barriers, stages, piece, units, lane,
                                  next_piece);
  list_pairs(choice, own_choices, items, m, top, has_shared);
#pragma unroll
  for (int j = 0; j < kOwnSlots; ++j) {
    const int i = threadIdx.x + j * kThreads, token = i / (top + 1), slot = i - token * (top + 1);
    if (token >= m) break;
    if (slot < top) slot_weights[i] = known_weight(own_weights[j], choice.is_listed(token * top + slot, token));
    else slot_weights[i] = gate == nullptr ? 1.0f : gate_weight(widen_kept(own_gates[j]));
  }
  wait_for_predecessors();

  const BlockReader reader(lane);
  Activations own_x(piece, k, lane);
  int tile = 0, item = warp - kWarps;
  for (int i = 0; i < units; ++i) {
    advance(tile, item);
    const int count = choice.count[item];
    // A column without a token multiplies the last one again; its sums are not used.
    own_x.set(act + static_cast<long long>(choice.pairs[item][min(g, count - 1)]) * k, piece, lane);
    ring.wait();
    const float upper = ring.scale(g), lower = ring.scale(g + 8);
    float total[4];
    multiply_piece(total, ring, piece, reader, own_x, lane);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      if (2 * c + odd >= count) continue;
      float* to = sums + (tile * m * slots + choice.pairs[item][2 * c + odd]) * kTileRows;
      to[g] = scaled_sum(total[odd], upper);
      to[g + 8] = scaled_sum(total[2 + odd], lower);
    }
  }
  __syncthreads();

  const auto finish = [&](int i, unsigned beside, unsigned residue) {
    const int token = i / width, row = i - token * width;
    const float* own = sums + row / kTileRows * (m * slots * kTileRows) + row % kTileRows;
    const float* of_token = slot_weights + token * (top + 1);
    float sum = 0.f;
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
      const int pair = slot < top ? token * top + slot : m * top + token;
      const float one = weighted(own[pair * kTileRows], of_token[slot]);
      sum = slot == 0 ? one : added(sum, one);
    }
    if (shared != nullptr) sum = added(sum, weighted(widen_kept(beside), of_token[top]));
    if (residual != nullptr) sum = added(sum, widen_kept(residue));
    out[place_of(i)] = narrow(sum);
  };
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
    if (threadIdx.x + j * kThreads < m * width) finish(threadIdx.x + j * kThreads, besides[j], before[j]);
  for (int i = threadIdx.x + kAhead * kThreads; i < m * width; i += kThreads)
    finish(i, shared == nullptr ? 0 : load_early_apart(shared + place_of(i)),
           residual == nullptr ? 0 : load_early_apart(residual + place_of(i)));
}
