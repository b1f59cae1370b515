#pragma once
// How a token's experts become its output: weighted sums in float32, slot 0 first, one rounding at the end.

#include "include/experts_early_ptx.cuh"
#include "include/row_values.cuh"
#include "include/sixteen_bits.cuh"

// The weight of the shared expert from its gate's logit.
__device__ __forceinline__ float gate_weight(float logit) {
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, __expf(-logit)));
}

// A router's weight, or NaN where the slot's expert is none.
__device__ __forceinline__ float known_weight(float weight, bool known) {
  return known ? weight : __uint_as_float(0x7fffffffu);
}

// The weight of a token's slot: the router's, or behind them the shared expert's (1 without a gate). NaN where the
// slot's expert is none, since a kernel cannot raise. gate: of the token. Loads as experts_early_ptx.cuh says.
__device__ __forceinline__ float slot_weight(const float* weights, const int* chosen, const unsigned short* gate,
                                             int token, int slot, int top, int experts) {
  if (slot >= top) return gate == nullptr ? 1.0f : gate_weight(widen(load_early(gate)));
  const int expert = load_early(chosen + token * top + slot);
  const float weight = load_early(weights + token * top + slot);
  return known_weight(weight, expert >= 0 && expert < experts);
}

__device__ __forceinline__ float weighted(float y, float weight) { return __fmul_rn(y, weight); }
