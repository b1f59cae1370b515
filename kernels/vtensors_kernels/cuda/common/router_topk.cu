// experts[m, :] = the k largest of logits[m, :], largest first, the lowest index first among equals;
// weights[m, :] = softmax(logits[m, :]) of those, divided by their sum.
//
// Choice and weights depend on nothing but the row, which a warp has (expert_choice.cuh).
//
// Shapes: any rows; experts 1 .. 32 * kPerLane; k 1 .. min(32, experts). Grid: x ceil(rows / kWarps). Block: kThreads.
// Shared memory: none. Arch: sm_80 and newer (redux); dependent launch from sm_90 on.

#include "include/expert_choice.cuh"
#include "include/ptx.cuh"

#ifndef VT_PER_LANE
#define VT_PER_LANE 8  // experts of a lane, at most
#endif

constexpr int kPerLane = VT_PER_LANE;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
static_assert(kPerLane >= 1 && kPerLane <= 32, "an expert's number and more fit into 16 bits");

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
  unsigned keys[kPerLane];
  // All loads first: those past the end read the last expert.
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = from[min(lane + 32 * i, experts - 1)];
  choose_experts(keys, experts, k, lane, chosen + row * k, weights + row * k);
}
