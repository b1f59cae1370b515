// One token of a gated delta net for each of B sequences: convolution, silu, unit vectors, delta rule, gated norm.
//
// y = silu(conv(qkv)); delta = beta (v - e^g S^T k); S = e^g S + k delta^T; o = S^T q;
// out = o / rms(o) * norm * silu(z), with beta = sigmoid(b), g = rate * softplus(a + bias).
//
// Shapes: any B; value heads a multiple of key heads; C = 2 * key heads * DK + value heads * DV; macros as
// gated_delta.cuh. Each sequence has a slot: a ring of its last W raw inputs, where position p lies at p mod W, and its
// states. Before position 0 inputs and state are 0 whatever the slot holds. Sequences with one slot (padding) leave
// anything there. Grid: x value heads, y B. Block: kThreads. Shared memory: static, 4 * (2 DK + 2 DV) bytes.
// Alignment: history and memory 16 bytes. Arch: all; dependent launch from sm_90 on.
//
// Slot and position must arrive before anything of the slot can be asked for. They are therefore read before the wait
// already, as hints: they change once a step, so that a hint is nearly always right, but a kernel before this one may
// yet write them. A hint may be any number; it is brought into range, and used for two things alone:
//   before the wait, to move ring and state of that slot into the L2 cache, which never has old numbers;
//   behind it, to load ring and state from there while the true slot and position arrive. If those are others,
//   everything is loaded once more, by the true ones.
// No load of ring or state is made before the wait, so none gives what an earlier kernel has since replaced. A load by
// a wrong hint may meet what another block is writing: it is a relaxed one, and its number is thrown away. Results and
// stores depend on the true numbers only.

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
    const float* conv,                 // [C, W]; plain pointers keep their loads in front of the wait
    const float* rates,                // [HV] -exp(A_log)
    const float* biases,               // [HV]
    const float* norm,                 // [DV]
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
  const bool writes_keys = kept(head % sharing) == 0;  // of the blocks that share a key head
  const int channels = 2 * key_heads * kKey + heads * kValue;
  const auto ring_of = [=](int slot) { return history + static_cast<long long>(slot) * kTaps * channels; };
  const auto state_of = [=](int slot) {
    return memory + (static_cast<long long>(slot) * heads + head) * (kKey * kValue);
  };

  int hinted_slot = load_hint(slots + row), hinted_position = load_hint(positions + row);
  const float rate = loaded(rates[head]), bias = loaded(biases[head]);
  float gain[kOutputsOfThread], weight[kChannelsOfThread][kTaps];
#pragma unroll
  for (int n = 0; n < kOutputsOfThread; ++n)
    gain[n] = thread + n * kThreads < kValue ? loaded(norm[thread + n * kThreads]) : 0.0f;
  int channel[kChannelsOfThread];
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
  if (static_cast<unsigned>(hinted_slot) >= static_cast<unsigned>(all_slots)) hinted_slot = 0;
  hinted_position = max(hinted_position, 0);
#if VT_HAS_BULK_COPY
  if (thread == 0) prefetch_bulk(state_of(hinted_slot), kKey * kValue * 4);
  // The head's q, k and v of each entry of the ring; from the last warp, as the first has the state to ask for.
  const int piece = thread - (kThreads - 32);
  if (piece >= 0 && piece < 3 * kTaps) {
    const int kind = piece % 3;
    const int begin = kind < 2 ? (kind * key_heads + key_head) * kKey : 2 * key_heads * kKey + head * kValue;
    prefetch_bulk(ring_of(hinted_slot) + (piece / 3 * channels + begin), 2 * (kind < 2 ? kKey : kValue));
  }
#endif

  // Where in a ring the inputs before a position are, oldest first; -1: before position 0.
  const auto find_entries = [=](int position, int (&entries)[kTaps - 1]) {
#pragma unroll
    for (int tap = 0; tap < kTaps - 1; ++tap) {
      const int at = position - (kTaps - 1) + tap;
      entries[tap] = at >= 0 ? at % kTaps * channels : -1;
    }
  };
  unsigned short x[kChannelsOfThread][kTaps];
  const auto load_ring = [&](int slot, const int (&entries)[kTaps - 1]) {
    const unsigned short* ring = ring_of(slot);
#pragma unroll
    for (int n = 0; n < kChannelsOfThread; ++n) {
      const bool wanted = thread + n * kThreads < kChannels;
#pragma unroll
      for (int tap = 0; tap < kTaps - 1; ++tap)
        x[n][tap] = wanted && entries[tap] >= 0 ? load_relaxed(ring + (entries[tap] + channel[n])) : 0;
    }
  };
  // The thread's first number of a slot's state. Its others are fixed distances behind, so that one address does for
  // all: part is told to be row 0 of the sharers from there.
  const int r = lane / kLanesOfRow;
  const int first = (thread / 32 * kLanesOfRow + lane % kLanesOfRow) * kColumns;
  const auto own_of = [=](int slot) { return kept(state_of(slot) + (row_of(0, r) * kValue + first)); };

  // All that can be worked out before the wait.
  const float* hinted_own = own_of(hinted_slot);
  int hinted_entries[kTaps - 1];
  find_entries(hinted_position, hinted_entries);
#pragma unroll
  for (int tap = 0; tap < kTaps - 1; ++tap) hinted_entries[tap] = static_cast<int>(kept(hinted_entries[tap]));

  wait_for_predecessors();
#pragma unroll
  for (int n = 0; n < kChannelsOfThread; ++n)
    x[n][kTaps - 1] = thread + n * kThreads < kChannels ? qkv[row * qkv_stride + channel[n]] : 0;
  StatePart<kColumns> part;
  load_ring(hinted_slot, hinted_entries);
  const int slot = load_relaxed(slots + row), position = load_relaxed(positions + row);
  part.load_relaxed(hinted_own, 0);
  const float b_own = widen(b[row * b_stride + head]), a_own = widen(a[row * a_stride + head]);
  unsigned short gate[kOutputsOfThread];
#pragma unroll
  for (int n = 0; n < kOutputsOfThread; ++n) {
    const int i = thread + n * kThreads;
    gate[n] = i < kValue ? z[row * z_stride + static_cast<long long>(head) * kValue + i] : 0;
  }
  // Also at position 0, where nothing counts that was there. Threads may have had different hints: no exchange in here.
  if (slot != hinted_slot || position != hinted_position || position <= 0) {
    int entries[kTaps - 1];
    find_entries(position, entries);
    load_ring(slot, entries);
    if (position > 0) part.load_relaxed(own_of(slot), 0);
    else part.clear();
  }

  // The state is on its way while the convolution is computed. What is kept here is not converted further up, where
  // loads would wait for it.
  unsigned short* ring = ring_of(slot);
  float* state = own_of(slot);
#pragma unroll
  for (int n = 0; n < kOutputsOfThread; ++n) gate[n] = kept(gate[n]);
#pragma unroll
  for (int n = 0; n < kChannelsOfThread; ++n) {
    const int i = thread + n * kThreads;
    if (i >= kChannels) break;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) x[n][tap] = kept(x[n][tap]);
    mixed[i] = widen(convolve(x[n], weight[n]));
    // It takes the place of position - W, which nobody reads.
    if (i >= 2 * kKey || writes_keys) ring[position % kTaps * channels + channel[n]] = x[n][kTaps - 1];
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
      if (position > 0) part.load(state + pass * kSpan, 0);
      else part.clear();
    }
    float v[kColumns];
    load_columns(mixed + 2 * kKey + column, v);
    const float o = part.advance(k, q, v, factors, r);
    part.store(state + pass * kSpan, 0);
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
