#pragma once
// The PTX of powers of two.

// 2^x for x up to 0, off by a few units of the last bit; 0 where it is below 2^-126, which costs exp2f as much again.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
