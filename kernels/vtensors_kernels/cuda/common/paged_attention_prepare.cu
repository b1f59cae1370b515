// The tokens of a prompt's chunk on their way into attention: each head of q, k and v normed and turned
// (attention_heads.cuh); keys and values enter the cache, and what the cache gives back may be written beside it.
//
// A warp makes one head of one token. Shapes: any T; D 32, 64, 128 or 256. Grid: x ceil((heads + 2 * kv_heads) /
// kWarps), y T. Block: kThreads. Shared memory: static. Arch: all; dependent launch from sm_90 on.

#include "include/attention_heads.cuh"
#include "include/ptx.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

extern "C" __global__ __launch_bounds__(kThreads) void paged_attention_prepare(
    const unsigned short* q,     // [T, heads * q_head] bf16 or f16; as ptx.cuh says of what earlier kernels write
    const unsigned short* k,     // [T, kv_heads * D]
    const unsigned short* v,     // [T, kv_heads * D]
    Stored* k_pages,             // [pages, kv_heads, 64, D]
    Stored* v_pages,             // [pages, kv_heads, 64, D]
    const int* page_table,       // [P] page numbers
    const float* cos_sin,        // [positions, rotary] or null
    const float* q_gain,         // [D] or null
    const float* k_gain,         // [D] or null
    unsigned short* q_out,       // [T, heads, D]
    unsigned short* k_out,       // [kv_heads, T, D] or null
    unsigned short* v_out,       // [kv_heads, T, D] or null
    float eps,
    float k_scale, float v_scale,  // of VT_FP8
    int q_stride, int k_stride, int v_stride,
    int heads, int kv_heads,
    int dim,                     // D
    int q_head,                  // D, or 2 D: the gate lies behind each query
    int rotary,
    int start)                   // position of the first token
{
  __shared__ float stage[kWarps][kMostDims];
  launch_dependents();
  wait_for_predecessors();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = blockIdx.x * kWarps + warp;
  if (which >= heads + 2 * kv_heads) return;
  const bool is_query = which < heads, is_key = !is_query && which < heads + kv_heads;
  const int head = is_query ? which : (which - heads) % kv_heads;
  const long long token = blockIdx.y, position = start + token;

  Head own;
  own.load(is_query ? q + token * q_stride + head * static_cast<long long>(q_head)
                    : (is_key ? k + token * k_stride : v + token * v_stride) + head * dim, dim, lane);
  if (is_query || is_key) {
    float gain[kMostOfLane];
    load_gain(gain, is_query ? q_gain : k_gain, dim, lane);
    if ((is_query ? q_gain : k_gain) != nullptr) own.norm(gain, eps, dim);
    if (rotary) {
      const Turn turn(cos_sin + position * rotary, rotary, dim, lane);
#pragma unroll
      for (int i = 0; i < kMostOfLane; ++i)
        if (32 * i < dim) stage[warp][lane + 32 * i] = own.x[i];
      __syncwarp();
      own.rotate(turn, [&](int d) { return stage[warp][d]; }, dim, lane);
    }
  }
  const long long row = (static_cast<long long>(page_table[position / kPageTokens]) * kv_heads + head) * kPageTokens +
                        position % kPageTokens;
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    const int d = lane + 32 * i;
    if (32 * i >= dim) break;
    if (is_query) {
      q_out[(token * heads + head) * dim + d] = narrow(own.x[i]);
    } else {
      const float scale = is_key ? k_scale : v_scale;
      const Stored stored = to_stored(own.x[i], scale);
      (is_key ? k_pages : v_pages)[row * dim + d] = stored;
      unsigned short* out = is_key ? k_out : v_out;
      const long long at = (static_cast<long long>(head) * gridDim.y + token) * dim + d;
      if (out != nullptr) out[at] = from_stored(stored, scale);
    }
  }
}
