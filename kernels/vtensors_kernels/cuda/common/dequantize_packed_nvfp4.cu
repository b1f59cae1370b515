// out[r, k] = e2m1 * block_scale / 256 of packed row first_row + r, exact in bfloat16 and float16.
//
// Shapes: K a multiple of 16; rows a multiple of 16, first_row too (padding rows come out as zeros).
// One warp decodes one 16 x 128 block. In turn i its lanes take words 32 i .. 32 i + 31 of the block, which are
// all 32 words of rows 2 i and 2 i + 1, so that each store of the warp is two runs of 256 contiguous bytes.
// Block: kThreads; grid x covers (rows / 16) * ceil(K / 128) warps. Alignment: out 16 bytes.
// Shared memory: none. Arch: all.

#include "include/nvfp4_packed.cuh"

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWordsPerBlock = kCodeBytes / 4;
constexpr int kTurns = kWordsPerBlock / kWarp;
static_assert(kTurns == 8 && kWarp * 8 == 2 * kStepColumns, "a turn covers two rows of a block");
static_assert(kBlockBytes - kCodeBytes == 4 * kWarp, "a lane holds one word of scales");

extern "C" __global__ __launch_bounds__(kThreads) void dequantize_packed_nvfp4(
    const unsigned* __restrict__ blocks,  // [row tiles, column steps, kBlockBytes / 4], from first_row on
    uint4* __restrict__ out,              // [rows, K / 8] 8 bf16 or f16 each
    long long tiles,                      // rows / 16
    long long columns)                    // K
{
  const long long warp = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const long long steps = (columns + kStepColumns - 1) / kStepColumns;
  const long long tile = warp / steps, step = warp % steps;
  if (tile >= tiles) return;
  const int lane = threadIdx.x % kWarp;
  const unsigned* block = blocks + (tile * steps + step) * (kBlockBytes / 4);

  const unsigned scales = __ldcs(block + kWordsPerBlock + lane);
  unsigned words[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) words[turn] = __ldcs(block + turn * kWarp + lane);

  // Word 4 (4 g + c) + u of a half: here g = 2 turn + lane / 16, c = lane / 4 % 4, u = lane % 4.
  const int quarter = lane / 4 % 4;
  const long long column = step * kStepColumns + 32 * quarter + 8 * (lane % 4 ^ quarter >> 1);
  uint4* target = out + ((tile * kTileRows + lane / 16) * columns + column) / 8;
  const unsigned scale_step = scale_multiplier();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int owner = (8 * turn + lane / 4) % kWarp;
    const unsigned byte = __shfl_sync(0xffffffffu, scales, owner) >> (16 * (turn / 4) + 8 * (lane % 4 / 2));
    unsigned pairs[4];
    decode_word(words[turn], decode_scale<0>(byte, scale_step), pairs);
    if (column < columns) target[turn * columns / 4] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
