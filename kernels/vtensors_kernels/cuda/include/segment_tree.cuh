#pragma once
// The balanced tree over the segments of a row's sum, built as they come:
//   ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
// A node is a segment (level 0), an aligned pair (1) or an aligned four (2) of them. Left children wait for their
// siblings.

#include "include/segments_form.cuh"

// The nodes that segments begin .. end - 1 make, in order: each the largest that is aligned and lies within.
__device__ __forceinline__ int node_level(int segment, int end) {
  if (segment % 4 == 0 && segment + 4 <= end) return 2;
  return segment % 2 == 0 && segment + 2 <= end ? 1 : 0;
}

// How many of those come before the one from `segment` on.
__device__ __forceinline__ int nodes_before(int segment, int begin, int end) {
  int count = 0;
  for (; begin < segment; ++count) begin += 1 << node_level(begin, end);
  return count;
}

// Where a warp's left children wait: a segment and a pair in shared memory, a four, of which a group has one, in
// global memory. Every lane has places of its own.
struct Waiting {
  unsigned shared;  // [2] nodes
  float4* four;

  __device__ __forceinline__ unsigned at(int level, int i) const { return shared + level * kNodeBytes + i * 512; }
  __device__ __forceinline__ void keep(int level, const float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float* v = sums + 4 * i;
      if (level == 2) four[i * 32] = make_float4(v[0], v[1], v[2], v[3]);
      else
        store_shared_128(at(level, i), make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                                  __float_as_uint(v[3])));
    }
  }
  __device__ __forceinline__ float4 part(int level, int i) const {
    return level == 2 ? __ldcg(four + i * 32) : load_shared_float4(at(level, i));
  }
  __device__ __forceinline__ void add_to(float (&sums)[kSums], int level) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float4 v = part(level, i);
      sums[4 * i] = v.x + sums[4 * i], sums[4 * i + 1] = v.y + sums[4 * i + 1];
      sums[4 * i + 2] = v.z + sums[4 * i + 2], sums[4 * i + 3] = v.w + sums[4 * i + 3];
    }
  }
  __device__ __forceinline__ void load(float (&sums)[kSums], int level) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float4 v = part(level, i);
      sums[4 * i] = v.x, sums[4 * i + 1] = v.y, sums[4 * i + 2] = v.z, sums[4 * i + 3] = v.w;
    }
  }
};

// A node of 2^level segments from `segment` on joins those of segments from `begin` on that wait. True where `sums`
// has become that of all segments. give(sums, segment): a right child whose sibling is not here.
template <class Give>
__device__ __forceinline__ bool add_node(float (&sums)[kSums], const Waiting& waiting, int segment, int level,
                                         int begin, const Give& give) {
#pragma unroll
  for (int of = 0; of < 3; ++of) {
    if (level > of) continue;
    const int size = 1 << of;
    if ((segment & size) == 0) {
      waiting.keep(of, sums);
      return false;
    }
    if (segment - size < begin) {
      give(sums, segment);
      return false;
    }
    waiting.add_to(sums, of);
    segment -= size;
  }
  return true;
}

// What still waits after segments begin .. end - 1, end < kSegments, in order.
template <class Give>
__device__ __forceinline__ void give_waiting(float (&sums)[kSums], const Waiting& waiting, int begin, int end,
                                             const Give& give) {
#pragma unroll
  for (int of = 2; of >= 0; --of) {
    const int size = 1 << of, from = end / (2 * size) * (2 * size);
    if ((end & size) == 0 || from < begin) continue;
    waiting.load(sums, of);
    give(sums, from);
  }
}
