#pragma once
// What drawing a token works on: a row of 16-bit logits in pieces, their order, scores and weights.
//
// The score of a logit is (logit - largest) / temperature, rounded as float32 rounds 1 + score: what differs by less is
// equally probable. Its weight is exp(score), 1 at the largest; as mass it is the whole number below weight * 2^44, so
// that sums are exact in any order and those of 2^18 logits stay below 2^63.

#include "include/sixteen_bits.cuh"

using Mass = unsigned long long;

constexpr unsigned kMinusInfinity = VT_F16 ? 0xfc00u : 0xff80u;
constexpr int kUnit = 44;                   // log2 of the mass of the largest logit
constexpr float kLeastScore = -200.0f;      // stands for all below: their mass is 0

struct Logits {
  const unsigned short* from;
  int columns;
  int lead;    // columns that would lie between the multiple of 16 bytes before the row and the row
  int pieces;  // of eight columns, piece p from 8 p - lead on
};

__device__ __forceinline__ Logits logits_at(const unsigned short* from, int columns) {
  const int lead = static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16 / 2);
  return {from, columns, lead, (lead + columns + 7) / 8};
}

// take(bits, column) of every column of a piece, in order; those outside of the row are -inf.
template <typename Take>
__device__ __forceinline__ void visit_piece(const Logits& row, int piece, Take take) {
  const int first = 8 * piece - row.lead;
  unsigned words[4];
  if (first >= 0 && first + 8 <= row.columns) {
    const uint4 eight = *reinterpret_cast<const uint4*>(row.from + first);
    words[0] = eight.x, words[1] = eight.y, words[2] = eight.z, words[3] = eight.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = first + 2 * i, high = low + 1;
      words[i] = low >= 0 && low < row.columns ? row.from[low] : kMinusInfinity;
      words[i] |= (high >= 0 && high < row.columns ? row.from[high] : kMinusInfinity) << 16;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    take(words[i] & 0xffffu, first + 2 * i);
    take(words[i] >> 16, first + 2 * i + 1);
  }
}

// Rising with the value, -0 as 0; of numbers and infinities.
__device__ __forceinline__ unsigned key_of_bits(unsigned bits) {
  bits = bits == 0x8000u ? 0u : bits;
  return bits & 0x8000u ? 0xffffu ^ bits : bits | 0x8000u;
}

__device__ __forceinline__ float value_of_key(unsigned key) {
  return widen(key & 0x8000u ? key & 0x7fffu : 0xffffu ^ key);
}

struct Scale {
  float largest, temperature, reciprocal;
};

// The quotient as IEEE rounds it: two corrections, without the division's tests. NaN, of infinities, becomes the least.
__device__ __forceinline__ float score_of(float value, const Scale& scale) {
  const float above = __fsub_rn(value, scale.largest);
  float score = __fmul_rn(above, scale.reciprocal);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    score = __fmaf_rn(__fmaf_rn(-score, scale.temperature, above), scale.reciprocal, score);
  return __fsub_rn(__fadd_rn(fmaxf(score, kLeastScore), 1.0f), 1.0f);
}

__device__ __forceinline__ float weight_of(float score) { return expf(score); }

// Of a weight from 0 to 1. What is subnormal shifts to 0 as well.
__device__ __forceinline__ Mass mass_of(float weight) {
  const unsigned bits = __float_as_uint(weight);
  const Mass mantissa = (bits & 0x7fffffu) | 0x800000u;
  return (mantissa << (kUnit - 23)) >> min(127u - (bits >> 23), 63u);
}

// Of the key of a logit.
__device__ __forceinline__ float score_of_key(unsigned key, const Scale& scale) {
  return score_of(value_of_key(key), scale);
}
