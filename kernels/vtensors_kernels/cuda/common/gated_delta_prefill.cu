// T tokens of one sequence through the delta rule, token by token, the state in registers all the while: the second of
// three kernels (behind gated_delta_prepare, before gated_delta_norm).
//
// S = decay S + k delta^T, o = S^T q as gated_delta.cuh says; per token the same operations in the same order as in
// gated_delta_decode.
//
// Shapes: any T >= 1; at position positions[0] + offset = 0 the state begins as 0 whatever the slot holds. A block has
// VT_SPAN columns of one value head, a lane VT_COLUMNS of them. Grid: x value heads * DV / VT_SPAN. Block: kThreads.
// Shared memory: static, 2 * kGroup * kTokenFloats * 4 bytes: tokens are fetched kGroup at a time, one group ahead.
// Alignment: mixed, factors, memory 16 bytes. Arch: all; dependent launch from sm_90 on.

#include "include/gated_delta_state.cuh"
#include "include/ptx.cuh"

#ifndef VT_COLUMNS
#define VT_COLUMNS 4  // of a lane
#endif
#ifndef VT_SPAN
#define VT_SPAN 32  // columns of a block
#endif

constexpr int kColumns = VT_COLUMNS, kSpan = VT_SPAN, kGroup = 8;
constexpr int kThreads = kSharers * kSpan / kColumns;
static_assert(kValue % kSpan == 0 && kSpan % 8 == 0, "whole blocks, whole chunks");
static_assert(kThreads % 32 == 0 && kThreads <= 512, "whole warps");

// A token in shared memory: q, k, v of the block's columns, factors. In global memory, chunks of 16 bytes.
constexpr int kTokenFloats = 2 * kKey + kSpan + kFactors;
constexpr int kWideChunks = (2 * kKey + kSpan) / 8, kChunks = kWideChunks + kFactors / 4;
constexpr int kFetches = (kGroup * kChunks + kThreads - 1) / kThreads;
static_assert(2 * kGroup * kTokenFloats * 4 <= 48 << 10, "static shared memory");

// Where a head's tokens lie, at its columns of the block.
struct Place {
  const unsigned short *q, *k, *v;  // of [T, C]
  const float* factors;             // of [T, HV, kFactors]
  int channels, heads, tokens;
};

struct Fetch {
  uint4 held[kFetches];
  __device__ __forceinline__ void load(const Place& from, int begin) {
#pragma unroll
    for (int n = 0; n < kFetches; ++n) {
      const int i = n * kThreads + threadIdx.x, chunk = i % kChunks;
      const long long token = begin + i / kChunks;
      held[n] = make_uint4(0, 0, 0, 0);
      if (i >= kGroup * kChunks || token >= from.tokens) continue;
      const unsigned short* row = chunk < kKey / 8       ? from.q + chunk * 8
                                  : chunk < 2 * kKey / 8 ? from.k + (chunk - kKey / 8) * 8
                                                         : from.v + (chunk - 2 * kKey / 8) * 8;
      const void* at = chunk < kWideChunks
                           ? static_cast<const void*>(row + token * from.channels)
                           : from.factors + token * from.heads * kFactors + (chunk - kWideChunks) * 4;
      held[n] = *static_cast<const uint4*>(at);
    }
  }
  __device__ __forceinline__ void store(float* group) const {
#pragma unroll
    for (int n = 0; n < kFetches; ++n) {
      const int i = n * kThreads + threadIdx.x, chunk = i % kChunks;
      if (i >= kGroup * kChunks) continue;
      float* token = group + i / kChunks * kTokenFloats;
      const uint4 v = held[n];
      if (chunk < kWideChunks) {
        float4* to = reinterpret_cast<float4*>(token + chunk * 8);
        to[0] = make_float4(widen(v.x & 0xffffu), widen(v.x >> 16), widen(v.y & 0xffffu), widen(v.y >> 16));
        to[1] = make_float4(widen(v.z & 0xffffu), widen(v.z >> 16), widen(v.w & 0xffffu), widen(v.w >> 16));
      } else {
        *reinterpret_cast<uint4*>(token + 2 * kKey + kSpan + (chunk - kWideChunks) * 4) = v;
      }
    }
  }
};

__device__ __forceinline__ Factors load_factors(const float* token) {
  const float4 low = *reinterpret_cast<const float4*>(token + 2 * kKey + kSpan);
  const float2 high = *reinterpret_cast<const float2*>(token + 2 * kKey + kSpan + 4);
  return {low.x, low.y, low.z, low.w, high.x, high.y};
}

extern "C" __global__ __launch_bounds__(kThreads, 1) void gated_delta_prefill(
    const unsigned short* mixed,   // [T, C] bf16 or f16; as ptx.cuh says of what earlier kernels write
    const float* factors,          // [T, HV, kFactors]
    float* memory,                 // [slots, HV, DK, DV]
    const int* slots,              // [1]
    const int* positions,          // [1]
    float* __restrict__ out,       // [T, HV, DV]
    int tokens,                    // T
    int offset,
    int key_heads,
    int value_heads)
{
  alignas(16) __shared__ float fetched[2][kGroup * kTokenFloats];
  launch_dependents();
  wait_for_predecessors();
  const int lane = threadIdx.x % 32, r = lane / kLanesOfRow;
  const int head = blockIdx.x / (kValue / kSpan), begin = blockIdx.x % (kValue / kSpan) * kSpan;
  const int key_head = head / (value_heads / key_heads);
  const Place from = {mixed + key_head * kKey,
                      mixed + (key_heads + key_head) * kKey,
                      mixed + 2 * key_heads * kKey + head * kValue + begin,
                      factors + head * kFactors,
                      2 * key_heads * kKey + value_heads * kValue,
                      value_heads,
                      tokens};
  // Of the block's columns.
  const int first = (static_cast<int>(threadIdx.x) / 32 * kLanesOfRow + lane % kLanesOfRow) * kColumns;
  float* state = memory + (static_cast<long long>(slots[0]) * value_heads + head) * (kKey * kValue) + begin + first;
  StatePart<kColumns> part;
  if (positions[0] + offset > 0) part.load(state, r);
  else part.clear();
  Fetch next;
  next.load(from, 0);
  next.store(fetched[0]);
  __syncthreads();

  float* to = out + static_cast<long long>(head) * kValue + begin + first + part.output_column(r);
  const long long step = static_cast<long long>(value_heads) * kValue;
  int buffer = 0;
  for (int done = 0; done < tokens; done += kGroup, buffer ^= 1) {
    const bool more = done + kGroup < tokens;
    if (more) next.load(from, done + kGroup);
    const int count = more ? kGroup : tokens - done;
    const float* token = fetched[buffer];
    HeldRows q, k;
    q.load(SharedRows(token, r));
    k.load(SharedRows(token + kKey, r));
#pragma unroll 2
    for (int t = 0; t < count; ++t) {
      const float* following = t + 1 < count ? token + kTokenFloats : token;
      HeldRows next_q, next_k;
      next_k.load(SharedRows(following + kKey, r));
      next_q.load(SharedRows(following, r));
      float v[kColumns];
      load_columns(token + 2 * kKey + first, v);
      const float o = part.advance(k, q, v, load_factors(token), r);
      if (r < kColumns) *to = o;
      to += step;
      token = following;
      q = next_q, k = next_k;
    }
    if (more) next.store(fetched[buffer ^ 1]);
    __syncthreads();
  }
  part.store(state, r);
}
