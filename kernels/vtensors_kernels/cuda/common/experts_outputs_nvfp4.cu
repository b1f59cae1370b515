#include "include/format_nvfp4.cuh"

#define VT_FUNCTION experts_outputs_nvfp4
#include "include/experts_outputs.cuh"
