#pragma once
// What a warp of the grouped expert linears does: a segment of the columns of several row tiles, its packed blocks
// straight from memory into registers, several on their way, times rows of activations.
//
// The source includes the header of its weights' format (weights_*.cuh) before.
//
// The sum of a row is that of linear_*_stream, bit for bit: eight segments of the column steps, each in order of k,
// joined as a balanced tree. VT_SEGMENTS 4 is the same for up to 4 column steps, where one of two neighbours is empty.

#include "include/segment_sums.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_TOKEN_TILES
#define VT_TOKEN_TILES 1  // groups of 8 tokens that share a decoded block
#endif
#ifndef VT_SEGMENTS
#define VT_SEGMENTS 8  // of a row, one a warp
#endif
#ifndef VT_UNITS
#define VT_UNITS 1  // row tiles that the warps of a block work on at a time
#endif
#ifndef VT_DEPTH
#define VT_DEPTH 4  // blocks of a warp on their way
#endif
#ifndef VT_TAIL
#define VT_TAIL 0  // 1: K is not a multiple of 128
#endif

constexpr int kTokenTiles = VT_TOKEN_TILES, kSegments = VT_SEGMENTS, kUnits = VT_UNITS, kDepth = VT_DEPTH;
constexpr int kWarps = kSegments * kUnits, kThreads = 32 * kWarps;
constexpr int kTileTokens = 8 * kTokenTiles;
static_assert(kSegments == 8 || kSegments == 4, "a row has eight segments, or four that are not empty");
static_assert(kThreads <= 1024 && kTokenTiles >= 1 && kTokenTiles <= 4 && kDepth >= 1, "limits of a block");

using Sums = float[2][kTokenTiles][4];  // of even and odd halves of eight columns: rows g, g + 8 x tokens 2 c, 2 c + 1

// One matrix's columns: K, its column steps, and those of this warp's segment.
struct Columns {
  int k, steps, first, length;
  __device__ __forceinline__ Columns(int columns, int segment) : k(columns) {
    steps = (k + kStepColumns - 1) / kStepColumns;
    first = steps * segment / kSegments;
    length = steps * (segment + 1) / kSegments - first;
  }
};

// Eight neighbouring activations of this lane's columns; zeros beyond K.
__device__ __forceinline__ uint4 load_x(const unsigned short* at, int chunk, int room) {
#if VT_TAIL
  if (8 * chunk >= room) return make_uint4(0u, 0u, 0u, 0u);
#endif
  return *reinterpret_cast<const uint4*>(at + 8 * chunk);
}

// sums += a block * this lane's activations. x[n]: this lane's 32 columns of the token that is column g of tile n;
// room: how many of them K has.
__device__ __forceinline__ void multiply_part(Sums& sums, const WeightPart& part, const unsigned short* const* x,
                                              int room, int half, unsigned constant) {
  Sums step_sums = {};
  Sums& to = kStepScales ? step_sums : sums;
  constexpr int kSecond = kStepScales ? 0 : 1;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    unsigned upper[4], lower[4];
    part.decode(constant, u, upper, lower);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const uint4 b = load_x(x[n], u ^ half, room);
      multiply_add_16x8x16(to[0][n], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
      multiply_add_16x8x16(to[kSecond][n], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
    }
  }
  if constexpr (kStepScales) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[0][n][i] = __fmaf_rn(part.step_scale(i / 2), step_sums[0][n][i], sums[0][n][i]);
  }
}

// `units` row tiles one after the other. first_block(): the first packed block of this warp's segment of unit 0;
// next_block(i, at): that of unit i, `at` being behind the segment of the unit before.
// ready(): called once, with the first blocks on their way, by warps without units too: waits until x can be read.
// first_x(x): sets x[n] to this lane's 32 columns in the first step of the segment; next_x(i, x): for unit i, x[n] being
// behind the last step. deliver(i, sums) takes the sums.
template <class FirstBlock, class NextBlock, class Ready, class FirstX, class NextX, class Deliver>
__device__ __forceinline__ void multiply_units(int units, const Columns& columns, int lane,
                                               const FirstBlock& first_block, const NextBlock& next_block,
                                               const Ready& ready, const FirstX& first_x, const NextX& next_x,
                                               const Deliver& deliver) {
  Sums sums = {};
  const unsigned constant = decoding_constant();
  const int half = (lane & 3) >> 1, count = units * columns.length;
  const int room = columns.k - columns.first * kStepColumns - 32 * (lane & 3);

  const unsigned char* from = first_block() + 16 * lane;
  const int to_scales = scales_from(lane);
  int fetched = 0, to_fetch = columns.length;
  const auto fetch = [&](WeightPart& part) {
    part.load(from, to_scales);
    from += kBlockBytes;
    if (--to_fetch == 0) {
      to_fetch = columns.length;
      if (++fetched < units) from = next_block(fetched, from);
    }
  };
  WeightPart parts[kDepth];
#pragma unroll
  for (int j = 0; j < kDepth; ++j)
    if (j < count) fetch(parts[j]);

  ready();
  if (columns.length == 0) {
    for (int i = 0; i < units; ++i) deliver(i, sums);
    return;
  }
  const unsigned short* x[kTokenTiles];
  first_x(x);
  int unit = 0, left = columns.length;
  for (int i = 0; i < count; i += kDepth) {
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      if (i + j >= count) break;
      multiply_part(sums, parts[j], x, room - (columns.length - left) * kStepColumns, half, constant);
      if (i + j + kDepth < count) fetch(parts[j]);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) x[n] += kStepColumns;
      if (--left == 0) {
        deliver(unit, sums);
#pragma unroll
        for (int n = 0; n < 2 * kTokenTiles * 4; ++n) (&sums[0][0][0])[n] = 0.f;
        left = columns.length;
        if (++unit < units) next_x(unit, x);
      }
    }
  }
}

// The balanced tree over a row's segments.
__device__ __forceinline__ float add_segments(const float (&parts)[kSegments]) {
  float sums[kSegments];
#pragma unroll
  for (int i = 0; i < kSegments; ++i) sums[i] = parts[i];
#pragma unroll
  for (int width = 1; width < kSegments; width *= 2)
#pragma unroll
    for (int i = 0; i < kSegments; i += 2 * width) sums[i] = sums[i] + sums[i + width];
  return sums[0];
}
