#pragma once
// The softmax of a page's scores against those of the pages before it, in the layout of attention_tokens.cuh.

#include "include/attention_tokens.cuh"
#include "include/power_of_two_ptx.cuh"

// What the lanes 4 g + c know of a split: of head g the largest score and the sum of the softmax's weights of the
// tokens that are theirs, of heads 2 c and 2 c + 1 the sums over values. parts: how many of the kValueWarps parts that
// `Values` makes of D are the warp's.
template <int parts>
struct Running {
  float top, weight, sums[parts][kOwnSteps][4];
  __device__ __forceinline__ void reset() {
    top = __uint_as_float(0xff800000u), weight = 0.0f;
#pragma unroll
    for (int w = 0; w < parts; ++w)
#pragma unroll
      for (int a = 0; a < kOwnSteps; ++a)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[w][a][i] = 0.0f;
  }
};

// From what every lane knows of head g to what this one needs of heads 2 c and 2 c + 1.
__device__ __forceinline__ void of_columns(float (&to)[2], float of_head, int c) {
#pragma unroll
  for (int j = 0; j < 2; ++j) to[j] = __shfl_sync(0xffffffffu, of_head, 4 * (2 * c + j));
}

// weights: the scores of head g, minus infinity where there is no token, of tokens Values::token(i, c) of each 16 ->
// the softmax's weights against the new top. factor: of scores, as powers of 2.
template <int parts>
__device__ __forceinline__ void weigh(Running<parts>& running, float (&weights)[kPageTokens / 16][4], float factor,
                                      int c) {
  float top = running.top;
#pragma unroll
  for (int j = 0; j < kPageTokens / 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, weights[j][i]);
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
  const float shrink = power_of_two(__fmul_rn(running.top - top, factor));
  running.top = top;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPageTokens / 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[j][i] = power_of_two(__fmul_rn(weights[j][i] - top, factor));
    sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(weights[j][0], weights[j][1]), __fadd_rn(weights[j][2], weights[j][3])));
  }
  running.weight = __fmaf_rn(running.weight, shrink, sum);
  // Where one warp has many sums it looks first: most pages change no top, and a factor of 1 changes nothing.
  if (parts > 1 && !__any_sync(0xffffffffu, shrink != 1.0f)) return;
  float shrinks[2];
  of_columns(shrinks, shrink, c);
#pragma unroll
  for (int w = 0; w < parts; ++w)
#pragma unroll
    for (int a = 0; a < kOwnSteps; ++a)
#pragma unroll
      for (int i = 0; i < 4; ++i) running.sums[w][a][i] = __fmul_rn(running.sums[w][a][i], shrinks[i % 2]);
}

// The weights as operands: rounded, and what that has lost.
__device__ __forceinline__ void as_operands(const float (&weights)[4], unsigned (&upper)[2], unsigned (&lower)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    upper[i] = narrow_pair(weights[2 * i], weights[2 * i + 1]);
    lower[i] = narrow_pair(__fsub_rn(weights[2 * i], widen(upper[i] & 0xffffu)),
                           __fsub_rn(weights[2 * i + 1], widen(upper[i] >> 16)));
  }
}
