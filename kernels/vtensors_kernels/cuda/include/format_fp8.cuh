#pragma once
// FP8 blocks for the consumers of linear_fp8_stream: 16 words of 4 codes a lane.

#include "include/fp8_packed.cuh"
#include "include/ptx.cuh"

constexpr bool kStepScales = VT_SCALES == 1;  // float32 scales of a column step's sums

// What a lane needs for every block.
struct BlockReader {
  unsigned to_scales, selector;
  __device__ __forceinline__ explicit BlockReader(int lane) {
    to_scales = kept(kCodeBytes + (VT_SCALES == 1 ? lane / 16 * 4 : lane / 2 * 4) - lane * 16);
    selector = kept(lane % 2 * 2 | 0x4440u);  // a byte of a word, zeros above
  }
};

// A lane's part of a block, at `at` = the block + 16 * lane.
struct BlockPart {
  unsigned top[8], bottom[8], scales[2];
  __device__ __forceinline__ void load(const BlockReader& reader, unsigned at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 upper = load_shared_128(at + 512 * i), lower = load_shared_128(at + 1024 + 512 * i);
      top[4 * i] = upper.x, top[4 * i + 1] = upper.y, top[4 * i + 2] = upper.z, top[4 * i + 3] = upper.w;
      bottom[4 * i] = lower.x, bottom[4 * i + 1] = lower.y, bottom[4 * i + 2] = lower.z, bottom[4 * i + 3] = lower.w;
    }
#if VT_SCALES == 1
    scales[0] = load_shared_32(at + reader.to_scales);
    scales[1] = load_shared_32(at + reader.to_scales + 8);
#elif VT_SCALES == 2
    const unsigned bytes = load_shared_32(at + reader.to_scales);
    scales[0] = decode_group_scale(__byte_perm(bytes, 0u, reader.selector));
    scales[1] = decode_group_scale(__byte_perm(bytes, 0u, reader.selector + 1u));
#else
    scales[0] = scales[1] = 0;
#endif
  }
  // Eight weights of either row as operands; u: which of the four activation chunks of the lane they meet.
  __device__ __forceinline__ void decode(const BlockReader&, int u, unsigned (&upper)[4], unsigned (&lower)[4]) const {
    decode_words(top[2 * u], top[2 * u + 1], scales[0], upper);
    decode_words(bottom[2 * u], bottom[2 * u + 1], scales[1], lower);
  }
  // Of the rows of `upper` (0) and `lower` (1), with kStepScales.
  __device__ __forceinline__ float step_scale(int row) const { return __uint_as_float(scales[row]); }
};
