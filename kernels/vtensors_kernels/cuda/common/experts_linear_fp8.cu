// Grouped expert linears on packed FP8 weights: gate and up of the experts that a router has chosen, or down.
//
// Arguments, formula, grid, block, shapes and arch: experts_linear.cuh; scales by VT_SCALES as in linear_fp8_stream.

#include "include/weights_fp8.cuh"

#define VT_FUNCTION experts_linear_fp8
#include "include/experts_linear.cuh"
