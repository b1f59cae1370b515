// y[m, n] = row_scale[n] * sum_k (w * s_w)[n, k] (x * s_x)[m, k] + bias[n], 4-bit weights and activations multiplied
// by block-scaled tensor cores; then
//   VT_EPILOGUE 0: y      1: y + residual      2: silu(gate) * up of paired rows (8 of gate, 8 of up in a row tile)
// rounded once to 16 bits. row_scale has both global scales.
//
// Weights: [row tiles of 16][steps of 128 columns][1152 bytes]. Of lane 4 g + c, s = 0, 1:
//   bytes 512 s + 16 lane     the words k = 64 s + 32 h + 8 c .. + 7 of rows g, g + 8 with h = 0, then h = 1
//   bytes 1024 + 16 g         8 scales of row g (k = 16 j ..), then those of row g + 8
// which is the register order of mma.m16n8k64 (block_scaled_ptx.cuh), so that a lane loads 16 bytes at a time.
// Activations: fragments of 8 tokens as common/quantize_nvfp4.cu writes them. Padding has zero codes and scales.
//
// A block takes a row tile and 8 * kTokenTiles tokens; its warps share the steps, each a run of them in order, and
// their sums are added in order of the warps. So a row's bits depend on neither M, place nor neighbours.
// Grid: row tiles * ceil(M / (8 kTokenTiles)), tokens fastest. Block: 32 * kWarps. Alignment: 16 bytes.
// Shared memory: kWarps * 8 kTokenTiles * kStride floats. Arch: sm_120a, sm_121a.

#include "include/block_scaled_ptx.cuh"
#include "include/ptx.cuh"
#include "include/row_values.cuh"
#include "include/sixteen_bits.cuh"

#ifndef VT_EPILOGUE
#define VT_EPILOGUE 0
#endif
#ifndef VT_TOKEN_TILES
#define VT_TOKEN_TILES 1  // groups of 8 tokens of a block
#endif
static_assert(VT_EPILOGUE >= 0 && VT_EPILOGUE <= 2, "VT_EPILOGUE is 0, 1 or 2");
static_assert(VT_HAS_BLOCK_SCALED_MMA, "made for sm_120a and sm_121a");

constexpr int kTokenTiles = VT_TOKEN_TILES;
constexpr int kTokens = 8 * kTokenTiles;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;             // of a tile
constexpr int kWeightBytes = 1152;    // 16 rows x 128 columns
constexpr int kFragmentBytes = 576;   // 8 tokens x 128 columns
constexpr int kAhead = 2;             // steps whose weights are on their way
constexpr int kStride = 20;           // floats between tokens in shared memory: no bank conflicts
static_assert(kWarps * kTokens * kStride * 4 <= 48 << 10, "fits static shared memory");

struct Weights {
  uint4 codes[2];
  uint2 scales;
  __device__ __forceinline__ void load(const unsigned char* __restrict__ block, int lane) {
    codes[0] = *reinterpret_cast<const uint4*>(block + 16 * lane);
    codes[1] = *reinterpret_cast<const uint4*>(block + 512 + 16 * lane);
    // Row g for lanes c = 0 and 2, g + 8 for c = 1 and 3; the product reads those of c = 0 and 1.
    scales = *reinterpret_cast<const uint2*>(block + 1024 + 16 * (lane / 4) + 8 * (lane % 2));
  }
};

// sums of every token tile += one step. fragments: of the first token tile at this step.
__device__ __forceinline__ void multiply_step(float (&sums)[kTokenTiles][4], const Weights& w,
                                              const unsigned char* fragments, long long tile_bytes, int tiles,
                                              int lane) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    if (tile >= tiles) break;
    const unsigned char* from = fragments + tile * tile_bytes;
    const uint4 x = *reinterpret_cast<const uint4*>(from + 16 * lane);
    const uint2 scales = *reinterpret_cast<const uint2*>(from + 512 + 8 * (lane / 4));
    multiply_add_e2m1_16x8x64(sums[tile], w.codes[0], x.x, x.y, w.scales.x, scales.x);
    multiply_add_e2m1_16x8x64(sums[tile], w.codes[1], x.z, x.w, w.scales.y, scales.y);
  }
}

extern "C" __global__ __launch_bounds__(kThreads) void linear_nvfp4_w4a4(
    const unsigned char* __restrict__ blocks,  // [row tiles, steps, kWeightBytes]
    const float* __restrict__ row_scale,       // [16 row tiles]
    const float* __restrict__ bias,            // [16 row tiles] or null
    const unsigned char* x,                    // [ceil(M / 8), steps, kFragmentBytes]; not read before the wait
    const unsigned short* residual,            // [M, n] bf16 or f16, for epilogue 1; not read before the wait
    unsigned short* out,                       // [M, n], [M, n / 2] for epilogue 2
    int tokens,                                // M
    int n,                                     // rows of the matrix, both of a pair counted
    int steps)                                 // ceil(K / 128)
{
  __shared__ float partial[kWarps][kTokens][kStride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = (tokens + kTokens - 1) / kTokens;
  const int row_tile = blockIdx.x / chunks, first_token = static_cast<int>(blockIdx.x % chunks) * kTokens;
  const int first = static_cast<int>(static_cast<long long>(warp) * steps / kWarps);
  const int last = static_cast<int>(static_cast<long long>(warp + 1) * steps / kWarps);
  const unsigned char* __restrict__ tile = blocks + static_cast<long long>(row_tile) * steps * kWeightBytes;

  Weights ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (first + i < last) ahead[i].load(tile + static_cast<long long>(first + i) * kWeightBytes, lane);
  launch_dependents();
  wait_for_predecessors();

  float sums[kTokenTiles][4] = {};
  const long long tile_bytes = static_cast<long long>(steps) * kFragmentBytes;
  const unsigned char* fragments = x + first_token / 8 * tile_bytes;
  const int tiles = (min(tokens - first_token, kTokens) + 7) / 8;
  for (int step = first; step < last; step += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (step + i >= last) break;
      const Weights now = ahead[i];
      const int next = step + i + kAhead;
      if (next < last) ahead[i].load(tile + static_cast<long long>(next) * kWeightBytes, lane);
      multiply_step(sums, now, fragments + static_cast<long long>(step + i) * kFragmentBytes, tile_bytes, tiles, lane);
    }
  }

#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][8 * t + 2 * (lane % 4) + i % 2][lane / 4 + 8 * (i / 2)] = sums[t][i];
  __syncthreads();

  const auto value = [&](int token, int row) {
    float sum = partial[0][token][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = added(sum, partial[w][token][row]);
    const int at = row_tile * kRows + row;
    const float y = scaled_sum(sum, row_scale[at]);
    return bias ? added(y, bias[at]) : y;
  };
  constexpr int kColumns = VT_EPILOGUE == 2 ? kRows / 2 : kRows;  // of the output, of a tile
  const int width = VT_EPILOGUE == 2 ? n / 2 : n;
  for (int index = threadIdx.x; index < kColumns * kTokens; index += kThreads) {
    const int token = index / kColumns, row = index % kColumns, column = row_tile * kColumns + row;
    if (first_token + token >= tokens || column >= width) continue;
    const long long at = static_cast<long long>(first_token + token) * width + column;
    float y = value(token, row);
#if VT_EPILOGUE == 1
    y = added(y, widen(residual[at]));
#elif VT_EPILOGUE == 2
    y = swiglu(y, value(token, row + 8));
#endif
    out[at] = narrow(y);
  }
}
