#pragma once
// What a compiled form of linear_nvfp4_wgmma fixes: sizes, registers, shared memory. nvfp4/wgmma_form.py chooses.

#include "include/format_nvfp4.cuh"
#include "include/ptx.cuh"

#ifndef VT_TOKENS
#define VT_TOKENS 64  // tokens of a product
#endif
#ifndef VT_WARPGROUPS
#define VT_WARPGROUPS 4  // 64 rows each
#endif
#ifndef VT_CLUSTER
#define VT_CLUSTER 1  // blocks that share each fetch of x
#endif
#ifndef VT_STAGES
#define VT_STAGES 4  // of x
#endif
#ifndef VT_CHUNK
#define VT_CHUNK 2  // column steps a weight copy
#endif
#ifndef VT_SLOTS
#define VT_SLOTS 4  // weight copies of a warp
#endif
#ifndef VT_DEPTH
#define VT_DEPTH 2  // words whose products are in flight
#endif
#ifndef VT_GROUP
#define VT_GROUP 1  // words decoded before their products, which follow one another
#endif

#if VT_CLUSTER > 1
#define VT_CLUSTER_DIMENSIONS __cluster_dims__(VT_CLUSTER, 1, 1)
#else
#define VT_CLUSTER_DIMENSIONS
#endif

constexpr int kTokens = VT_TOKENS, kSums = kTokens / 2, kTokenTiles = kTokens / 8;
constexpr int kWarps = 4 * VT_WARPGROUPS, kThreads = 32 * (kWarps + 4);
// Registers of a thread at launch, kept low by a bound of more threads than there are, so that blocks of the next
// kernel find room; and after the producer's have moved to the consumers, where those need more.
constexpr bool kMovesRegisters = kTokens > 32;
constexpr int kBound = 640, kRegisters = 96, kProducerRegisters = 24;
constexpr int kConsumerRegisters =
    (kRegisters * (VT_WARPGROUPS + 1) - kProducerRegisters) / VT_WARPGROUPS / 8 * 8;
constexpr int kCluster = VT_CLUSTER, kStages = VT_STAGES, kChunk = VT_CHUNK, kSlots = VT_SLOTS;
constexpr int kDepth = VT_DEPTH, kGroup = VT_GROUP;
constexpr int kStageBytes = kTokens * kStepColumns * 2;
constexpr int kSlotBytes = kChunk * kBlockBytes;
constexpr int kWords = 4;  // of a row, lane and column step

static_assert(kTokens == 16 || kTokens == 32 || kTokens == 48 || kTokens == 64, "multiply_warpgroup has these");
static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4, "a stage is cut in equal parts");
static_assert(VT_WARPGROUPS >= 2 && VT_WARPGROUPS <= 4 && kThreads <= kBound, "registers without spills");
static_assert((kDepth == 2 || kDepth == 4) && kDepth % kGroup == 0, "words return to their registers");
static_assert(kStageBytes / kCluster % 16 == 0 && kSlotBytes % 16 == 0, "limits and alignment");

// Byte offsets in dynamic shared memory; the launcher has the same formula.
struct Layout {
  static constexpr unsigned kX = 0, kRings = kStages * kStageBytes, kBarriers = kRings + kWarps * kSlots * kSlotBytes;
  static constexpr unsigned kXFull = kBarriers, kXEmpty = kXFull + 8 * kStages, kSlotFull = kXEmpty + 8 * kStages;
  static constexpr unsigned kBytes = kSlotFull + 8 * kWarps * kSlots;
};
static_assert(Layout::kBytes <= 232448, "shared memory of a block");
