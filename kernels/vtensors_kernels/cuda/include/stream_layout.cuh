#pragma once
// What the warps of linear_*_stream share: the form it is compiled in, the problem, the layout of shared memory.
//
// The source includes the header of its weights' format (format_*.cuh) before: kTileRows, kStepColumns, kBlockBytes,
// kStepScales, BlockReader and BlockPart.

#include "include/ptx.cuh"
#include "include/segment_sums.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_WARPS
#define VT_WARPS 12  // consumer warps
#endif
#ifndef VT_TOKEN_TILES
#define VT_TOKEN_TILES 1  // groups of 8 tokens
#endif
#ifndef VT_ROW_TILES
#define VT_ROW_TILES 1  // row tiles that a consumer multiplies with the same x
#endif
#ifndef VT_CLUSTER
#define VT_CLUSTER 1  // blocks of a cluster, which split the segments
#endif
#ifndef VT_REDUCERS
#define VT_REDUCERS 1
#endif
#ifndef VT_BLOCKS_PER_SM
#define VT_BLOCKS_PER_SM 1
#endif
#ifndef VT_EPILOGUE
#define VT_EPILOGUE 0  // 0: y, 1: y + residual, 2: silu(gate) * up of paired rows, 3: the largest y of each token
#endif
#ifndef VT_PROLOGUE
#define VT_PROLOGUE 0  // 0: x, 1: x * gain, 2: x * rsqrt(mean(x^2) + eps) * gain, 3: x, whose sums are scaled by token
#endif

constexpr int kWarps = VT_WARPS, kTokenTiles = VT_TOKEN_TILES, kRowTiles = VT_ROW_TILES, kReducers = VT_REDUCERS;
constexpr int kCluster = VT_ARCH >= 900 ? VT_CLUSTER : 1;
// Blocks of a stage that are multiplied side by side: two where registers allow.
constexpr int kUnrolled =
    kTokenTiles * kRowTiles == 1 && VT_BLOCKS_PER_SM * kWarps <= 16 && !kStepScales ? 2 : 1;
constexpr int kThreads = 32 * (kWarps + kReducers);
constexpr int kSegments = 8;
constexpr int kOwnSegments = kSegments / kCluster;
constexpr int kStride = kWarps / kOwnSegments;  // groups of row tiles that the consumers work on at a time

static_assert(kThreads <= 1024 && kTokenTiles >= 1 && kTokenTiles <= 4, "limits of a block");
static_assert(kCluster * kOwnSegments == kSegments, "a cluster has 1, 2, 4 or 8 blocks");
static_assert(kStride * kOwnSegments == kWarps, "a consumer keeps to one segment");

struct Problem {
  const unsigned char* blocks;     // [tiles, steps, kBlockBytes]
  const unsigned short* x;         // [M, K]
  unsigned short* out;             // [M, N], paired: [M, N / 2]
  const float* row_scale;          // [16 * tiles]
  const float* bias;               // [16 * tiles] or null
  const unsigned short* residual;  // [M, N] of VT_EPILOGUE 1
  const float* gain;               // [K] of VT_PROLOGUE 1 and 2; [M] the tokens' scales of 3, from an earlier kernel
  unsigned long long* keys;        // [M, gridDim.x * kReducers] of VT_EPILOGUE 3, see largest.cuh
  int m, n, k;
  int stages, stage_blocks, slots;  // of each consumer's ring, of a stage, row tiles between consumers and reducers
  int steps;                        // of the whole matrix
  int first_tile, tiles;            // of this cluster
  int rank;                         // of this block in the cluster
  int x_step, x_steps;              // column steps of this block

  // The first column step of a segment of the whole matrix.
  __device__ __forceinline__ int segment_step(int segment) const { return steps * segment / kSegments; }
};

// Offsets in dynamic shared memory, in bytes, the same formula as the launcher's.
struct Layout {
  unsigned ring, x, sums, received, token_scale, full, x_full, sum_full, sum_empty, arrived;
  unsigned x_row, segment_sums, message;  // bytes of a token of x, of the sums of a segment, of what a block sends
  __device__ Layout(unsigned base, const Problem& p) {
    // The same in every block of the cluster; 32 more keep rows apart in the banks.
    x_row = (p.steps * kOwnSegments + kSegments - 1) / kSegments * (kStepColumns * 2) + 32;
    message = (p.m + 1) / 2 * 128;
    segment_sums = message;
    ring = base;
    x = ring + kWarps * p.stages * kRowTiles * p.stage_blocks * kBlockBytes;
    sums = x + p.m * x_row;
    received = sums + p.slots * kOwnSegments * segment_sums;
    token_scale = received + (kCluster == 1 ? 0 : kReducers * 2 * kCluster * message);
    full = token_scale + (VT_PROLOGUE == 2 ? 8 * kTokenTiles * 4 : 0);
    x_full = full + 8 * kWarps * p.stages;
    sum_full = x_full + 8;
    sum_empty = sum_full + 8 * p.slots;
    arrived = sum_empty + 8 * p.slots;
  }
};

// A place in a ring and the parity of the phase it is in.
struct Cursor {
  int index = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int size) {
    if (++index == size) {
      index = 0;
      parity ^= 1;
    }
  }
};
