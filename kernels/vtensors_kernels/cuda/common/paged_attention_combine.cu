// out[b, h] = sum_s 2^(top_s - top) parts[b, h, s] / sum_s 2^(top_s - top) weight_s * v_scale * sigmoid(gate), over the
// splits s of a row in order, top the largest of them: what paged_attention_decode leaves of rows of several splits.
//
// A warp makes up to 128 dimensions of one head. Shapes: D 32, 64, 128 or 256. Grid: x ceil(heads * ceil(D / 128) /
// kWarps), y B. Block: kThreads. Shared memory: none. Arch: all; dependent launch from sm_90 on.

#include "include/attention_heads.cuh"
#include "include/attention_splits.cuh"
#include "include/ptx.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpDims = 128;
constexpr int kAtOnce = 16;  // splits whose sums are on their way together
static_assert(kMostSplits == 64 && kMostSplits % kAtOnce == 0, "a lane knows two splits");

extern "C" __global__ __launch_bounds__(kThreads) void paged_attention_combine(
    const float* parts,         // [B, heads, most_splits, D]; as ptx.cuh says of what earlier kernels write
    const float* tops,          // [B, heads, most_splits, 2] largest score, as a power of 2, and weight of a split
    const int* positions,       // [B]
    const unsigned short* q,    // [B, heads * q_head], of which the gates
    unsigned short* out,        // [B, heads * D] bf16 or f16
    float v_scale,
    int q_stride, int heads,
    int dim,                    // D
    int q_head,                 // D, or 2 D: the gate lies behind each query
    int fine,                   // of splits_of
    int most_splits)
{
  const int lane = threadIdx.x % 32, pieces = (dim + kWarpDims - 1) / kWarpDims;
  const int own = blockIdx.x * kWarps + threadIdx.x / 32, head = own / pieces, first = own % pieces * kWarpDims + lane;
  const long long row = blockIdx.y;
  launch_dependents();
  wait_for_predecessors();
  const int count = splits_of(positions[row] + 1, fine).count;
  if (count == 1 || head >= heads) return;

  const long long at = (row * heads + head) * most_splits;
  const float* from = parts + at * dim + first;
  const int dims = min(4, dim / 32);
  float values[kAtOnce][4];
  const auto load = [&](int split) {
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[s][i] = split + s < count && i < dims ? from[static_cast<long long>(split + s) * dim + 32 * i] : 0.0f;
  };
  load(0);
  float top[2], weight[2], sum[4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int split = lane + 32 * i;
    float2 found = make_float2(__uint_as_float(0xff800000u), 0.0f);
    if (split < count) found = *reinterpret_cast<const float2*>(tops + 2 * (at + split));
    top[i] = found.x, weight[i] = found.y;
  }
  float highest = fmaxf(top[0], top[1]);
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, distance));
#pragma unroll
  for (int i = 0; i < 2; ++i) top[i] = exp2f(top[i] - highest);
  const float total = sum_of_warp(__fmaf_rn(weight[0], top[0], __fmul_rn(weight[1], top[1])));

  for (int split = 0;;) {
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      // Beyond the last split the factor is 0.
      const float shrink = __shfl_sync(0xffffffffu, split + s < 32 ? top[0] : top[1], (split + s) % 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = __fmaf_rn(values[s][i], shrink, sum[i]);
    }
    split += kAtOnce;
    if (split >= count) break;
    load(split);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= dims) break;
    const int d = first + 32 * i;
    float value = __fmul_rn(__fdividef(sum[i], total), v_scale);
    if (q_head > dim)
      value = __fmul_rn(value, sigmoid(widen(q[row * q_stride + head * static_cast<long long>(q_head) + dim + d])));
    out[(row * heads + head) * dim + d] = narrow(value);
  }
}
