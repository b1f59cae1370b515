#pragma once
// The arithmetic of RMSNorm: kernels that promise the same bits share it.
//
// Sum of squares of a row: lane l of a warp takes the chunks l, l + 32, ... of eight values, in order, one rounding per
// value; the lanes' sums are added by exchanges at distances 16, 8, 4, 2, 1. So it depends on the row alone.

#include "include/sixteen_bits.cuh"

__device__ __forceinline__ void add_squares(float& sum, uint4 eight) {
  const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float even = widen(pairs[j] & 0xffffu), odd = widen(pairs[j] >> 16);
    sum = __fmaf_rn(even, even, sum);
    sum = __fmaf_rn(odd, odd, sum);
  }
}

// 1 / rms of a row from its lanes' sums, in every lane.
__device__ __forceinline__ float norm_scale(float sum, int columns, float eps) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(columns)), eps));
}

// The same of a row that the threads of a block have brought into shared memory, in all of them. found: shared.
__device__ __forceinline__ float norm_scale_of_block(const uint4* row, int columns, float eps, float& found) {
  __syncthreads();
  if (threadIdx.x < 32) {
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = threadIdx.x; chunk < columns / 8; chunk += 32) add_squares(sum, row[chunk]);
    const float scale = norm_scale(sum, columns, eps);
    if (threadIdx.x == 0) found = scale;
  }
  __syncthreads();
  return found;
}

// Two neighbours times the row's scale, then times their gains.
__device__ __forceinline__ unsigned normed_pair(unsigned pair, float scale, float gain_low, float gain_high) {
  return narrow_pair(__fmul_rn(__fmul_rn(widen(pair & 0xffffu), scale), gain_low),
                     __fmul_rn(__fmul_rn(widen(pair >> 16), scale), gain_high));
}
