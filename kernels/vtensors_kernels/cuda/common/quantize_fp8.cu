// x [M, K] in 16 bits -> E4M3 codes and the scales they are under, bit for bit those of `vtensors_formats`.
//
// With v = x, or x * pre_scale[k] rounded to x's format, and the scale s of v by VT_SCALE:
//   0 stored   s as the checkpoint stores it                      code = e4m3(v / s)
//   1 tokens   s = amax of the token / 448, 2^-23 where that is 0   code = e4m3(v / s)
//   2 groups   the same of 128 columns                            code = e4m3(v / s)
//   3 mx       s = 2^(byte - 127) of 32 columns, by `rule`        code = e4m3(v * 2^(127 - byte))
// All in float32, divisions rounded to nearest. NaN makes its group NaN. What is written, by VT_OUT:
//   0 codes    [M, K] E4M3        1 values   [M, K] the codes' values in x's format, exact
//   2 rounded  [M, K] value * s, rounded to x's format
// and s where `scales` is not null. A row depends on nothing but itself.
//
// Shapes: any M; K a multiple of 16. Grid: x covers M rows of blocks_per_row blocks (one with VT_SCALE 1). Block:
// kThreads; a thread takes 8 columns at a time. Alignment: x, its rows and pre_scale 16 bytes. Shared memory: static, a
// word a warp. Arch: all; dependent launch from sm_90 on.

#include "include/e4m3_encode.cuh"
#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_SCALE
#define VT_SCALE 0
#endif
#ifndef VT_OUT
#define VT_OUT 0
#endif
static_assert(VT_SCALE >= 0 && VT_SCALE <= 3 && VT_OUT >= 0 && VT_OUT <= 2, "see above");

constexpr int kPerToken = VT_SCALE == 1;
constexpr int kThreads = kPerToken ? 512 : 128;
constexpr int kColumns = 8;                                         // of a thread at a time
constexpr int kGroup = VT_SCALE == 3 ? 32 : VT_SCALE == 2 ? 128 : kColumns;
constexpr int kLanes = kGroup / kColumns;                           // that share a scale
constexpr int kHeld = 5;                                            // pieces of a token that a thread keeps

struct Input {
  const unsigned short* row;
  const float* pre_scale;

  __device__ __forceinline__ uint4 load(int piece) const {
    uint4 v = *reinterpret_cast<const uint4*>(row + static_cast<long long>(piece) * kColumns);
    if (pre_scale != nullptr) {
      const float4* factors = reinterpret_cast<const float4*>(pre_scale + static_cast<long long>(piece) * kColumns);
      const float4 a = __ldg(factors), b = __ldg(factors + 1);
      const auto scaled = [](unsigned pair, float low, float high) {
        return narrow_pair(__fmul_rn(widen(pair & 0xffffu), low), __fmul_rn(widen(pair >> 16), high));
      };
      v = make_uint4(scaled(v.x, a.x, a.y), scaled(v.y, a.z, a.w), scaled(v.z, b.x, b.y), scaled(v.w, b.z, b.w));
    }
    return v;
  }
};

// The bits of the largest magnitude; NaN lies above infinity.
__device__ __forceinline__ unsigned largest(const uint4& v) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) found = max(found, max(words[i] & 0x7fffu, words[i] >> 16 & 0x7fffu));
  return found;
}

// Of the largest magnitude: what v is divided by, with VT_SCALE 3 what it is multiplied by and the E8M0 byte.
struct Scale {
  float value, inverse;
  unsigned byte;

  __device__ __forceinline__ void of(float amax, int rule) {
#if VT_SCALE == 3
    unsigned bits = __float_as_uint(amax), stored;
    if (rule == 0) {  // ceil(log2(amax / 448))
      bits = __float_as_uint(__fdiv_rn(amax, 448.0f));
      stored = bits <= 0x400000u ? 0u : (bits + 0x7fffffu) >> 23;
    } else {  // floor(log2(amax)) - 8, with rule 2 one more from a mantissa of 1.75 on
      const unsigned exponent = (bits + (rule == 2 ? 0x200000u : 0u)) >> 23;
      stored = bits < 0x00800000u || exponent < 8u ? 0u : exponent - 8u;
      if (bits == 0x7f800000u) stored = 0xfeu;
    }
    byte = amax != amax ? 0xffu : min(stored, 0xfeu);
    value = power(byte), inverse = power(byte == 0xffu ? 0xffu : 0xfeu - byte);
#else
    value = __fdiv_rn(amax, 448.0f);
    if (value == 0.0f) value = 0x1p-23f;
#endif
  }
  // 2^(byte - 127)
  static __device__ __forceinline__ float power(unsigned byte) {
    return __uint_as_float(byte == 0u ? 0x400000u : byte == 0xffu ? 0x7fc00000u : byte << 23);
  }
  __device__ __forceinline__ float divided(float v) const {
    return VT_SCALE == 3 ? __fmul_rn(v, inverse) : __fdiv_rn(v, value);
  }
};

__device__ __forceinline__ unsigned quantized_pair(unsigned pair, const Scale& scale) {
  return encode_e4m3_pair(scale.divided(widen(pair & 0xffffu)), scale.divided(widen(pair >> 16)));
}

__device__ __forceinline__ unsigned written_pair(unsigned codes, const Scale& scale) {
  float low = value_of_e4m3(codes & 0xffu), high = value_of_e4m3(codes >> 8);
#if VT_OUT == 2
  low = __fmul_rn(low, scale.value), high = __fmul_rn(high, scale.value);
#endif
  return narrow_pair(low, high);
}

__device__ __forceinline__ void store(void* out, long long piece, const uint4& v, const Scale& scale) {
  const unsigned a = quantized_pair(v.x, scale), b = quantized_pair(v.y, scale);
  const unsigned c = quantized_pair(v.z, scale), d = quantized_pair(v.w, scale);
#if VT_OUT == 0
  static_cast<uint2*>(out)[piece] = make_uint2(a | b << 16, c | d << 16);
#else
  static_cast<uint4*>(out)[piece] = make_uint4(written_pair(a, scale), written_pair(b, scale), written_pair(c, scale),
                                               written_pair(d, scale));
#endif
}

__device__ __forceinline__ unsigned largest_of_lanes(unsigned found, int lanes) {
  for (int distance = lanes / 2; distance; distance /= 2)
    found = max(found, __shfl_xor_sync(0xffffffffu, found, distance));
  return found;
}

extern "C" __global__ __launch_bounds__(kThreads) void quantize_fp8(
    const unsigned short* x,              // [M, K] bf16 or f16; as ptx.cuh says of what earlier kernels write
    void* __restrict__ out,               // [M, K] by VT_OUT
    void* __restrict__ scales,            // float32, with VT_SCALE 3 uint8, of row m and group g at m * scale_row +
                                          // g * scale_group; or null
    const float* __restrict__ global,     // [1] of VT_SCALE 0: as stored
    const float* __restrict__ pre_scale,  // [K] or null
    long long x_row,                      // elements from row to row of x
    long long scale_row,
    long long scale_group,
    int columns,                          // K
    int blocks_per_row,
    int rule)                             // of VT_SCALE 3: 0 ceil, 1 floor, 2 floor after rounding
{
  launch_dependents();
  const long long row = blockIdx.x / blocks_per_row;
  const int pieces = columns / kColumns;
  const Input input{x + row * x_row, pre_scale};
  const long long first = row * pieces;
  Scale scale{};
#if VT_SCALE == 1
  __shared__ unsigned found[kThreads / 32];
  wait_for_predecessors();
  uint4 held[kHeld];
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int piece = i * kThreads + threadIdx.x;
    held[i] = piece < pieces ? input.load(piece) : make_uint4(0, 0, 0, 0);
    most = max(most, largest(held[i]));
  }
  for (int piece = kHeld * kThreads + threadIdx.x; piece < pieces; piece += kThreads)
    most = max(most, largest(input.load(piece)));
  most = largest_of_lanes(most, 32);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = most;
  __syncthreads();
  most = largest_of_lanes(found[threadIdx.x % (kThreads / 32)], kThreads / 32);
  scale.of(widen(most), rule);
  if (scales != nullptr && threadIdx.x == 0) static_cast<float*>(scales)[row * scale_row] = scale.value;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int piece = i * kThreads + threadIdx.x;
    if (piece < pieces) store(out, first + piece, held[i], scale);
  }
  for (int piece = kHeld * kThreads + threadIdx.x; piece < pieces; piece += kThreads)
    store(out, first + piece, input.load(piece), scale);
#else
  const int piece = blockIdx.x % blocks_per_row * kThreads + threadIdx.x;
#if VT_SCALE == 0
  scale.value = *global;
#endif
  wait_for_predecessors();
  const uint4 v = piece < pieces ? input.load(piece) : make_uint4(0, 0, 0, 0);
#if VT_SCALE >= 2
  scale.of(widen(largest_of_lanes(largest(v), kLanes)), rule);
  if (scales != nullptr && piece < pieces && piece % kLanes == 0) {
    const long long at = row * scale_row + piece / kLanes * scale_group;
#if VT_SCALE == 3
    static_cast<unsigned char*>(scales)[at] = static_cast<unsigned char>(scale.byte);
#else
    static_cast<float*>(scales)[at] = scale.value;
#endif
  }
#endif
  if (piece < pieces) store(out, first + piece, v, scale);
#endif
}
