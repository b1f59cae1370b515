#pragma once
// What a compiled form of linear_nvfp4_wgmma fixes beyond warpgroup_form.cuh. nvfp4/wgmma_form.py chooses.

#include "include/format_nvfp4.cuh"
#include "include/warpgroup_form.cuh"

#ifndef VT_GROUP
#define VT_GROUP 1  // words decoded before their products, which follow one another
#endif

constexpr int kGroup = VT_GROUP;
constexpr bool kMovesRegisters = kTokens > 32;  // of the producer's: where the consumers need more

static_assert(kTokens == 16 || kTokens == 32 || kTokens == 48 || kTokens == 64, "multiply_warpgroup has these");
static_assert(VT_WARPGROUPS >= 2 && VT_WARPGROUPS <= 4, "registers without spills");
static_assert((kDepth == 2 || kDepth == 4) && kDepth % kGroup == 0, "words return to their registers");

// Byte offsets in dynamic shared memory; the launcher has the same formula.
struct Layout {
  static constexpr unsigned kX = 0, kRings = kStages * kStageBytes, kBarriers = kRings + kWarps * kSlots * kSlotBytes;
  static constexpr unsigned kXFull = kBarriers, kXEmpty = kXFull + 8 * kStages, kSlotFull = kXEmpty + 8 * kStages;
  static constexpr unsigned kBytes = kSlotFull + 8 * kWarps * kSlots;
};
static_assert(Layout::kBytes <= 232448, "shared memory of a block");
