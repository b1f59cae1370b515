// y = x @ W.T for a few tokens: packed NVFP4 weights streamed once, 16-bit activations, float32 sums.
//
// y[m, n] = row_scale[n] * sum_k x[m, k] * (e2m1 * e4m3 / 256)[n, k]  (+ bias[n]), rounded once to x's format;
// variants: + residual[m, n]; silu(y[m, gate]) * y[m, up]; the largest y of a block; x through RMSNorm first.
//
// Arguments, grid, block, shapes and arch: stream_kernel.cuh; row_scale is 256 * the global scale.

#include "include/format_nvfp4.cuh"

#define VT_FUNCTION linear_nvfp4_stream
#include "include/stream_kernel.cuh"
