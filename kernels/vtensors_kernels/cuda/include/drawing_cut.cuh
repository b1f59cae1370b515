#pragma once
// Where top_k and top_p cut a row. Tokens stay in descending order of their scores, equal ones in the order of ids.
//
// Logits are counted by value, kWindow neighbouring values from the largest down at a time: of equal logits the number
// is enough, so that their order does not matter here. A second pass over the row counts the next window, rarely.

#include "include/block_prefix.cuh"
#include "include/drawing.cuh"

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kOfThread = 16;  // values of a window that one thread adds up
constexpr int kWindow = kThreads * kOfThread;

// The first `kept` tokens in order stay. score: of the last of them. floor: the least logit with that score. mass: of all
// that stay.
struct Cut {
  float score, floor;
  unsigned kept;
  Mass mass;
};

// Below all tokens.
__device__ __forceinline__ Cut whole_row() { return {2 * kLeastScore, value_of_key(key_of_bits(kMinusInfinity)), 0, 0}; }

struct CutMemory {
  Cut cut;
  unsigned below;  // the largest key below the window
  unsigned numbers[kWarps];
  Mass masses[kWarps];
};

// What a thread knows of the window from key `top` down. before: of the tokens above it.
struct Window {
  unsigned top;
  unsigned tokens_before;
  Mass mass_before;
  Prefix<unsigned> tokens;
  Prefix<Mass> mass;
};

// take(key, number) of this thread's part of the window, the largest key first, where there are any.
template <typename Take>
__device__ __forceinline__ void visit_counts(const unsigned* counts, unsigned top, Take take) {
  const uint4* own = reinterpret_cast<const uint4*>(counts + kOfThread * threadIdx.x);
#pragma unroll 1
  for (int i = 0; i < kOfThread / 4; ++i) {
    const uint4 four = own[i];
    const unsigned first = top - (kOfThread * threadIdx.x + 4 * i);
    if (four.x) take(first, four.x);
    if (four.y) take(first - 1, four.y);
    if (four.z) take(first - 2, four.z);
    if (four.w) take(first - 3, four.w);
  }
}

// Counts the window and adds up. Returns the mass of the tokens below it if `weigh`, else 0.
__device__ __forceinline__ Mass look(Window& window, const Logits& row, const Scale& scale, bool weigh, unsigned* counts,
                                     CutMemory& memory) {
  const unsigned top = window.top;
  __syncthreads();  // what the last window left is in use
  for (int i = threadIdx.x; i < kWindow / 4; i += kThreads) reinterpret_cast<uint4*>(counts)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) memory.below = 0;
  __syncthreads();
  unsigned largest = 0;
  Mass rest = 0;
#pragma unroll 1
  for (int piece = threadIdx.x; piece < row.pieces; piece += kThreads)
    visit_piece(row, piece, [&](unsigned bits, int) {
      const unsigned key = key_of_bits(bits);
      if (key > top) return;
      if (top - key < kWindow) {
        atomicAdd(counts + (top - key), 1u);
        return;
      }
      largest = max(largest, key);
      if (weigh) rest += mass_of(weight_of(score_of(widen(bits), scale)));
    });
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&memory.below, largest);
  rest = prefix_of_block(rest, memory.masses).all;
  unsigned tokens = 0;
  Mass mass = 0;
  visit_counts(counts, top, [&](unsigned key, unsigned number) {
    tokens += number;
    mass += number * mass_of(weight_of(score_of_key(key, scale)));
  });
  window.tokens = prefix_of_block(tokens, memory.numbers);
  window.mass = prefix_of_block(mass, memory.masses);
  return rest;
}

// The lowest of the keys that share this one's score: scores do not fall as keys rise.
__device__ __forceinline__ unsigned lowest_equal(unsigned key, float score, const Scale& scale) {
  unsigned low = key_of_bits(kMinusInfinity), high = key;
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    if (score_of_key(middle, scale) < score) low = middle + 1;
    else high = middle;
  }
  return high;
}

// The fewest tokens that are `tokens` or, where that is 0, have `mass` together; there must be so many.
__device__ __forceinline__ Cut cut_at(unsigned tokens, Mass mass, Window& window, const Logits& row, const Scale& scale,
                                      unsigned* counts, CutMemory& memory) {
  const auto enough = [&](unsigned number, Mass sum) { return tokens ? number >= tokens : sum >= mass; };
  if (threadIdx.x == 0) memory.cut = whole_row();
  __syncthreads();
  while (!enough(window.tokens_before + window.tokens.all, window.mass_before + window.mass.all) && memory.below) {
    window.tokens_before += window.tokens.all, window.mass_before += window.mass.all;
    window.top = memory.below;
    look(window, row, scale, false, counts, memory);
  }
  unsigned number = window.tokens_before + window.tokens.before;
  Mass sum = window.mass_before + window.mass.before;
  if (!enough(number, sum))
    visit_counts(counts, window.top, [&](unsigned key, unsigned equal) {
      const float score = score_of_key(key, scale);
      const Mass one = mass_of(weight_of(score));
      if (!enough(number, sum) && enough(number + equal, sum + equal * one)) {
        const unsigned more = tokens ? tokens - number : static_cast<unsigned>((mass - sum + one - 1) / one);
        memory.cut = {score, value_of_key(lowest_equal(key, score, scale)), number + more, sum + more * one};
      }
      number += equal, sum += equal * one;
    });
  __syncthreads();
  return memory.cut;
}

// top_k: 0 is off; below the number of columns. top_p: above 0; 1 is off. One of them is on.
__device__ __forceinline__ Cut find_cut(unsigned top_k, double top_p, const Logits& row, const Scale& scale,
                                        unsigned* counts, CutMemory& memory) {
  const unsigned top = key_of_bits(narrow(scale.largest));
  Window window = {top, 0, 0, {}, {}};
  const Mass below = look(window, row, scale, top_k == 0, counts, memory);
  Mass whole = window.mass.all + below;
  if (top_k) {
    const Cut cut = cut_at(top_k, 0, window, row, scale, counts, memory);
    if (top_p >= 1) return cut;
    whole = cut.mass;
    if (window.top != top) {
      window = {top, 0, 0, {}, {}};
      look(window, row, scale, false, counts, memory);
    }
    __syncthreads();  // all have read the cut
  }
  const Mass reached = static_cast<Mass>(ceil(top_p * static_cast<double>(whole)));
  return cut_at(0, min(reached, whole), window, row, scale, counts, memory);
}
