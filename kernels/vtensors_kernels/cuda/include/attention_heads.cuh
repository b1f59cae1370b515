#pragma once
// One head of a query, key or value on its way into attention: RMSNorm, rotation, rounding, storing in the cache.

#include "include/e4m3_encode.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_FP8
#define VT_FP8 0  // 1: keys and values are stored as E4M3 of value / scale
#endif
static_assert(VT_FP8 == 0 || VT_FP8 == 1, "VT_FP8 is 0 or 1");

constexpr int kPageTokens = 64;
constexpr int kMostDims = 256;  // of a head
constexpr int kStoredBytes = VT_FP8 ? 1 : 2;

// What one entry of the cache is read as; unsigned char or unsigned short.
#if VT_FP8
using Stored = unsigned char;
#else
using Stored = unsigned short;
#endif

__device__ __forceinline__ Stored to_stored(float value, float scale) {
#if VT_FP8
  return static_cast<Stored>(encode_e4m3_pair(__fdiv_rn(value, scale), 0.0f) & 0xffu);
#else
  return narrow(value);
#endif
}

// The value that a stored one stands for, as 16 bits.
__device__ __forceinline__ unsigned short from_stored(Stored stored, float scale) {
#if VT_FP8
  return narrow(__fmul_rn(value_of_e4m3(stored), scale));
#else
  return stored;
#endif
}

__device__ __forceinline__ float rounded(float value) { return widen(narrow(value)); }

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// What the lanes of a warp hold of D values: lane + 32 i.
constexpr int kMostOfLane = kMostDims / 32;

// The angles of one position for the first `rotary` dimensions: d and d + rotary / 2 are turned by the same.
struct Turn {
  int rotary;
  float cosines[kMostOfLane], sines[kMostOfLane];

  // angles: cos [rotary / 2], then sin; not read where rotary is 0.
  __device__ __forceinline__ Turn(const float* angles, int rotary_, int dim, int lane) : rotary(rotary_) {
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) cosines[i] = sines[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) {
      const int d = lane + 32 * i, half = rotary / 2;
      if (32 * i >= dim || 32 * i >= rotary) break;
      if (d < rotary) {
        cosines[i] = angles[d < half ? d : d - half];
        sines[i] = angles[d < half ? d + half : d];
      }
    }
  }
};

// One head between its projection and attention, by the lanes of one warp. D: 32, 64, 128 or 256.
struct Head {
  float x[kMostOfLane];

  __device__ __forceinline__ void load(const unsigned short* from, int dim, int lane) {
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) x[i] = 32 * i < dim ? widen(from[lane + 32 * i]) : 0.0f;
  }
  // x * rsqrt(mean(x^2) + eps) * gain, rounded to 16 bits.
  __device__ __forceinline__ void norm(const float (&gain)[kMostOfLane], float eps, int dim) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) squares = __fmaf_rn(x[i], x[i], squares);
    const float part = dim == 32 ? 0x1p-5f : dim == 64 ? 0x1p-6f : dim == 128 ? 0x1p-7f : 0x1p-8f;
    const float inverse = rsqrtf(__fmaf_rn(sum_of_warp(squares), part, eps));
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) x[i] = rounded(__fmul_rn(__fmul_rn(x[i], inverse), gain[i]));
  }
  // Pairs (d, d + rotary / 2) turned, and rounded to 16 bits. before: (d) -> x of dimension d before any is turned.
  template <class Before>
  __device__ __forceinline__ void rotate(const Turn& turn, const Before& before, int dim, int lane) {
    const int half = turn.rotary / 2;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) {
      const int d = lane + 32 * i;
      if (32 * i >= dim || 32 * i >= turn.rotary) break;
      const float other = __fmul_rn(before(d < half ? d + half : d < turn.rotary ? d - half : d), turn.sines[i]);
      const float own = __fmul_rn(x[i], turn.cosines[i]);
      const float turned = rounded(d < half ? __fsub_rn(own, other) : __fadd_rn(own, other));
      x[i] = d < turn.rotary ? turned : x[i];
    }
  }
};

// A lane's part of gain [dim], zeros where there is none.
__device__ __forceinline__ void load_gain(float (&to)[kMostOfLane], const float* gain, int dim, int lane) {
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) to[i] = gain != nullptr && 32 * i < dim ? gain[lane + 32 * i] : 0.0f;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x))); }
