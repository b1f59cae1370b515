#pragma once
// How the cache of one sequence is cut for attention: by its own length alone, so that a row's sums are.

constexpr int kMostSplits = 64;

// Splits of whole pages of 64 tokens; all but the last have the same number of pages.
struct Splits {
  int all_pages;  // of the sequence
  int pages;      // of a split
  int count;      // 1 .. kMostSplits
};

// length: tokens, at least 1. fine: up to so many tokens a split has one page, beyond them two or more.
__device__ __forceinline__ Splits splits_of(int length, int fine) {
  Splits splits;
  splits.all_pages = (length + 63) / 64;
  splits.pages = max(length <= fine ? 1 : 2, (splits.all_pages + kMostSplits - 1) / kMostSplits);
  // A division by a number that is not known takes as long as a load from L2.
  splits.count = splits.pages == 1 ? splits.all_pages : (splits.all_pages + 1) / 2;
  if (splits.pages > 2) splits.count = (splits.all_pages + splits.pages - 1) / splits.pages;
  return splits;
}
