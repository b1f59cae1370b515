#pragma once
// What becomes of a row's float32 sum before its one rounding to 16 bits, each step rounded by itself: kernels that
// promise the same bits share it, and no compiler joins a multiplication and an addition in one of them alone.

// The sum times the row's scale.
__device__ __forceinline__ float scaled_sum(float sum, float scale) { return __fmul_rn(sum, scale); }

// A scaled sum and its bias, or y and its residual.
__device__ __forceinline__ float added(float y, float other) { return __fadd_rn(y, other); }

// silu(gate) * up.
__device__ __forceinline__ float swiglu(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, __expf(-gate))), up);
}
