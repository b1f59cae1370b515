#pragma once
// Exact decoding of E2M1 and E4M3 into float32: the code's bits are placed in the exponent and mantissa of a
// float32 whose exponent bias is then made up by one exact multiplication. Subnormal codes become subnormal
// floats, which the multiplication normalises (compile without flush-to-zero).

// E2M1 code 0..15 -> float32. Bias 1 against 127: factor 2^126.
__device__ __forceinline__ float decode_e2m1(unsigned code) {
  const float magnitude = __uint_as_float((code & 7u) << 22) * 0x1p126f;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8u) << 28);
}

// E4M3 byte without NaN -> float32. Bias 7 against 127: factor 2^120.
__device__ __forceinline__ float decode_e4m3(unsigned byte) {
  const float magnitude = __uint_as_float((byte & 0x7fu) << 20) * 0x1p120f;
  return __uint_as_float(__float_as_uint(magnitude) | (byte & 0x80u) << 24);
}

// float32 -> bfloat16 bits where the value has at most 8 significant bits: the cut is exact.
__device__ __forceinline__ unsigned bf16_bits_exact(float value) { return __float_as_uint(value) >> 16; }

// float32 -> float16 bits, to nearest; exact for |e2m1 * e4m3|, which lies in 2^-10..2688 with 6 bits.
__device__ __forceinline__ unsigned f16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
