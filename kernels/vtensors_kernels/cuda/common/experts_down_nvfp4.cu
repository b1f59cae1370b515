// The output of a few tokens from their experts' activations, down projections in packed NVFP4.
//
// Arguments, formula, grid, block, shapes and arch: experts_down.cuh; row_scale is 256 * the global scale of each row.

#include "include/weights_nvfp4.cuh"

#define VT_FUNCTION experts_down_nvfp4
#include "include/experts_down.cuh"
