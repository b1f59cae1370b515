#pragma once
// Which part of a matrix as stored a thread of repack_* moves, and to which packed row.
//
// One thread moves 32 columns of a row: lanes 4 r + c of a warp take rows r of 8 and columns 32 c of one block, so that
// what a warp writes is contiguous. Block: kThreads; grid x covers ceil(N / 8) * ceil(K / 128) warps.

#include "include/packed_blocks.cuh"

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kRowsPerWarp = 8;
constexpr int kColumnsPerThread = 32;
static_assert(kThreads % kWarp == 0, "whole warps");
static_assert(kRowsPerWarp * (kStepColumns / kColumnsPerThread) == kWarp, "a warp moves half a block");

// Stored rows become packed rows from first_row on, or, interleaved, 8 rows of every 16: first_row 0 gate, 8 up.
__device__ __forceinline__ long long packed_row(long long row, long long first_row, int interleaved) {
  return interleaved ? row / 8 * 16 + row % 8 + first_row : row + first_row;
}
