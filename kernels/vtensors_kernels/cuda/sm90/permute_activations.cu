// Activations -> the stages of linear_*_wgmma* (staged_activations.cuh).
//
// Four lanes c bring eight columns each that are the parts c of four chunks, and give each other their pairs. A warp
// does so for two u of four tokens, a block for all u of them: whole sectors are read and written. All of a thread's
// columns are on their way before the first arrives. Blocks are small and have few registers so that they start beside
// the blocks of the linear before this one and wait there.
// Shapes: M <= pitch; K a multiple of 8. Grid: x any, steps are dealt out to the blocks; y ceil(M / 4) or more. x: rows
// aligned to 16 bytes. Shared memory: none. Arch: sm_90a.

#include "include/staged_activations.cuh"
#include "include/wgmma_ptx.cuh"

#ifndef VT_PRE_SCALE
#define VT_PRE_SCALE 0  // 1: there is a pre_scale
#endif
#ifndef VT_AHEAD
#define VT_AHEAD (VT_PRE_SCALE ? 2 : 4)
#endif

constexpr int kAhead = VT_AHEAD;  // stages whose columns a thread has on their way
constexpr int kThreads = 64, kBlocks = 32;  // of an SM: at most 32 registers a thread

// Lane c of four has pair p = 0..3 of its columns and gets the pairs p = c of all four lanes.
__device__ __forceinline__ uint4 exchange_pairs(uint4 own, int c) {
  const bool odd = c & 1, high = c & 2;
  const unsigned x = __shfl_xor_sync(~0u, odd ? own.x : own.y, 1), y = __shfl_xor_sync(~0u, odd ? own.z : own.w, 1);
  // Pairs p = c % 2 and p = c % 2 + 2 of the lanes 2 (c / 2) and the next.
  const uint2 low = odd ? make_uint2(x, own.y) : make_uint2(own.x, x);
  const uint2 upper = odd ? make_uint2(y, own.w) : make_uint2(own.z, y);
  const unsigned first = __shfl_xor_sync(~0u, high ? low.x : upper.x, 2);
  const unsigned second = __shfl_xor_sync(~0u, high ? low.y : upper.y, 2);
  return high ? make_uint4(first, second, upper.x, upper.y) : make_uint4(low.x, low.y, first, second);
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocks) void permute_activations(
    const unsigned short* x,               // [M, K] bf16 or f16, rows row_stride apart; not read before the wait
    const float* __restrict__ pre_scale,   // [K], with VT_PRE_SCALE
    uint4* __restrict__ staged,            // [steps, 16, pitch] chunks of 8
    long long row_stride,                  // elements
    int tokens,                            // M
    int columns,                           // K
    int pitch)                             // tokens of a stage
{
  launch_dependents();
  const int lane = threadIdx.x % 32, c = lane % 4, u = threadIdx.x / 32 * 2 + lane / 4 % 2;
  const int token = blockIdx.y * 4 + lane / 8, of_step = staged_column(0, u, c);
  const int steps = (columns + kStepColumns - 1) / kStepColumns, apart = gridDim.x;
  const unsigned short* row = x + min(token, tokens - 1) * row_stride + of_step;
  uint4* to = staged + staged_chunk(0, u, c, pitch, token);
  wait_for_predecessors();
  for (int first = blockIdx.x; first < steps; first += kAhead * apart) {
    uint4 read[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int column = (first + i * apart) * kStepColumns;
      read[i] = make_uint4(0u, 0u, 0u, 0u);
      if (of_step < columns - column) read[i] = *reinterpret_cast<const uint4*>(row + column);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = first + i * apart;
      if (step >= steps) break;
      const int column = step * kStepColumns + of_step;
      if (VT_PRE_SCALE && column < columns) {
        const float* scale = pre_scale + column;
        read[i] = make_uint4(scale_pair(read[i].x, scale), scale_pair(read[i].y, scale + 2),
                             scale_pair(read[i].z, scale + 4), scale_pair(read[i].w, scale + 6));
      }
      const uint4 chunk = exchange_pairs(read[i], c);
      if (token < tokens) to[16ll * step * pitch] = chunk;
    }
  }
}
