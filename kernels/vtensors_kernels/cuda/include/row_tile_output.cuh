#pragma once
// A row tile's float32 sums -> output: scales, bias, variant, one rounding, stores of neighbouring rows.

#include "include/row_values.cuh"
#include "include/staged_activations.cuh"
#include "include/wgmma_ptx.cuh"

#ifndef VT_EPILOGUE
#define VT_EPILOGUE 0  // 0: y, 1: y + residual, 2: silu(gate) * up of paired rows, 3: the same as stages of x
#endif
static_assert(VT_EPILOGUE >= 0 && VT_EPILOGUE <= 3, "VT_EPILOGUE is 0, 1, 2 or 3");

// Row `column` and the next of one token: a pair where pairs are aligned, else what there is of it.
struct Rows {
  int n, tokens;
  bool even;
  __device__ __forceinline__ void store(unsigned short* y, int token, int column, unsigned pair) const {
    if (token >= tokens || column >= n) return;
    unsigned short* at = y + static_cast<long long>(token) * n + column;
    if (even) {
      *reinterpret_cast<unsigned*>(at) = pair;
      return;
    }
    at[0] = static_cast<unsigned short>(pair);
    if (column + 1 < n) at[1] = static_cast<unsigned short>(pair >> 16);
  }
  __device__ __forceinline__ unsigned load(const unsigned short* from, int token, int column) const {
    if (token >= tokens || column >= n) return 0u;
    const unsigned short* at = from + static_cast<long long>(token) * n + column;
    if (even) return *reinterpret_cast<const unsigned*>(at);
    return at[0] | (column + 1 < n ? static_cast<unsigned>(at[1]) << 16 : 0u);
  }
};

// Where silu(gate) * up goes that another linear of this width of products reads next: into the stages that it copies,
// so that nothing lays out x between the two. In the words of staged_activations.cuh, a tile of eight columns is those
// of part tile / 4 % 4 and one u of a stage, and the pair of lane c is the pair p = c of them. A chunk of a token is so
// written by four tiles, four bytes each.
// Zeros from column K, a multiple of 8, to the end of the last stage are written by the last tile.
template <int pitch>
struct Stages {
  int width, tokens;
  __device__ __forceinline__ void store(unsigned short* y, int token, int tile, int c, unsigned pair) const {
    if (token >= tokens || tile * 8 >= width) return;
    put(y, token, tile, c, pair);
    if (tile * 8 + 8 == width)
      for (int rest = tile + 1; rest % (kStepColumns / 8); ++rest) put(y, token, rest, c, 0u);
  }
  __device__ __forceinline__ static void put(unsigned short* y, int token, int tile, int c, unsigned pair) {
    const int part = tile / 4 % 4, u = tile % 4 ^ part >> 1;
    reinterpret_cast<unsigned*>(y)[staged_chunk(tile / 16, u, c, pitch, token) * 4 + part] = pair;
  }
};

// sums 4 i ..: rows g, g + 8 of the tile x tokens 8 i + 2 c, + 1, as products leave them. row_scale, bias (or null):
// of all 16 rows of every tile. residual, y: [tokens, n], y [tokens, n / 2] for paired rows, or their stages.
template <int count>
__device__ __forceinline__ void finish_row_tile(const float (&sums)[count], int tile, const float* row_scale,
                                                const float* bias, const unsigned short* residual, unsigned short* y,
                                                int n, int tokens, int lane) {
  const int g = lane >> 2, c = lane & 3, row = tile * 16 + g;
  const float scale[2] = {row_scale[row], row_scale[row + 8]};
  const float shift[2] = {bias ? bias[row] : 0.0f, bias ? bias[row + 8] : 0.0f};  // added only where there is a bias
  const int width = VT_EPILOGUE >= 2 ? n / 2 : n;
  const Rows rows = {width, tokens, width % 2 == 0};
#pragma unroll
  for (int i = 0; i < count / 4; ++i) {
    float v[2][2];  // row g or g + 8, token 8 i + 2 c or the next
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = scaled_sum(sums[4 * i + j], scale[j / 2]);
      v[j / 2][j % 2] = bias ? added(scaled, shift[j / 2]) : scaled;
    }
#if VT_EPILOGUE >= 2
    const unsigned pair = transpose_8x8(round_pair(swiglu(v[0][0], v[1][0]), swiglu(v[0][1], v[1][1])));
    if (VT_EPILOGUE == 3) Stages<2 * count>{width, tokens}.store(y, 8 * i + g, tile, c, pair);
    else rows.store(y, 8 * i + g, tile * 8 + 2 * c, pair);
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = tile * 16 + 8 * half + 2 * c;
#if VT_EPILOGUE == 1
      const unsigned pair = transpose_8x8(rows.load(residual, 8 * i + g, column));
      v[half][0] = added(v[half][0], widen_half<0>(pair));
      v[half][1] = added(v[half][1], widen_half<1>(pair));
#endif
      rows.store(y, 8 * i + g, column, transpose_8x8(round_pair(v[half][0], v[half][1])));
    }
#endif
  }
}
