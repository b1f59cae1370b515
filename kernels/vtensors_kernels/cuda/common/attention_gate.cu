// out[t, h] = x[h, t] * sigmoid(gate[t, h]) over D values, or x[h, t] without a gate: float32 and one rounding.
//
// A thread makes 8 values. Shapes: any T and heads; D a multiple of 8. Grid: x ceil(T * heads * D / 8 / kThreads).
// Block: kThreads. Alignment: x and out 16 bytes. Shared memory: none. Arch: all; dependent launch from sm_90 on.

#include "include/attention_heads.cuh"
#include "include/ptx.cuh"

constexpr int kThreads = 256;

extern "C" __global__ __launch_bounds__(kThreads) void attention_gate(
    const unsigned short* x,     // [kv_heads, heads / kv_heads, T, D] bf16 or f16 of the strides given, in elements;
                                 // as ptx.cuh says of what earlier kernels write
    const unsigned short* gate,  // [T, heads, ...] row_stride and head_stride apart, or null
    unsigned short* out,         // [T, heads, D]
    long long tokens,            // T
    long long group_stride, long long x_head_stride, long long token_stride,  // of x
    long long row_stride, long long head_stride,                            // of the gate
    int heads,
    int shared_heads,            // heads / kv_heads
    int dim)                     // D
{
  launch_dependents();
  wait_for_predecessors();
  const long long piece = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const int pieces = dim / 8, d = static_cast<int>(piece % pieces) * 8;
  const long long row = piece / pieces, token = row / heads;
  const int head = static_cast<int>(row % heads);
  if (token >= tokens) return;
  float values[8];
  load_eight(x + head / shared_heads * group_stride + head % shared_heads * x_head_stride + token * token_stride + d,
             values);
  if (gate != nullptr) {
    const unsigned short* own = gate + token * row_stride + head * head_stride + d;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], sigmoid(widen(own[i])));
  }
  store_eight(out + row * dim + d, values);
}
