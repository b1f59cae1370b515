// out[t] = sum_s weight[t, s] * y[pair of t and s]  (+ a shared expert's)  (+ residual[t]), rounded once: float32, slot
// after slot, as experts_down_* has it.
//
// Pairs: t * top + s, and M * top + t of a shared expert, where slots = top + 1. Shapes: N a multiple of 4. Grid: x
// ceil(N / 4 / kThreads), y M. Block: kThreads. Alignment: 16 bytes. Arch: all; dependent launch from sm_90 on.

#include "include/experts_combine.cuh"
#include "include/ptx.cuh"

constexpr int kThreads = 128;

__device__ __forceinline__ float4 weighted(const float4& y, float weight) {
  return make_float4(weighted(y.x, weight), weighted(y.y, weight), weighted(y.z, weight), weighted(y.w, weight));
}

__device__ __forceinline__ float4 added(const float4& a, const float4& b) {
  return make_float4(added(a.x, b.x), added(a.y, b.y), added(a.z, b.z), added(a.w, b.w));
}

__device__ __forceinline__ float4 load_four(const unsigned short* from) {
  const uint2 v = *reinterpret_cast<const uint2*>(from);
  return make_float4(widen(v.x & 0xffffu), widen(v.x >> 16), widen(v.y & 0xffffu), widen(v.y >> 16));
}

extern "C" __global__ __launch_bounds__(kThreads) void experts_finish(
    const float* y,                    // [pairs, N] of each expert, not weighted; as ptx.cuh says of what kernels write
    const int* chosen,                 // [M, top], likewise
    const float* weights,              // [M, top], likewise
    const unsigned short* gate,        // [M] logits of the shared expert's weight, gate_stride apart, likewise, or null
    const unsigned short* shared,      // [M, N], likewise, or null
    const unsigned short* residual,    // [M, N], likewise, or null
    unsigned short* __restrict__ out,  // [M, N]
    long long gate_stride,
    int m, int top,
    int experts,                       // without the shared one
    int slots, int n)
{
  launch_dependents();
  wait_for_predecessors();
  const int column = 4 * (blockIdx.x * kThreads + threadIdx.x), token = blockIdx.y;
  if (column >= n) return;
  const unsigned short* own_gate = gate == nullptr ? nullptr : gate + token * gate_stride;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int slot = 0; slot < slots; ++slot) {
    const long long pair = slot < top ? token * top + slot : m * top + token;
    const float4 one = weighted(*reinterpret_cast<const float4*>(y + pair * n + column),
                                slot_weight(weights, chosen, own_gate, token, slot, top, experts));
    sum = slot == 0 ? one : added(sum, one);
  }
  const long long at = static_cast<long long>(token) * n + column;
  if (shared != nullptr) {
    const float weight = slot_weight(weights, chosen, own_gate, token, top, top, experts);
    sum = added(sum, weighted(load_four(shared + at), weight));
  }
  if (residual != nullptr) sum = added(sum, load_four(residual + at));
  *reinterpret_cast<uint2*>(out + at) = make_uint2(narrow_pair(sum.x, sum.y), narrow_pair(sum.z, sum.w));
}
