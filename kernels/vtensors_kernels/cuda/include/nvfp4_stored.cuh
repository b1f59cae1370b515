#pragma once
// Exact decoding of NVFP4 as stored (codes low nibble first, E4M3 scales) into 16-bit matrix operands.
//
// A word holds 8 codes s e e m of neighbouring k. Its four operand pairs are codes (i, i + 4), i = 0..3, where
// bits are moved by shifts: i and i + 4 lie at one place of the two half-words. Where the hardware converts
// (kNaturalPairs) they are codes (2 i, 2 i + 1). The other operand has to be paired likewise: pair_activations.
//
// Every product is e2m1 * e4m3 / 256, at most 6 significant bits, exact in bfloat16 and float16:
//   bfloat16  code as e2m1 * 2^-126, scale * 2^118;  float16  code as e2m1 * 2^-14, scale * 2^6;
//   float16 converted by hardware  code as e2m1, scale / 256.

#include "include/conversions.cuh"
#include "include/nvfp4_packed.cuh"

constexpr bool kNaturalPairs = VT_F16 && VT_HAS_E2M1;

// Byte `which` of a word of E4M3 scales, zero or positive, as both halves of a pair.
template <int which>
__device__ __forceinline__ unsigned stored_scale(unsigned scales) {
  constexpr unsigned selector = which | 4u << 4 | which << 8 | 4u << 12;  // byte, zero, byte, zero
  const unsigned both = __byte_perm(scales & 0x7f7f7f7fu, 0u, selector);
#if VT_F16
  const unsigned value = both * 128u;  // times 2^-8
  return kNaturalPairs ? value : multiply_pairs(value, 0x74007400u);  // 2^14
#else
  return multiply_pairs(multiply_pairs(both * 16u, 0x7B807B80u), 0x7A807A80u);  // 2^-120 * 2^120 * 2^118
#endif
}

// Eight weights of one row as four pairs, times a scale of stored_scale.
__device__ __forceinline__ void stored_pairs(unsigned word, unsigned scale, unsigned (&pairs)[4]) {
#if VT_F16 && VT_HAS_E2M1
  convert_e2m1(word, pairs);
#else
  constexpr unsigned kSign = 0x80008000u;
#if VT_F16
  constexpr unsigned kValue = 0x0E000E00u;
  const unsigned values[4] = {word * 512u, word * 32u, word * 2u, word >> 3};
#else
  constexpr unsigned kValue = 0x01C001C0u;
  const unsigned values[4] = {word * 64u, word * 4u, word >> 2, word >> 6};
#endif
  const unsigned signs[4] = {word * 4096u, word * 256u, word * 16u, word};
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) pairs[pair] = (signs[pair] & kSign) | (values[pair] & kValue);
#endif
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) pairs[pair] = multiply_pairs(pairs[pair], scale);
}

// Eight neighbouring 16-bit activations in the order of stored_pairs.
__device__ __forceinline__ void pair_activations(uint4 eight, unsigned (&pairs)[4]) {
  if (kNaturalPairs) {
    pairs[0] = eight.x, pairs[1] = eight.y, pairs[2] = eight.z, pairs[3] = eight.w;
    return;
  }
  pairs[0] = __byte_perm(eight.x, eight.z, 0x5410);  // low halves: 0 4
  pairs[1] = __byte_perm(eight.x, eight.z, 0x7632);  // high halves: 1 5
  pairs[2] = __byte_perm(eight.y, eight.w, 0x5410);
  pairs[3] = __byte_perm(eight.y, eight.w, 0x7632);
}
