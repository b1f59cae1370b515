// out[r, :] = x[r, :] * rsqrt(mean(x[r, :]^2) + eps) * gain, in float32, rounded once: the bits of the norm that
// linear_*_stream computes in its prologue.
//
// Shapes: any rows; columns a multiple of 8, at most 8 * kChunks * threads. A block makes a row: its threads bring it
// into shared memory, the first warp adds the squares (row_norm.cuh), all scale what they brought.
// Grid: x rows. Block: a multiple of 32, at most kMostThreads. Dynamic shared memory: 2 * columns bytes. Alignment:
// rows of x and out, gain 16 bytes. Arch: all; dependent launch from sm_90 on.

#include "include/ptx.cuh"
#include "include/row_norm.cuh"

#ifndef VT_CHUNKS
#define VT_CHUNKS 2  // chunks of eight columns of a thread
#endif

constexpr int kChunks = VT_CHUNKS;
constexpr int kMostThreads = 512;
static_assert(kChunks == 1 || kChunks == 2 || kChunks == 4, "what registers hold");

extern "C" __global__ __launch_bounds__(kMostThreads) void rms_norm(
    const unsigned short* x,           // [rows, columns] bf16 or f16, rows x_stride apart; as ptx.cuh says of such inputs
    const float* __restrict__ gain,    // [columns]
    unsigned short* __restrict__ out,  // [rows, columns], contiguous
    long long x_stride,
    int columns,
    float eps)
{
  extern __shared__ __align__(16) uint4 row[];
  __shared__ float found;
  launch_dependents();
  const int thread = threadIdx.x, chunks = columns / 8;
  float4 gains[kChunks][2];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = thread + i * blockDim.x;
    if (chunk < chunks) {
      gains[i][0] = __ldg(reinterpret_cast<const float4*>(gain) + 2 * chunk);
      gains[i][1] = __ldg(reinterpret_cast<const float4*>(gain) + 2 * chunk + 1);
    }
  }
  wait_for_predecessors();
  const uint4* from = reinterpret_cast<const uint4*>(x + blockIdx.x * x_stride);
  uint4 own[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = thread + i * blockDim.x;
    if (chunk < chunks) own[i] = from[chunk];
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = thread + i * blockDim.x;
    if (chunk < chunks) row[chunk] = own[i];
  }
  const float scale = norm_scale_of_block(row, columns, eps, found);
  uint4* to = reinterpret_cast<uint4*>(out + static_cast<long long>(blockIdx.x) * columns);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = thread + i * blockDim.x;
    if (chunk < chunks)
      to[chunk] = make_uint4(normed_pair(own[i].x, scale, gains[i][0].x, gains[i][0].y),
                             normed_pair(own[i].y, scale, gains[i][0].z, gains[i][0].w),
                             normed_pair(own[i].z, scale, gains[i][1].x, gains[i][1].y),
                             normed_pair(own[i].w, scale, gains[i][1].z, gains[i][1].w));
  }
}
