// x = norm(h); logits = x @ w.T; of each token the experts with the largest logits and their weights, in one launch.
//
// x: the bits of rms_norm.cu. Logits: those of linear_plain_small in its forms of 16 pieces. Choice and weights: those
// of router_topk.cu. Rows of w behind the experts' are other gates over the same x, whose logits are handed on.
//
// Grid: x kCluster, one cluster; y: one for every kTokens tokens. Block: a warp for each of 16 pieces of K. Block r of a
// cluster has the tiles r, r + kCluster, ... of eight rows of w, all in registers before the kernels before this one
// have ended, and norms all tokens; what it has summed goes to the block that chooses for the token, t % kCluster.
// Tokens are the 16-row operand of the products, whose second half is zeros; rows of w the 8-column one: lane 4 g + c
// holds columns 8 c to 8 c + 7 of a step for row g of w and for token g.
//
// Shapes: any M; n <= 8 * kCluster * kRowTiles; experts <= 32 * kPerLane; top <= min(32, experts); K <= kColumns and
// a multiple of 8. Alignment: rows of h, x, w, gain 16 bytes. Dynamic shared memory: Shared. Arch: sm_90a.

#include "include/expert_choice.cuh"
#include "include/piece_sums.cuh"
#include "include/ptx.cuh"
#include "include/row_norm.cuh"
#include "include/weights_ptx.cuh"

#ifndef VT_CLUSTER
#define VT_CLUSTER 8
#endif
#ifndef VT_ROW_TILES
#define VT_ROW_TILES 5
#endif
#ifndef VT_STEPS
#define VT_STEPS 4
#endif
#ifndef VT_PER_LANE
#define VT_PER_LANE 8
#endif

constexpr int kCluster = VT_CLUSTER, kRowTiles = VT_ROW_TILES, kSteps = VT_STEPS, kPerLane = VT_PER_LANE;
constexpr int kWarps = 16, kThreads = 32 * kWarps, kTokens = 8, kRows = 8 * kRowTiles, kStep = 32;
constexpr int kColumns = kWarps * kSteps * kStep, kChunks = kColumns / 8;
constexpr int kOwnTokens = (kTokens + kCluster - 1) / kCluster;  // that a block chooses for
constexpr int kRowsAtOnce = kThreads / kChunks;                  // of h, a chunk of eight columns for each thread
static_assert(kThreads % kChunks == 0 && kTokens % kRowsAtOnce == 0, "every thread has a chunk of whole rows");

struct __align__(16) Shared {
  unsigned short h[kTokens][kColumns + 32];  // the gap keeps rows apart in the banks
  float gains[kColumns];
  float products[kWarps][kTokens][kRows];
  float logits[kOwnTokens][kCluster * kRows];
  float scales[kTokens];
  unsigned long long arrived;
};

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) norm_router(
    const unsigned short* h,           // [M, K] bf16 or f16, rows h_stride apart; as ptx.cuh says of such inputs
    const float* __restrict__ gain,    // [K]
    const unsigned char* __restrict__ w,  // [n, K] bf16 or f16
    unsigned short* __restrict__ x,    // [M, K]
    unsigned short* __restrict__ gates,  // [M, n - experts]
    int* __restrict__ chosen,          // [M, top]
    float* __restrict__ weights,       // [M, top]
    float eps, int all_tokens, int n, int experts, int k, int top,
    long long h_stride)                // elements
{
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
  const int rank = static_cast<int>(cluster_rank());
  const int first_token = static_cast<int>(blockIdx.y) * kTokens, m = min(all_tokens - first_token, kTokens);
  const int tiles = (n + 7) / 8;
  const unsigned barrier = shared_address(&shared.arrived);
  if (thread == 0) {
    init_barrier(barrier, 1);
    if (rank < m) arrive_expecting(barrier, (m - rank + kCluster - 1) / kCluster * tiles * 32);
  }
  fence_barrier_init();
  cluster_arrive();
  launch_dependents();

  const int steps = (k + kStep - 1) / kStep;
  const int begin = steps * warp / kWarps, count = steps * (warp + 1) / kWarps - begin;
  const int column = begin * kStep + c * 8;  // of the lane, in the first step
  const unsigned char* from = w + 2 * (static_cast<long long>(rank * 8 + g) * k + column);
  uint4 ahead[kSteps][kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const bool row = (rank + kCluster * r) * 8 + g < n;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      ahead[i][r] = row && i < count && column + i * kStep < k ? load_weights_128(from + 2 * i * kStep)
                                                               : make_uint4(0, 0, 0, 0);
    from += 16ll * kCluster * k;
  }
  for (int i = 4 * thread; i < k; i += 4 * kThreads)
    *reinterpret_cast<float4*>(shared.gains + i) = __ldg(reinterpret_cast<const float4*>(gain + i));

  wait_for_predecessors();
  const int chunk = thread % kChunks;
  uint4 read[kTokens / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kTokens / kRowsAtOnce; ++i) {
    const int token = thread / kChunks + i * kRowsAtOnce;
    read[i] = token < m && 8 * chunk < k
                  ? *reinterpret_cast<const uint4*>(h + (first_token + token) * h_stride + 8 * chunk)
                  : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kTokens / kRowsAtOnce; ++i)
    *reinterpret_cast<uint4*>(shared.h[thread / kChunks + i * kRowsAtOnce] + 8 * chunk) = read[i];
  __syncthreads();
  if (warp < m) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; i += 32)
      add_squares(sum, *reinterpret_cast<const uint4*>(shared.h[warp] + 8 * (lane + i)));  // zeros add nothing
    const float scale = norm_scale(sum, k, eps);
    if (lane == 0) shared.scales[warp] = scale;
  }
  __syncthreads();

  float d[kRowTiles][4] = {};
  const float scale = g < m ? shared.scales[g] : 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    uint4 normed = make_uint4(0, 0, 0, 0);
    const int at = column + i * kStep;
    if (g < m && i < count && at < k) {
      const uint4 raw = *reinterpret_cast<const uint4*>(shared.h[g] + at);
      const float4 low = *reinterpret_cast<const float4*>(shared.gains + at);
      const float4 high = *reinterpret_cast<const float4*>(shared.gains + at + 4);
      normed = make_uint4(normed_pair(raw.x, scale, low.x, low.y), normed_pair(raw.y, scale, low.z, low.w),
                          normed_pair(raw.z, scale, high.x, high.y), normed_pair(raw.w, scale, high.z, high.w));
      if (g % kCluster == rank)
        *reinterpret_cast<uint4*>(x + static_cast<long long>(first_token + g) * k + at) = normed;
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      multiply_add_16x8x16(d[r], normed.x, 0, normed.y, 0, ahead[i][r].x, ahead[i][r].y);
      multiply_add_16x8x16(d[r], normed.z, 0, normed.w, 0, ahead[i][r].z, ahead[i][r].w);
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
    *reinterpret_cast<float2*>(&shared.products[warp][g][r * 8 + 2 * c]) = make_float2(d[r][0], d[r][1]);
  __syncthreads();

  cluster_wait();  // every block has begun
  constexpr int kWords = kRows / 4;
  for (int i = thread; i < m * kWords; i += kThreads) {
    const int token = i / kWords, word = i % kWords, tile = rank + kCluster * (word / 2), to = token % kCluster;
    if (tile < tiles)
      store_remote(
          cluster_address(shared_address(&shared.logits[token / kCluster][8 * tile + word % 2 * 4]), to),
          sum_of_pieces<kWarps>(&shared.products[0][token][4 * word], kTokens * kRows), cluster_address(barrier, to));
  }
  if (rank + kCluster * warp >= m) return;
  wait_barrier(barrier, 0);
  const long long token = first_token + rank + kCluster * warp;
  const float* logits = shared.logits[warp];
  unsigned keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) keys[i] = narrow(logits[min(lane + 32 * i, n - 1)]);
#pragma unroll 1
  for (int i = experts + lane; i < n; i += 32) gates[token * (n - experts) + i - experts] = narrow(logits[i]);
  choose_experts(keys, experts, top, lane, chosen + token * top, weights + token * top);
}
