#pragma once
// The largest of many values and where it is, as one unsigned number.

// A float's order in the high half, ~row in the low one: the largest key is the largest value, then the lowest row.
// No key is 0.
__device__ __forceinline__ unsigned long long key_of(float value, long long row) {
  const unsigned bits = __float_as_uint(value + 0.0f);  // -0 counts as 0
  const unsigned order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(order) << 32 | (0xffffffffu - static_cast<unsigned>(row));
}
