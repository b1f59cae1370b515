// y = x @ W.T for up to 64 tokens: packed NVFP4 weights as the register operand of warpgroup products.
//
// y[m, n] = row_scale[n] * sum_k x[m, k] * (e2m1 * e4m3 / 256)[n, k]  (+ bias[n]), rounded once to x's format;
// variants: + residual[m, n]; silu(y[m, gate]) * y[m, up] of paired rows, also as the stages of the next linear.
//
// Grid: clusters of kCluster blocks, at most as many as (groups of row tiles) x (column steps); each
// takes an equal range of that line: the end of a group, whole groups, the beginning of one. A block has kWarps
// row tiles of its cluster's group.
// Block: kWarps consumer warps, one row tile each, four to a warpgroup, and a producer (of whose warpgroup
// three warps idle).
//   consumer   fetches its own row tile, kChunk column steps a copy, through a ring of kSlots of its own; decodes
//              them into products' A operands (nvfp4_packed.cuh is in that order), kGroup words at a time
//   producer   fetches x, as permute_activations laid it out, one column step a stage, kStages stages for the
//              whole block; the blocks of a cluster fetch a part each, for all
// Sums of a part of a group go to `partials`; the warp that comes last to a tile adds its parts in order of K, so
// that results depend on the grid and not on timing, and sets the tile's counter back to 0.
//
// Shapes: any N; M <= kTokens. Dynamic shared memory: Layout::kBytes. Arch: sm_90a.

#include "include/row_tile_output.cuh"
#include "include/wgmma_form.cuh"
#include "include/wgmma_step.cuh"

// The matrix as a line of (group of row tiles, column step), cut in one equal range a cluster.
struct Work {
  unsigned steps, tiles, total, clusters, cluster, begin, end;
  __device__ __forceinline__ Work(int n, int column_steps) : steps(column_steps) {
    tiles = (n + kTileRows - 1) / kTileRows;
    total = row_groups(tiles) * steps;
    clusters = gridDim.x / kCluster;
    cluster = blockIdx.x / kCluster;
    begin = total * cluster / clusters;
    end = total * (cluster + 1) / clusters;
  }
  // Whose range has that place.
  __device__ __forceinline__ unsigned owner(unsigned place) const { return ((place + 1) * clusters - 1) / total; }
};

// What a range has of one group.
struct Piece {
  unsigned group, first, end;  // column steps first .. end - 1
  __device__ __forceinline__ Piece(unsigned place, const Work& work) {
    group = place / work.steps;
    first = place - group * work.steps;
    end = min(work.steps, first + work.end - place);
  }
  __device__ __forceinline__ unsigned tile(int warp) const { return row_tile(group, warp); }
};

// What a warp has yet to fetch: chunks of pieces in the order in which they are used.
struct Fetch {
  const unsigned char* from;
  unsigned place;  // of the piece after this one
  int left;        // column steps of this one

  __device__ __forceinline__ void open(const unsigned char* blocks, const Work& work, int warp) {
    left = 0;
    if (place >= work.end) return;
    const Piece now(place, work);
    const unsigned tile = min(now.tile(warp), work.tiles - 1);  // a warp beyond the matrix repeats its last tile
    from = blocks + (static_cast<unsigned long long>(tile) * work.steps + now.first) * kBlockBytes;
    left = now.end - now.first;
    place += left;
  }
  __device__ __forceinline__ void next(unsigned to, unsigned full, bool leader, const unsigned char* blocks,
                                       const Work& work, int warp) {
    if (left <= 0) return;
    if (leader) {
      const unsigned bytes = min(left, kChunk) * kBlockBytes;
      arrive_expecting(full, bytes);
      copy_bulk_once(to, from, bytes, full, evict_first_policy());
    }
    from += kSlotBytes;
    left -= kChunk;
    if (left <= 0) open(blocks, work, warp);
  }
};

// This warp's sums of its part of a tile to memory; true, and the whole sums, for the tile's last warp. A block
// has two places: 0 for a group that an earlier cluster began, 1 for one that it begins itself.
// A warp that finds all others arrived does not announce its own part: that is the end of most ranges.
__device__ __forceinline__ bool add_parts(float (&sums)[kSums], float4* partials, unsigned* counter, const Work& work,
                                          const Piece& piece, int warp, int lane) {
  const unsigned first = work.owner(piece.group * work.steps);
  const unsigned count = work.owner(piece.group * work.steps + work.steps - 1) - first + 1;
  constexpr unsigned kPitch = kTokenTiles * 32, kOfBlock = 2 * kWarps * kPitch;
  float4* of_first = partials + (first * kCluster + block_rank()) * kOfBlock + warp * kPitch + lane;
  const auto part_of = [&](unsigned i) { return of_first + i * kCluster * kOfBlock + (i ? 0 : kWarps * kPitch); };
  const unsigned own = work.cluster - first;
  unsigned before = 0;
  if (lane == 0) before = read_arrivals(counter);
  before = __shfl_sync(0xffffffffu, before, 0);
  const bool late = before + 1 == count;
  if (!late || count > 2) {
    float4* mine = part_of(own);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
      mine[i * 32] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
  __syncwarp();  // orders the warp's stores before lane 0's arrival, and its arrival before the warp's loads
  if (!late) {
    if (lane == 0) before = count_arrival(counter);
    if (__shfl_sync(0xffffffffu, before, 0) + 1 != count) return false;
    __syncwarp();
  }
  if (lane == 0) *counter = 0;
  unsigned other = 0, end = count;
  if (count == 2) {  // the order of two does not matter
    other = own ^ 1;
    end = other + 1;
  } else {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  }
#pragma unroll 1
  for (; other < end; ++other) {
    const float4* from = part_of(other);
    float4 part[kTokenTiles];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) part[i] = __ldcg(from + i * 32);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      sums[4 * i] += part[i].x;
      sums[4 * i + 1] += part[i].y;
      sums[4 * i + 2] += part[i].z;
      sums[4 * i + 3] += part[i].w;
    }
  }
  return true;
}

extern "C" __global__ VT_CLUSTER_DIMENSIONS __launch_bounds__(kBound) void linear_nvfp4_wgmma(
    const unsigned char* __restrict__ blocks,      // [tiles, column steps, kBlockBytes]
    const unsigned char* __restrict__ staged,      // [column steps, 16, kTokens, 8] bf16 or f16
    const float* __restrict__ row_scale,           // [16 tiles]
    const float* __restrict__ bias,                // [16 tiles] or null
    const unsigned short* residual,                // [M, N] or null; not read before the wait
    unsigned short* __restrict__ y,                // [M, N], or [M, N / 2] for silu(gate) * up, or stages of that
    float4* partials,                              // [blocks of the grid, 2, kWarps, kTokens / 8, 32]
    unsigned* counters,                            // [tiles] zeros, left as zeros
    int n,                                         // N
    int column_steps,                              // ceil(K / 128)
    int tokens)                                    // M
{
  extern __shared__ __align__(128) unsigned char memory[];
  const unsigned base = shared_address(memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work(n, column_steps);
  const bool leader = lane == 0;
  const unsigned ring = base + Layout::kRings + warp * kSlots * kSlotBytes;
  const unsigned slot_full = base + Layout::kSlotFull + 8 * warp * kSlots;

  Fetch fetch = {blocks, work.begin, 0};
  if (warp < kWarps) {  // weights before anything else: they do not depend on earlier kernels
    if (leader)
      for (int slot = 0; slot < kSlots; ++slot) init_barrier(slot_full + 8 * slot, 1);
    fence_barrier_init();
    __syncwarp();
    fetch.open(blocks, work, warp);
    for (int slot = 0; slot < kSlots; ++slot)
      fetch.next(ring + slot * kSlotBytes, slot_full + 8 * slot, leader, blocks, work, warp);
  } else if (warp == kWarps && leader) {
    init_stages(base);
  }
  launch_dependents();
  __syncthreads();
  meet_cluster();
  wait_for_predecessors();

  if (warp >= kWarps) {
    if constexpr (kMovesRegisters) give_registers_back<kFetcherRegisters>();
    if (warp == kWarps && leader) fetch_stages(staged, work.begin, work.end, work.steps, base);
  } else {
    if constexpr (kMovesRegisters) take_registers<kConsumerRegisters>();
    const BlockReader reader(lane);
    const unsigned own = kept(ring + 16 * lane);
    const unsigned long long x_first = operand_descriptor(base + Layout::kX, kTokens * 16, 128);
    float sums[1][kSums];
    unsigned operands[kDepth][2][4] = {};
    Place<kSlots> slot;
    Place<kStages> stage;
    for (unsigned place = work.begin; place < work.end;) {
      const Piece now(place, work);
      place += now.end - now.first;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[0][i] = 0.0f;
      unsigned previous = 0;
      int within = 0;
      for (unsigned step = now.first; step < now.end; ++step) {
        if (within == 0) wait_barrier(slot_full + 8 * slot.index, slot.parity);
        BlockPart part;
        part.load(reader, own + slot.index * kSlotBytes + within * kBlockBytes);
        wait_barrier(base + Layout::kXFull + 8 * stage.index, stage.parity);
        multiply_step(sums, operands, part, reader, x_first + stage.index * (kStageBytes / 16), previous, lane);
        previous = base + Layout::kXEmpty + 8 * stage.index;
        stage.advance();
        if (++within == kChunk || step + 1 == now.end) {
          __syncwarp();
          fetch.next(ring + slot.index * kSlotBytes, slot_full + 8 * slot.index, leader, blocks, work, warp);
          slot.advance();
          within = 0;
        }
      }
      wait_warpgroup<0>();
      pin(sums[0]);
      release_stage(previous, lane);
      const unsigned tile = now.tile(warp);
      if (tile >= work.tiles) continue;
      const bool whole = now.end - now.first == work.steps;
      if (!whole && !add_parts(sums[0], partials, counters + tile, work, now, warp, lane)) continue;
      finish_row_tile(sums[0], tile, row_scale, bias, residual, y, n, tokens, lane);
    }
  }
  __syncwarp();
  // No block of a cluster leaves while another may still write to it.
  meet_cluster();
}
