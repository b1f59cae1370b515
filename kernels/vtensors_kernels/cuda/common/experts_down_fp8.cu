// The output of a few tokens from their experts' activations, down projections in packed FP8.
//
// Arguments, formula, grid, block, shapes and arch: experts_down.cuh; scales by VT_SCALES as in linear_fp8_stream.

#include "include/weights_fp8.cuh"

#define VT_FUNCTION experts_down_fp8
#include "include/experts_down.cuh"
