// out[b, h] = sum_s 2^(top_s - top) parts[b, h, s] / sum_s 2^(top_s - top) weight_s * v_scale * sigmoid(gate), over the
// splits s of a row in order, top the largest of them: what paged_attention_decode and paged_attention_stream leave of
// rows of several splits.
//
// A warp makes up to 64 dimensions of one head. Shapes: D 32, 64, 128 or 256. Grid: x ceil(heads * ceil(D / 64) /
// kWarps), y B. Block: kThreads. Shared memory: none. Arch: all; dependent launch from sm_90 on. Alignment: `parts` and
// `tops` 8 bytes.

#include "include/attention_heads.cuh"
#include "include/attention_splits.cuh"
#include "include/ptx.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpDims = 64;
constexpr int kAtOnce = 24;  // splits whose sums are on their way together
static_assert(kMostSplits == 64, "a lane knows two splits");

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
  const int own = blockIdx.x * kWarps + threadIdx.x / 32, head = own / pieces;
  const int first = own % pieces * kWarpDims + 2 * lane;  // of this lane's two
  const bool has_dims = first < dim;
  const long long row = blockIdx.y, at = (row * heads + head) * most_splits;
  launch_dependents();
  wait_for_predecessors();
  if (head >= heads) return;
  // What a row of fewer splits does not have is read, where it lies in the tensor, so that this does not wait for the
  // position; it is used nowhere.
  const int position = positions[row];
  float2 found[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    found[i] = *reinterpret_cast<const float2*>(tops + 2 * (at + min(lane + 32 * i, most_splits - 1)));
  unsigned short gates[2] = {};
  if (q_head > dim && has_dims)
#pragma unroll
    for (int i = 0; i < 2; ++i) gates[i] = q[row * q_stride + head * static_cast<long long>(q_head) + dim + first + i];

  const int count = splits_of(position + 1, fine).count;
  if (count == 1) return;
  const float* from = parts + at * dim + first;
  float2 values[kAtOnce];
  const auto load = [&](int split) {
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      values[s] = make_float2(0.0f, 0.0f);
      if (split + s < count && has_dims)
        values[s] = *reinterpret_cast<const float2*>(from + static_cast<long long>(split + s) * dim);
    }
  };
  load(0);
  float top[2], weight[2], sum[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = lane + 32 * i < count;
    top[i] = there ? found[i].x : __uint_as_float(0xff800000u);
    weight[i] = there ? found[i].y : 0.0f;
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
      sum[0] = __fmaf_rn(values[s].x, shrink, sum[0]);
      sum[1] = __fmaf_rn(values[s].y, shrink, sum[1]);
    }
    split += kAtOnce;
    if (split >= count) break;
    load(split);
  }
  if (!has_dims) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float value = __fmul_rn(__fdividef(sum[i], total), v_scale);
    if (q_head > dim) value = __fmul_rn(value, sigmoid(widen(gates[i])));
    out[(row * heads + head) * dim + first + i] = narrow(value);
  }
}
