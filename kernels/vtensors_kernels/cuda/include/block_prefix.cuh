#pragma once
// Sums over the threads before one, of a warp and of a block of 1024 threads. Integers: no order changes a result.

template <typename T>
struct Prefix {
  T before, all;  // of the threads before this one; of all
};

template <typename T>
__device__ __forceinline__ Prefix<T> prefix_of_warp(T value) {
  const int lane = threadIdx.x % 32;
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  return {sum - value, __shfl_sync(~0u, sum, 31)};
}

// of_warps: [32] in shared memory, free to be written when all threads have come.
template <typename T>
__device__ __forceinline__ Prefix<T> prefix_of_block(T value, T* of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Prefix<T> own = prefix_of_warp(value);
  __syncthreads();
  if (lane == 0) of_warps[warp] = own.all;
  __syncthreads();
  const Prefix<T> warps = prefix_of_warp(of_warps[lane]);
  return {__shfl_sync(~0u, warps.before, warp) + own.before, warps.all};
}
