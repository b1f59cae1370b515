#pragma once
// What a warp of experts_gate_up_* and experts_outputs_* does: some segments of the columns of one row tile after the
// other (a piece), its packed blocks copied into a ring of its own in shared memory, times rows of activations.
//
// The source includes the header of its weights' format (format_*.cuh) before.
//
// The sum of a row is that of linear_*_stream, bit for bit: eight segments of the column steps, each in order of k,
// joined as a balanced tree. Up to 4 column steps one of two neighbours is empty, and four segments are the same.

#include "include/ptx.cuh"
#include "include/segment_sums.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_STEPS
#define VT_STEPS 16  // column steps of K
#endif
#ifndef VT_TAIL
#define VT_TAIL 0  // 1: K is not a multiple of 128
#endif
#ifndef VT_WARPS
#define VT_WARPS 16
#endif
#ifndef VT_SPLIT
#define VT_SPLIT 4  // warps that share a row tile
#endif
#ifndef VT_STAGE_BLOCKS
#define VT_STAGE_BLOCKS 2  // packed blocks of a stage of the ring
#endif
#ifndef VT_HELD
#define VT_HELD 0  // 1: activations stay in registers for all row tiles of an item
#endif
#ifndef VT_BLOCKS_PER_SM
#define VT_BLOCKS_PER_SM 1
#endif

constexpr int kSteps = VT_STEPS, kWarps = VT_WARPS, kThreads = 32 * kWarps, kSplit = VT_SPLIT;
constexpr int kGroups = kWarps / kSplit;  // row tiles that the warps work on at a time
constexpr int kSegments = kSteps <= 4 ? 4 : 8, kOwnSegments = kSegments / kSplit;
constexpr bool kEven = kSteps % kSegments == 0;  // all segments are of one length
constexpr int kMostLength = (kSteps + kSegments - 1) / kSegments, kMostOwn = (kSteps + kSplit - 1) / kSplit;
constexpr int kRowScaleBytes = 4 * kTileRows;  // of a row tile, behind the first blocks of a piece
constexpr int kStageBlocks = VT_STAGE_BLOCKS, kStageBytes = kStageBlocks * kBlockBytes + kRowScaleBytes;
constexpr int kMostStages = 8, kItemTokens = 8;
// A piece of a few blocks is one run of code.
constexpr bool kUnrolled = kEven && kMostOwn <= 4;
static_assert(kGroups * kSplit == kWarps && kOwnSegments * kSplit == kSegments, "warps share row tiles evenly");
static_assert(kSplit <= kSteps, "every piece has a block");
static_assert(kThreads <= 1024 && (kSplit == 1 || kGroups <= 15), "limits of a block and of its named barriers");
static_assert(!VT_HELD || kUnrolled, "registers have no index that changes");

// The columns of one of the warps that share a row tile.
struct Piece {
  int first_segment, first, length;  // length: its column steps
  __device__ __forceinline__ explicit Piece(int share) : first_segment(share * kOwnSegments) {
    first = step_of(first_segment);
    length = kEven ? kMostOwn : step_of(first_segment + kOwnSegments) - first;
  }
  static __device__ __forceinline__ int step_of(int segment) { return kSteps * segment / kSegments; }
  __device__ __forceinline__ int steps_of_segment(int i) const {
    return kEven ? kMostLength : step_of(first_segment + i + 1) - step_of(first_segment + i);
  }
};

// Where a piece and the scales of its row tile begin.
struct PieceAddress {
  const unsigned char* blocks;
  const float* scales;
};

// A warp's ring: stages of packed blocks on their way from memory, in the order in which pieces are multiplied.
// next_piece(): the address of the piece after the one before; called `pieces` times in all, by all lanes.
template <class NextPiece>
struct Ring {
  const NextPiece& next_piece;
  unsigned memory, full;  // of stages, and of their barriers
  int stages, lane, length;
  int to_fetch, left = 0;  // pieces, blocks of the present one
  const unsigned char* from = nullptr;
  int index = 0;
  unsigned parity = 0, place;  // of the stage that is read

  __device__ __forceinline__ Ring(unsigned at, unsigned barriers, int count, const Piece& piece, int pieces, int own,
                                  const NextPiece& next)
      : next_piece(next), memory(at), full(barriers), stages(count), lane(own), length(piece.length),
        to_fetch(pieces), place(at) {
    for (int i = 0; i < stages; ++i) fetch(memory + i * kStageBytes, full + 8 * i);
  }
  __device__ __forceinline__ void fetch(unsigned to, unsigned barrier) {
    const float* scales = nullptr;
    if (left == 0) {
      if (to_fetch == 0) return;
      --to_fetch;
      const PieceAddress next = next_piece();
      from = next.blocks;
      scales = next.scales;
      left = length;
    }
    const int count = min(kStageBlocks, left);
    const unsigned bytes = count * kBlockBytes;
#if VT_HAS_BULK_COPY
    if (lane == 0) {
      const unsigned long long policy = evict_first_policy();
      arrive_expecting(barrier, bytes + (scales == nullptr ? 0 : kRowScaleBytes));
      copy_bulk_once(to, from, bytes, barrier, policy);
      if (scales != nullptr) copy_bulk(to + kStageBlocks * kBlockBytes, scales, kRowScaleBytes, barrier);
    }
#else
    for (unsigned at = 16 * lane; at < bytes; at += 512) copy_16(to + at, from + at);
    if (scales != nullptr && lane < kRowScaleBytes / 16)
      copy_16(to + kStageBlocks * kBlockBytes + 16 * lane, scales + 4 * lane);
    arrive_after_copies(barrier);
#endif
    left -= count;
    from += bytes;
  }
  __device__ __forceinline__ void wait() const { wait_barrier(full + 8 * index, parity); }
  // The scale of a row of the tile, while the first stage of the piece is waited for or read.
  __device__ __forceinline__ float scale(int row) const {
    return __uint_as_float(load_shared_32(place + kStageBlocks * kBlockBytes + 4 * row));
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    fetch(place, full + 8 * index);
    place += kStageBytes;
    if (++index == stages) {
      index = 0;
      parity ^= 1;
      place = memory;
    }
  }
};

// The arrivals that a stage's barrier is initialised for.
constexpr unsigned kStageArrivals = VT_HAS_BULK_COPY ? 1 : 32;

// Before a warp's ring, with a barrier of the block between: each warp its own, so that none waits for many.
__device__ __forceinline__ void init_ring(unsigned barriers, int stages, int lane) {
  if (lane == 0)
#pragma unroll 1
    for (int i = 0; i < stages; ++i) init_barrier(barriers + 8 * i, kStageArrivals);
  fence_barrier_init();
}

// This lane's 32 columns of every step of a piece, of the token that is column g: read where they are used, or held.
struct Activations {
  int half, room;
#if VT_HELD
  uint4 held[kMostOwn][4];
#else
  const unsigned short* at;
#endif
  __device__ __forceinline__ Activations(const Piece& piece, int k, int lane)
      : half((lane & 3) >> 1), room(k - piece.first * kStepColumns - 32 * (lane & 3)) {}
  // row: of the token, its first column.
  __device__ __forceinline__ void set(const unsigned short* row, const Piece& piece, int lane) {
    const unsigned short* from = row + piece.first * kStepColumns + 32 * (lane & 3);
#if VT_HELD
#pragma unroll
    for (int step = 0; step < kMostOwn; ++step)
#pragma unroll
      for (int u = 0; u < 4; ++u) held[step][u] = read(from, step, u);
#else
    at = from;
#endif
  }
  __device__ __forceinline__ uint4 operator()(int step, int u) const {
#if VT_HELD
    return held[step][u];
#else
    return read(at, step, u);
#endif
  }
  __device__ __forceinline__ uint4 read(const unsigned short* from, int step, int u) const {
    const int column = step * kStepColumns + 8 * (u ^ half);
#if VT_TAIL
    if (column >= room) return make_uint4(0u, 0u, 0u, 0u);
#endif
    return *reinterpret_cast<const uint4*>(from + column);
  }
};

// sums [even and odd halves of eight columns] += the packed block at `block` (+ 16 * lane) * activations of a step.
__device__ __forceinline__ void multiply_block(float (&sums)[2][4], unsigned block, const BlockReader& reader,
                                               const Activations& x, int step) {
  BlockPart part;
  part.load(reader, block);
  float step_sums[2][4] = {};
  float(&to)[2][4] = kStepScales ? step_sums : sums;
  constexpr int kSecond = kStepScales ? 0 : 1;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const uint4 b = x(step, u);
    unsigned upper[4], lower[4];
    part.decode(reader, u, upper, lower);
    multiply_add_16x8x16(to[0], upper[0], lower[0], upper[1], lower[1], b.x, b.y);
    multiply_add_16x8x16(to[kSecond], upper[2], lower[2], upper[3], lower[3], b.z, b.w);
  }
  if constexpr (kStepScales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = __fmaf_rn(part.step_scale(reader, i / 2), step_sums[0][i], sums[0][i]);
  }
}

// What the tree over segments has of each width.
constexpr int levels_of(int segments) { return segments == 1 ? 1 : 1 + levels_of(segments / 2); }
constexpr int kLevels = levels_of(kOwnSegments);

// total = the tree over the piece's segments: rows g, g + 8 x tokens 2 c, 2 c + 1.
template <class OwnRing>
__device__ __forceinline__ void multiply_piece(float (&total)[4], OwnRing& ring, const Piece& piece,
                                               const BlockReader& reader, const Activations& x, int lane) {
  float joined[kLevels][4];
  int step = 0;
#pragma unroll(kUnrolled ? kOwnSegments : 1)
  for (int s = 0; s < kOwnSegments; ++s) {
    float sums[2][4] = {};
#pragma unroll(kUnrolled ? kMostLength : 1)
    for (int left = piece.steps_of_segment(s); left > 0; --left) {
      if (step % kStageBlocks == 0) ring.wait();
      multiply_block(sums, ring.place + step % kStageBlocks * kBlockBytes + 16 * lane, reader, x, step);
      ++step;
      if (step % kStageBlocks == 0 || step == piece.length) ring.release();
    }
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = sums[0][i] + sums[1][i];
    bool rises = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if (!rises) continue;
      rises = (s >> level & 1) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (rises) sum[i] = joined[level][i] + sum[i];
        else joined[level][i] = sum[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) total[i] = joined[kLevels - 1][i];
}
