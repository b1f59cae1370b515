// out[t, k] = e2m1(codes[ids[t], k]) * (block_scale[ids[t], k / group] * global), each product in float32, the
// result rounded once to 16 bits: bit for bit what dequantising the row and rounding it gives. A divisor
// (VT_DIVISOR) divides the block scale instead.
//
// Shapes: any T and V; K a multiple of 16. Ids outside 0 .. V - 1 come out as NaN, since a kernel cannot raise.
// A thread makes 16 columns. Grid: x T * ceil(K / 16 / kThreads). Block: kThreads. Alignment: codes 8 bytes,
// out 16. Shared memory: none. Arch: all; dependent launch from sm_90 on.

#include "include/number_formats.cuh"
#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_DIVISOR
#define VT_DIVISOR 0  // 1: the global scale divides
#endif

constexpr int kThreads = 128;
constexpr int kColumns = 16;
static_assert(VT_DIVISOR == 0 || VT_DIVISOR == 1, "VT_DIVISOR is 0 or 1");

extern "C" __global__ __launch_bounds__(kThreads) void embedding_nvfp4(
    const long long* ids,                           // [T]; as ptx.cuh says of what earlier kernels write
    const unsigned char* __restrict__ codes,        // [V, K / 2] low nibble first
    const unsigned char* __restrict__ block_scale,  // [V, K / group] E4M3
    const float* __restrict__ global,               // [V] or [1]
    unsigned short* __restrict__ out,               // [T, K] bf16 or f16
    long long rows,                                 // V
    int columns,                                    // K
    int group,                                      // 16 or 32
    int scale_stride)                               // 1: a scale per row, 0: one for all
{
  launch_dependents();
  wait_for_predecessors();
  const int pieces = columns / kColumns, blocks = (pieces + kThreads - 1) / kThreads;
  const long long token = blockIdx.x / blocks;
  const int piece = static_cast<int>(blockIdx.x % blocks) * kThreads + threadIdx.x;
  if (piece >= pieces) return;
  const long long row = ids[token];
  unsigned short* to = out + token * columns + piece * kColumns;
  float low[8], high[8];
  if (row < 0 || row >= rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = high[i] = __uint_as_float(0x7fffffffu);
  } else {
    const uint2 packed = *reinterpret_cast<const uint2*>(codes + (row * columns + piece * kColumns) / 2);
    const float block = decode_e4m3(block_scale[row * (columns / group) + piece * kColumns / group]);
    const float scale = VT_DIVISOR ? __fdiv_rn(block, global[row * scale_stride])
                                   : __fmul_rn(block, global[row * scale_stride]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      low[i] = __fmul_rn(decode_e2m1(packed.x >> (4 * i)), scale);
      high[i] = __fmul_rn(decode_e2m1(packed.y >> (4 * i)), scale);
    }
  }
  store_eight(to, low);
  store_eight(to + 8, high);
}
