#pragma once
// The arithmetic of a gated delta net outside its state, shared by the kernels that promise the same bits for one token
// at a time and for many: every sum has one fixed order, and no multiplication is joined to an addition but by hand.
//
// Rounding as in the reference: float32 everywhere, the convolution's silu rounded once to 16 bits, the gated norm's
// result once more.

#include "include/sixteen_bits.cuh"

#ifndef VT_KEY_DIM
#define VT_KEY_DIM 128  // DK
#endif
#ifndef VT_VALUE_DIM
#define VT_VALUE_DIM 128  // DV
#endif
#ifndef VT_TAPS
#define VT_TAPS 4  // W of the convolution
#endif

constexpr int kKey = VT_KEY_DIM, kValue = VT_VALUE_DIM, kTaps = VT_TAPS;
constexpr int kValuesOfLane = (kValue + 31) / 32;
constexpr float kUnitEps = 1e-6f;  // of the lengths of q and k
constexpr unsigned kWholeWarp = 0xffffffffu;

static_assert(kKey % 16 == 0 && kKey >= 16 && kKey <= 256, "DK is a multiple of 16 up to 256");
static_assert(kValue % 16 == 0 && kValue >= 16 && kValue <= 256, "DV is a multiple of 16 up to 256");
static_assert(kTaps >= 2 && kTaps <= 8, "2 to 8 taps");

// Quotients within 2 ulp; 0 where e^-x is 2^126 and more.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, expf(-x))); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, __fadd_rn(1.0f, expf(-x))); }

// The sum over a warp, in every lane.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    value = __fadd_rn(value, __shfl_xor_sync(kWholeWarp, value, distance));
  return value;
}

// silu of the convolution at one position, in 16 bits. x, weight: oldest first; x of positions before 0 is 0.
__device__ __forceinline__ unsigned short convolve(const unsigned short (&x)[kTaps], const float (&weight)[kTaps]) {
  float sum = __fmul_rn(widen(x[0]), weight[0]);
#pragma unroll
  for (int tap = 1; tap < kTaps; ++tap) sum = __fmaf_rn(widen(x[tap]), weight[tap], sum);
  return narrow(silu(sum));
}

// What makes q and k of a token and key head unit vectors, q times DK^-0.5 too; and their product after that.
struct KeyFactors {
  float key, query, product;
};

// q, k: [kKey] as the convolution gives them. A whole warp; every lane has the result.
__device__ __forceinline__ KeyFactors key_factors(const float* q, const float* k, int lane) {
  float queries = 0.0f, keys = 0.0f, products = 0.0f;
#pragma unroll
  for (int i = lane; i < kKey; i += 32) {
    queries = __fmaf_rn(q[i], q[i], queries);
    keys = __fmaf_rn(k[i], k[i], keys);
    products = __fmaf_rn(q[i], k[i], products);
  }
  queries = sum_of_warp(queries), keys = sum_of_warp(keys), products = sum_of_warp(products);
  KeyFactors f;
  f.key = rsqrtf(__fadd_rn(keys, kUnitEps));
  f.query = __fmul_rn(rsqrtf(__fadd_rn(queries, kUnitEps)), sqrtf(1.0f / kKey));
  f.product = __fmul_rn(products, __fmul_rn(f.key, f.query));
  return f;
}

// What one token does to a value head, for q and k as the convolution gives them: with S the state before it
//   delta = beta * (v - read_key * S^T k),  S = decay * S + k (write_key * delta)^T,
//   o = read_query * (S before)^T q + product * delta.
// The same as o = S^T q of the new S: both sums are over the state as it was read, so neither waits for the other.
struct Factors {
  float decay, beta, read_key, read_query, write_key, product;
};
constexpr int kFactors = 8;  // floats of them in memory, two unused

// b, a: of the token and value head. rate: -exp(A_log).
__device__ __forceinline__ Factors factors_of(const KeyFactors& keys, float b, float a, float rate, float bias) {
  const float x = __fadd_rn(a, bias);
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  Factors f;
  f.decay = expf(__fmul_rn(rate, softplus));
  f.beta = sigmoid(b);
  f.read_key = __fmul_rn(f.decay, keys.key);
  f.read_query = __fmul_rn(f.decay, keys.query);
  f.write_key = keys.key;
  f.product = keys.product;
  return f;
}

// 1 / rms of a head's outputs; o: its values lane, lane + 32, ... (0 past kValue). A whole warp.
__device__ __forceinline__ float inverse_rms(const float (&o)[kValuesOfLane], float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kValuesOfLane; ++i) squares = __fmaf_rn(o[i], o[i], squares);
  return rsqrtf(__fmaf_rn(sum_of_warp(squares), 1.0f / kValue, eps));
}

// One value of the gated norm, in 16 bits. z: bits of the gate.
__device__ __forceinline__ unsigned short gated(float o, float inverse, float weight, unsigned short z) {
  return narrow(__fmul_rn(__fmul_rn(__fmul_rn(o, inverse), weight), silu(widen(z))));
}
