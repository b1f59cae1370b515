#pragma once
// The PTX of loads from global memory that is read once, beside ptx.cuh.

// Zeros where `wanted` is false. Not kept in L1, and L2 is asked for 256 bytes around it. Like every volatile load it
// stays behind wait_for_predecessors. Alignment: 16 bytes.
__device__ __forceinline__ uint4 load_global_once_128_if(bool wanted, const void* from) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
      " @wanted ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"(static_cast<unsigned>(wanted)));
  return v;
}
