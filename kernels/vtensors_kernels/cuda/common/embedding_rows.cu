// out[t, :] = weight[ids[t], :] of a plain matrix, rounded once where it has another format.
//
// Shapes: any T and V; K a multiple of 8. Ids outside 0 .. V - 1 come out as NaN, since a kernel cannot raise. A thread
// makes 8 columns. Grid: x T * ceil(K / 8 / kThreads). Block: kThreads. Alignment: weight and out 16 bytes. Shared
// memory: none. Arch: all; dependent launch from sm_90 on.

#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_WEIGHT
#define VT_WEIGHT 0  // 0 bf16, 1 f16, 2 f32
#endif

constexpr int kThreads = 128;
constexpr int kColumns = 8;
static_assert(VT_WEIGHT >= 0 && VT_WEIGHT <= 2, "VT_WEIGHT is 0, 1 or 2");

extern "C" __global__ __launch_bounds__(kThreads) void embedding_rows(
    const long long* ids,                 // [T]; as ptx.cuh says of what earlier kernels write
    const void* __restrict__ weight,      // [V, K]
    unsigned short* __restrict__ out,     // [T, K] bf16 or f16
    long long rows,                       // V
    int columns)                          // K
{
  launch_dependents();
  wait_for_predecessors();
  const int pieces = columns / kColumns, blocks = (pieces + kThreads - 1) / kThreads;
  const long long token = blockIdx.x / blocks;
  const int piece = static_cast<int>(blockIdx.x % blocks) * kThreads + threadIdx.x;
  if (piece >= pieces) return;
  const long long row = ids[token];
  uint4* to = reinterpret_cast<uint4*>(out + token * columns) + piece;
  if (row < 0 || row >= rows) {
    *to = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
    return;
  }
  const long long at = row * pieces + piece;
#if VT_WEIGHT == VT_F16
  *to = __ldg(static_cast<const uint4*>(weight) + at);
#elif VT_WEIGHT == 2
  const float4* values = static_cast<const float4*>(weight) + 2 * at;
  const float4 low = __ldg(values), high = __ldg(values + 1);
  *to = make_uint4(narrow_pair(low.x, low.y), narrow_pair(low.z, low.w), narrow_pair(high.x, high.y),
                   narrow_pair(high.z, high.w));
#else
  const uint4 eight = __ldg(static_cast<const uint4*>(weight) + at);
  const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if VT_WEIGHT == 1
    pairs[i] = narrow_pair(widen_f16(static_cast<unsigned short>(words[i])),
                           widen_f16(static_cast<unsigned short>(words[i] >> 16)));
#else
    pairs[i] = narrow_pair(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
#endif
  }
  *to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}
