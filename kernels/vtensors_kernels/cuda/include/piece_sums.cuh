#pragma once
// Sums of a product whose K is cut into pieces: four pieces one after the other make a group, the groups one after the
// other the sum. Kernels that promise the same bits share it.

constexpr int kGroup = 4;  // pieces

// The pieces of one group, or the groups, one after the other.
__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// The sum of so many pieces in groups, `stride` floats apart from `at` on.
template <int kPieces>
__device__ __forceinline__ float4 sum_of_pieces(const float* at, int stride) {
  static_assert(kPieces % kGroup == 0, "whole groups");
  float4 total;
#pragma unroll
  for (int group = 0; group < kPieces / kGroup; ++group) {
    float4 sum = *reinterpret_cast<const float4*>(at + group * kGroup * stride);
#pragma unroll
    for (int piece = 1; piece < kGroup; ++piece)
      sum = sum_of(sum, *reinterpret_cast<const float4*>(at + (group * kGroup + piece) * stride));
    total = group ? sum_of(total, sum) : sum;
  }
  return total;
}
