#pragma once
// A lane's part of a packed NVFP4 block in registers: 8 words of 8 codes, block scales in the operands.

#include "include/nvfp4_packed.cuh"
#include "include/ptx.cuh"
#include "include/weights_ptx.cuh"

constexpr bool kStepScales = false;  // float32 scales of a column step's sums

struct WeightPart {
  uint4 top, bottom;
  unsigned scales;
  // at: the block + 16 * lane.
  __device__ __forceinline__ void load(const unsigned char* at, int to_scales) {
    top = load_weights_128(at);
    bottom = load_weights_128(at + 512);
    scales = load_weights_32(at + to_scales);
  }
  // Eight weights of either row as operands; u: which of the four activation chunks of the lane they meet.
  __device__ __forceinline__ void decode(unsigned scale_step, int u, unsigned (&upper)[4], unsigned (&lower)[4]) const {
    const unsigned above[4] = {top.x, top.y, top.z, top.w}, below[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
    const unsigned first = u < 2 ? decode_scale<0>(scales, scale_step) : decode_scale<1>(scales, scale_step);
    const unsigned second = u < 2 ? decode_scale<2>(scales, scale_step) : decode_scale<3>(scales, scale_step);
    decode_word(above[u], first, upper);
    decode_word(below[u], second, lower);
  }
  // Of the rows of `upper` (0) and `lower` (1), with kStepScales.
  __device__ __forceinline__ float step_scale(int) const { return 1.f; }
};

// What decode is given.
__device__ __forceinline__ unsigned decoding_constant() { return scale_multiplier(); }
