#pragma once
// What a compiled form of linear_*_wgmma_segments fixes beyond warpgroup_form.cuh. nvfp4/wgmma_segments_form.py chooses.

#include "include/warpgroup_form.cuh"

constexpr int kGroup = 1;
constexpr int kFetchers = 2;     // warps that fetch weights
constexpr int kSegments = 8;     // of a row's sum, those of linear_nvfp4_stream
constexpr int kNodeBytes = kSums * 4 * 32;  // a warp's sums of a node of the tree
constexpr int kPlaces = 7;       // nodes of parts of groups that a block may have to give away

static_assert(kTokens == 24 || kTokens == 32, "multiply_warpgroup has these, and two chains fit");
static_assert(kDepth == 1 || kDepth == 2, "words return to their registers");

// Byte offsets in dynamic shared memory; the launcher has the same formula.
struct Layout {
  static constexpr unsigned kX = 0, kNodes = kStages * kStageBytes, kRings = kNodes + kWarps * 2 * kNodeBytes;
  static constexpr unsigned kBarriers = kRings + kWarps * kSlots * kSlotBytes;
  static constexpr unsigned kXFull = kBarriers, kXEmpty = kXFull + 8 * kStages, kSlotFull = kXEmpty + 8 * kStages;
  static constexpr unsigned kSlotEmpty = kSlotFull + 8 * kWarps * kSlots;
  static constexpr unsigned kBytes = kSlotEmpty + 8 * kWarps * kSlots;
};
static_assert(Layout::kBytes <= 232448, "shared memory of a block");
