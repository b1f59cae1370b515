#pragma once
// The kernel linear_*_stream, for the format of weights that the source has included (stream_layout.cuh says what that
// brings) and under the name VT_FUNCTION.
//
// The sum of a row: its column steps are cut into kSegments segments of equal length; of each, the products of the
// first and of the second four columns of every eight are summed apart in order of k; all these sums are added as a
// balanced tree. With scales of steps (kStepScales) it is the sums of a segment's steps, scaled, that are summed in
// order of k. Nothing else enters, so a row's result is the same bits at any M, any place in the batch, any number of
// warps, stages, blocks and blocks of a cluster.
//
// Grid: clusters of kCluster blocks; a cluster owns a contiguous range of row tiles, a block of it kSegments /
// kCluster segments of each. Block: kWarps consumer warps, kReducers reducer warps.
//   consumer w  takes segment w % kOwnSegments of the groups of kRowTiles row tiles w / kOwnSegments, + kStride, ...;
//               copies their blocks into a ring of its own, decodes them in registers and multiplies; no warp waits
//               for another until it delivers its sums
//   reducer     adds a tile's segments; sends the sum to the block of the cluster that finishes the tile, or adds
//               what the others sent, applies scales and stores; reducer q takes rounds q, q + kReducers, ... of
//               kCluster tiles, of which every block of the cluster finishes one
// Between them lie `slots` row tiles of sums, a multiple of kStride * kRowTiles and of kCluster * kReducers: a slot
// always belongs to the same warps, or a warp could take an old phase of its barrier for the one it waits for.
//
// Shapes: any N and M <= 8 * kTokenTiles; K a multiple of 16. x, residual and out are row-major, 16-byte
// aligned. Dynamic shared memory: Layout, which the launcher computes alike. Arch: sm_80 and newer; bulk copies,
// clusters and programmatic dependent launch from sm_90 on.

#include "include/stream_consumer.cuh"
#include "include/stream_reducer.cuh"

#if VT_ARCH >= 900 && VT_CLUSTER > 1
#define VT_CLUSTER_ATTRIBUTE __cluster_dims__(VT_CLUSTER, 1, 1)
#else
#define VT_CLUSTER_ATTRIBUTE
#endif

extern "C" __global__ void VT_CLUSTER_ATTRIBUTE __launch_bounds__(kThreads, VT_BLOCKS_PER_SM) VT_FUNCTION(
    const unsigned char* __restrict__ blocks,     // [ceil(N / 16), ceil(K / 128), kBlockBytes] packed weights
    const unsigned short* x,                      // [M, K] bf16 or f16; as ptx.cuh says of what earlier kernels write
    unsigned short* __restrict__ out,             // [M, N], paired rows [M, N / 2]; unused by VT_EPILOGUE 3
    const float* __restrict__ row_scale,          // [16 * ceil(N / 16)] what is left of the scale
    const float* __restrict__ bias,               // [16 * ceil(N / 16)] or null
    const unsigned short* residual,               // [M, N] of VT_EPILOGUE 1, likewise
    const float* gain,                            // [K] of VT_PROLOGUE 1 and 2, for good; [M] of 3, likewise as x
    unsigned long long* __restrict__ keys,        // [M, gridDim.x * kReducers] of VT_EPILOGUE 3
    float eps,                                    // of VT_PROLOGUE 2
    int m, int n, int k,
    int stages,                                   // of each consumer's ring
    int stage_blocks,                             // blocks of a stage
    int slots)                                    // row tiles between consumers and reducers
{
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;

  Problem p{blocks, x, out, row_scale, bias, residual, gain, keys, m, n, k, stages, stage_blocks, slots};
  const unsigned all_tiles = (n + kTileRows - 1) / kTileRows;
  p.steps = (k + kStepColumns - 1) / kStepColumns;
  p.first_tile = all_tiles * cluster / clusters;
  p.tiles = all_tiles * (cluster + 1) / clusters - p.first_tile;
#if VT_ARCH >= 900
  p.rank = kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
#else
  p.rank = 0;
#endif
  p.x_step = p.segment_step(p.rank * kOwnSegments);
  p.x_steps = p.segment_step((p.rank + 1) * kOwnSegments) - p.x_step;
  const Layout at(shared_address(memory), p);

  const unsigned copies = VT_HAS_BULK_COPY ? 1 : 32;
  for (int i = threadIdx.x; i < kWarps * stages; i += kThreads) init_barrier(at.full + 8 * i, copies);
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    init_barrier(at.sum_full + 8 * i, kOwnSegments * kArrivalsOfWarp);
    init_barrier(at.sum_empty + 8 * i, kArrivalsOfWarp);
  }
  if (threadIdx.x < kReducers * 2) init_barrier(at.arrived + 8 * threadIdx.x, 1);
  if (threadIdx.x == 0) init_barrier(at.x_full, copies);
  fence_barrier_init();
  __syncthreads();
#if VT_ARCH >= 900
  if (kCluster > 1) cluster_arrive();
#endif
  launch_dependents();

  if (warp < kWarps) {
    consume(p, at, eps, warp, lane);
  } else {
    wait_for_predecessors();
    if (warp == kWarps) fetch_x(p, at, lane);
#if VT_ARCH >= 900
    if (kCluster > 1) cluster_wait();
#endif
    reduce(p, at, warp - kWarps, lane);
  }
}
