// out = o / rms(o) * norm * silu(z), per token and value head: the last of three kernels (behind gated_delta_prefill).
//
// Shapes: T * HV below 2^31. A warp has one head of one token. Grid: x ceil(T * HV / kWarps). Block: 32 * kWarps.
// Shared memory: none. Arch: all; dependent launch from sm_90 on.

#include "include/gated_delta.cuh"
#include "include/ptx.cuh"

constexpr int kWarps = 8;

extern "C" __global__ __launch_bounds__(32 * kWarps) void gated_delta_norm(
    const float* o,                    // [T, HV, DV]; as ptx.cuh says of what earlier kernels write
    const unsigned short* z,           // [T, HV * DV] bf16 or f16, rows z_stride apart
    const float* __restrict__ norm,    // [DV]
    unsigned short* __restrict__ out,  // [T, HV * DV]
    long long z_stride,
    int tokens,                        // T
    int heads,                         // HV
    float eps)
{
  launch_dependents();
  wait_for_predecessors();
  const int lane = threadIdx.x % 32;
  const int number = blockIdx.x * kWarps + threadIdx.x / 32;
  if (number >= tokens * heads) return;
  const unsigned short* gate = z + number / heads * z_stride + number % heads * kValue;
  const long long item = number;
  float values[kValuesOfLane];
#pragma unroll
  for (int i = 0; i < kValuesOfLane; ++i)
    values[i] = lane + 32 * i < kValue ? o[item * kValue + lane + 32 * i] : 0.0f;
  const float inverse = inverse_rms(values, eps);
#pragma unroll
  for (int i = 0; i < kValuesOfLane; ++i) {
    const int at = lane + 32 * i;
    if (at < kValue) out[item * kValue + at] = gated(values[i], inverse, norm[at], gate[at]);
  }
}
