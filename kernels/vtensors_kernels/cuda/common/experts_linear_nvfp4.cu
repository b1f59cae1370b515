// Grouped expert linears on packed NVFP4 weights: gate and up of the experts that a router has chosen, or down.
//
// Arguments, formula, grid, block, shapes and arch: experts_linear.cuh; row_scale is 256 * the row's global scale.

#include "include/weights_nvfp4.cuh"

#define VT_FUNCTION experts_linear_nvfp4
#include "include/experts_linear.cuh"
