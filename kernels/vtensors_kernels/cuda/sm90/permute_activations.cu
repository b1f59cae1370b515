// Activations -> the shared-memory stages of linear_nvfp4_wgmma: one per 128 columns, copied there as they lie.
//
// Product 2 u + h of a stage (u = word 0..3, h = 0, 1) has at its k position 8 q + 2 c + e (q, e = 0, 1;
// c = 0..3) the column 32 c + 8 (u ^ (c >> 1)) + 4 h + 2 q + e, as lane c of the packed layout holds it. A stage
// is [16 chunks of 8 k positions][kTokens][8]: chunk 4 u + 2 h + q is one column of core matrices.
//
//   staged[s][4 u + 2 h + q][t][2 c + e] = x[t, 128 s + 32 c + 8 (u ^ (c >> 1)) + 4 h + 2 q + e] (* pre_scale)
//
// Zero for tokens from M to kTokens and for columns from K to the end of the last stage.
// One thread: one u and h of one token of one step at a time; any grid. Blocks are small and have few registers so that
// they start beside the blocks of the linear before this one and wait there.
// Shapes: M <= kTokens; K a multiple of 4. x: rows aligned to 8 bytes. Shared memory: none. Arch: sm_90a.

#include "include/wgmma_ptx.cuh"

#ifndef VT_TOKENS
#define VT_TOKENS 64  // tokens of a stage
#endif

constexpr int kTokens = VT_TOKENS;
constexpr int kStep = 128;  // columns of a stage
constexpr int kThreads = 64, kBlocks = 32;  // of an SM: at most 32 registers a thread
static_assert(kTokens % 8 == 0 && kTokens <= 64, "whole core matrices");

// Four values times four scales, each product rounded once.
__device__ __forceinline__ uint2 scale_four(uint2 v, const float* __restrict__ scale) {
  return make_uint2(round_pair(widen_half<0>(v.x) * scale[0], widen_half<1>(v.x) * scale[1]),
                    round_pair(widen_half<0>(v.y) * scale[2], widen_half<1>(v.y) * scale[3]));
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocks) void permute_activations(
    const unsigned short* x,               // [M, K] bf16 or f16, rows row_stride apart; not read before the wait
    const float* __restrict__ pre_scale,   // [K] or null
    uint4* __restrict__ staged,            // [steps, 16, kTokens] chunks of 8
    long long row_stride,                  // elements
    int tokens,                            // M
    int columns,                           // K
    int steps)                             // ceil(K / 128)
{
  launch_dependents();
  wait_for_predecessors();
  for (int index = blockIdx.x * kThreads + threadIdx.x; index < 8 * kTokens * steps; index += gridDim.x * kThreads) {
    const int h = index & 1, u = index >> 1 & 3, token = (index >> 3) % kTokens, step = (index >> 3) / kTokens;
    uint2 read[4];  // by c: pairs of q = 0, 1
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = step * kStep + 32 * c + 8 * (u ^ (c >> 1)) + 4 * h;
      read[c] = make_uint2(0u, 0u);
      if (token < tokens && column < columns) {
        read[c] = *reinterpret_cast<const uint2*>(x + token * row_stride + column);
        if (pre_scale) read[c] = scale_four(read[c], pre_scale + column);
      }
    }
    uint4* to = staged + (static_cast<long long>(step) * 16 + 4 * u + 2 * h) * kTokens + token;
    to[0] = make_uint4(read[0].x, read[1].x, read[2].x, read[3].x);
    to[kTokens] = make_uint4(read[0].y, read[1].y, read[2].y, read[3].y);
  }
  fence_async_proxy();
}
