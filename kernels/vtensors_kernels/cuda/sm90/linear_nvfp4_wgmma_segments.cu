// y = x @ W.T for up to 32 tokens by warpgroup products, with the bits of linear_nvfp4_stream in every row.
//
// y[m, n] = row_scale[n] * sum_k x[m, k] * (e2m1 * e4m3 / 256)[n, k]  (+ bias[n]), rounded once to x's format;
// variants: + residual[m, n]; silu(y[m, gate]) * y[m, up] of paired rows, also as the stages of the next linear.
//
// Arguments, grid, block, shapes and arch: segments_kernel.cuh; row_scale is 256 * the global scale.

#include "include/format_nvfp4.cuh"

#define VT_FUNCTION linear_nvfp4_wgmma_segments
#include "include/segments_kernel.cuh"
