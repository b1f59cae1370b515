#pragma once
// Which pairs of a token and an expert a block of the grouped expert linears computes.
//
// Pair token * top + slot is the choice chosen[token][slot]; behind all of them pair m * top + token is the shared
// expert's, which is expert number `experts`. An item is one expert and up to kTileTokens of its pairs, or all of them,
// as the list is given.

#include "include/experts_early_ptx.cuh"

// The most pairs among which a block finds those of its expert by itself.
constexpr int kMostPairs = 256;

struct Item {
  int expert;          // -1: nothing to do
  const int* listed;   // pairs in global memory, or null
  int first, count;    // first: the first pair where they are consecutive
};

// The item of a shared expert: up to kTileTokens tokens from kTileTokens * index on.
__device__ __forceinline__ Item shared_item(int index, int m, int top, int experts) {
  const int first = kTileTokens * index;
  return {experts, nullptr, m * top + first, min(kTileTokens, m - first)};
}

// The item that group_experts has listed: grouped[0] items, of four numbers each (expert, first, count, 0) from
// grouped[4] on, pairs behind the `bound` places for items.
__device__ __forceinline__ Item listed_item(const int* grouped, int index, int bound) {
  if (index >= load_early(grouped)) return {-1, nullptr, 0, 0};
  const int* item = grouped + 4 + 4 * index;
  return {load_early(item), grouped + 4 + 4 * bound + load_early(item + 1), 0, load_early(item + 2)};
}

// A pair of the only token, whose experts differ.
__device__ __forceinline__ Item lone_item(const int* chosen, int pair) {
  return {load_early(chosen + pair), nullptr, pair, 1};
}

// All pairs of the expert of a pair, in order, into this warp's list: where that pair is the first of them. Warps of a
// block find the same. Not to be called before the wait: every warp of a grid reads the whole choice, which the
// first-level cache must answer, or a few lines of the second-level one have as much to do as all the weights.
__device__ __forceinline__ Item found_item(const int* chosen, int pair, int pairs, unsigned short* list, int lane) {
  const int expert = chosen[pair], words = (pairs + 31) / 32;
  int others[kMostPairs / 32];
#pragma unroll
  for (int j = 0; j < kMostPairs / 32; ++j) others[j] = 32 * j + lane < pairs ? chosen[32 * j + lane] : -1;
  int count = 0, first = pairs;
#pragma unroll
  for (int j = 0; j < kMostPairs / 32; ++j) {
    if (j >= words) break;
    const bool same = 32 * j + lane < pairs && others[j] == expert;
    const unsigned mask = __ballot_sync(~0u, same);
    if (mask == 0u) continue;
    if (count == 0) {
      first = 32 * j + __ffs(mask) - 1;
      // Another block has them.
      if (first != pair) break;
    }
    if (same) list[count + __popc(mask & ((1u << lane) - 1u))] = static_cast<unsigned short>(32 * j + lane);
    count += __popc(mask);
  }
  __syncwarp();
  if (first != pair) return {-1, nullptr, 0, 0};
  return {expert, nullptr, 0, count};
}
