#pragma once
// The PTX of block-scaled 4-bit formats, one instruction a function: conversions from float32, matrix products.
// VT_ARCH is the target's number: 890 for sm_89, 1210 for sm_121a.

#include "include/conversions.cuh"

// Conversion to E4M3: from sm_89 on. Block-scaled mma.sync: sm_120 and sm_121 alone, as an `a` or `f` target.
#define VT_HAS_NARROW_E4M3 (VT_ARCH >= 890)
#define VT_HAS_BLOCK_SCALED_MMA (VT_HAS_E2M1 && VT_ARCH >= 1200 && VT_ARCH < 1300)

#if VT_HAS_NARROW_E4M3
// The byte of a float32 to nearest even, saturating at 448; NaN is 0x7F of its sign.
__device__ __forceinline__ unsigned narrow_e4m3(float value) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return pair & 0xffu;
}
#endif

#if VT_HAS_E2M1
// Eight codes of float32 values to nearest even, saturating at 6, the first in the low nibble.
__device__ __forceinline__ unsigned narrow_e2m1(const float (&v)[8]) {
  unsigned word;
  asm("{\n .reg .b8 b0, b1, b2, b3;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      " mov.b32 %0, {b0, b1, b2, b3};\n}"
      : "=r"(word)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return word;
}
#endif

// d [16 x 8] += (scale_a * a [16 x 64]) * (scale_b * b [64 x 8]): E2M1 operands, an E4M3 scale per 16 of k, float32 sums.
//
// Of lane 4 g + c (PTX ISA 9.0, matrix fragments for mma.m16n8k64 and block scaling of warp-level mma):
//   a[r], r = 0..3   row g + 8 (r % 2), k = 8 c + 32 (r / 2) .. + 7, the first in the low nibble
//   b[r], r = 0, 1   column g, k = 8 c + 32 r .. + 7
//   d[i], i = 0..3   row g + 8 (i / 2), column 2 c + i % 2
//   scale_a          byte j: k = 16 j .. 16 j + 15 of row g + 8 c, from lanes c = 0, 1 (thread id 0; others are ignored)
//   scale_b          byte j: the same of column g, from lane c = 0 (thread id 0)
#if VT_HAS_BLOCK_SCALED_MMA
__device__ __forceinline__ void multiply_add_e2m1_16x8x64(float (&d)[4], uint4 a, unsigned b0, unsigned b1,
                                                          unsigned scale_a, unsigned scale_b) {
  asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b));
}
#endif
