// out[i] = e4m3(codes[i]) in 16 bits, without any scale.
//
// An E4M3 value has at most 4 significant bits and lies in 2^-9..448, so it is exact in bfloat16 and in float16.
// The scale is applied to the matrix product's result. NaN codes are refused when a checkpoint is read.
//
// One thread decodes 16 codes; `vectors` is the number of elements / 16, any tail is left to the caller.
// Block: kThreads. Shared memory: none. Arch: all.

#include "include/output_format.cuh"

constexpr int kThreads = 256;

__device__ __forceinline__ unsigned pair(unsigned bytes) {
  return encode(decode_e4m3(bytes)) | encode(decode_e4m3(bytes >> 8)) << 16;
}

extern "C" __global__ __launch_bounds__(kThreads) void widen_fp8(
    const uint4* __restrict__ codes,  // [vectors] 16 E4M3 codes each
    uint4* __restrict__ out,          // [vectors, 2] 8 bf16 or f16 each
    long long vectors)
{
  const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= vectors) return;
  const uint4 packed = codes[index];
  out[2 * index] = make_uint4(pair(packed.x), pair(packed.x >> 16), pair(packed.y), pair(packed.y >> 16));
  out[2 * index + 1] = make_uint4(pair(packed.z), pair(packed.z >> 16), pair(packed.w), pair(packed.w >> 16));
}
