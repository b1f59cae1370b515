#pragma once
// Sixteen activations -> E2M1 codes and their E4M3 block scale, bit for bit as vtensors_formats.activations has it:
//   g multiplies (ModelOpt input_scale):               s = e4m3(amax / (6 g)),  e = s g
//   g divides (compressed-tensors input_global_scale): s = e4m3(g (amax / 6)),  e = s / g
//   code = e2m1(x / e), zero where e is 0; every operation rounded once to float32 (no contraction, no flush).
// A NaN makes the scale NaN (0x7F) and every code 7; an infinity saturates.

#include "include/block_scaled_ptx.cuh"
#include "include/number_formats.cuh"

constexpr unsigned kNanScale = 0x7fu;

// A magnitude below the next power of two after the largest, to the nearest code of a format with subnormals, ties to
// even: kMantissa bits of fraction, exponent bias kBias. Not for NaN.
template <int kMantissa, int kBias>
__device__ __forceinline__ unsigned nearest_code(float magnitude) {
  constexpr int kShift = 23 - kMantissa;
  // In [2^(24 - bias - mantissa), ..) a float32 step is that of the format's subnormals.
  constexpr unsigned kAligned = (127u + 24u - kBias - kMantissa) << 23;
  constexpr unsigned kSmallestNormal = (128u - kBias) << 23;
  const unsigned bits = __float_as_uint(magnitude);
  if (bits < kSmallestNormal)
    return __float_as_uint(__fadd_rn(magnitude, __uint_as_float(kAligned))) - kAligned;
  return ((bits + (1u << (kShift - 1)) - 1u + (bits >> kShift & 1u)) >> kShift) - ((127u - kBias) << kMantissa);
}

// Of a value that is not negative; not for NaN.
__device__ __forceinline__ unsigned encode_e4m3(float value) {
#if VT_HAS_NARROW_E4M3
  return narrow_e4m3(value);
#else
  return nearest_code<3, 7>(fminf(value, 448.0f));
#endif
}

// Eight codes, the first in the low nibble.
__device__ __forceinline__ unsigned encode_e2m1(const float (&v)[8]) {
#if VT_HAS_E2M1
  return narrow_e2m1(v);
#else
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    word |= (nearest_code<1, 1>(fminf(fabsf(v[i]), 6.0f)) | __float_as_uint(v[i]) >> 31 << 3) << (4 * i);
  return word;
#endif
}

struct QuantizedGroup {
  unsigned words[2];  // codes of k 0..7 and 8..15
  unsigned scale;     // E4M3 byte
};

// values: k 0..7 and 8..15 of a group. global: g, which divides or multiplies.
__device__ __forceinline__ QuantizedGroup quantize_group(const float (&values)[2][8], float global, bool divides) {
  unsigned largest = 0;  // of the magnitudes' bits, where a NaN is larger than any number
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(values[half][i]) & 0x7fffffffu);
  if (largest > 0x7f800000u) return {{0x77777777u, 0x77777777u}, kNanScale};
  const float amax = __uint_as_float(largest);
  const unsigned scale = encode_e4m3(divides ? __fmul_rn(global, __fdiv_rn(amax, 6.0f))
                                             : __fdiv_rn(amax, __fmul_rn(6.0f, global)));
  const float block = decode_e4m3(scale);
  const float effective = divides ? __fdiv_rn(block, global) : __fmul_rn(block, global);
  QuantizedGroup group = {{0u, 0u}, scale};
  if (effective == 0.0f) return group;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = __fdiv_rn(values[half][i], effective);
    group.words[half] = encode_e2m1(scaled);
  }
  return group;
}

// Eight codes of a word times their scale: at most 6 significant bits within 2^-10 .. 2688, exact in bfloat16 and float16.
__device__ __forceinline__ void dequantize_eight(unsigned word, unsigned scale, float (&v)[8]) {
  const float block = scale == kNanScale ? __uint_as_float(0x7fffffffu) : decode_e4m3(scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(decode_e2m1(word >> (4 * i)), block);
}
