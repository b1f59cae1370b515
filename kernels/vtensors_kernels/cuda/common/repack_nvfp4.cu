// Rows of an NVFP4 matrix as stored -> the packed layout of nvfp4_packed.cuh, bits moved and nothing else:
//   element 2 p + h of a word = half h of pair p;  scale byte = (x + 10) << 3 | mmm of 2^x * 1.mmm.
// Codes under a zero scale become zero (of their sign), as their product is.
//
// Shapes: any N; K a multiple of 16 (32 for groups of 32). Columns from K to the end of the last block become zeros;
// rows that no stored row goes to are left alone. A warp writes 512 contiguous bytes.
// Threads, block and grid: repack_place.cuh. Alignment: codes 8 bytes, blocks 16 bytes. Shared memory: none. Arch: all.

#include "include/nvfp4_packed.cuh"
#include "include/repack_place.cuh"

static_assert(kTileRows * kStepColumns / 2 == kCodeBytes && kBlockBytes == kCodeBytes + kTileRows * kStepColumns / 16,
              "a block holds its codes and one scale byte per 16 of them");

// Bits m, e, e, s of half 0 and half 1 of each pair in a word, as the table of nvfp4_packed.cuh has them.
__device__ constexpr unsigned char kPlaces[4][2][4] = {
    {{30, 7, 8, 15}, {14, 23, 24, 31}},
    {{4, 5, 6, 13}, {20, 21, 22, 29}},
    {{0, 1, 2, 9}, {16, 17, 18, 25}},
    {{26, 27, 28, 3}, {10, 11, 12, 19}}};

// Eight codes, the first in the low nibble, as one word of the layout.
__device__ __forceinline__ unsigned reorder(unsigned codes) {
  unsigned word = 0;
#pragma unroll
  for (int bit = 0; bit < 32; ++bit) word |= (codes >> bit & 1u) << kPlaces[bit / 8][bit / 4 % 2][bit % 4];
  return word;
}

// An E4M3 byte, zero or positive, as (x + 10) << 3 | mmm; a subnormal m * 2^-9 has x = -9 + floor(log2 m).
__device__ __forceinline__ unsigned reencode(unsigned byte) {
  const unsigned magnitude = byte & 0x7fu;
  if (magnitude >= 8u) return magnitude + 24u;
  if (magnitude == 0u) return 0u;
  const unsigned log2 = 31u - __clz(magnitude);
  return (log2 + 1u) << 3 | (magnitude << (3u - log2) & 7u);
}

extern "C" __global__ __launch_bounds__(kThreads) void repack_nvfp4(
    const unsigned char* __restrict__ codes,        // [N, K / 2] low nibble first
    const unsigned char* __restrict__ block_scale,  // [N, K / group] E4M3, zero or positive
    unsigned char* __restrict__ blocks,             // [row tiles, column steps, kBlockBytes]
    long long rows,                                 // N
    long long columns,                              // K
    long long first_row,                            // packed row of stored row 0
    int interleaved,                                // 1: 8 rows of every 16
    int group)                                      // 16 or 32
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

  unsigned words[4] = {0u, 0u, 0u, 0u};
  unsigned scales = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long at = column + 16 * half;
    if (at >= columns) break;
    const uint2 packed = *reinterpret_cast<const uint2*>(codes + (row * columns + at) / 2);
    const unsigned scale = reencode(block_scale[row * (columns / group) + at / group]);
    const unsigned kept = scale ? 0xffffffffu : 0x88888888u;
    scales |= scale << (8 * half);
    words[2 * half] = reorder(packed.x & kept);
    words[2 * half + 1] = reorder(packed.y & kept);
  }

  unsigned char* block = blocks + (target / kTileRows * steps + step) * kBlockBytes;
  const int half = static_cast<int>(target / 8 % 2), owner = static_cast<int>(target % 8) * 4 + quarter;
  // Word u holds columns 8 (u ^ (quarter >> 1)): the upper two quarters swap neighbours.
  *reinterpret_cast<uint4*>(block + 512 * half + 16 * owner) =
      quarter < 2 ? make_uint4(words[0], words[1], words[2], words[3])
                  : make_uint4(words[1], words[0], words[3], words[2]);
  *reinterpret_cast<unsigned short*>(block + kCodeBytes + 4 * owner + 2 * half) =
      static_cast<unsigned short>(scales);
}
