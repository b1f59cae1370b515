#pragma once
// What the warpgroup kernels share, behind wgmma_form.cuh or segments_form.cuh: whose rows are whose, places in rings,
// the stages of x, one column step of products.

#include "include/wgmma_ptx.cuh"

__device__ __forceinline__ unsigned block_rank() { return kCluster > 1 ? cluster_rank() : 0; }

// All blocks of the cluster come here before one goes on.
__device__ __forceinline__ void meet_cluster() {
  if (kCluster > 1) cluster_arrive(), cluster_wait();
}

// Groups of row tiles, one for each consumer of a cluster, that so many tiles make.
__device__ __forceinline__ unsigned row_groups(unsigned tiles) {
  return (tiles + kWarps * kCluster - 1) / (kWarps * kCluster);
}

// The row tile of a group that is this block's warp's; beyond the matrix where the group is not full.
__device__ __forceinline__ unsigned row_tile(unsigned group, int warp) {
  return (group * kCluster + block_rank()) * kWarps + warp;
}

// A place in a ring and the parity of its round.
template <int size>
struct Place {
  unsigned index = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == size) index = 0, parity ^= 1;
  }
};

// Makes the barriers of the stages of x. One thread.
__device__ __forceinline__ void init_stages(unsigned base) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(base + Layout::kXFull + 8 * stage, 1);
    init_barrier(base + Layout::kXEmpty + 8 * stage, kCluster * kWarps);
  }
  fence_barrier_init();
}

// Fetches the stages of x for places begin .. end - 1 of a line of rows of `steps` column steps: the blocks of a
// cluster a part each, for all. One thread.
__device__ __forceinline__ void fetch_stages(const unsigned char* staged, unsigned begin, unsigned end, unsigned steps,
                                             unsigned base) {
  fence_async_proxy();
  Place<kStages> at;
  constexpr unsigned kPart = kStageBytes / kCluster;
  const unsigned part = block_rank() * kPart;
  unsigned step = begin % steps;
  for (unsigned place = begin; place < end; ++place, at.advance()) {
    const unsigned full = base + Layout::kXFull + 8 * at.index;
    const unsigned to = base + Layout::kX + at.index * kStageBytes + part;
    const unsigned char* from = staged + static_cast<unsigned long long>(step) * kStageBytes + part;
    wait_barrier(base + Layout::kXEmpty + 8 * at.index, at.parity ^ 1);
    arrive_expecting(full, kStageBytes);
    if (kCluster == 1) copy_bulk(to, from, kPart, full);
    else copy_bulk_to_all(to, from, kPart, full, (1 << kCluster) - 1);
    if (++step == steps) step = 0;
  }
}

// This warp has read a stage of x (0: none): told to every block of the cluster.
__device__ __forceinline__ void release_stage(unsigned empty, int lane) {
  if (empty == 0) return;
  if (kCluster == 1) {
    if (lane == 0) arrive(empty);
  } else if (lane < kCluster) {
    arrive_in_cluster(cluster_address(empty, lane));
  }
}

// One column step of a row tile times x: kWords * 2 products of 16 columns. With two chains of sums the second halves
// of words go to the second. part: this lane's of the block. previous: the stage of the step before, released when its
// products are done, or 0.
template <int chains>
__device__ __forceinline__ void multiply_step(float (&sums)[chains][kSums], unsigned (&operands)[kDepth][2][4],
                                              BlockPart& part, const BlockReader& reader, unsigned long long x,
                                              unsigned previous, int lane) {
  // Registers that a group of products reads are free once the groups since are the only ones in flight.
  constexpr int kInFlight = kDepth / kGroup - 1;
#pragma unroll
  for (int first = 0; first < kWords; first += kGroup) {
    wait_warpgroup<kInFlight>();
#pragma unroll
    for (int u = first; u < first + kGroup; ++u) pin(operands[u % kDepth][0]), pin(operands[u % kDepth][1]);
    // All products of the step before are done by now.
    if (first == kDepth - kGroup) release_stage(previous, lane);
#pragma unroll
    for (int u = first; u < first + kGroup; ++u) {
      unsigned(&a)[2][4] = operands[u % kDepth];
      unsigned row[2][4];
      part.decode(reader, u, row[0], row[1]);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[h][i] = row[i % 2][2 * h + i / 2];
      pin(a[0]);
      pin(a[1]);
    }
    fence_warpgroup();
#pragma unroll
    for (int u = first; u < first + kGroup; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        multiply_warpgroup(sums[h % chains], operands[u % kDepth][h], x + (2 * u + h) * (2 * kTokens));
    commit_warpgroup();
  }
}
