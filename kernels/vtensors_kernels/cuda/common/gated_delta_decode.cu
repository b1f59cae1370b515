// One token of a gated delta net for each of B sequences: convolution, silu, unit vectors, delta rule, gated norm.
//
// y = silu(conv(qkv)); delta = beta (v - e^g S^T k); S = e^g S + k delta^T; o = S^T q;
// out = o / rms(o) * norm * silu(z), with beta = sigmoid(b), g = rate * softplus(a + bias).
//
// Shapes: any B; value heads a multiple of key heads; C = 2 * key heads * DK + value heads * DV; macros as
// gated_delta.cuh. Each sequence has a slot: a ring of its last W raw inputs, where position p lies at p mod W, and its
// states. Before position 0 inputs and state are 0 whatever the slot holds. Sequences with one slot (padding) leave
// anything there. Grid: x value heads, y B. Block: kThreads. Shared memory: static, 4 * (2 DK + 2 DV) bytes.
// Alignment: memory 16 bytes. Arch: all; dependent launch from sm_90 on.

#include "include/gated_delta_state.cuh"
#include "include/ptx.cuh"

constexpr int kColumns = 4;
// Columns of the state held at once.
constexpr int kSpan = kValue < 128 ? kValue : 128;
constexpr int kPasses = (kValue + kSpan - 1) / kSpan;
constexpr int kThreads = kSharers * kSpan / kColumns;
constexpr int kChannels = 2 * kKey + kValue;
constexpr int kChannelsOfThread = (kChannels + kThreads - 1) / kThreads;
constexpr int kOutputsOfThread = (kValue + kThreads - 1) / kThreads;
static_assert(kThreads % 32 == 0 && kThreads <= 512, "whole warps");

// The value, loaded before what comes next waits.
__device__ __forceinline__ float loaded(float value) { return __uint_as_float(kept(__float_as_uint(value))); }

extern "C" __global__ __launch_bounds__(kThreads, kThreads <= 256 ? 2 : 1) void gated_delta_decode(
    const unsigned short* qkv,         // [B, C] bf16 or f16, rows qkv_stride apart; as ptx.cuh says of such inputs
    const unsigned short* z,           // [B, HV * DV], rows z_stride apart
    const unsigned short* b,           // [B, HV], rows b_stride apart
    const unsigned short* a,           // [B, HV], rows a_stride apart
    const float* __restrict__ conv,    // [C, W]
    const float* __restrict__ rates,   // [HV] -exp(A_log)
    const float* __restrict__ biases,  // [HV]
    const float* __restrict__ norm,    // [DV]
    unsigned short* history,           // [slots, W, C]
    float* memory,                     // [slots, HV, DK, DV]
    const int* slots,                  // [B]
    const int* positions,              // [B]
    unsigned short* __restrict__ out,  // [B, HV * DV]
    long long qkv_stride,
    long long z_stride,
    long long b_stride,
    long long a_stride,
    int key_heads,
    int all_slots,                     // of history and memory
    float eps)
{
  alignas(16) __shared__ float mixed[kChannels];  // q, k, v
  __shared__ float outputs[kValue];
  launch_dependents();
  const int thread = threadIdx.x, lane = thread % 32, head = blockIdx.x, heads = gridDim.x;
  const long long row = blockIdx.y;
  const int sharing = heads / key_heads, key_head = head / sharing;
  const int channels = 2 * key_heads * kKey + heads * kValue;

  int channel[kChannelsOfThread];
  float weight[kChannelsOfThread][kTaps], gain[kOutputsOfThread];
#pragma unroll
  for (int n = 0; n < kChannelsOfThread; ++n) {
    const int i = thread + n * kThreads;
    channel[n] = i < kKey       ? key_head * kKey + i
                 : i < 2 * kKey ? (key_heads + key_head) * kKey + i - kKey
                                : 2 * key_heads * kKey + head * kValue + i - 2 * kKey;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap)
      weight[n][tap] = i < kChannels ? loaded(conv[static_cast<long long>(channel[n]) * kTaps + tap]) : 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kOutputsOfThread; ++n)
    gain[n] = thread + n * kThreads < kValue ? loaded(norm[thread + n * kThreads]) : 0.0f;
  const float rate = loaded(rates[head]), bias = loaded(biases[head]);
#if VT_HAS_BULK_COPY
  // The state of the row's slot is on its way already; should the slot be an older one still, nothing but time is lost.
  if (thread == 0) {
    const int likely = load_hint(slots + row);
    if (static_cast<unsigned>(likely) < static_cast<unsigned>(all_slots))
      prefetch_bulk(memory + (static_cast<long long>(likely) * heads + head) * (kKey * kValue), kKey * kValue * 4);
  }
#endif

  wait_for_predecessors();
  const long long slot = slots[row];
  const int position = positions[row];
  unsigned short* ring = history + slot * kTaps * channels;
  unsigned short x[kChannelsOfThread][kTaps];
#pragma unroll
  for (int n = 0; n < kChannelsOfThread; ++n) {
    const bool wanted = thread + n * kThreads < kChannels;
#pragma unroll
    for (int tap = 0; tap < kTaps - 1; ++tap) {
      const int at = position - (kTaps - 1) + tap;
      x[n][tap] = wanted && at >= 0 ? ring[static_cast<long long>(at % kTaps) * channels + channel[n]] : 0;
    }
    x[n][kTaps - 1] = wanted ? qkv[row * qkv_stride + channel[n]] : 0;
  }
  const float b_own = widen(b[row * b_stride + head]), a_own = widen(a[row * a_stride + head]);
  unsigned short gate[kOutputsOfThread];
#pragma unroll
  for (int n = 0; n < kOutputsOfThread; ++n) {
    const int i = thread + n * kThreads;
    gate[n] = i < kValue ? z[row * z_stride + static_cast<long long>(head) * kValue + i] : 0;
  }

  // The state is on its way while the convolution is computed.
  const int r = lane / kLanesOfRow;
  const int first = (thread / 32 * kLanesOfRow + lane % kLanesOfRow) * kColumns;
  float* state = memory + (slot * heads + head) * (kKey * kValue);
  StatePart<kColumns> part;
  if (position > 0) part.load(state + first, r);
  else part.clear();

#pragma unroll
  for (int n = 0; n < kChannelsOfThread; ++n) {
    const int i = thread + n * kThreads;
    if (i >= kChannels) break;
    mixed[i] = widen(convolve(x[n], weight[n]));
    // It takes the place of position - W, which nobody reads: one of the blocks that share a key head writes it.
    if (i >= 2 * kKey || head % sharing == 0)
      ring[static_cast<long long>(position % kTaps) * channels + channel[n]] = x[n][kTaps - 1];
  }
  __syncthreads();
  const Factors factors = factors_of(key_factors(mixed, mixed + kKey, lane), b_own, a_own, rate, bias);
  const SharedRows q(mixed, r), k(mixed + kKey, r);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int column = first + pass * kSpan;
    // Whole warps: their columns are a divisor of kValue.
    if (kValue % kSpan && column >= kValue) break;
    if (pass > 0) {
      if (position > 0) part.load(state + column, r);
      else part.clear();
    }
    float v[kColumns];
    load_columns(mixed + 2 * kKey + column, v);
    const float o = part.advance(k, q, v, factors, r);
    part.store(state + column, r);
    if (r < kColumns) outputs[column + part.output_column(r)] = o;
  }
  __syncthreads();
  float o[kValuesOfLane];
#pragma unroll
  for (int i = 0; i < kValuesOfLane; ++i) o[i] = lane + 32 * i < kValue ? outputs[lane + 32 * i] : 0.0f;
  const float inverse = inverse_rms(o, eps);
#pragma unroll
  for (int n = 0; n < kOutputsOfThread; ++n) {
    const int i = thread + n * kThreads;
    if (i < kValue) out[(row * heads + head) * kValue + i] = gated(outputs[i], inverse, gain[n], gate[n]);
  }
}
