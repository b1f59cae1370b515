// y = x @ W.T for a few tokens: packed FP8 weights streamed once, 16-bit activations, float32 sums.
//
// y[m, n] = row_scale[n] * sum_k x[m, k] * w[n, k]  (+ bias[n]), rounded once to x's format; w by VT_SCALES:
//   0  e4m3 / 256                 row_scale is 256 * the scale of the matrix or the row
//   1  e4m3 / 256 * step_scale    in float32, on the sums of a column step; row_scale is 256
//   2  e4m3 * 2^(byte - 247)      in the operands, exact (fp8_packed.cuh says where not); row_scale is 2^(largest E8M0
//                                 byte of the row - 134)
// variants: + residual[m, n]; silu(y[m, gate]) * y[m, up]; the largest y of a block; x through RMSNorm first.
//
// Arguments, grid, block, shapes and arch: stream_kernel.cuh.

#include "include/format_fp8.cuh"

#define VT_FUNCTION linear_fp8_stream
#include "include/stream_kernel.cuh"
