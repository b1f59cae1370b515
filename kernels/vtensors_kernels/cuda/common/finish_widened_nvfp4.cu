// What is left of a linear once cuBLAS has the sums, rounded once to 16 bits:
//   plain:  out[m, r] = sums[m, r] * row_scale[r] * token_scale[m] + bias[r] + residual[m, r]
//   VT_SWIGLU:  out[m, 8 i + j] = silu(y[m, 16 i + j]) * y[m, 16 i + 8 + j],  y = sums * row_scale * token_scale + bias
//
// Shapes: any M; sums has `rows` columns, a multiple of 16, of which those that fall on out columns below
// `valid` are written. bias, residual, row_scale and token_scale may be null (1 where sums are scaled already).
// A thread makes 8 columns of every gridDim.y-th row m. Block: kThreads; grid x covers the outputs / 8.
// Alignment: sums 32 bytes; out and residual 16 bytes where `stride` is a multiple of 8 and so is the first
// column, else 2. Shared memory: none. Arch: all.

#include "include/sixteen_bits.cuh"

#ifndef VT_SWIGLU
#define VT_SWIGLU 0  // 1: rows of gate and up, interleaved by 8
#endif
#ifndef VT_SUMS16
#define VT_SUMS16 0  // 1: sums are 16-bit, in the operands' format
#endif
static_assert((VT_SWIGLU == 0 || VT_SWIGLU == 1) && (VT_SUMS16 == 0 || VT_SUMS16 == 1), "switches are 0 or 1");

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2;  // at least: to fit a third, registers would be spilled
constexpr int kColumns = 8;
constexpr int kSumsPerThread = VT_SWIGLU ? 2 * kColumns : kColumns;

#if VT_SUMS16
using Sum = unsigned short;
#else
using Sum = float;
#endif

// Eight neighbouring sums.
__device__ __forceinline__ void load_sums(const Sum* __restrict__ from, float (&values)[kColumns]) {
#if VT_SUMS16
  load_eight(from, values);
#else
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
#endif
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocksPerSm) void finish_widened_nvfp4(
    const Sum* __restrict__ sums,                 // [M, rows]
    const float* __restrict__ row_scale,          // [rows] or null
    const float* __restrict__ token_scale,        // [M] or null
    const float* __restrict__ bias,               // [rows] or null
    const unsigned short* __restrict__ residual,  // [M, stride] bf16 or f16, or null
    unsigned short* __restrict__ out,             // [M, stride] bf16 or f16
    long long m_rows,                             // M
    long long rows,                               // columns of sums
    long long valid,                              // columns of out that are written
    long long stride,                             // from row to row of out and residual
    int vectors)                                  // 1: out and residual are aligned to 16 bytes at every row
{
  const long long column = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  const long long first = VT_SWIGLU ? 2 * column : column;
  if (column >= valid || first >= rows) return;
  const bool whole = vectors && column + kColumns <= valid;

  float scale[kSumsPerThread], add[kSumsPerThread];
#pragma unroll
  for (int i = 0; i < kSumsPerThread; ++i) {
    scale[i] = row_scale ? row_scale[first + i] : 1.0f;
    add[i] = bias ? bias[first + i] : 0.0f;
  }
  for (long long m = blockIdx.y; m < m_rows; m += gridDim.y) {
    float y[kColumns];
    load_sums(sums + m * rows + first, y);
    const float by_token = token_scale ? token_scale[m] : 1.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y[i] = y[i] * (scale[i] * by_token) + add[i];
#if VT_SWIGLU
    float up[kColumns];
    load_sums(sums + m * rows + first + kColumns, up);
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      y[i] = y[i] / (1.0f + __expf(-y[i])) * (up[i] * (scale[kColumns + i] * by_token) + add[kColumns + i]);
#endif
    const long long at = m * stride + column;
    if (whole) {
      if (residual) {
        float old[kColumns];
        load_eight(residual + at, old);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) y[i] += old[i];
      }
      store_eight(out + at, y);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (column + i >= valid) break;
        out[at + i] = narrow(residual ? y[i] + widen(residual[at + i]) : y[i]);
      }
    }
  }
}
