#pragma once
// FP8 blocks for the consumers of linear_fp8_stream: 16 words of 4 codes a lane.

#include "include/fp8_packed.cuh"
#include "include/ptx.cuh"

constexpr bool kStepScales = VT_SCALES == 1;  // float32 scales of a column step's sums

// What a lane needs for every block.
struct BlockReader {
  unsigned to_scales;
  __device__ __forceinline__ explicit BlockReader(int lane)
      : to_scales(kept(scales_from(lane))) {}
};

// A lane's part of a block, at `at` = the block + 16 * lane: half of the codes at a time.
struct BlockPart {
  unsigned at, top[4], bottom[4], scales[2];
  __device__ __forceinline__ void load(const BlockReader& reader, unsigned place) {
    at = place;
#if VT_SCALES == 2
    const unsigned bytes = load_shared_16(at + reader.to_scales);
    scales[0] = decode_group_scale(bytes & 0xffu);
    scales[1] = decode_group_scale(bytes >> 8);
#else
    scales[0] = scales[1] = 0;
#endif
  }
  // Eight weights of either row as operands; u: which of the four activation chunks of the lane they meet, in order.
  __device__ __forceinline__ void decode(const BlockReader&, int u, unsigned (&upper)[4], unsigned (&lower)[4]) {
    if (u % 2 == 0) {
      const uint4 above = load_shared_128(at + 256 * u), below = load_shared_128(at + 256 * u + 1024);
      top[0] = above.x, top[1] = above.y, top[2] = above.z, top[3] = above.w;
      bottom[0] = below.x, bottom[1] = below.y, bottom[2] = below.z, bottom[3] = below.w;
    }
    decode_words(top[u % 2 * 2], top[u % 2 * 2 + 1], scales[0], upper);
    decode_words(bottom[u % 2 * 2], bottom[u % 2 * 2 + 1], scales[1], lower);
  }
  // Of the rows of `upper` (0) and `lower` (1), with kStepScales.
  __device__ __forceinline__ float step_scale(const BlockReader& reader, int row) const {
    return __uint_as_float(load_shared_32(at + reader.to_scales + 8 * row));
  }
};
