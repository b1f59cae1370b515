#pragma once
// Which pairs of a token and an expert a small batch has, by expert, as a whole block finds them.
//
// Pair token * top + slot is the choice chosen[token][slot]; behind all of them pair m * top + token is the shared
// expert's, which is expert number `experts`. An item is one expert and up to kItemTokens of its pairs in order; items
// are in order of experts, the shared one last. Pairs of an expert outside 0 .. experts - 1 are in none, and of the pairs
// of a token that chose an expert twice one is.

#include "include/experts_early_ptx.cuh"

constexpr int kMostPairs = 256, kMostTokens = 32, kMostExperts = 1024;
static_assert(kMostTokens <= kThreads, "a thread has a token at most");
constexpr int kMostItems = kMostPairs + kMostTokens / kItemTokens;

struct Choice {
  unsigned tokens[kMostExperts];        // of each expert, a bit each
  unsigned short first[kMostExperts];   // item
  unsigned short chosen[kMostPairs];    // kMostExperts: none
  unsigned short expert[kMostItems], count[kMostItems];
  unsigned short pairs[kMostItems][kItemTokens];
  int of_warps[kWarps];

  // The place of a token among the pairs of its expert.
  __device__ __forceinline__ unsigned short& pair_of(int expert, int token) {
    const int before = __popc(tokens[expert] & ((1u << token) - 1u));
    return pairs[first[expert] + before / kItemTokens][before % kItemTokens];
  }
  // Whether a pair of a token is in an item; behind list_pairs.
  __device__ __forceinline__ bool is_listed(int pair, int token) {
    return chosen[pair] != kMostExperts && pair_of(chosen[pair], token) == pair;
  }
};
static_assert(sizeof(Choice) + 8 * kWarps * kMostStages <= 14 << 10, "what launches leave for static shared memory");

// The choices of a thread, of pairs threadIdx.x + j * kThreads, on their way while all else is made ready: read early.
constexpr int kOwnPairs = (kMostPairs + kThreads - 1) / kThreads;
struct OwnChoices {
  int experts[kOwnPairs], tokens[kOwnPairs];
  __device__ __forceinline__ OwnChoices(const int* chosen, int m, int top) {
#pragma unroll
    for (int j = 0; j < kOwnPairs; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i < m * top) experts[j] = load_early(chosen + i);
      tokens[j] = i / top;
    }
  }
};

// Before list_experts, with a barrier between.
__device__ __forceinline__ void clear_choice(Choice& choice, int experts) {
#pragma unroll 1
  for (int i = threadIdx.x; i < experts; i += kThreads) choice.tokens[i] = 0u;
}

// The number of items; their experts and counts, behind a barrier.
__device__ __forceinline__ int list_experts(Choice& choice, const OwnChoices& chosen, int m, int experts, bool shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kOwnPairs; ++j) {
    const int token = chosen.tokens[j], expert = chosen.experts[j];
    if (token >= m) break;
    const bool known = expert >= 0 && expert < experts;
    choice.chosen[threadIdx.x + j * kThreads] = static_cast<unsigned short>(known ? expert : kMostExperts);
    if (known) atomicOr(&choice.tokens[expert], 1u << token);
  }
  __syncthreads();

  const int each = (experts + kThreads - 1) / kThreads, begin = threadIdx.x * each, end = min(begin + each, experts);
  int own = 0;
#pragma unroll 1
  for (int e = begin; e < end; ++e) own += (__popc(choice.tokens[e]) + kItemTokens - 1) / kItemTokens;
  int place = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, place, distance);
    if (lane >= distance) place += other;
  }
  if (lane == 31) choice.of_warps[warp] = place;
  place -= own;
  __syncthreads();
  int items = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int of_warp = choice.of_warps[i];
    place += i < warp ? of_warp : 0;
    items += of_warp;
  }
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    choice.first[e] = static_cast<unsigned short>(place);
#pragma unroll 1
    for (int left = __popc(choice.tokens[e]); left > 0; left -= kItemTokens, ++place) {
      choice.expert[place] = static_cast<unsigned short>(e);
      choice.count[place] = static_cast<unsigned short>(min(kItemTokens, left));
    }
  }
  if (!shared) {
    __syncthreads();
    return items;
  }
  const int of_shared = (m + kItemTokens - 1) / kItemTokens;
  if (threadIdx.x < of_shared) {
    choice.expert[items + threadIdx.x] = static_cast<unsigned short>(experts);
    const int left = m - kItemTokens * static_cast<int>(threadIdx.x);
    choice.count[items + threadIdx.x] = static_cast<unsigned short>(min(kItemTokens, left));
  }
  __syncthreads();
  return items + of_shared;
}

// The pairs of all items, behind a barrier.
__device__ __forceinline__ void list_pairs(Choice& choice, const OwnChoices& chosen, int items, int m, int top,
                                           bool shared) {
#pragma unroll
  for (int j = 0; j < kOwnPairs; ++j) {
    const int i = threadIdx.x + j * kThreads;
    if (chosen.tokens[j] >= m) break;
    const int expert = choice.chosen[i];
    if (expert != kMostExperts) choice.pair_of(expert, chosen.tokens[j]) = static_cast<unsigned short>(i);
  }
  if (shared && threadIdx.x < m) {
    unsigned short* to = choice.pairs[items - (m + kItemTokens - 1) / kItemTokens];
    to[threadIdx.x] = static_cast<unsigned short>(m * top + threadIdx.x);
  }
  __syncthreads();
}
