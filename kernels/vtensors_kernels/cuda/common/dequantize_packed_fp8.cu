// out[r, k] = w of packed row first_row + r without row_scale, by VT_SCALES:
//   0  e4m3 / 256, exact in bfloat16 and float16
//   1  e4m3 / 256 * step_scale, rounded once
//   2  e4m3 * 2^(byte - 247), exact but for groups far smaller than the row's largest (fp8_packed.cuh)
//
// Shapes: K a multiple of 16; rows a multiple of 16, first_row too (padding rows come out as zeros).
// One warp decodes one 16 x 128 block. In turn i its lanes take the 32 chunks of 8 columns of rows 2 i and 2 i + 1, so
// that each store of the warp is two runs of 256 contiguous bytes.
// Block: kThreads; grid x covers (rows / 16) * ceil(K / 128) warps. Alignment: blocks and out 16 bytes.
// Shared memory: none. Arch: all.

#include "include/fp8_packed.cuh"
#include "include/sixteen_bits.cuh"

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kTurns = kTileRows / 2;
static_assert(2 * kStepColumns / 8 == kWarp, "a turn covers two rows of a block");

extern "C" __global__ __launch_bounds__(kThreads) void dequantize_packed_fp8(
    const unsigned char* __restrict__ blocks,  // [row tiles, column steps, kBlockBytes], from first_row on
    uint4* __restrict__ out,                   // [rows, K / 8] 8 bf16 or f16 each
    long long tiles,                           // rows / 16
    long long columns)                         // K
{
  const long long warp = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const long long steps = (columns + kStepColumns - 1) / kStepColumns;
  const long long tile = warp / steps, step = warp % steps;
  if (tile >= tiles) return;
  const int lane = threadIdx.x % kWarp;
  const int quarter = lane / 4 % 4, chunk = lane % 4;
  const long long column = step * kStepColumns + 32 * quarter + 8 * (chunk ^ quarter >> 1);
  if (column >= columns) return;
  const unsigned char* block = blocks + (tile * steps + step) * kBlockBytes;

  uint2 words[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = 2 * turn + lane / 16;
    const int at = 512 * (row / 8 * 2 + chunk / 2) + 16 * (row % 8 * 4 + quarter) + 8 * (chunk % 2);
    words[turn] = __ldcs(reinterpret_cast<const uint2*>(block + at));
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = 2 * turn + lane / 16;
    unsigned scale = 0, pairs[4];
#if VT_SCALES == 2
    scale = decode_group_scale(block[kCodeBytes + 2 * (row % 8 * 4 + quarter) + row / 8]);
#endif
    decode_words(words[turn].x, words[turn].y, scale, pairs);
#if VT_SCALES == 1
    const float step_scale = reinterpret_cast<const float*>(block + kCodeBytes)[row / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = narrow_pair(widen(pairs[i] & 0xffffu) * step_scale, widen(pairs[i] >> 16) * step_scale);
#endif
    out[((tile * kTileRows + row) * columns + column) / 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
