#pragma once
// float32 -> E4M3 as `vtensors_formats.e4m3.encode`: to nearest, ties to even, saturating at +-448, NaN to 0x7F.

#include "include/number_formats.cuh"

#define VT_HAS_E4M3 (VT_ARCH >= 890)

#if VT_HAS_E4M3
__device__ __forceinline__ unsigned convert_e4m3_pair(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
__device__ __forceinline__ unsigned encode_e4m3(float value) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
  const unsigned magnitude = min(bits & 0x7fffffffu, 0x43e00000u);  // 448
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fu;
  // Below 2^-6 codes are multiples of 2^-9, which is a unit in the last place of 2^14.
  if (magnitude < 0x3c800000u) return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - 0x46800000u);
  return sign | (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
}

#endif

// Two floats, `low` in the low byte.
__device__ __forceinline__ unsigned encode_e4m3_pair(float low, float high) {
#if VT_HAS_E4M3
  return convert_e4m3_pair(low, high);
#else
  return encode_e4m3(low) | encode_e4m3(high) << 8;
#endif
}

// Any E4M3 byte -> float32, NaN included.
__device__ __forceinline__ float value_of_e4m3(unsigned byte) {
  return (byte & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : decode_e4m3(byte & 0xffu);
}
