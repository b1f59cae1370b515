#pragma once
// The choice of experts of one row by one warp, which depends on nothing but the row.
//
// Lane l has experts l, l + 32, ... A key of 32 bits, the order of the 16-bit logit above 65535 - expert, is what the
// warp takes the largest of, k times. NaN counts as the largest, as in torch's sort, and makes every weight NaN. Sums:
// a lane's in order of experts, those of lanes and of the chosen at distances 16, 8, 4, 2, 1.

#include "include/sixteen_bits.cuh"

constexpr unsigned kInfinity = VT_F16 ? 0x7c00u : 0x7f80u;

// Rising with the value; -0 as 0, NaN above all. No number's is 0.
__device__ __forceinline__ unsigned order_of(unsigned bits) {
  bits = bits == 0x8000u ? 0u : bits;
  const unsigned order = bits & 0x8000u ? 0xffffu ^ bits : bits | 0x8000u;
  return (bits & 0x7fffu) > kInfinity ? 0xffffu : order;
}

__device__ __forceinline__ float value_of(unsigned order) {
  return widen(order & 0x8000u ? order & 0x7fffu : 0xffffu ^ order);
}

__device__ __forceinline__ float add_lanes(float sum) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

// chosen[0 .. k) = the k largest, largest first, the lowest index first among equals; weights[0 .. k) = their softmax
// over all, divided by its sum over them. keys: the bits of the lane's logits; of others than `experts`, anything.
template <int kPerLane>
__device__ __forceinline__ void choose_experts(unsigned (&keys)[kPerLane], int experts, int k, int lane, int* chosen,
                                               float* weights) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + 32 * i;
    keys[i] = expert < experts ? order_of(keys[i]) << 16 | (0xffffu - expert) : 0u;
    largest = max(largest, keys[i]);
  }
  unsigned best = __reduce_max_sync(~0u, largest);
  const float top = value_of(best >> 16);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float power = expf(__fsub_rn(value_of(keys[i] >> 16), top));
    sum = __fadd_rn(sum, keys[i] ? power : 0.0f);
  }
  sum = add_lanes(sum);

  // Lane j keeps the choice of round j.
  unsigned mine = 0;
  for (int round = 0; round < k; ++round) {
    if (round) best = __reduce_max_sync(~0u, largest);
    if (lane == round) mine = best;
    if (largest == best) {  // this lane alone: keys differ
      largest = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (keys[i] == best) keys[i] = 0;
        largest = max(largest, keys[i]);
      }
    }
  }
  const float probability = lane < k ? __fdiv_rn(expf(__fsub_rn(value_of(mine >> 16), top)), sum) : 0.0f;
  const float of_chosen = add_lanes(probability);
  if (lane < k) {
    chosen[lane] = static_cast<int>(0xffffu - (mine & 0xffffu));
    weights[lane] = __fdiv_rn(probability, of_chosen);
  }
}
