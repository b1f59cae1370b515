#pragma once
// The reducer warps of linear_*_stream: sums of segments in, results out.

#include "include/largest.cuh"
#include "include/row_values.cuh"
#include "include/stream_layout.cuh"

// Everywhere here lane 4 t + j holds rows 4 j .. 4 j + 3 of tokens t, 8 + t, ...

__device__ __forceinline__ void store_rows(unsigned short* out, const float (&y)[4], int row, int rows) {
  if (row + 4 <= rows && rows % 4 == 0) {
    *reinterpret_cast<uint2*>(out + row) =
        make_uint2(narrow_pair(y[0], y[1]), narrow_pair(y[2], y[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i < rows) out[row + i] = narrow(y[i]);
  }
}

// Scales four rows of one token and stores what the variant asks for.
// token_scale: with VT_PROLOGUE 3, behind the row's.
__device__ __forceinline__ void finish(const Problem& p, const float4& sum, const float4& scale, float token_scale,
                                       int tile, int token, int lane, unsigned long long& best) {
  const int row = tile * kTileRows + 4 * (lane & 3);
  float y[4] = {scaled_sum(sum.x, scale.x), scaled_sum(sum.y, scale.y), scaled_sum(sum.z, scale.z),
                scaled_sum(sum.w, scale.w)};
#if VT_PROLOGUE == 3
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = scaled_sum(y[i], token_scale);
#endif
  if (p.bias != nullptr) {
    const float4 bias = *reinterpret_cast<const float4*>(p.bias + row);
    y[0] = added(y[0], bias.x), y[1] = added(y[1], bias.y), y[2] = added(y[2], bias.z), y[3] = added(y[3], bias.w);
  }
#if VT_EPILOGUE == 2
  float up[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) up[i] = __shfl_xor_sync(~0u, y[i], 2);
  if ((lane & 2) == 0 && token < p.m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = swiglu(y[i], up[i]);
    store_rows(p.out + static_cast<long long>(token) * (p.n / 2), y, tile * 8 + 4 * (lane & 1), p.n / 2);
  }
#else
  if (token >= p.m) return;
#if VT_EPILOGUE == 3
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (row + i < p.n) best = max(best, key_of(widen(narrow(y[i])), row + i));
#else
  const long long at = static_cast<long long>(token) * p.n;
#if VT_EPILOGUE == 1
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (row + i < p.n) y[i] = added(y[i], widen(p.residual[at + row + i]));
#endif
  store_rows(p.out + at, y, row, p.n);
#endif
#endif
}

// This lane's four rows of a tile's own segments, added; releases the slot.
__device__ __forceinline__ void add_segments(float4 (&total)[kTokenTiles], const Problem& p, const Layout& at, int tile,
                                             int lane) {
  const int slot = tile % p.slots;
  const unsigned from = at.sums + slot * kOwnSegments * at.segment_sums;
  wait_barrier(at.sum_full + 8 * slot, tile / p.slots & 1);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int token = n * 8 + (lane >> 2);
    float4 parts[kOwnSegments];
#pragma unroll
    for (int s = 0; s < kOwnSegments; ++s)
      parts[s] = load_shared_float4_if(token < p.m, from + s * at.segment_sums + sum_offset(token, 4 * (lane & 3)));
    total[n] = add_tree<kOwnSegments>(parts);
  }
  __syncwarp();
  arrive_for_warp(at.sum_empty + 8 * slot, lane);
}

__device__ __forceinline__ void reduce(const Problem& p, const Layout& at, int reducer, int lane) {
  const int token = lane >> 2;
  const unsigned buffer = at.received + reducer * 2 * kCluster * at.message;
  const unsigned arrived = at.arrived + 16 * reducer;
  unsigned long long best[kTokenTiles] = {};
  float token_scales[kTokenTiles] = {};
#if VT_PROLOGUE == 3
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) token_scales[n] = load_written_float(p.gain + min(n * 8 + token, p.m - 1));
#endif
  Cursor turn;
  for (int round = reducer * kCluster; round < p.tiles; round += kReducers * kCluster) {
    const int own = round + p.rank;
    float4 scale = make_float4(0.f, 0.f, 0.f, 0.f), kept_sums[kTokenTiles];
    if (own < p.tiles)
      scale = *reinterpret_cast<const float4*>(p.row_scale + (p.first_tile + own) * kTileRows + 4 * (lane & 3));
    const int last = min(kCluster, p.tiles - round);
    for (int j = 0; j < last; ++j) {
      float4 total[kTokenTiles];
      add_segments(total, p, at, round + j, lane);
      if (kCluster == 1 || j == p.rank) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) kept_sums[n] = total[n];
      }
#if VT_ARCH >= 900
      else {
        const unsigned to = cluster_address(buffer + (turn.index * kCluster + p.rank) * at.message, j);
        const unsigned barrier = cluster_address(arrived + 8 * turn.index, j);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
          if (n * 8 + token < p.m) store_remote(to + (n * 8 + token) * 64 + (lane & 3) * 16, total[n], barrier);
      }
#endif
    }
#if VT_ARCH >= 900
    if (kCluster > 1) {
      // Every other block has sent this round, so it has read what it got in the round before: two buffers do.
      if (lane == 0) arrive_expecting(arrived + 8 * turn.index, own < p.tiles ? (kCluster - 1) * p.m * 64 : 0);
      __syncwarp();
      wait_barrier(arrived + 8 * turn.index, turn.parity);
      if (own < p.tiles) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          float4 parts[kCluster];
#pragma unroll
          for (int j = 0; j < kCluster; ++j) {
            const unsigned from = buffer + (turn.index * kCluster + j) * at.message;
            parts[j] = load_shared_float4_if(n * 8 + token < p.m, from + (n * 8 + token) * 64 + (lane & 3) * 16);
            if (j == p.rank) parts[j] = kept_sums[n];
          }
          kept_sums[n] = add_tree<kCluster>(parts);
        }
      }
      turn.advance(2);
    }
#endif
    if (own < p.tiles) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
        finish(p, kept_sums[n], scale, token_scales[n], p.first_tile + own, n * 8 + token, lane, best[n]);
    }
  }
#if VT_EPILOGUE == 3
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) best[n] = max(best[n], __shfl_xor_sync(~0u, best[n], distance));
    const long long at_token = static_cast<long long>(n * 8 + token) * (gridDim.x * kReducers);
    if ((lane & 3) == 0 && n * 8 + token < p.m) p.keys[at_token + blockIdx.x * kReducers + reducer] = best[n];
  }
#endif
}
