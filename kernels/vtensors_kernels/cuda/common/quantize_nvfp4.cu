// Activations -> NVFP4, by group of 16 columns as nvfp4_quantize.cuh says, of
//   VT_SOURCE 0:  x        1:  x * gain (a pre-scale)        2:  x * rsqrt(mean(x^2) + eps) * gain
//             3:  silu(gate) * up, of rows that hold the K columns of gate and then those of up
// where 1, 2 and 3 round to the 16-bit format before they are quantized, as the separate ops do.
//   VT_OUTPUT 0:  codes [M, K / 2], low nibble first; scales [M, K / 16]
//             1:  codes likewise; scales in tiles of 128 rows x 4 groups as block-scaled products take them:
//                 [rows / 128][groups / 4][row % 32][row % 128 / 32][group % 4], zero for padding
//             2:  fragments of mma.m16n8k64: [rows / 8][groups / 8][kFragmentBytes]; lane 4 t + c has at 16 * lane the
//                 words k = 64 s + 32 h + 8 c .. + 7 of token t at 8 s + 4 h, and the scales of token t are at
//                 512 + 8 t; zero for padding
//             3:  code * scale in 16 bits, exact: [M, K]
//
// Shapes: K a multiple of 16. rows, groups: M and K / 16, padded to multiples of 128 and 4 (output 1), of 8 and 8 (2).
// A thread makes a group. Grid: a block per row for a norm, else rows * ceil(groups / kThreads). Block: kThreads.
// Alignment: x and outputs 16 bytes, row_stride a multiple of 8. A row's bits depend on that row alone.
// Shared memory: one float per warp for a norm. Arch: all; dependent launch from sm_90 on.

#include "include/nvfp4_quantize.cuh"
#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_SOURCE
#define VT_SOURCE 0
#endif
#ifndef VT_OUTPUT
#define VT_OUTPUT 3
#endif
static_assert(VT_SOURCE >= 0 && VT_SOURCE <= 3 && VT_OUTPUT >= 0 && VT_OUTPUT <= 3, "0 .. 3");

constexpr bool kNorm = VT_SOURCE == 2;
constexpr int kThreads = kNorm ? 256 : 64;
constexpr int kBlocksPerSm = 1024 / kThreads;  // at least: at most 64 registers a thread
constexpr int kGroup = 16;
constexpr int kFragmentBytes = 576;  // 8 tokens x 128 columns

// Round to the 16-bit format and back.
__device__ __forceinline__ float rounded(float value) { return widen(narrow(value)); }

__device__ __forceinline__ float silu(float gate) { return __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))); }

// The group of a row, before quantization. from: its first column. gain: at that column. inverse: 1 / rms.
__device__ __forceinline__ void load_group(const unsigned short* from, const float* __restrict__ gain, float inverse,
                                           int columns, float (&values)[2][8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    load_eight(from + 8 * half, values[half]);
#if VT_SOURCE == 3
    float up[8];
    load_eight(from + columns + 8 * half, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[half][i] = rounded(__fmul_rn(silu(values[half][i]), up[i]));
#elif VT_SOURCE
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = kNorm ? __fmul_rn(values[half][i], inverse) : values[half][i];
      values[half][i] = rounded(__fmul_rn(x, gain[8 * half + i]));
    }
#endif
  }
}

#if VT_SOURCE == 2
// 1 / rms of a row, for every thread; the order of the sums depends on the number of columns alone.
__device__ __forceinline__ float inverse_rms(const unsigned short* row, int columns, float eps) {
  __shared__ float sums[kThreads / 32];
  float sum = 0.0f;
  for (int at = 8 * threadIdx.x; at < columns; at += 8 * kThreads) {
    float v[8];
    load_eight(row + at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
  }
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) total = __fadd_rn(total, sums[warp]);
  return rsqrtf(__fadd_rn(__fdiv_rn(total, static_cast<float>(columns)), eps));
}
#endif

__device__ __forceinline__ void store_group(const QuantizedGroup& made, bool live, long long row, int group,
                                            int columns, int groups, unsigned char* codes, unsigned char* scales) {
#if VT_OUTPUT == 2
  unsigned char* block = codes + (row / 8 * (groups / 8) + group / 8) * kFragmentBytes;
  const int token = static_cast<int>(row % 8), place = group % 8;
  unsigned* to = reinterpret_cast<unsigned*>(block + 16 * (4 * token + 2 * (place % 2)) + 4 * (place / 2));
  to[0] = made.words[0], to[4] = made.words[1];
  block[512 + 8 * token + place] = static_cast<unsigned char>(made.scale);
#elif VT_OUTPUT == 3
  float low[8], high[8];
  dequantize_eight(made.words[0], made.scale, low);
  dequantize_eight(made.words[1], made.scale, high);
  unsigned short* to = reinterpret_cast<unsigned short*>(codes) + row * columns + group * kGroup;
  store_eight(to, low);
  store_eight(to + 8, high);
#else
  if (live) {
    const long long at = row * (columns / 2) + group * (kGroup / 2);
    *reinterpret_cast<uint2*>(codes + at) = make_uint2(made.words[0], made.words[1]);
  }
  const long long tile = row / 128 * (groups / 4) + group / 4;
  const int within = static_cast<int>(row % 32 * 16 + row % 128 / 32 * 4 + group % 4);
  scales[VT_OUTPUT == 1 ? tile * 512 + within : row * groups + group] = static_cast<unsigned char>(made.scale);
#endif
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocksPerSm) void quantize_nvfp4(
    const unsigned short* x,           // [M, K] bf16 or f16 ([M, 2 K] for source 3); not read before the wait
    const float* __restrict__ gain,    // [K], or null for sources 0 and 3
    const float* __restrict__ global,  // [1]
    unsigned char* codes,              // what VT_OUTPUT says
    unsigned char* scales,             // for outputs 0 and 1
    long long row_stride,              // elements between rows of x
    long long tokens,                  // M
    int columns,                       // K
    int groups,                        // K / 16, padded
    int divides,                       // whether the global scale divides
    float eps)                         // of a norm
{
  launch_dependents();
  wait_for_predecessors();
  const int blocks = kNorm ? 1 : (groups + kThreads - 1) / kThreads;
  const long long row = blockIdx.x / blocks;
  const unsigned short* from = x + row * row_stride;
  float inverse = 1.0f;
#if VT_SOURCE == 2
  if (row < tokens) inverse = inverse_rms(from, columns, eps);  // all threads of a block have one row
#endif
  const int first = kNorm ? threadIdx.x : blockIdx.x % blocks * kThreads + threadIdx.x;
  for (int group = first; group < groups; group += kNorm ? kThreads : groups) {
    const bool live = row < tokens && group * kGroup < columns;
    QuantizedGroup made = {{0u, 0u}, 0u};
    if (live) {
      float values[2][8];
      load_group(from + group * kGroup, gain ? gain + group * kGroup : gain, inverse, columns, values);
      made = quantize_group(values, *global, divides != 0);
    }
    store_group(made, live, row, group, columns, groups, codes, scales);
  }
}
