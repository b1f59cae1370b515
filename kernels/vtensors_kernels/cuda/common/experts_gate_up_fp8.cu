#include "include/format_fp8.cuh"

#define VT_FUNCTION experts_gate_up_fp8
#include "include/experts_gate_up.cuh"
