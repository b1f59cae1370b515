// k_out[h, s] = what the cache holds of token s of one sequence, E4M3 codes times their scale rounded to 16 bits;
// v_out likewise.
//
// A thread makes 8 dimensions. Shapes: any S; D a multiple of 8. Grid: x ceil(kv_heads * S * D / 8 / kThreads), y 2
// (keys, values). Block: kThreads. Alignment: 16 bytes. Shared memory: none. Arch: all; dependent launch from sm_90 on.

#include "include/attention_heads.cuh"
#include "include/ptx.cuh"

constexpr int kThreads = 256;

extern "C" __global__ __launch_bounds__(kThreads) void paged_attention_gather(
    const Stored* k_pages,   // [pages, kv_heads, 64, D]; as ptx.cuh says of what earlier kernels write
    const Stored* v_pages,   // [pages, kv_heads, 64, D]
    const int* page_table,   // [P] page numbers
    unsigned short* k_out,   // [kv_heads, S, D] bf16 or f16
    unsigned short* v_out,   // [kv_heads, S, D]
    float k_scale, float v_scale,  // of VT_FP8
    long long tokens,        // S
    int kv_heads,
    int dim)                 // D
{
  launch_dependents();
  wait_for_predecessors();
  const long long piece = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const int pieces = dim / 8, d = static_cast<int>(piece % pieces) * 8;
  const long long row = piece / pieces, token = row % tokens, head = row / tokens;
  if (head >= kv_heads) return;
  const long long page = page_table[token / kPageTokens];
  const Stored* from = (blockIdx.y ? v_pages : k_pages) +
                       ((page * kv_heads + head) * kPageTokens + token % kPageTokens) * dim + d;
  unsigned short* to = (blockIdx.y ? v_out : k_out) + row * dim + d;
#if VT_FP8
  const uint2 codes = *reinterpret_cast<const uint2*>(from);
  const float scale = blockIdx.y ? v_scale : k_scale;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    values[i] = __fmul_rn(value_of_e4m3((i < 4 ? codes.x : codes.y) >> 8 * (i % 4) & 0xffu), scale);
  store_eight(to, values);
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}
