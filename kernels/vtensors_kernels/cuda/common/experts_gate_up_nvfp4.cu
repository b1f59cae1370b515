#include "include/format_nvfp4.cuh"

#define VT_FUNCTION experts_gate_up_nvfp4
#include "include/experts_gate_up.cuh"
