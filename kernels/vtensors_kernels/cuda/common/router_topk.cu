// experts[m, :] = the k largest of logits[m, :], largest first, the lowest index first among equals;
// weights[m, :] = softmax(logits[m, :]) of those, divided by their sum.
//
// Choice and weights depend on nothing but the row: a warp has it, lane l experts l, l + 32, ... A key of 32 bits, the
// order of the 16-bit logit above 65535 - expert, is what the warp takes the largest of, k times. NaN counts as the
// largest, as in torch's sort, and makes every weight NaN. Sums: a lane's in order of experts, those of lanes and of
// the chosen at distances 16, 8, 4, 2, 1.
//
// Shapes: any rows; experts 1 .. 32 * kPerLane; k 1 .. min(32, experts). Grid: x ceil(rows / kWarps). Block: kThreads.
// Shared memory: none. Arch: sm_80 and newer (redux); dependent launch from sm_90 on.

#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_PER_LANE
#define VT_PER_LANE 8  // experts of a lane, at most
#endif

constexpr int kPerLane = VT_PER_LANE;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr unsigned kInfinity = VT_F16 ? 0x7c00u : 0x7f80u;
static_assert(kPerLane >= 1 && kPerLane <= 32, "an expert's number and more fit into 16 bits");

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

extern "C" __global__ __launch_bounds__(kThreads) void router_topk(
    const unsigned short* logits,  // [rows, experts] bf16 or f16, rows stride apart; as ptx.cuh says of such inputs
    int* __restrict__ chosen,      // [rows, k]
    float* __restrict__ weights,   // [rows, k]
    long long stride,
    int rows,
    int experts,
    int k)
{
  launch_dependents();
  wait_for_predecessors();
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const unsigned short* from = logits + row * stride;
  unsigned keys[kPerLane], largest = 0;
  // All loads first: those past the end read the last expert.
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = from[min(lane + 32 * i, experts - 1)];
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
    chosen[row * k + lane] = static_cast<int>(0xffffu - (mine & 0xffffu));
    weights[row * k + lane] = __fdiv_rn(probability, of_chosen);
  }
}
