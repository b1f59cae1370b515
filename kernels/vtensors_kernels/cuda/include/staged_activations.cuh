#pragma once
// Where a column of x lies in the shared-memory stages of the warpgroup products, which copy them as they are here.
//
// Product 2 u + h of a stage (u = word 0..3, h = 0, 1) has at its k position 8 q + 2 c + e (q, e = 0, 1;
// c = 0..3) the column 32 c + 8 (u ^ (c >> 1)) + 4 h + 2 q + e, as lane c of the packed layout holds it. A stage
// is [16 chunks of 8 k positions][pitch tokens][8]: chunk 4 u + 2 h + q is one column of core matrices. With
// p = 2 h + q:
//
//   staged[s][4 u + p][t][2 c + e] = x[t, 128 s + 32 c + 8 (u ^ (c >> 1)) + 2 p + e] (* pre_scale)
//
// Zero for columns from K to the end of the last stage. Tokens from M on are left as they are: what products make of
// them is not stored.
//
// Whoever writes stages does so with plain stores and no fence of the proxies: the products read them with bulk copies,
// a launch later, behind the wait for it and a fence of their own (fetch_stages).

#include "include/packed_blocks.cuh"
#include "include/sixteen_bits.cuh"

// The first of eight columns whose pairs p = 0..3 are the parts c of the chunks 4 u + p.
__device__ __forceinline__ int staged_column(int step, int u, int c) {
  return step * kStepColumns + 32 * c + 8 * (u ^ (c >> 1));
}

// Of a token, in chunks from the first stage on.
__device__ __forceinline__ long long staged_chunk(int step, int u, int p, int pitch, int token) {
  return (16ll * step + 4 * u + p) * pitch + token;
}

// Two neighbours times their pre-scales, each product rounded once.
__device__ __forceinline__ unsigned scale_pair(unsigned pair, const float* __restrict__ scale) {
  return narrow_pair(__fmul_rn(widen(pair & 0xffffu), scale[0]), __fmul_rn(widen(pair >> 16), scale[1]));
}
