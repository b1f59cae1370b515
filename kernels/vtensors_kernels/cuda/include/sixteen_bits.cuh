#pragma once
// The 16-bit format of activations and operands, chosen when a kernel is compiled, and float32 to and from it.

#include "include/conversions.cuh"

// 16 bits -> float32, exact.
__device__ __forceinline__ float widen(unsigned bits) {
#if VT_F16
  return widen_f16(static_cast<unsigned short>(bits));
#else
  return __uint_as_float(bits << 16);
#endif
}

// Two floats to nearest even, `low` in the low half.
__device__ __forceinline__ unsigned narrow_pair(float low, float high) {
#if VT_F16
  return narrow_f16_pair(low, high);
#else
  return narrow_bf16_pair(low, high);
#endif
}

__device__ __forceinline__ unsigned short narrow(float value) {
  return static_cast<unsigned short>(narrow_pair(value, 0.0f));
}

// Eight neighbours at an address aligned to 16 bytes.
__device__ __forceinline__ void load_eight(const unsigned short* from, float (&values)[8]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(from);
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = widen(words[i] & 0xffffu);
    values[2 * i + 1] = widen(words[i] >> 16);
  }
}

__device__ __forceinline__ void store_eight(unsigned short* to, const float (&values)[8]) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(narrow_pair(values[0], values[1]), narrow_pair(values[2], values[3]),
                 narrow_pair(values[4], values[5]), narrow_pair(values[6], values[7]));
}
