// out[n, k] = e2m1(codes[n, k]) * block_scale[n, k / VT_GROUP], without the global scale.
//
// The product of an E2M1 and an E4M3 value has at most 6 significant bits and lies in 2^-10..2688, so it is
// exact in bfloat16 and in float16. The global scale is applied to the matrix product's result.
//
// Shapes: K a multiple of VT_GROUP (16 or 32), any N. One thread decodes 16 elements of one scale; grid x covers
// N * K / 16 of them. Block: kThreads. Shared memory: none. Arch: all.

#include "include/output_format.cuh"

#ifndef VT_GROUP
#define VT_GROUP 16
#endif

constexpr int kThreads = 256;
// Threads whose elements share a scale.
constexpr int kSharers = VT_GROUP / 16;
static_assert(VT_GROUP == 16 || VT_GROUP == 32, "groups of 16 or 32");

extern "C" __global__ __launch_bounds__(kThreads) void dequantize_nvfp4(
    const uint2* __restrict__ codes,                // [N, K / 16] 16 codes of 4 bits each, low nibble first
    const unsigned char* __restrict__ block_scale,  // [N, K / VT_GROUP] E4M3
    uint4* __restrict__ out,                        // [N, K / 16, 2] 8 bf16 or f16 each
    long long blocks)                               // N * K / 16
{
  const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= blocks) return;
  const uint2 packed = codes[index];
  const float scale = decode_e4m3(block_scale[index / kSharers]);
  const unsigned words[2] = {packed.x, packed.y};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const unsigned byte = words[half] >> (8 * pair);
      pairs[pair] = encode(decode_e2m1(byte) * scale) | encode(decode_e2m1(byte >> 4) * scale) << 16;
    }
    out[2 * index + half] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
