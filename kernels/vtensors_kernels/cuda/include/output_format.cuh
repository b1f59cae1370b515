#pragma once
// The 16-bit format that a widening kernel writes, chosen when it is compiled.

#ifndef VT_OUT_F16
#define VT_OUT_F16 0  // 0: bfloat16, 1: float16
#endif

#include "include/number_formats.cuh"

static_assert(VT_OUT_F16 == 0 || VT_OUT_F16 == 1, "VT_OUT_F16 is 0 or 1");

// The bits of a value that is exact in either format.
__device__ __forceinline__ unsigned encode(float value) {
  return VT_OUT_F16 ? f16_bits(value) : bf16_bits_exact(value);
}
