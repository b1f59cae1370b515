// norm(x) -> the stages of linear_*_wgmma* (staged_activations.cuh): the bits of rms_norm.cu, then of
// permute_activations.cu, in one launch.
//
// A block makes a row: its threads bring it into shared memory, the first warp adds the squares (row_norm.cuh), each
// thread norms the pairs of its chunks of the stages.
// Shapes: M <= pitch; columns a multiple of 8, in whole stages at most 8 * kChunks * threads. Grid: x M or more.
// Block: a multiple of 32, at most kMostThreads. Dynamic shared memory: 2 * columns bytes. Alignment: rows of x
// 16 bytes, gain 8. Arch: sm_90a.

#include "include/row_norm.cuh"
#include "include/staged_activations.cuh"
#include "include/wgmma_ptx.cuh"

#ifndef VT_CHUNKS
#define VT_CHUNKS 2  // chunks of eight columns of a thread
#endif

constexpr int kChunks = VT_CHUNKS;
constexpr int kMostThreads = 512;
static_assert(kChunks == 1 || kChunks == 2 || kChunks == 4, "what registers hold");

// Chunk 4 u + p of a step, which number `chunk` of the row is.
struct StagedChunk {
  int step, u, p;
  __device__ __forceinline__ explicit StagedChunk(int chunk) : step(chunk / 16), u(chunk / 4 % 4), p(chunk % 4) {}
  // Of its part c.
  __device__ __forceinline__ int column(int c) const { return staged_column(step, u, c) + 2 * p; }
};

extern "C" __global__ __launch_bounds__(kMostThreads) void norm_activations(
    const unsigned short* x,               // [M, K] bf16 or f16, rows row_stride apart; not read before the wait
    const float* __restrict__ gain,        // [K]
    const float* __restrict__ pre_scale,   // [K] or null
    uint4* __restrict__ staged,            // [steps, 16, pitch] chunks of 8
    long long row_stride,                  // elements
    int tokens,                            // M
    int columns,                           // K
    int pitch,                             // tokens of a stage
    float eps)
{
  extern __shared__ __align__(16) uint4 row[];
  __shared__ float found;
  launch_dependents();
  const int token = blockIdx.x, all = (columns + kStepColumns - 1) / kStepColumns * (kStepColumns / 8);
  float2 gains[kChunks][4];
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = StagedChunk(threadIdx.x + i * blockDim.x).column(c);
      if (column < columns) gains[i][c] = __ldg(reinterpret_cast<const float2*>(gain + column));
    }
  wait_for_predecessors();
  if (token >= tokens) return;
  const uint4* from = reinterpret_cast<const uint4*>(x + token * row_stride);
  uint4 own[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = threadIdx.x + i * blockDim.x;
    if (chunk < columns / 8) own[i] = from[chunk];
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = threadIdx.x + i * blockDim.x;
    if (chunk < columns / 8) row[chunk] = own[i];
  }
  const float scale = norm_scale_of_block(row, columns, eps, found);
  const unsigned* pairs = reinterpret_cast<const unsigned*>(row);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = threadIdx.x + i * blockDim.x;
    if (chunk >= all) break;
    const StagedChunk place(chunk);
    unsigned parts[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = place.column(c);
      parts[c] = column < columns ? normed_pair(pairs[column / 2], scale, gains[i][c].x, gains[i][c].y) : 0u;
      if (pre_scale && column < columns) parts[c] = scale_pair(parts[c], pre_scale + column);
    }
    staged[staged_chunk(place.step, place.u, place.p, pitch, token)] =
        make_uint4(parts[0], parts[1], parts[2], parts[3]);
  }
}
