#pragma once
// The consumer warps of linear_*_stream: weights and activations in, sums of a segment out.

#include "include/row_norm.cuh"
#include "include/stream_layout.cuh"

// Copies `count` blocks of each of `tiles` row tiles, which lie `steps` blocks apart, into a stage of this warp's ring.
__device__ __forceinline__ void fetch_blocks(unsigned to, unsigned stage_tile, const unsigned char* from, int steps,
                                             int tiles, int count, unsigned full, int lane) {
  const unsigned bytes = count * kBlockBytes;
#if VT_HAS_BULK_COPY
  if (lane == 0) {
    const unsigned long long policy = evict_first_policy();
    arrive_expecting(full, tiles * bytes);
    copy_bulk_once(to, from, bytes, full, policy);
    if (kRowTiles == 2 && tiles == 2)
      copy_bulk_once(to + stage_tile, from + static_cast<long long>(steps) * kBlockBytes, bytes, full, policy);
  }
#else
  for (int r = 0; r < tiles; ++r, from += static_cast<long long>(steps) * kBlockBytes)
    for (unsigned at = 16 * lane; at < bytes; at += 512) copy_16(to + r * stage_tile + at, from + at);
  arrive_after_copies(full);
#endif
}

// Copies this block's columns of every token.
__device__ __forceinline__ void fetch_x(const Problem& p, const Layout& at, int lane) {
  const int first = p.x_step * kStepColumns;
  const int columns = min(p.x_steps * kStepColumns, p.k - first);
#if VT_HAS_BULK_COPY
  if (lane == 0) arrive_expecting(at.x_full, columns > 0 ? p.m * columns * 2 : 0);
  __syncwarp();
  if (columns > 0)
    for (int token = lane; token < p.m; token += 32)
      copy_bulk(at.x + token * at.x_row, p.x + static_cast<long long>(token) * p.k + first, columns * 2, at.x_full);
#else
  for (int token = 0; token < p.m; ++token)
    for (int i = 8 * lane; i < columns; i += 256)
      copy_16(at.x + token * at.x_row + 2 * i, p.x + static_cast<long long>(token) * p.k + first + i);
  arrive_after_copies(at.x_full);
#endif
}

// The gains of eight neighbouring columns.
struct Gains {
  float4 low, high;
  __device__ __forceinline__ void load(const float* gain) {
    low = __ldg(reinterpret_cast<const float4*>(gain));
    high = __ldg(reinterpret_cast<const float4*>(gain) + 1);
  }
  __device__ __forceinline__ uint4 of(uint4 x, float scale) const {
    return make_uint4(normed_pair(x.x, scale, low.x, low.y), normed_pair(x.y, scale, low.z, low.w),
                      normed_pair(x.z, scale, high.x, high.y), normed_pair(x.w, scale, high.z, high.w));
  }
};

// Chunks of eight columns whose gains a thread has before x is there; loads of a row that are under way together.
constexpr int kGainsAhead = 3, kLoadsAhead = 10;

// Eight columns of every token, in shared memory.
__device__ __forceinline__ void apply_gains(const Problem& p, const Layout& at, const Gains& gains, int chunk) {
  for (int token = 0; token < p.m; ++token) {
    float scale = 1.f;
    if (VT_PROLOGUE == 2) scale = __uint_as_float(load_shared_32(at.token_scale + 4 * token));
    const unsigned place = at.x + token * at.x_row + chunk * 16;
    store_shared_128(place, gains.of(load_shared_128(place), scale));
  }
}

// The scales of all tokens, each by one warp.
__device__ __forceinline__ void find_token_scales(const Problem& p, const Layout& at, float eps, int warp, int lane) {
  const int chunks = p.k / 8;
  for (int token = warp; token < p.m; token += kWarps) {
    const uint4* row = reinterpret_cast<const uint4*>(p.x + static_cast<long long>(token) * p.k);
    float sum = 0.f;
    for (int first = lane; first < chunks; first += 32 * kLoadsAhead) {
      uint4 read[kLoadsAhead];
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i)
        read[i] = first + 32 * i < chunks ? row[first + 32 * i] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) add_squares(sum, read[i]);  // zeros add nothing
    }
    const float scale = norm_scale(sum, p.k, eps);
    if (lane == 0) store_shared_float(at.token_scale + 4 * token, scale);
  }
}

// What the consumers do to x before they multiply: zeros beyond K, and the prologue of the variant.
__device__ __forceinline__ void prepare_x(const Problem& p, const Layout& at, float eps, int warp, int lane) {
  const int first = p.x_step * kStepColumns;
  const int columns = min(p.x_steps * kStepColumns, p.k - first);
  constexpr bool kChanged = VT_PROLOGUE == 1 || VT_PROLOGUE == 2;
  constexpr int kWorkers = kWarps * 32;
  const int thread = warp * 32 + lane, chunks = columns / 8;
  Gains gains[kGainsAhead];
  if (kChanged && chunks > 0)
#pragma unroll
    for (int i = 0; i < kGainsAhead; ++i)
      gains[i].load(p.gain + first + 8 * max(0, min(thread + i * kWorkers, chunks - 1)));
#if VT_PROLOGUE == 2
  wait_for_predecessors();
  find_token_scales(p, at, eps, warp, lane);
#endif
  const int padding = p.x_steps * kStepColumns - columns;
  if (!kChanged && padding == 0) return;
  for (int i = thread; i < p.m * padding; i += kWorkers)
    store_shared_16(at.x + i / padding * at.x_row + (columns + i % padding) * 2, 0);
  if (kChanged) {
    sync_threads_of(1, kWorkers);
    wait_barrier(at.x_full, 0);
#pragma unroll
    for (int i = 0; i < kGainsAhead; ++i) {
      const int chunk = thread + i * kWorkers;
      if (chunk < chunks) apply_gains(p, at, gains[i], chunk);
    }
    for (int chunk = thread + kGainsAhead * kWorkers; chunk < chunks; chunk += kWorkers) {
      gains[0].load(p.gain + first + 8 * chunk);
      apply_gains(p, at, gains[0], chunk);
    }
  }
  sync_threads_of(1, kWorkers);
}

// sums [16 rows x 8 tokens] per row tile and token tile += the blocks at `block` * this lane's activations, which lie
// at x + rows[n] and, for odd chunks, `turn` from there.
__device__ __forceinline__ void multiply_blocks(float (&sums)[kRowTiles][2][kTokenTiles][4], unsigned block,
                                                unsigned stage_tile, const BlockReader& reader, unsigned x,
                                                unsigned turn, const unsigned (&rows)[kTokenTiles]) {
  BlockPart parts[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) parts[r].load(reader, block + r * stage_tile);
  float step_sums[kRowTiles][2][kTokenTiles][4] = {};
  float(&to)[kRowTiles][2][kTokenTiles][4] = kStepScales ? step_sums : sums;
  constexpr int kSecond = kStepScales ? 0 : 1;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    unsigned upper[kRowTiles][4], lower[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) parts[r].decode(reader, u, upper[r], lower[r]);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const uint4 b = load_shared_128(x + rows[n] + ((u & 1) ? turn : 0u) + (u >> 1) * 32);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply_add_16x8x16(to[r][0][n], upper[r][0], lower[r][0], upper[r][1], lower[r][1], b.x, b.y);
        multiply_add_16x8x16(to[r][kSecond][n], upper[r][2], lower[r][2], upper[r][3], lower[r][3], b.z, b.w);
      }
    }
  }
  if constexpr (kStepScales) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float scale = parts[r].step_scale(reader, row);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
          for (int i = 2 * row; i < 2 * row + 2; ++i)
            sums[r][0][n][i] = __fmaf_rn(scale, step_sums[r][0][n][i], sums[r][0][n][i]);
      }
  }
}

__device__ __forceinline__ void consume(const Problem& p, const Layout& at, float eps, int warp, int lane) {
  const int g = lane >> 2, c = lane & 3;
  const int first_of_mine = warp / kOwnSegments, segment = warp % kOwnSegments;
  const int all_groups = (p.tiles + kRowTiles - 1) / kRowTiles;
  const int groups = (all_groups - first_of_mine + kStride - 1) / kStride;
  const bool last_is_mine = p.tiles % kRowTiles != 0 && (all_groups - 1 - first_of_mine) % kStride == 0;
  const int first_step = p.segment_step(p.rank * kOwnSegments + segment);
  const int length = p.segment_step(p.rank * kOwnSegments + segment + 1) - first_step;
  const unsigned stage_tile = p.stage_blocks * kBlockBytes, stage_bytes = kRowTiles * stage_tile;
  const unsigned ring = at.ring + warp * p.stages * stage_bytes, full = at.full + 8 * warp * p.stages;

  // What is to be fetched: the next block of the whole matrix (fewer than 2^31), groups of row tiles left, and blocks
  // left of the group that is being fetched.
  int next = (p.first_tile + first_of_mine * kRowTiles) * p.steps + first_step;
  int groups_to_fetch = length > 0 ? groups : 0, blocks_to_fetch = length;
  const auto fetch = [&](unsigned to, unsigned barrier) {
    if (groups_to_fetch <= 0) return;
    const int count = min(p.stage_blocks, blocks_to_fetch);
    const int tiles = last_is_mine && groups_to_fetch == 1 ? 1 : kRowTiles;
    fetch_blocks(to, stage_tile, p.blocks + static_cast<long long>(next) * kBlockBytes, p.steps, tiles, count, barrier,
                 lane);
    next += count;
    blocks_to_fetch -= count;
    if (blocks_to_fetch == 0) {
      blocks_to_fetch = length;
      next += kStride * kRowTiles * p.steps - length;
      --groups_to_fetch;
    }
  };
  for (int i = 0; i < p.stages; ++i) fetch(ring + i * stage_bytes, full + 8 * i);

  prepare_x(p, at, eps, warp, lane);
  wait_barrier(at.x_full, 0);

  const BlockReader reader(lane);
  const unsigned x_first = kept(at.x + (first_step - p.x_step) * (kStepColumns * 2));
  // The neighbouring chunk of 16 bytes: before or behind.
  const unsigned turn = (c >> 1) ? -16u : 16u;
  const unsigned segment_to = kept(at.sums + segment * at.segment_sums), slot_bytes = kOwnSegments * at.segment_sums;
  // A lane without a token multiplies the last one again; its sums are not delivered.
  unsigned rows[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) rows[n] = kept(min(n * 8 + g, p.m - 1) * at.x_row + c * 64 + (c >> 1) * 16);

  Cursor stage;
  int tile = first_of_mine * kRowTiles, slot = tile;
  unsigned slot_parity = 1;
  for (int i = 0; i < groups; ++i) {
    float sums[kRowTiles][2][kTokenTiles][4] = {};
    unsigned x = x_first;
    for (int left = length; left > 0; left -= p.stage_blocks) {
      unsigned block = ring + stage.index * stage_bytes + lane * 16;
      wait_barrier(full + 8 * stage.index, stage.parity);
#pragma unroll kUnrolled
      for (int count = min(p.stage_blocks, left); count > 0; --count) {
        multiply_blocks(sums, block, stage_tile, reader, x, turn, rows);
        block += kBlockBytes;
        x += kStepColumns * 2;
      }
      __syncwarp();
      fetch(ring + stage.index * stage_bytes, full + 8 * stage.index);
      stage.advance(p.stages);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (r > 0 && tile + r >= p.tiles) break;
      wait_barrier(at.sum_empty + 8 * (slot + r), slot_parity);
      const unsigned to = segment_to + (slot + r) * slot_bytes;
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int token = n * 8 + 2 * c + odd;
          if (token < p.m) {
            store_shared_float(to + sum_offset(token, g), sums[r][0][n][odd] + sums[r][1][n][odd]);
            store_shared_float(to + sum_offset(token, g + 8), sums[r][0][n][2 + odd] + sums[r][1][n][2 + odd]);
          }
        }
      __syncwarp();
      arrive_for_warp(at.sum_full + 8 * (slot + r), lane);
    }
    tile += kStride * kRowTiles;
    slot += kStride * kRowTiles;
    while (slot >= p.slots) {
      slot -= p.slots;
      slot_parity ^= 1;
    }
  }
}
