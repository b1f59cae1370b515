// ids[m] = the row of the largest of keys[m, :]: key = order of the value << 32 | 2^32 - 1 - row.
//
// So the largest key is the largest value, and the lowest row among equals. Shapes: any M, count >= 1.
// Grid: x M. Block: kThreads. Shared memory: static, a key a warp. Arch: all; dependent launch from sm_90 on.

#include "include/ptx.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps <= 32, "one warp reads what the warps found");

__device__ __forceinline__ unsigned long long largest_of_warp(unsigned long long key) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, key, distance);
    key = other > key ? other : key;
  }
  return key;
}

extern "C" __global__ __launch_bounds__(kThreads) void pick_largest(
    const unsigned long long* keys,  // [M, count]; as ptx.cuh says of what earlier kernels write
    long long* __restrict__ ids,     // [M]
    long long count)
{
  __shared__ unsigned long long found[kWarps];
  launch_dependents();
  wait_for_predecessors();
  const unsigned long long* own = keys + blockIdx.x * count;
  unsigned long long best = 0;
  for (long long at = threadIdx.x; at < count; at += kThreads) best = own[at] > best ? own[at] : best;
  best = largest_of_warp(best);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = largest_of_warp(threadIdx.x < kWarps ? found[threadIdx.x] : 0ull);
  if (threadIdx.x == 0) ids[blockIdx.x] = 0xffffffffll - static_cast<long long>(best & 0xffffffffull);
}
