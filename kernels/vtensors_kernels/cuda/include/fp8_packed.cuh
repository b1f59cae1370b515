#pragma once
// The packed FP8 layout and its exact decoding into 16-bit matrix operands.
//
// The matrix is cut into blocks of 16 rows x 128 columns, stored as [row tiles][column steps][kBlockBytes], rows and
// columns padded with zero codes. Inside a block, lane 4 g + c of a warp (g = 0..7, c = 0..3) owns rows g and g + 8,
// columns 32 c .. 32 c + 31:
//   bytes 512 i + 16 * lane ..        4 words of row g (i = 0, 1) or g + 8 (i = 2, 3)
// The eight words of a row: words 2 u and 2 u + 1 = columns 32 c + 8 (u ^ (c >> 1)) .. + 7, the order of activations
// of the NVFP4 layout. Behind the codes, by VT_SCALES:
//   0 rows    W = e4m3 * row_scale[n] / 256: nothing
//   1 steps   W = e4m3 * step_scale * row_scale[n] / 256: 4 float32, of rows 4 j .. 4 j + 3
//   2 groups  W = e4m3 * 2^(byte - 247) * row_scale[n]: bytes 2 * lane ..: of columns 32 c .. + 31 of rows g and g + 8
//
// A word holds 4 E4M3 codes (s, magnitude 0..127 = e e e e m m m), element i = 2 p + h:
//   pair p   bits of half 0: s, then the magnitude's    half 1
//     0      15, 10 9 8 7 6 5 4                          16 above
//     1      11, 14 13 12 3 2 1 0                        16 above
// In bfloat16 the sign belongs to bit 15, the magnitude to bits 10 .. 4, which makes value * 2^-120 (a subnormal where
// e is 0); a multiplication makes up for it. Found by search: 5 operations for 4 codes, 4 of them in the integer unit,
// the fewest: 14 bits go below bit 11 of a half and 11 come from there, so that something is shifted right. In float16
// the magnitude belongs to bits 13 .. 7 and makes value * 2^-8 as it stands: 9 operations, 6 in the integer unit.
// NaN codes are refused when a checkpoint is read.

#include "include/packed_blocks.cuh"

#ifndef VT_SCALES
#define VT_SCALES 0  // 0 rows, 1 steps, 2 groups
#endif
static_assert(VT_SCALES >= 0 && VT_SCALES <= 2, "VT_SCALES is 0, 1 or 2");

constexpr int kCodeBytes = 2048;                                       // codes of a block
constexpr int kScaleBytes = VT_SCALES == 0 ? 0 : VT_SCALES == 1 ? 16 : 64;  // what lies behind them
constexpr int kBlockBytes = kCodeBytes + kScaleBytes;

// From the first of a lane's codes to its scales, in bytes; with VT_SCALES 1 to that of row g.
__device__ __forceinline__ int scales_from(int lane) {
  return kCodeBytes + (VT_SCALES == 1 ? lane / 16 * 4 : lane * 2) - lane * 16;
}

// Four codes as two pairs of raw operands: value * 2^-120 in bfloat16, value * 2^-8 in float16.
__device__ __forceinline__ void place_codes(unsigned word, unsigned& first, unsigned& second) {
#if VT_F16
  first = (word & 0x80008000u) | (word * 8u & 0x3F803F80u);
  second = (word * 16u & 0x80008000u) | (word * 128u & 0x07800780u) | (word >> 1 & 0x38003800u);
#else
  first = word & 0x87F087F0u;
  second = (word * 16u & 0x80F080F0u) | (word >> 4 & 0x07000700u);
#endif
}

// A group's byte as both halves of a pair that a raw operand is multiplied by, for value * 2^(byte - 247). In float16
// bytes below 233 round what they scale, and below 225 make zeros: 2^-30 and less of what the largest byte, 254, scales.
__device__ __forceinline__ unsigned decode_group_scale(unsigned byte) {
#if VT_F16
  return (max(byte, 224u) - 224u) * 0x04000400u;
#else
  return byte * 0x00800080u;
#endif
}

// Eight weights of one row as four pairs in order of columns. scale: of decode_group_scale, with VT_SCALES 2.
__device__ __forceinline__ void decode_words(unsigned low, unsigned high, unsigned scale, unsigned (&pairs)[4]) {
  place_codes(low, pairs[0], pairs[1]);
  place_codes(high, pairs[2], pairs[3]);
#if VT_SCALES == 2 || !VT_F16
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) pairs[pair] = multiply_pairs(pairs[pair], VT_SCALES == 2 ? scale : 0x77807780u);
#endif
}
