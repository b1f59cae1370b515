#pragma once
// linear_nvfp4_wgmma_segments and linear_fp8_wgmma_segments but for the format of their weights, which the source
// includes before (format_*.cuh), as it defines VT_FUNCTION, the name of the kernel.
//
// The sum of a row: its column steps are cut into kSegments segments of equal length; of each, the products of the
// first and of the second half of every word are summed apart in order of k; all these sums are added as a balanced
// tree (segment_tree.cuh). A warpgroup product adds like mma.sync, so these are the sums of linear_*_stream.
//
// Grid: clusters of kCluster blocks, at most as many as (groups of row tiles) x (segments); each takes an equal
// range of that line: the end of a group, whole groups, the beginning of one. A block has kWarps row tiles of its
// cluster's group.
// Block: kWarps consumer warps, one row tile each, four to a warpgroup, and a warpgroup that fetches.
//   consumer   fills its ring of kSlots copies of kChunk column steps of its row tile; decodes them into products' A
//              operands (the packed layouts are in that order), kDepth words in flight
//   fetching   one warp fetches x, as permute_activations laid it out, one column step a stage, kStages stages for
//              the whole block, the blocks of a cluster a part each, for all; kFetchers warps refill the rings
// Nodes of the tree whose siblings are in another range go to `nodes`; the warp that comes last to a tile builds the
// rest of its tree from them and sets the tile's counter back to 0.
//
// Shapes: any N; M <= kTokens. Dynamic shared memory: Layout::kBytes. Arch: sm_90a.

#include "include/row_tile_output.cuh"
#include "include/segment_tree.cuh"
#include "include/segments_ranges.cuh"

// In float4s: a warp's node, from there to the warp's next place, all of a block.
constexpr unsigned kPitch = kTokenTiles * 32, kToNext = kWarps * kPitch, kOfBlock = kPlaces * kToNext;

// Where this warp of the block of that cluster puts the nodes of its part of a group: a block has at most one part
// that begins a group and does not end it, of up to three nodes, and one that does not begin it, of up to four.
__device__ __forceinline__ unsigned nodes_of(unsigned cluster, int begin, int warp, int lane) {
  return (cluster * kCluster + block_rank()) * kOfBlock + (begin == 0 ? 4 : 0) * kToNext + warp * kPitch + lane;
}

// This warp's nodes are in memory; true, and the whole sums, for the tile's last warp.
__device__ __forceinline__ bool join_parts(float (&sums)[kSums], const Waiting& waiting, float4* nodes,
                                           unsigned* counter, const Work& work, unsigned group, int warp, int lane) {
  const unsigned first = work.owner(group * kSegments), last = work.owner(group * kSegments + kSegments - 1);
  __syncwarp();  // orders the warp's stores before lane 0's arrival, and its arrival before the warp's loads
  unsigned before = 0;
  if (lane == 0) before = count_arrival(counter);
  if (__shfl_sync(0xffffffffu, before, 0) != last - first) return false;
  __syncwarp();
  if (lane == 0) *counter = 0;
  const auto nothing = [](const float(&)[kSums], int) {};
  int segment = 0;
#pragma unroll 1
  for (unsigned other = first; other <= last; ++other) {
    const float4* from = nodes + nodes_of(other, segment, warp, lane);
    const int end = min(static_cast<unsigned>(kSegments), work.first_unit(other + 1) - group * kSegments);
#pragma unroll 1
    while (segment < end) {
      const int level = node_level(segment, end);
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        const float4 v = __ldcg(from + i * 32);
        sums[4 * i] = v.x, sums[4 * i + 1] = v.y, sums[4 * i + 2] = v.z, sums[4 * i + 3] = v.w;
      }
      from += kToNext;
      add_node(sums, waiting, segment, level, 0, nothing);
      segment += 1 << level;
    }
  }
  return true;
}

// A segment's sums into their tile's tree; the end of the tile where they or the other parts of its group complete it.
__device__ __forceinline__ void add_segment(float (&sums)[kSums], const Work& work, unsigned unit, bool ends,
                                            unsigned base, float4* nodes, unsigned* counters, const float* row_scale,
                                            const float* bias, const unsigned short* residual, unsigned short* y, int n,
                                            int tokens, int warp, int lane) {
  const int begin = work.first_segment(unit), end = work.end_segment(unit);
  // A four waits where a part that begins a group has its first node: such a part is the last of a range, so the
  // place is free before.
  const Waiting waiting = {base + Layout::kNodes + warp * 2 * kNodeBytes + 16 * lane,
                           nodes + nodes_of(work.cluster, 0, warp, lane)};
  const auto give = [&](const float(&node)[kSums], int segment) {
    float4* to =
        nodes + nodes_of(work.cluster, begin, warp, lane) + nodes_before(segment, begin, end) * kToNext;
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
      to[i * 32] = make_float4(node[4 * i], node[4 * i + 1], node[4 * i + 2], node[4 * i + 3]);
  };
  bool whole = add_node(sums, waiting, unit % kSegments, 0, begin, give);
  if (!ends) return;
  if (end < kSegments) give_waiting(sums, waiting, begin, end, give);
  const unsigned group = unit / kSegments, tile = row_tile(group, warp);
  if (tile >= work.tiles) return;
  if (!whole) whole = join_parts(sums, waiting, nodes, counters + tile, work, group, warp, lane);
  if (whole) finish_row_tile(sums, tile, row_scale, bias, residual, y, n, tokens, lane);
}

extern "C" __global__ VT_CLUSTER_DIMENSIONS __launch_bounds__(kBound, 1) void VT_FUNCTION(
    const unsigned char* __restrict__ blocks,      // [tiles, column steps, kBlockBytes]
    const unsigned char* __restrict__ staged,      // [column steps, 16, kTokens, 8] bf16 or f16
    const float* __restrict__ row_scale,           // [16 tiles]
    const float* __restrict__ bias,                // [16 tiles] or null
    const unsigned short* residual,                // [M, N] or null; not read before the wait
    unsigned short* __restrict__ y,                // [M, N], or [M, N / 2] for silu(gate) * up, or stages of that
    float4* nodes,                                 // [blocks of the grid, kPlaces, kWarps, kTokens / 8, 32]
    unsigned* counters,                            // [tiles] zeros, left as zeros
    int n,                                         // N
    int column_steps,                              // ceil(K / 128)
    int tokens)                                    // M
{
  extern __shared__ __align__(128) unsigned char memory[];
  const unsigned base = shared_address(memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work(n, column_steps);
  const bool leader = lane == 0;
  const unsigned ring = base + Layout::kRings + warp * kSlots * kSlotBytes;
  const unsigned slot_full = base + Layout::kSlotFull + 8 * warp * kSlots;
  const unsigned slot_empty = base + Layout::kSlotEmpty + 8 * warp * kSlots;

  if (warp < kWarps && leader) {  // weights before anything else: they do not depend on earlier kernels
    for (int slot = 0; slot < kSlots; ++slot) {
      init_barrier(slot_full + 8 * slot, 1);
      init_barrier(slot_empty + 8 * slot, kArrivalsOfWarp);
    }
    fence_barrier_init();
    fetch_first(blocks, work, ring, slot_full, warp);
  } else if (warp == kWarps && leader) {
    init_stages(base);
  }
  launch_dependents();
  __syncthreads();
  meet_cluster();

  if (warp >= kWarps) {
    give_registers_back<kFetcherRegisters>();
    const int consumer = lane * kFetchers + warp - kWarps - 1;
    if (warp == kWarps && leader) {
      wait_for_predecessors();
      fetch_stages(staged, work.begin, work.end, work.steps, base);
    } else if (warp > kWarps && warp <= kWarps + kFetchers && consumer < kWarps) {
      fetch_rest(blocks, work, base, consumer);
    }
  } else {
    take_registers<kConsumerRegisters>();
    wait_for_predecessors();
    const BlockReader reader(lane);
    const unsigned long long x_first = operand_descriptor(base + Layout::kX, kTokens * 16, 128);
    float chains[2][kSums];  // of the first and of the second halves of words
    float(&sums)[kSums] = chains[0];
    unsigned operands[kDepth][2][4] = {};
    Place<kSlots> slot;
    Place<kStages> stage;
    int within = 0;  // a weight copy
    const unsigned last_unit = work.first_unit(work.cluster + 1);
    for (unsigned unit = work.first_unit(work.cluster); unit < last_unit; ++unit) {
      const bool ends = unit % kSegments == kSegments - 1 || unit + 1 == last_unit;  // this range's part of a group
#pragma unroll
      for (int i = 0; i < kSums; ++i) chains[0][i] = chains[1][i] = 0.0f;
      unsigned previous = 0;
      const int end = work.segment_step(unit % kSegments + 1);
      for (int step = work.segment_step(unit % kSegments); step < end; ++step) {
        if (within == 0) wait_barrier(slot_full + 8 * slot.index, slot.parity);
        BlockPart part;
        part.load(reader, ring + slot.index * kSlotBytes + within * kBlockBytes + 16 * lane);
        wait_barrier(base + Layout::kXFull + 8 * stage.index, stage.parity);
        multiply_step(chains, operands, part, reader, x_first + stage.index * (kStageBytes / 16), previous, lane);
        previous = base + Layout::kXEmpty + 8 * stage.index;
        stage.advance();
        if (++within == kChunk || (ends && step + 1 == end)) {
          __syncwarp();
          arrive_for_warp(slot_empty + 8 * slot.index, lane);
          slot.advance();
          within = 0;
        }
      }
      wait_warpgroup<0>();
      pin(chains[0]);
      pin(chains[1]);
      release_stage(previous, lane);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += chains[1][i];
      // What only the end of a segment needs is computed there again: registers are what the products lack.
      add_segment(sums, Work(n, kept(column_steps)), unit, ends, base, nodes, counters, row_scale, bias, residual, y, n,
                  tokens, warp, lane);
    }
  }
  __syncwarp();
  // No block of a cluster leaves while another may still write to it.
  meet_cluster();
}
