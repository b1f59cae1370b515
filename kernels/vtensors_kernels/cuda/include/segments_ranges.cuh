#pragma once
// How linear_*_wgmma_segments cuts a matrix in ranges, and the fetching of their weights.

#include "include/segments_form.cuh"
#include "include/wgmma_step.cuh"

// The matrix as a line of (group of row tiles, segment), cut in one equal range a cluster; as columns it is a line of
// (group, column step), whose range is begin .. end - 1.
struct Work {
  unsigned steps, tiles, units, clusters, cluster;
  unsigned begin, end;
  __device__ __forceinline__ Work(int n, int column_steps) : steps(column_steps) {
    tiles = (n + kTileRows - 1) / kTileRows;
    units = row_groups(tiles) * kSegments;
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
  // The segments of a unit's group that are in this range.
  __device__ __forceinline__ int first_segment(unsigned unit) const {
    return max(0, static_cast<int>(first_unit(cluster) - unit / kSegments * kSegments));
  }
  __device__ __forceinline__ int end_segment(unsigned unit) const {
    return min(kSegments, static_cast<int>(first_unit(cluster + 1) - unit / kSegments * kSegments));
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
    const unsigned tile = min(row_tile(group, warp), work.tiles - 1);  // beyond the matrix: the last tile again
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
