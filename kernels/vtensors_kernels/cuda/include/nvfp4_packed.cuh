#pragma once
// The packed NVFP4 layout and its exact decoding into 16-bit matrix operands.
//
// W[n, k] = e2m1 * e4m3 * row_scale[n] / 256. The matrix is cut into blocks of 16 rows x 128 columns, stored as
// [row tiles][column steps][kBlockBytes], rows and columns padded with zero codes. Inside a block, lane
// 4 g + c of a warp (g = 0..7, c = 0..3) owns rows g and g + 8, columns 32 c .. 32 c + 31:
//   bytes 16 * lane ..                4 words of row g,     word u = columns 32 c + 8 (u ^ (c >> 1)) .. + 7
//   bytes 512 + 16 * lane ..          4 words of row g + 8, likewise
//   bytes 1024 + 4 * lane ..          scales: row g words 0 1, row g words 2 3, row g + 8 words 0 1, words 2 3
// so that a lane reads 16 bytes at a time, converts 4 scales for 64 weights, and finds its 8 activations of a
// word side by side. The exclusive-or keeps shared-memory reads of those activations free of bank conflicts.
//
// A word holds 8 codes (s e e m, value 0..7 = e e m), element i = 2 p + h. In the operand of pair p, half h has its
// sign at bit 15 and e e m at bits 8 7 6; e e m there is the value times 2^-126 in bfloat16 (a subnormal where ee
// is 0), and the scale makes up for it. The word stores what one or two rotations bring there:
//   pair p   rotate left by        bits of half 0 (s e e m)    bits of half 1
//     0      0, its m by 8         15  8  7 30                 31 24 23 14
//     1      2                     13  6  5  4                 29 22 21 20
//     2      6                      9  2  1  0                 25 18 17 16
//     3      12                     3 28 27 26                 19 12 11 10
// Found by search: 9 operations for 8 codes, 7 of them in the integer unit, which is the busiest.
//
// A scale byte is the block scale 2^x * 1.mmm as (x + 10) << 3 | mmm, x = -9..8: E4M3's subnormals are
// normalised, zero is 0 (its codes are zero too). As an operand it is scale * 2^118 in bfloat16, or scale * 2^6
// in float16, so that the product is e2m1 * e4m3 / 256: at most 6 significant bits, exact in either format.

#include "include/packed_blocks.cuh"

constexpr int kCodeBytes = 1024;    // codes of a block
constexpr int kBlockBytes = 1152;   // codes and scales of a block

// From the codes of a lane's row g to its scales, in bytes.
__device__ __forceinline__ int scales_from(int lane) { return kCodeBytes - 12 * lane; }

// What decode_scale multiplies by. The compiler must not know it (grids have a depth of 1): a shift and an addition
// by a known number would go to the integer unit, a multiplication does not.
__device__ __forceinline__ unsigned scale_multiplier() { return gridDim.z * (VT_F16 ? 128u : 16u); }

// Byte `which` of a word of scales, as both halves of a 16-bit pair.
template <int which>
__device__ __forceinline__ unsigned decode_scale(unsigned scales, unsigned scale_step) {
  constexpr unsigned selector = which | 4u << 4 | which << 8 | 4u << 12;  // byte, zero, byte, zero
  const unsigned both = __byte_perm(scales, 0u, selector);
#if VT_F16
  return both * scale_step + 0x2C002C00u;
#else
  return both * scale_step + 0x75807580u;
#endif
}

// Eight weights of one row as four 16-bit pairs in order of columns, times a scale of decode_scale.
__device__ __forceinline__ void decode_word(unsigned word, unsigned scale, unsigned (&pairs)[4]) {
#if VT_F16
  // e e m belongs to bits 11 10 9 there, the sign to bit 15: three rotations more.
  constexpr unsigned kSign = 0x80008000u, kValue = 0x0E000E00u;
  pairs[0] = (word & kSign) | (word * 8u & 0x0C000C00u) | (__funnelshift_l(word, word, 11) & 0x02000200u);
  pairs[1] = (word * 4u & kSign) | (word * 32u & kValue);
  pairs[2] = (word * 64u & kSign) | (word * 512u & kValue);
  pairs[3] = (__funnelshift_l(word, word, 12) & kSign) | (__funnelshift_l(word, word, 15) & kValue);
#else
  constexpr unsigned kCode = 0x81C081C0u;
  pairs[0] = (word & 0x81808180u) | (__funnelshift_l(word, word, 8) & 0x00400040u);
  pairs[1] = word * 4u & kCode;
  pairs[2] = word * 64u & kCode;
  pairs[3] = __funnelshift_l(word, word, 12) & kCode;
#endif
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) pairs[pair] = multiply_pairs(pairs[pair], scale);
}
