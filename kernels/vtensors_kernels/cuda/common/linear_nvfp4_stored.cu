// y = x @ W.T for a few tokens, the NVFP4 weight read as stored: no second copy of it.
//
// y[m, n] = row_scale[n] * sum_k x[m, k] * (e2m1 * e4m3 / 256)[n, k] + bias[n], rounded once to x's format.
// VT_ARGMAX: instead of y, per token and 16 rows the key of the largest rounded y, the lowest row among equals.
//
// A block owns kRowTiles tiles of 16 rows and up to 8 * kTokenTiles tokens. Its warps split K: warp w takes steps w, w + kWarps, ... of 128
// columns; lane 4 g + c decodes rows g and g + 8 of columns 32 c .. 32 c + 31 and needs the same of token g. The
// warps' sums are added in order of w. So the order of every sum depends on K and kWarps alone: a row's result
// is the same bits at any M, any place in the batch and any number of tiles.
//
// Shapes: any N and M; K below 2^28, a multiple of 16, of 32 for VT_WIDE and groups of 32. Rows and tokens
// outside are neither read nor written. Alignment: x 16 bytes; codes 16 (8 without VT_WIDE); scales 2.
// Grid: x ceil(M / (8 * kTokenTiles)) * ceil(N / (16 * kRowTiles)), tokens fastest. Block: 32 * kWarps. Shared memory: static, kPassBytes, below 48 KB.
// Arch: sm_80 and newer; dependent launch from sm_90 on; E2M1 conversion by hardware for float16 from sm_100a.

#include "include/largest.cuh"
#include "include/nvfp4_stored.cuh"
#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_WARPS
#define VT_WARPS 8
#endif
#ifndef VT_TOKEN_TILES
#define VT_TOKEN_TILES 1  // groups of 8 tokens
#endif
#ifndef VT_GROUP
#define VT_GROUP 16  // columns of one scale
#endif
#ifndef VT_WIDE
#define VT_WIDE 1  // 1: K is a multiple of 32, so that a lane's 32 columns are all there or not
#endif
#ifndef VT_ARGMAX
#define VT_ARGMAX 0
#endif

constexpr int kWarps = VT_WARPS, kTokenTiles = VT_TOKEN_TILES, kGroup = VT_GROUP;
constexpr int kRowTiles = kTokenTiles == 4 ? 2 : 1;
constexpr int kTiles = kRowTiles * kTokenTiles;  // 16 x 8 tiles of sums in each warp
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = kWarps > 8 || kTokenTiles > 2 ? 1 : (kTokenTiles == 1 ? 24 : 16) / kWarps;
constexpr int kPieces = 4;                                          // of 8 columns in a lane's 32
constexpr int kAhead = kTokenTiles == 1 ? 4 : kTokenTiles == 2 ? 2 : 1;  // pieces of x under way
constexpr int kTokenStride = 20;                                    // floats from token to token: 16 rows and a gap
constexpr int kTileFloats = 8 * kTokenStride;
constexpr int kRoom = 46080 / (4 * kWarps * kTileFloats);
constexpr int kPassLimit = kRoom >= 16 ? 16 : kRoom >= 8 ? 8 : 4;
constexpr int kTilesPerPass = kTiles < kPassLimit ? kTiles : kPassLimit;
constexpr int kPassBytes = 4 * kWarps * kTileFloats * kTilesPerPass;

static_assert(kWarps >= 4 && kWarps <= 16, "a tile of 128 sums is finished by as many threads");
static_assert(kTokenTiles == 1 || kTokenTiles == 2 || (kTokenTiles == 4 && kWarps <= 8), "what registers hold");
static_assert(kGroup == 16 || (kGroup == 32 && VT_WIDE), "groups of 32 need whole ones");
static_assert(kPieces % kAhead == 0 && kTiles % kTilesPerPass == 0 && kPassBytes <= 48 << 10, "layout");

// What a lane holds of one row tile and step: rows g and g + 8, and their two scales each.
struct Piece {
  uint4 rows[2];
  unsigned scales;
};

// Where a lane reads one row tile: row g, and how many rows further down the other one is.
struct Source {
  const unsigned char* codes;
  const unsigned char* scales;
  int gap;  // 8, less where the matrix ends
};

__device__ __forceinline__ Piece load_weights(const Source& source, int step, int quarter, int columns) {
  Piece piece = {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}, 0u};
  const int column = step * kStepColumns + 32 * quarter;
  if (column >= columns) return piece;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int down = half ? source.gap : 0;
    const unsigned char* codes = source.codes + (step * (kStepColumns / 2) + down * (columns / 2));
    const unsigned char* scales = source.scales + (step * (kStepColumns / kGroup) + down * (columns / kGroup));
    unsigned both;
#if VT_WIDE
    piece.rows[half] = __ldcs(reinterpret_cast<const uint4*>(codes));
    both = kGroup == 32 ? __ldg(scales) * 0x101u : __ldg(reinterpret_cast<const unsigned short*>(scales));
#else
    const uint2 low = __ldcs(reinterpret_cast<const uint2*>(codes));
    uint2 high = make_uint2(0, 0);
    both = __ldg(scales);
    if (column + 16 < columns) {
      high = __ldcs(reinterpret_cast<const uint2*>(codes) + 1);
      both |= static_cast<unsigned>(__ldg(scales + 1)) << 8;
    }
    piece.rows[half] = make_uint4(low.x, low.y, high.x, high.y);
#endif
    piece.scales |= both << (16 * half);
  }
  return piece;
}

// Both rows' pairs of one word, at their places of a matrix operand: a[0..3] for the first product, a[4..7].
template <int word>
__device__ __forceinline__ void decode_piece(const Piece& piece, unsigned (&a)[8]) {
  unsigned upper[4], lower[4];
  const unsigned words[2] = {word == 0 ? piece.rows[0].x : word == 1 ? piece.rows[0].y : word == 2 ? piece.rows[0].z : piece.rows[0].w,
                             word == 0 ? piece.rows[1].x : word == 1 ? piece.rows[1].y : word == 2 ? piece.rows[1].z : piece.rows[1].w};
  stored_pairs(words[0], stored_scale<word / 2>(piece.scales), upper);
  stored_pairs(words[1], stored_scale<2 + word / 2>(piece.scales), lower);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    a[2 * pair] = upper[pair];
    a[2 * pair + 1] = lower[pair];
  }
}

// What a lane reads of x: token g of each tile of 8.
struct Activations {
  const unsigned short* from;  // token g, column 32 c
  int tokens;                  // how many of its tiles' tokens are there
  int quarter;                 // c
  int columns;                 // K
};

// Eight columns of one tile's token, zeros outside.
__device__ __forceinline__ uint4 load_x(const Activations& x, int step, int piece, int tile) {
  const int column = step * kStepColumns + 8 * piece;
  if (tile >= x.tokens || column + 32 * x.quarter >= x.columns) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(x.from + 8ll * tile * x.columns + column);
}

// One word of every row times the same columns of every token; asks for the x of the piece kAhead further on.
template <int piece>
__device__ __forceinline__ void multiply_piece(const Piece (&weights)[kRowTiles], const Activations& x, int step,
                                               uint4 (&ahead)[kAhead][kTokenTiles],
                                               float (&sums)[kRowTiles][kTokenTiles][4]) {
  unsigned a[kRowTiles][8];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) decode_piece<piece>(weights[tile], a[tile]);
  constexpr int later = piece + kAhead;
#pragma unroll
  for (int token = 0; token < kTokenTiles; ++token) {
    unsigned b[4];
    uint4& x_of_token = ahead[piece % kAhead][token];
    pair_activations(x_of_token, b);
    x_of_token = load_x(x, step + later / kPieces * kWarps, later % kPieces, token);
#pragma unroll
    for (int row = 0; row < kRowTiles; ++row) {
      unsigned(&w)[8] = a[row];
      multiply_add_16x8x16(sums[row][token], w[0], w[1], w[2], w[3], b[0], b[1]);
      multiply_add_16x8x16(sums[row][token], w[4], w[5], w[6], w[7], b[2], b[3]);
    }
  }
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocksPerSm) void linear_nvfp4_stored(
    const unsigned char* __restrict__ codes,        // [N, K / 2] low nibble first
    const unsigned char* __restrict__ block_scale,  // [N, K / kGroup] E4M3, zero or positive
    const float* __restrict__ row_scale,            // [N] or [1]: 256 times the global scale
    const float* __restrict__ bias,                 // [N] or null
    const unsigned short* x,                        // [M, K] bf16 or f16; as ptx.cuh says of what earlier kernels write
    unsigned short* __restrict__ out,               // [M, N] bf16 or f16; null for VT_ARGMAX
    unsigned long long* __restrict__ keys,          // [M, ceil(N / 16)] for VT_ARGMAX, else null
    long long rows,                                 // N
    int columns,                                    // K
    int tokens,                                     // M
    int scale_stride)                               // 1: a scale per row, 0: one for all
{
  __shared__ float shared[kTilesPerPass][kWarps][kTileFloats];
  launch_dependents();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const int token_groups = (tokens + 8 * kTokenTiles - 1) / (8 * kTokenTiles);
  const int first_token = static_cast<int>(blockIdx.x % token_groups) * 8 * kTokenTiles;
  const long long first_row = static_cast<long long>(blockIdx.x / token_groups) * kTileRows * kRowTiles;
  const int steps = (columns + kStepColumns - 1) / kStepColumns;

  Source sources[kRowTiles];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    // Rows past the end read the last one; their sums are not stored.
    const long long row = min(first_row + kTileRows * tile + g, rows - 1);
    sources[tile].codes = codes + row * (columns / 2) + 16 * quarter;
    sources[tile].scales = block_scale + row * (columns / kGroup) + 32 / kGroup * quarter;
    sources[tile].gap = static_cast<int>(min(8ll, rows - 1 - row));
  }
  Piece next[kRowTiles];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) next[tile] = load_weights(sources[tile], warp, quarter, columns);

  // Weights never change; everything below may depend on the kernel before.
  wait_for_predecessors();
  const int own_token = first_token + g;
  const Activations activations = {x + static_cast<long long>(own_token) * columns + 32 * quarter,
                                   (tokens - own_token + 7) / 8, quarter, columns};
  uint4 ahead[kAhead][kTokenTiles];
#pragma unroll
  for (int piece = 0; piece < kAhead; ++piece) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
      ahead[piece][tile] = load_x(activations, warp, piece, tile);
  }

  float sums[kRowTiles][kTokenTiles][4] = {};
  for (int step = warp; step < steps; step += kWarps) {
    Piece now[kRowTiles];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      now[tile] = next[tile];
      next[tile] = load_weights(sources[tile], step + kWarps, quarter, columns);
    }
    multiply_piece<0>(now, activations, step, ahead, sums);
    multiply_piece<1>(now, activations, step, ahead, sums);
    multiply_piece<2>(now, activations, step, ahead, sums);
    multiply_piece<3>(now, activations, step, ahead, sums);
  }

#pragma unroll
  for (int pass = 0; pass < kTiles / kTilesPerPass; ++pass) {
    if (pass) __syncthreads();
#pragma unroll
    for (int slot = 0; slot < kTilesPerPass; ++slot) {
      const float(&tile)[4] = sums[(pass * kTilesPerPass + slot) / kTokenTiles][(pass * kTilesPerPass + slot) % kTokenTiles];
      float* to = shared[slot][warp] + 2 * quarter * kTokenStride + g;
      to[0] = tile[0];
      to[kTokenStride] = tile[1];
      to[8] = tile[2];
      to[kTokenStride + 8] = tile[3];
    }
    __syncthreads();
    for (int index = threadIdx.x; index < 128 * kTilesPerPass; index += kThreads) {
      const int slot = index / 128, tile = pass * kTilesPerPass + slot;
      const long long token = first_token + tile % kTokenTiles * 8 + index % 128 / 16;
      const long long row = first_row + tile / kTokenTiles * kTileRows + index % 16;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[slot][w][index % 128 / 16 * kTokenStride + index % 16];
      const bool inside = row < rows;
      float y = inside ? sum * row_scale[row * scale_stride] : 0.0f;
      if (inside && bias) y += bias[row];
#if VT_ARGMAX
      // Keys of the 16 rows lie in 16 neighbouring lanes; a row outside loses to any other.
      unsigned long long key = inside ? key_of(widen(narrow(y)), row) : 0ull;
#pragma unroll
      for (int distance = 8; distance; distance /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, key, distance);
        key = other > key ? other : key;
      }
      if (inside && index % 16 == 0 && token < tokens)
        keys[token * ((rows + kTileRows - 1) / kTileRows) + row / kTileRows] = key;
#else
      if (inside && token < tokens) out[token * rows + row] = narrow(y);
#endif
    }
  }
}
