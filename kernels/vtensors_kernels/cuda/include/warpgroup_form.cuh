#pragma once
// What a compiled form of a linear by warpgroup products fixes, whichever it is: sizes and registers. wgmma_form.cuh and
// segments_form.cuh add what is their own.

#include "include/packed_blocks.cuh"
#include "include/ptx.cuh"

#ifndef VT_TOKENS
#define VT_TOKENS 32  // tokens of a product
#endif
#ifndef VT_WARPGROUPS
#define VT_WARPGROUPS 4  // 64 rows each
#endif
#ifndef VT_CLUSTER
#define VT_CLUSTER 1  // blocks that share each fetch of x
#endif
#ifndef VT_STAGES
#define VT_STAGES 6  // of x
#endif
#ifndef VT_CHUNK
#define VT_CHUNK 3  // column steps a weight copy
#endif
#ifndef VT_SLOTS
#define VT_SLOTS 2  // weight copies of a warp
#endif
#ifndef VT_DEPTH
#define VT_DEPTH 2  // words whose products are in flight
#endif

#if VT_CLUSTER > 1
#define VT_CLUSTER_DIMENSIONS __cluster_dims__(VT_CLUSTER, 1, 1)
#else
#define VT_CLUSTER_DIMENSIONS
#endif

constexpr int kTokens = VT_TOKENS, kSums = kTokens / 2, kTokenTiles = kTokens / 8;
constexpr int kWarps = 4 * VT_WARPGROUPS, kThreads = 32 * (kWarps + 4);
// Registers of a thread at launch, kept low by a bound of more threads than there may be, so that blocks of the next
// kernel find room; and after the fetching warps' have moved to the consumers.
constexpr int kBound = VT_WARPGROUPS == 5 ? 768 : 640, kRegisters = VT_WARPGROUPS == 5 ? 80 : 96;
constexpr int kFetcherRegisters = 24;
constexpr int kConsumerRegisters =
    (kRegisters * (VT_WARPGROUPS + 1) - kFetcherRegisters) / VT_WARPGROUPS / 8 * 8;
constexpr int kCluster = VT_CLUSTER, kStages = VT_STAGES, kChunk = VT_CHUNK, kSlots = VT_SLOTS, kDepth = VT_DEPTH;
constexpr int kStageBytes = kTokens * kStepColumns * 2;
constexpr int kSlotBytes = kChunk * kBlockBytes;  // kBlockBytes: of the format, format_*.cuh
constexpr int kWords = 4;                         // of a row, lane and column step

static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4, "a stage is cut in equal parts");
static_assert(VT_WARPGROUPS >= 1 && VT_WARPGROUPS <= 5 && kThreads <= kBound, "registers without spills");
static_assert(kStageBytes / kCluster % 16 == 0 && kSlotBytes % 16 == 0, "limits and alignment");
