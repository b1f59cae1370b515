// The pairs of every expert side by side, in order, and the items that experts_linear_* computes: a counting sort
// without atomics, the same at every launch.
//
// grouped[0] = number of items; grouped[4 + 4 i ..] = expert, first place, count (up to tile_tokens), 0 of item i, in
// order of experts; grouped[4 + 4 bound + place] = pair. Pairs whose expert is none are left out.
//
// Each warp counts and places a range of pairs, 32 at a time, in a table of its own; pairs of one expert among the 32
// get their order from the mask of lanes that have it. Shapes: 1 <= experts <= kMostExperts. Grid: one block. Block:
// kThreads. Dynamic shared memory: 4 * kWarps * experts bytes. Arch: all; dependent launch from sm_90 on.

#include "include/ptx.cuh"

constexpr int kThreads = 1024, kWarps = kThreads / 32, kMostExperts = 1024;
static_assert(kMostExperts <= kThreads, "a thread has an expert");

// The sum over all threads before this one, and the sum over all.
__device__ __forceinline__ int sum_before(int value, int& total, int* of_warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) of_warps[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) {
    before += i < warp ? of_warps[i] : 0;
    total += of_warps[i];
  }
  __syncthreads();
  return before + inclusive - value;
}

extern "C" __global__ __launch_bounds__(kThreads) void experts_group(
    const int* chosen,          // [pairs]; as ptx.cuh says of what earlier kernels write
    int* __restrict__ grouped,  // [4 + 4 * bound + pairs]
    int pairs, int experts,
    int tile_tokens,            // most pairs of an item
    int bound)                  // places for items
{
  extern __shared__ int counts[];  // [kWarps, experts]
  __shared__ int of_warps[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) counts[i] = 0;
  wait_for_predecessors();
  __syncthreads();

  // A warp's range is whole groups of 32.
  const int each = (pairs + 32 * kWarps - 1) / (32 * kWarps) * 32;
  const int begin = min(pairs, warp * each), end = min(pairs, begin + each);
  int* own = counts + warp * experts;
  for (int at = begin; at < end; at += 32) {
    int expert = at + lane < end ? chosen[at + lane] : -1;
    if (expert >= experts) expert = -1;
    const unsigned same = __match_any_sync(~0u, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) own[expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

  // Counts become places: of the expert's pairs of all warps before.
  const int expert = threadIdx.x;
  int count = 0;
  if (expert < experts)
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      const int here = counts[w * experts + expert];
      counts[w * experts + expert] = count;
      count += here;
    }
  int all, items;
  const int first = sum_before(count, all, of_warps);
  const int own_items = (count + tile_tokens - 1) / tile_tokens;
  const int first_item = sum_before(own_items, items, of_warps);
  if (expert < experts) {
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) counts[w * experts + expert] += first;
    for (int i = 0; i < own_items; ++i) {
      int* item = grouped + 4 + 4 * (first_item + i);
      item[0] = expert;
      item[1] = first + i * tile_tokens;
      item[2] = min(tile_tokens, count - i * tile_tokens);
      item[3] = 0;
    }
  }
  if (threadIdx.x == 0) grouped[0] = items;
  __syncthreads();

  int* order = grouped + 4 + 4 * bound;
  for (int at = begin; at < end; at += 32) {
    int expert_here = at + lane < end ? chosen[at + lane] : -1;
    if (expert_here >= experts) expert_here = -1;
    const unsigned same = __match_any_sync(~0u, expert_here);
    const int before = __popc(same & ((1u << lane) - 1u));
    if (expert_here >= 0) order[own[expert_here] + before] = at + lane;
    __syncwarp();
    if (expert_here >= 0 && lane == __ffs(same) - 1) own[expert_here] += __popc(same);
    __syncwarp();
  }
}
