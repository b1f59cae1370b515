// Rows of E4M3 codes as stored -> the code bytes of the packed layout of fp8_packed.cuh, bits moved and nothing else.
//
// Shapes: any N; K a multiple of 16. Columns from K to the end of the last block become zeros; rows that no stored row
// goes to are left alone, and so is what a block holds behind its codes. A warp writes twice 512 contiguous bytes.
// Threads, block and grid: repack_place.cuh. Alignment: codes and blocks 16 bytes. Shared memory: none. Arch: all.

#include "include/fp8_packed.cuh"
#include "include/repack_place.cuh"

static_assert(kTileRows * kStepColumns == kCodeBytes, "a block holds a byte per code");

// A code where pair 0 and pair 1 of a word have it, in the low half.
__device__ __forceinline__ unsigned in_first(unsigned code) { return (code & 0x80u) << 8 | (code & 0x7fu) << 4; }
__device__ __forceinline__ unsigned in_second(unsigned code) {
  return (code & 0x80u) << 4 | (code & 0x70u) << 8 | (code & 0x0fu);
}

// Four codes, the first in the low byte, as one word of the layout.
__device__ __forceinline__ unsigned reorder(unsigned codes) {
  return in_first(codes) | in_first(codes >> 8) << 16 | in_second(codes >> 16) | in_second(codes >> 24) << 16;
}

__device__ __forceinline__ uint4 reorder(const uint4& codes) {
  return make_uint4(reorder(codes.x), reorder(codes.y), reorder(codes.z), reorder(codes.w));
}

extern "C" __global__ __launch_bounds__(kThreads) void repack_fp8(
    const uint4* __restrict__ codes,     // [N, K / 16] 16 codes each
    unsigned char* __restrict__ blocks,  // [row tiles, column steps, block_bytes]
    long long rows,                      // N
    long long columns,                   // K
    long long first_row,                 // packed row of stored row 0
    int interleaved,                     // 1: 8 rows of every 16
    int block_bytes)                     // codes and scales, a multiple of 16
{
  const long long warp = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  const long long steps = (columns + kStepColumns - 1) / kStepColumns;
  const long long row = warp / steps * kRowsPerWarp + lane / 4;
  if (row >= rows) return;
  const long long step = warp % steps;
  const int quarter = lane % 4;
  const long long column = step * kStepColumns + quarter * kColumnsPerThread;
  const long long target = packed_row(row, first_row, interleaved);

  // Chunks of 8 columns: words 0 1, 2 3 of the first half, then of the second.
  uint4 halves[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long at = column + 16 * half;
    uint4 loaded = make_uint4(0u, 0u, 0u, 0u);
    if (at < columns) loaded = codes[(row * columns + at) / 16];
    const uint4 moved = reorder(loaded);
    // Chunk u holds columns 8 (u ^ (quarter >> 1)): the upper two quarters swap neighbours.
    halves[half] = quarter < 2 ? moved : make_uint4(moved.z, moved.w, moved.x, moved.y);
  }

  unsigned char* block = blocks + (target / kTileRows * steps + step) * block_bytes;
  const int part = static_cast<int>(target / 8 % 2), owner = static_cast<int>(target % 8) * 4 + quarter;
  uint4* to = reinterpret_cast<uint4*>(block + 1024 * part + 16 * owner);
  to[0] = halves[0];
  to[512 / 16] = halves[1];
}
