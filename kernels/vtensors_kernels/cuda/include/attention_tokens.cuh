#pragma once
// The tokens of one key-value head on their way through shared memory into operands of 16 x 8 x 16 products.
//
// Keys are the rows of scores [16 tokens x 8 heads] = K [16 x D] Q^T [D x 8], a warp's own 16 tokens of a page; values,
// turned, those of sums [D x 8 heads] += V^T [D x 16 tokens] P [16 tokens x 8], a warp's own dimensions of all tokens.
// The order of what is summed over and of D's rows is free: it is the one in which lanes read up to 16 neighbouring
// bytes of a token. A lane copies what it will read itself, [unit][lane]: nobody else waits for it, and banks are apart.
//   lane 4 g + c, keys:   tokens g and g + 8, bytes kKeyUnit * c of every 4 * kKeyUnit
//                 values: tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of every 16, bytes kValueUnit * g of the warp's

#include "include/attention_heads.cuh"
#include "include/packed_blocks.cuh"
#include "include/ptx.cuh"
#include "include/staged_copies_ptx.cuh"

#ifndef VT_HEAD_DIM
#define VT_HEAD_DIM 256
#endif
constexpr int kDim = VT_HEAD_DIM;
static_assert(kDim == 32 || kDim == 64 || kDim == 128 || kDim == 256, "VT_HEAD_DIM is 32, 64, 128 or 256");

constexpr int kRowBytes = kDim * kStoredBytes;  // of a token
constexpr int kHeads = 8;                       // columns of the products
constexpr int kSteps = kDim / 16;               // products of 16 x 8 x 16 for a sum over D
constexpr int kKeyWords = kRowBytes / 16;       // of a token, a lane's
constexpr int kKeyUnit = kKeyWords >= 4 ? 16 : 4 * kKeyWords;
constexpr int kKeyUnits = 4 * kKeyWords / kKeyUnit;
constexpr int kValueWarps = kRowBytes >= 128 ? 4 : kRowBytes / 32;  // a lane has at least 4 bytes of a token
constexpr int kValueUnit = kRowBytes / kValueWarps / 8;
constexpr int kUnitDims = kValueUnit / kStoredBytes;  // dimensions of a lane
constexpr int kOwnSteps = kUnitDims / 2;              // products for 16 of the warp's dimensions each

// A unit of shared memory in words.
template <int unit>
__device__ __forceinline__ void load_unit(unsigned* to, const unsigned char* from) {
  if constexpr (unit == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (unit == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *reinterpret_cast<const unsigned*>(from);
  }
}

// Four E4M3 codes as two pairs of operands: of bytes 0 and 2, and of bytes 1 and 3. Exact; NaN codes count as 480.
__device__ __forceinline__ void decode_codes(unsigned word, unsigned& even, unsigned& odd) {
#if VT_F16
  constexpr unsigned kMagnitude = 0x3F803F80u, kFactor = 0x5C005C00u;  // placed it is value * 2^-8
  even = (word << 8 & 0x80008000u) | (word << 7 & kMagnitude);
  odd = (word & 0x80008000u) | (word >> 1 & kMagnitude);
#else
  constexpr unsigned kMagnitude = 0x07F007F0u, kFactor = 0x7B807B80u;  // value * 2^-120
  even = (word << 8 & 0x80008000u) | (word << 4 & kMagnitude);
  odd = (word & 0x80008000u) | (word >> 4 & kMagnitude);
#endif
  even = multiply_pairs(even, kFactor);
  odd = multiply_pairs(odd, kFactor);
}

// Where dimension d of a query lies among the 16-bit values that keys meet: [D / 32][32 lanes][8], for head g = 0.
// Head g is at + 32 * g.
__device__ __forceinline__ int query_place(int d) {
  constexpr int kUnit = kKeyUnit / kStoredBytes;  // dimensions that a lane reads at once
  int own = d / (4 * kUnit) * kUnit + d % kUnit;  // of the lane's
  if (VT_FP8) own = (own & ~3) | (own & 1) << 1 | (own >> 1 & 1);
  return own / 8 * 256 + d % (4 * kUnit) / kUnit * 8 + own % 8;
}

struct Keys {
  unsigned words[2][kKeyWords];

  // Bytes from the first of the 16 tokens to what is this lane's.
  __device__ static __forceinline__ unsigned offset(int g, int c) { return g * kRowBytes + c * kKeyUnit; }
  // stage: the warp's, + kKeyUnit * lane. own: the first token's row and the offset. tokens: of these 16, how many
  // there are to read.
  __device__ static __forceinline__ void copy(unsigned stage, const unsigned char* own, int tokens, int g) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kKeyUnits; ++i)
        copy_or_zero<kKeyUnit>(stage + (r * kKeyUnits + i) * 32 * kKeyUnit, own + 8 * r * kRowBytes + i * 4 * kKeyUnit,
                               g + 8 * r < tokens);
  }
  __device__ __forceinline__ void load(const unsigned char* stage) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kKeyUnits; ++i)
        load_unit<kKeyUnit>(&words[r][i * (kKeyUnit / 4)], stage + (r * kKeyUnits + i) * 32 * kKeyUnit);
  }
  // The token at `place` is that row.
  __device__ __forceinline__ void replace(int place, const unsigned char* row, int g, int c) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (g + 8 * r == place)
#pragma unroll
        for (int i = 0; i < kKeyUnits; ++i)
          load_unit<kKeyUnit>(&words[r][i * (kKeyUnit / 4)], row + (4 * i + c) * kKeyUnit);
  }
  // scores: tokens g, g, g + 8, g + 8 and heads 2 c, 2 c + 1, 2 c, 2 c + 1. queries: as query_place says, + 8 * lane.
  __device__ __forceinline__ void scores(float (&scores)[4], const unsigned short* queries) const {
    constexpr int kChains = kSteps < 4 ? kSteps : 4;  // sums apart, so that products need not wait for each other
    float sums[kChains][4] = {};
#pragma unroll
    for (int t = 0; t < kSteps; t += 2) {
      const uint4 q = *reinterpret_cast<const uint4*>(queries + t / 2 * 256);
      multiply(sums[t % kChains], t, q.x, q.y);
      multiply(sums[(t + 1) % kChains], t + 1, q.z, q.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kChains == 4) {
        scores[i] = __fadd_rn(__fadd_rn(sums[0][i], sums[1][i]), __fadd_rn(sums[2][i], sums[3][i]));
      } else {
        scores[i] = __fadd_rn(sums[0][i], sums[1][i]);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&sums)[4], int t, unsigned q0, unsigned q1) const {
#if VT_FP8
    unsigned upper[2], lower[2];
    decode_codes(words[0][t], upper[0], upper[1]);
    decode_codes(words[1][t], lower[0], lower[1]);
    multiply_add_16x8x16(sums, upper[0], lower[0], upper[1], lower[1], q0, q1);
#else
    multiply_add_16x8x16(sums, words[0][2 * t], words[1][2 * t], words[0][2 * t + 1], words[1][2 * t + 1], q0, q1);
#endif
  }
};

// Sixteen tokens' values of the warp's dimensions.
struct Values {
  unsigned words[4][kValueUnit / 4];

  __device__ static __forceinline__ int token(int i, int c) { return 2 * c + i % 2 + i / 2 * 8; }
  // Bytes from the first token of a page to what is this lane's; the first of the lane's kUnitDims dimensions.
  __device__ static __forceinline__ unsigned offset(int warp, int g, int c) {
    return 2 * c * kRowBytes + (8 * warp + g) * kValueUnit;
  }
  __device__ static __forceinline__ int first_dim(int warp, int g) { return (8 * warp + g) * kUnitDims; }
  // The whole page. stage: the warp's, + kValueUnit * lane. own, tokens: as of Keys, of the page.
  __device__ static __forceinline__ void copy(unsigned stage, const unsigned char* own, int tokens, int c) {
#pragma unroll
    for (int j = 0; j < kPageTokens / 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_or_zero<kValueUnit>(stage + (4 * j + i) * 32 * kValueUnit, own + (16 * j + token(i, 0)) * kRowBytes,
                                 16 * j + token(i, c) < tokens);
  }
  // stage: of these 16 tokens.
  __device__ __forceinline__ void load(const unsigned char* stage) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_unit<kValueUnit>(words[i], stage + i * 32 * kValueUnit);
  }
  __device__ __forceinline__ void replace(int place, const unsigned char* row, int warp, int g, int c) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (token(i, c) == place) load_unit<kValueUnit>(words[i], row + (8 * warp + g) * kValueUnit);
  }
  // sums[a]: dimensions 2 a, 2 a, 2 a + 1, 2 a + 1 of the lane's, of heads 2 c, 2 c + 1, 2 c, 2 c + 1. upper, lower:
  // the weights of 16 tokens x 8 heads as two operands whose sum they are.
  __device__ __forceinline__ void add(float (&sums)[kOwnSteps][4], const unsigned (&upper)[2],
                                      const unsigned (&lower)[2]) const {
#pragma unroll
    for (int a = 0; a < kOwnSteps; ++a) {
      unsigned v[4];
#if VT_FP8
      const unsigned selector = a % 2 ? 0x7632u : 0x5410u;
      decode_codes(__byte_perm(words[0][a / 2], words[1][a / 2], selector), v[0], v[1]);
      decode_codes(__byte_perm(words[2][a / 2], words[3][a / 2], selector), v[2], v[3]);
#else
      v[0] = __byte_perm(words[0][a], words[1][a], 0x5410u);
      v[1] = __byte_perm(words[0][a], words[1][a], 0x7632u);
      v[2] = __byte_perm(words[2][a], words[3][a], 0x5410u);
      v[3] = __byte_perm(words[2][a], words[3][a], 0x7632u);
#endif
      multiply_add_16x8x16(sums[a], v[0], v[1], v[2], v[3], upper[0], upper[1]);
      multiply_add_16x8x16(sums[a], v[0], v[1], v[2], v[3], lower[0], lower[1]);
    }
  }
};
