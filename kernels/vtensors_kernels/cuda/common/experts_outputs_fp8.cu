#include "include/format_fp8.cuh"

#define VT_FUNCTION experts_outputs_fp8
#include "include/experts_outputs.cuh"
