#pragma once
// A lane's part of a packed FP8 block in registers: 16 words of 4 codes.

#include "include/fp8_packed.cuh"
#include "include/ptx.cuh"
#include "include/weights_ptx.cuh"

constexpr bool kStepScales = VT_SCALES == 1;  // float32 scales of a column step's sums

struct WeightPart {
  uint4 codes[4];  // of row g, then of row g + 8
  unsigned scales[2];
  // at: the block + 16 * lane.
  __device__ __forceinline__ void load(const unsigned char* at, int to_scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = load_weights_128(at + 512 * i);
#if VT_SCALES == 1
#pragma unroll
    for (int row = 0; row < 2; ++row) scales[row] = load_weights_32(at + to_scales + 8 * row);
#elif VT_SCALES == 2
    scales[0] = scales[1] = load_weights_16(at + to_scales);
#else
    scales[0] = scales[1] = 0;
#endif
  }
  // Eight weights of either row as operands; u: which of the four activation chunks of the lane they meet.
  __device__ __forceinline__ void decode(unsigned, int u, unsigned (&upper)[4], unsigned (&lower)[4]) const {
    const uint4 above = codes[u / 2], below = codes[2 + u / 2];
    // The bytes of a lane's group scales, of either row.
    const unsigned first = VT_SCALES == 2 ? decode_group_scale(scales[0] & 0xffu) : 0u;
    const unsigned second = VT_SCALES == 2 ? decode_group_scale(scales[1] >> 8) : 0u;
    decode_words(u % 2 ? above.z : above.x, u % 2 ? above.w : above.y, first, upper);
    decode_words(u % 2 ? below.z : below.x, u % 2 ? below.w : below.y, second, lower);
  }
  // Of the rows of `upper` (0) and `lower` (1), with kStepScales.
  __device__ __forceinline__ float step_scale(int row) const { return __uint_as_float(scales[row]); }
};

// What decode is given.
__device__ __forceinline__ unsigned decoding_constant() { return 0; }
