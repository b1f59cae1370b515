#pragma once
// Sums of the segments of rows in shared memory, and the balanced tree that joins them.

// Bytes into a segment's sums of row `row` of a token: two tokens share 128 bytes, turned so that neither the
// consumers' stores nor the reducers' loads of four rows meet in a bank.
__device__ __forceinline__ unsigned sum_offset(int token, int row) {
  const int line = token / 2;
  return line * 128 + ((token % 2 * 16 + row + 8 * line) % 32) * 4;
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The balanced tree over `count` values, a power of two.
template <int count>
__device__ __forceinline__ float4 add_tree(const float4* values) {
  if constexpr (count == 1) {
    return values[0];
  } else {
    return add(add_tree<count / 2>(values), add_tree<count / 2>(values + count / 2));
  }
}
