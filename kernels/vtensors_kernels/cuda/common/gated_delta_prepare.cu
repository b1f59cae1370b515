// T tokens of one sequence: the convolution with its silu, and what each token does to each value head. The first of
// three kernels (then gated_delta_prefill, gated_delta_norm) that give the bits of gated_delta_decode token by token.
//
// mixed[t] = silu(conv(qkv[t])); factors[t, j] as gated_delta.cuh says.
//
// Shapes: any T >= 1 from position positions[0] + offset on; value heads a multiple of key heads; C = 2 * key heads *
// DK + value heads * DV. Raw inputs before the first token come from the slot's ring (position p at p mod W; before
// position 0 they are 0), which then holds the last of these. Grid: x key heads + ceil(value heads * DV / kThreads),
// y ceil(T / kTile). Block: kThreads. Shared memory: static, 8 * DK * kTile bytes. Arch: all; dependent launch from
// sm_90 on.

#include "include/gated_delta.cuh"
#include "include/ptx.cuh"

constexpr int kThreads = 256, kTile = 8;
constexpr int kPairs = 2 * kKey;  // channels of a key head: q and k
static_assert(kTile >= kTaps - 1, "only the first tile reads the ring, which it also writes");

struct Sequence {
  const unsigned short* qkv;  // [T, C], rows qkv_stride apart
  unsigned short* ring;       // [W, C]
  long long qkv_stride;
  int channels, tokens, position;
};

// One channel's tokens of a tile, in 16 bits; those past the last token are anything.
__device__ __forceinline__ void convolve_tile(const Sequence& of, int channel, int begin,
                                              const float* __restrict__ conv, unsigned short (&y)[kTile]) {
  unsigned short raw[kTile + kTaps - 1];
#pragma unroll
  for (int i = 0; i < kTile + kTaps - 1; ++i) {
    const int token = begin - (kTaps - 1) + i, at = of.position + token;
    raw[i] = 0;
    if (token >= of.tokens) continue;
    if (token >= 0) raw[i] = of.qkv[token * of.qkv_stride + channel];
    else if (at >= 0) raw[i] = of.ring[static_cast<long long>(at % kTaps) * of.channels + channel];
  }
  float weight[kTaps];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) weight[tap] = conv[static_cast<long long>(channel) * kTaps + tap];
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    unsigned short x[kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) x[tap] = raw[i + tap];
    y[i] = convolve(x, weight);
  }
  if (begin > 0) return;
#pragma unroll
  for (int back = kTaps; back; --back) {
    const int token = of.tokens - back;
    if (token >= 0)
      of.ring[static_cast<long long>((of.position + token) % kTaps) * of.channels + channel] =
          of.qkv[token * of.qkv_stride + channel];
  }
}

extern "C" __global__ __launch_bounds__(kThreads, 3) void gated_delta_prepare(
    const unsigned short* qkv,           // [T, C] bf16 or f16, rows qkv_stride apart; as ptx.cuh says of such inputs
    const unsigned short* b,             // [T, HV], rows b_stride apart
    const unsigned short* a,             // [T, HV], rows a_stride apart
    const float* __restrict__ conv,      // [C, W]
    const float* __restrict__ rates,     // [HV] -exp(A_log)
    const float* __restrict__ biases,    // [HV]
    unsigned short* history,             // [slots, W, C]
    const int* slots,                    // [1]
    const int* positions,                // [1]
    unsigned short* __restrict__ mixed,  // [T, C]
    float* __restrict__ factors,         // [T, HV, kFactors]
    long long qkv_stride,
    long long b_stride,
    long long a_stride,
    int tokens,                          // T
    int offset,
    int key_heads,
    int value_heads)
{
  __shared__ float pairs[kTile][kPairs];
  launch_dependents();
  wait_for_predecessors();
  const int thread = threadIdx.x, lane = thread % 32, unit = blockIdx.x, begin = blockIdx.y * kTile;
  const int channels = 2 * key_heads * kKey + value_heads * kValue;
  const long long slot = slots[0];
  const Sequence of = {qkv, history + slot * kTaps * channels, qkv_stride, channels, tokens, positions[0] + offset};
  const int count = tokens - begin < kTile ? tokens - begin : kTile;
  unsigned short y[kTile];
  if (unit >= key_heads) {
    const int channel = 2 * key_heads * kKey + (unit - key_heads) * kThreads + thread;
    if (channel >= channels) return;
    convolve_tile(of, channel, begin, conv, y);
#pragma unroll
    for (int i = 0; i < kTile; ++i)
      if (i < count) mixed[static_cast<long long>(begin + i) * channels + channel] = y[i];
    return;
  }
  for (int n = thread; n < kPairs; n += kThreads) {
    const int channel = n < kKey ? unit * kKey + n : (key_heads + unit) * kKey + n - kKey;
    convolve_tile(of, channel, begin, conv, y);
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (i < count) mixed[static_cast<long long>(begin + i) * channels + channel] = y[i];
      pairs[i][n] = widen(y[i]);
    }
  }
  __syncthreads();
  const int sharing = value_heads / key_heads;
  for (int i = thread / 32; i < count; i += kThreads / 32) {
    const KeyFactors keys = key_factors(pairs[i], pairs[i] + kKey, lane);
    const long long token = begin + i;
    for (int n = lane; n < sharing; n += 32) {
      const int head = unit * sharing + n;
      const Factors f = factors_of(keys, widen(b[token * b_stride + head]), widen(a[token * a_stride + head]),
                                   rates[head], biases[head]);
      float4* to = reinterpret_cast<float4*>(factors + (token * value_heads + head) * kFactors);
      to[0] = make_float4(f.decay, f.beta, f.read_key, f.read_query);
      to[1] = make_float4(f.write_key, f.product, 0.0f, 0.0f);
    }
  }
}
