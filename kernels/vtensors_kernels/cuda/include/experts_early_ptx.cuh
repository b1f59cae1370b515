#pragma once
// Loads of what was written before the kernel that this one depends on, to be made before this kernel's own wait.
//
// They are right where that kernel launches its dependents only after its own wait, as experts_linear_* does: whatever
// came before it is complete then, and in the second-level cache, which these loads ask past the first.

#include "include/ptx.cuh"

__device__ __forceinline__ int load_early(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ float load_early(const float* from) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ unsigned short load_early(const unsigned short* from) {
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}

// The same in a register of its own: two of 16 bits would share one, and its second half wait for the first.
__device__ __forceinline__ unsigned load_early_apart(const unsigned short* from) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
