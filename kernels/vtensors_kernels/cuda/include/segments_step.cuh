#pragma once
// Weights and activations into warpgroup products: copies through rings, decoding, one column step at a time.

#include "include/segments_form.cuh"
#include "include/wgmma_ptx.cuh"

// The matrix as a line of (group of row tiles, segment), cut in one equal range a cluster; as columns it is a line of
// (group, column step), whose range is begin .. end - 1.
struct Work {
  unsigned steps, tiles, units, clusters, cluster;
  unsigned begin, end;
  __device__ __forceinline__ Work(int n, int column_steps) : steps(column_steps) {
    tiles = (n + kTileRows - 1) / kTileRows;
    units = (tiles + kWarps * kCluster - 1) / (kWarps * kCluster) * kSegments;
    clusters = gridDim.x / kCluster;
    cluster = blockIdx.x / kCluster;
    begin = place_of(first_unit(cluster));
    end = place_of(first_unit(cluster + 1));
  }
  __device__ __forceinline__ unsigned first_unit(unsigned of) const { return units * of / clusters; }
  // Whose range has that unit.
  __device__ __forceinline__ unsigned owner(unsigned unit) const { return ((unit + 1) * clusters - 1) / units; }
  // The first column step of a segment.
  __device__ __forceinline__ unsigned segment_step(unsigned segment) const { return steps * segment / kSegments; }
  __device__ __forceinline__ unsigned place_of(unsigned unit) const {
    return unit / kSegments * steps + segment_step(unit % kSegments);
  }
  __device__ __forceinline__ unsigned tile(unsigned group, int warp) const {
    return (group * kCluster + block_rank()) * kWarps + warp;
  }
};

// What is yet to be fetched for a consumer: chunks of the parts of its range, one a group, in the order of their use.
struct Fetch {
  unsigned block;  // in packed blocks
  unsigned place;  // of the part after this one
  int left;        // column steps of this one

  __device__ __forceinline__ void open(const Work& work, int warp) {
    left = 0;
    if (place >= work.end) return;
    const unsigned group = place / work.steps, first = place - group * work.steps;
    const unsigned tile = min(work.tile(group, warp), work.tiles - 1);  // beyond the matrix: the last tile again
    block = tile * work.steps + first;
    left = min(work.steps, first + work.end - place) - first;
    place += left;
  }
  __device__ __forceinline__ void copy(unsigned to, unsigned full, const unsigned char* blocks) const {
    const unsigned bytes = min(left, kChunk) * kBlockBytes;
    arrive_expecting(full, bytes);
    copy_bulk_once(to, blocks + static_cast<unsigned long long>(block) * kBlockBytes, bytes, full,
                   evict_first_policy());
  }
  __device__ __forceinline__ void advance(const Work& work, int warp) {
    block += kChunk;
    left -= kChunk;
    if (left <= 0) open(work, warp);
  }
};

// Whether the phase of that parity is over, without waiting.
__device__ __forceinline__ bool barrier_passed(unsigned barrier, unsigned parity) {
  unsigned passed;
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
      : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
  return passed != 0;
}

// What a consumer fetches for itself before it waits for anything: as much as its ring holds.
__device__ __forceinline__ void fetch_first(const unsigned char* blocks, const Work& work, unsigned ring,
                                            unsigned full, int warp) {
  Fetch fetch = {0, work.begin, 0};
  fetch.open(work, warp);
  for (int slot = 0; slot < kSlots && fetch.left > 0; ++slot) {
    fetch.copy(ring + slot * kSlotBytes, full + 8 * slot, blocks);
    fetch.advance(work, warp);
  }
}

// What comes after that, for one consumer: each lane of a fetching warp has another.
__device__ __forceinline__ void fetch_rest(const unsigned char* blocks, const Work& work, unsigned base, int warp) {
  Fetch fetch = {0, work.begin, 0};
  fetch.open(work, warp);
  for (int slot = 0; slot < kSlots; ++slot)
    if (fetch.left > 0) fetch.advance(work, warp);
  const unsigned first = warp * kSlots;
  Place<kSlots> at;
  while (fetch.left > 0) {
    const unsigned slot = first + at.index;
    if (!barrier_passed(base + Layout::kSlotEmpty + 8 * slot, at.parity)) {
      __nanosleep(40);
      continue;
    }
    fetch.copy(base + Layout::kRings + slot * kSlotBytes, base + Layout::kSlotFull + 8 * slot, blocks);
    fetch.advance(work, warp);
    at.advance();
  }
}

// Fetches every stage of x in the order of a range: the blocks of a cluster a part each, for all.
__device__ __forceinline__ void fetch_stages(const unsigned char* staged, const Work& work, unsigned base) {
  fence_async_proxy();
  Place<kStages> at;
  constexpr unsigned kPart = kStageBytes / kCluster;
  const unsigned part = block_rank() * kPart;
  unsigned step = work.begin % work.steps;
  for (unsigned place = work.begin; place < work.end; ++place, at.advance()) {
    const unsigned full = base + Layout::kXFull + 8 * at.index;
    const unsigned to = base + Layout::kX + at.index * kStageBytes + part;
    const unsigned char* from = staged + static_cast<unsigned long long>(step) * kStageBytes + part;
    wait_barrier(base + Layout::kXEmpty + 8 * at.index, at.parity ^ 1);
    arrive_expecting(full, kStageBytes);
    if (kCluster == 1) copy_bulk(to, from, kPart, full);
    else copy_bulk_to_all(to, from, kPart, full, (1 << kCluster) - 1);
    if (++step == work.steps) step = 0;
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

// One column step of a row tile times x: of every word, the first half into one chain of sums, the second half into
// the other. previous: the stage of the step before, released when its products are done.
__device__ __forceinline__ void multiply_step(float (&first)[kSums], float (&second)[kSums],
                                              unsigned (&operands)[kDepth][2][4], uint4 low, uint4 high,
                                              unsigned scales, unsigned long long x, unsigned previous, int lane,
                                              unsigned scale_step) {
  const unsigned low_words[kWords] = {low.x, low.y, low.z, low.w};
  const unsigned high_words[kWords] = {high.x, high.y, high.z, high.w};
  const unsigned low_scales[2] = {decode_scale<0>(scales, scale_step), decode_scale<1>(scales, scale_step)};
  const unsigned high_scales[2] = {decode_scale<2>(scales, scale_step), decode_scale<3>(scales, scale_step)};
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    unsigned(&a)[2][4] = operands[u % kDepth];
    wait_warpgroup<kDepth - 1>();
    pin(a[0]);
    pin(a[1]);
    if (u == kDepth - 1) release_stage(previous, lane);
    unsigned row[2][4];
    decode_word(low_words[u], low_scales[u / 2], row[0]);
    decode_word(high_words[u], high_scales[u / 2], row[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[h][i] = row[i % 2][2 * h + i / 2];
    pin(a[0]);
    pin(a[1]);
    fence_warpgroup();
    multiply_warpgroup(first, a[0], x + 2 * u * (2 * kTokens));
    multiply_warpgroup(second, a[1], x + (2 * u + 1) * (2 * kTokens));
    commit_warpgroup();
  }
}
