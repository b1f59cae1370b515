// y = x @ W.T for up to 32 tokens by warpgroup products, with the bits of linear_fp8_stream in every row.
//
// y[m, n] = row_scale[n] * sum_k x[m, k] * w[n, k]  (+ bias[n]), rounded once to x's format; w by VT_SCALES:
//   0  e4m3 / 256               row_scale is 256 * the scale of the matrix or the row
//   2  e4m3 * 2^(byte - 247)    in the operands; row_scale is 2^(largest E8M0 byte of the row - 134)
// variants: + residual[m, n]; silu(y[m, gate]) * y[m, up] of paired rows, also as the stages of the next linear.
//
// Arguments, grid, block, shapes and arch: segments_kernel.cuh.

#include "include/format_fp8.cuh"

static_assert(!kStepScales, "the scales of a column step would need sums of their own");

#define VT_FUNCTION linear_fp8_wgmma_segments
#include "include/segments_kernel.cuh"
