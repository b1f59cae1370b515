#pragma once
// Conversions between number formats that have instructions of their own.

#ifndef VT_F16
#define VT_F16 0  // operands: 0 bfloat16, 1 float16
#endif
static_assert(VT_F16 == 0 || VT_F16 == 1, "VT_F16 is 0 or 1");

// E2M1 conversion: from sm_100 on, and only where compiling for one device or one family ("a", "f").
#if VT_ARCH >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define VT_HAS_E2M1 1
#else
#define VT_HAS_E2M1 0
#endif

__device__ __forceinline__ float widen_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two floats to nearest even, `low` in the low half (sm_80).
__device__ __forceinline__ unsigned narrow_f16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned narrow_bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

#if VT_HAS_E2M1
// Eight codes, the first in the low nibble, to float16 pairs in order.
__device__ __forceinline__ void convert_e2m1(unsigned word, unsigned (&pairs)[4]) {
  asm("{\n .reg .b8 b0, b1, b2, b3;\n mov.b32 {b0, b1, b2, b3}, %4;\n"
      " cvt.rn.f16x2.e2m1x2 %0, b0;\n cvt.rn.f16x2.e2m1x2 %1, b1;\n"
      " cvt.rn.f16x2.e2m1x2 %2, b2;\n cvt.rn.f16x2.e2m1x2 %3, b3;\n}"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(word));
}
#endif
