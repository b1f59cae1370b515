#pragma once
// NVFP4 blocks for the consumers of linear_nvfp4_stream: 8 words of 8 codes a lane, block scales in the operands.

#include "include/nvfp4_packed.cuh"
#include "include/ptx.cuh"

constexpr bool kStepScales = false;  // float32 scales of a column step's sums

// What a lane needs for every block.
struct BlockReader {
  unsigned scale_step, to_scales;
  __device__ __forceinline__ explicit BlockReader(int lane)
      : scale_step(scale_multiplier()), to_scales(kept(scales_from(lane))) {}
};

// A lane's part of a block, at `at` = the block + 16 * lane.
struct BlockPart {
  unsigned top[4], bottom[4], scales;
  __device__ __forceinline__ void load(const BlockReader& reader, unsigned at) {
    const uint4 upper = load_shared_128(at), lower = load_shared_128(at + 512);
    scales = load_shared_32(at + reader.to_scales);
    top[0] = upper.x, top[1] = upper.y, top[2] = upper.z, top[3] = upper.w;
    bottom[0] = lower.x, bottom[1] = lower.y, bottom[2] = lower.z, bottom[3] = lower.w;
  }
  // Eight weights of either row as operands; u: which of the four activation chunks of the lane they meet.
  __device__ __forceinline__ void decode(const BlockReader& reader, int u, unsigned (&upper)[4],
                                         unsigned (&lower)[4]) const {
    const unsigned step = reader.scale_step;
    const unsigned first = u < 2 ? decode_scale<0>(scales, step) : decode_scale<1>(scales, step);
    const unsigned second = u < 2 ? decode_scale<2>(scales, step) : decode_scale<3>(scales, step);
    decode_word(top[u], first, upper);
    decode_word(bottom[u], second, lower);
  }
  // Of the rows of `upper` (0) and `lower` (1), with kStepScales.
  __device__ __forceinline__ float step_scale(const BlockReader&, int) const { return 1.f; }
};
