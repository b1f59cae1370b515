#pragma once
// Loads of packed weights straight into registers: past the first-level cache, which keeps the activations.
//
// Only for what is written before any launch (ptx.cuh, programmatic dependent launch).

__device__ __forceinline__ uint4 load_weights_128(const unsigned char* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// The same for loads in front of a wait, zeros where `wanted` is false. Not `nc`: compilers move such loads of straight
// code behind the wait (NVRTC 13.0 and 13.5).
__device__ __forceinline__ uint4 load_weights_128_early_if(bool wanted, const unsigned char* from) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
      " @wanted ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"(static_cast<unsigned>(wanted)));
  return v;
}

__device__ __forceinline__ unsigned load_weights_32(const unsigned char* from) {
  unsigned v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

// 16 bits, zeros above.
__device__ __forceinline__ unsigned load_weights_16(const unsigned char* from) {
  unsigned short v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}
