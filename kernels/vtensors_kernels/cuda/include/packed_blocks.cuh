#pragma once
// What the packed layouts share: blocks of 16 rows x 128 columns, decoded into pairs of 16-bit operands.

constexpr int kTileRows = 16;      // rows of a block
constexpr int kStepColumns = 128;  // columns of a block

#ifndef VT_F16
#define VT_F16 0  // operands: 0 bfloat16, 1 float16
#endif
static_assert(VT_F16 == 0 || VT_F16 == 1, "VT_F16 is 0 or 1");

__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
  unsigned product;
#if VT_F16
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#elif VT_ARCH >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
  // a * b + -0, which keeps the sign of a zero.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return product;
}
