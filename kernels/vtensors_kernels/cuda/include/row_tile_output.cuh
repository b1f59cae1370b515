#pragma once
// A row tile's float32 sums -> output: scales, bias, variant, one rounding, stores of neighbouring rows.

#include "include/row_values.cuh"
#include "include/wgmma_ptx.cuh"

#ifndef VT_EPILOGUE
#define VT_EPILOGUE 0  // 0: y, 1: y + residual, 2: silu(gate) * up of paired rows
#endif
static_assert(VT_EPILOGUE >= 0 && VT_EPILOGUE <= 2, "VT_EPILOGUE is 0, 1 or 2");

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

// sums 4 i ..: rows g, g + 8 of the tile x tokens 8 i + 2 c, + 1, as products leave them. row_scale, bias (or null):
// of all 16 rows of every tile. residual, y: [tokens, n], y [tokens, n / 2] for paired rows.
template <int count>
__device__ __forceinline__ void finish_row_tile(const float (&sums)[count], int tile, const float* row_scale,
                                                const float* bias, const unsigned short* residual, unsigned short* y,
                                                int n, int tokens, int lane) {
  const int g = lane >> 2, c = lane & 3, row = tile * 16 + g;
  const float scale[2] = {row_scale[row], row_scale[row + 8]};
  const float shift[2] = {bias ? bias[row] : 0.0f, bias ? bias[row + 8] : 0.0f};  // added only where there is a bias
  const int width = VT_EPILOGUE == 2 ? n / 2 : n;
  const Rows rows = {width, tokens, width % 2 == 0};
#pragma unroll
  for (int i = 0; i < count / 4; ++i) {
    float v[2][2];  // row g or g + 8, token 8 i + 2 c or the next
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = scaled_sum(sums[4 * i + j], scale[j / 2]);
      v[j / 2][j % 2] = bias ? added(scaled, shift[j / 2]) : scaled;
    }
#if VT_EPILOGUE == 2
    const unsigned pair = round_pair(swiglu(v[0][0], v[1][0]), swiglu(v[0][1], v[1][1]));
    rows.store(y, 8 * i + g, tile * 8 + 2 * c, transpose_8x8(pair));
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
