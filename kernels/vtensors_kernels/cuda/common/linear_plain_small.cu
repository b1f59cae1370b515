// y[m, n] = sum over k of x[m, k] * w[n, k], + bias[n], + residual[m, n]; for few tokens and weights of 16 bits.
// With VT_NORM x is x * gain rounded to 16 bits, and the sum is multiplied by rsqrt(mean(x[m]^2) + eps).
//
// K is cut into kPieces runs of steps of 32 columns, a warp for each. A piece is summed by matrix instructions in
// order of k, four pieces one after the other make a group, the groups one after the other the sum. Nothing else
// enters, so that a row is the same bits at any M, any place in the batch and in every form of as many pieces.
//
// Grid: clusters of kCluster blocks, one for every kRows rows of w; y: one for every kTokens tokens. Block: kWarps
// warps, which are its pieces; in a cluster a block is one group, and the first one adds what the others send. Tokens
// are the 16-row operand of the products, rows of w the 8-column one: lane 4 g + c holds columns 8 c to 8 c + 7 of a
// step for row g of w and for tokens g and g + 8, of which eight tokens leave the second out. As many steps of w as
// kAhead are in registers before the kernels before this one have ended.
//
// Shapes: any M and N; K and the strides of x multiples of 8, x and w aligned to 16 bytes.
// Shared memory: static. Arch: sm_80 and newer; clusters and dependent launch from sm_90 on.

#include "include/ptx.cuh"
#include "include/weights_ptx.cuh"
#include "include/piece_sums.cuh"
#include "include/sixteen_bits.cuh"
#include "include/row_values.cuh"

#ifndef VT_WARPS
#define VT_WARPS 16
#endif
#ifndef VT_CLUSTER
#define VT_CLUSTER 1
#endif
#ifndef VT_TOKEN_GROUPS
#define VT_TOKEN_GROUPS 2  // of eight tokens: 1, 2 or 4
#endif
#ifndef VT_ROW_TILES
#define VT_ROW_TILES 1
#endif
#ifndef VT_NORM
#define VT_NORM 0
#endif
#if VT_ARCH >= 900 && VT_CLUSTER > 1
#define VT_CLUSTER_ATTRIBUTE __cluster_dims__(VT_CLUSTER, 1, 1)
#else
#define VT_CLUSTER_ATTRIBUTE
#endif

constexpr int kWarps = VT_WARPS, kCluster = VT_CLUSTER, kTokenGroups = VT_TOKEN_GROUPS, kRowTiles = VT_ROW_TILES;
constexpr int kPieces = kWarps * kCluster, kThreads = 32 * kWarps;
constexpr int kTokenTiles = (kTokenGroups + 1) / 2, kTokens = 8 * kTokenGroups, kRows = 8 * kRowTiles, kStep = 32;
// Steps of w in registers, as many as leave no spills, and of those the ones whose x is loaded together.
constexpr bool kRoomy = kTokenTiles + VT_NORM <= (kThreads <= 128 ? 2 : 1);
constexpr int kAhead = kRowTiles > 1 ? 4 - kTokenTiles - VT_NORM : kRoomy ? 10 : 5 - kTokenTiles - VT_NORM;
constexpr bool kOneTile = kTokenTiles == 1 && kRowTiles == 1 && !VT_NORM;
constexpr int kAtOnce = !kOneTile ? 1 : kThreads <= 128 || kTokenGroups == 1 ? kAhead : kAhead / 2;
constexpr int kBlocksPerSm = kRowTiles > 1 ? 2 : 1;
static_assert(kWarps % kGroup == 0 && (kCluster == 1 || kWarps == kGroup), "a block of a cluster is a group");
static_assert(kCluster == 1 || VT_ARCH >= 900, "clusters come with sm_90");
static_assert(kAhead > 0 && kAhead % kAtOnce == 0, "turns of equal length");

// What the warps have summed, and of a cluster what the other blocks have.
struct __align__(16) Sums {
  float products[kWarps][kTokens][kRows];
  float squares[kWarps][kTokens];
};
struct __align__(16) Received {
  float products[kTokens][kRows];
  float squares[kTokens];
};

// Eight 16-bit numbers, zeros where `wanted` is false.
__device__ __forceinline__ uint4 load_if(bool wanted, const unsigned short* from) {
  return wanted ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ uint4 load_weights_if(bool wanted, const unsigned char* from) {
  return wanted ? load_weights_128(from) : make_uint4(0, 0, 0, 0);
}

// x * gain, rounded; adds the squares of x in order.
__device__ __forceinline__ uint4 gained(uint4 x, const float (&gain)[8], float& squares) {
  const unsigned words[4] = {x.x, x.y, x.z, x.w};
  unsigned out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = widen(words[i] & 0xffffu), high = widen(words[i] >> 16);
    squares = __fmaf_rn(low, low, squares);
    squares = __fmaf_rn(high, high, squares);
    out[i] = narrow_pair(__fmul_rn(low, gain[2 * i]), __fmul_rn(high, gain[2 * i + 1]));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

__device__ __forceinline__ void load_gains(const float* __restrict__ from, float (&gains)[8]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(from));
  const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
  gains[0] = low.x, gains[1] = low.y, gains[2] = low.z, gains[3] = low.w;
  gains[4] = high.x, gains[5] = high.y, gains[6] = high.z, gains[7] = high.w;
}

extern "C" __global__ void VT_CLUSTER_ATTRIBUTE __launch_bounds__(kThreads, kBlocksPerSm) linear_plain_small(
    const unsigned char* __restrict__ w,  // [N, K] bf16 or f16
    const unsigned short* x,              // [M, K], rows x_stride apart; as ptx.cuh says of what earlier kernels write
    unsigned short* __restrict__ out,     // [M, N]
    const float* __restrict__ bias,       // [N] or null
    const unsigned short* residual,       // [M, N], rows residual_stride apart, or null; likewise
    const float* __restrict__ gain,       // [K] of VT_NORM, aligned to 16 bytes
    float eps,                            // of VT_NORM
    int all_tokens, int n, int k,
    long long x_stride, long long residual_stride)  // elements
{
  __shared__ Sums sums;
  __shared__ Received received[kCluster > 1 ? kCluster - 1 : 1];
  __shared__ __align__(8) unsigned long long arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  int rank = 0;
#if VT_ARCH >= 900
  if (kCluster > 1) {
    rank = static_cast<int>(cluster_rank());
    if (threadIdx.x == 0) init_barrier(shared_address(&arrived), 1);
    fence_barrier_init();
    cluster_arrive();
  }
#endif
  launch_dependents();

  const int first_token = static_cast<int>(blockIdx.y) * kTokens, m = min(all_tokens - first_token, kTokens);
  const int steps = (k + kStep - 1) / kStep, piece = rank * kWarps + warp;
  const int begin = steps * piece / kPieces, end = steps * (piece + 1) / kPieces;
  // Of the lane: where its columns begin, and how many columns from there on belong to the piece.
  const int column = begin * kStep + c * 8, first_row = static_cast<int>(blockIdx.x) / kCluster * kRows;
  int left = min(end * kStep, k) - column;
  const unsigned char* rows[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const int row = min(first_row + r * 8 + g, n - 1);  // rows beyond the last are summed and not stored
    rows[r] = w + 2 * (static_cast<long long>(row) * k + column);
  }
  const unsigned short* tokens[kTokenGroups];
#pragma unroll
  for (int t = 0; t < kTokenGroups; ++t) tokens[t] = x + (first_token + t * 8 + g) * x_stride + column;

  uint4 ahead[kAhead][kRowTiles];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      ahead[i][r] = load_weights_128_early_if(i * kStep < left, rows[r] + 2 * i * kStep);

  float d[kTokenTiles][kRowTiles][4] = {};
  float squares[kTokenGroups] = {};
  wait_for_predecessors();
#pragma unroll 1
  for (int base = begin; base < end; base += kAhead) {
#pragma unroll
    for (int first = 0; first < kAhead; first += kAtOnce) {
      uint4 xs[kAtOnce][kTokenGroups];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int t = 0; t < kTokenGroups; ++t)
          xs[i][t] = load_if((first + i) * kStep < left && t * 8 + g < m, tokens[t] + (first + i) * kStep);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int step = first + i;
#if VT_NORM
        float gains[8] = {};
        if (step * kStep < left) load_gains(gain + base * kStep + c * 8 + step * kStep, gains);
#pragma unroll
        for (int t = 0; t < kTokenGroups; ++t) xs[i][t] = gained(xs[i][t], gains, squares[t]);
#endif
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const uint4 low = xs[i][2 * t];
          const uint4 high = 2 * t + 1 < kTokenGroups ? xs[i][2 * t + 1] : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            const uint4 b = ahead[step][r];
            multiply_add_16x8x16(d[t][r], low.x, high.x, low.y, high.y, b.x, b.y);
            multiply_add_16x8x16(d[t][r], low.z, high.z, low.w, high.w, b.z, b.w);
          }
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          ahead[step][r] =
              load_weights_if((step + kAhead) * kStep < left, rows[r] + 2 * (step + kAhead) * kStep);
      }
    }
    left -= kAhead * kStep;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) rows[r] += 2 * kAhead * kStep;
#pragma unroll
    for (int t = 0; t < kTokenGroups; ++t) tokens[t] += kAhead * kStep;
  }

#pragma unroll
  for (int t = 0; t < kTokenGroups; ++t) {
    const int token = t * 8 + g;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      *reinterpret_cast<float2*>(&sums.products[warp][token][r * 8 + 2 * c]) =
          make_float2(d[t / 2][r][t % 2 * 2], d[t / 2][r][t % 2 * 2 + 1]);
#if VT_NORM
    // A step's columns lie in four lanes.
    float square = squares[t];
    square = __fadd_rn(square, __shfl_xor_sync(0xffffffffu, square, 1));
    square = __fadd_rn(square, __shfl_xor_sync(0xffffffffu, square, 2));
    if (c == 0) sums.squares[warp][token] = square;
#endif
  }
  __syncthreads();

  constexpr int kWords = kRows / 4;
#if VT_ARCH >= 900
  if (kCluster > 1) {
    // Every block sends to the first one, which must have begun.
    const int messages = m * kWords, of_squares = VT_NORM ? (m + 3) / 4 : 0;
    const unsigned barrier = shared_address(&arrived);
    cluster_wait();
    if (rank == 0) {
      if (threadIdx.x == 0) arrive_expecting(barrier, (kCluster - 1) * (messages + of_squares) * 16);
      wait_barrier(barrier, 0);
    } else {
      const unsigned there = cluster_address(barrier, 0);
      Received* own = &received[rank - 1];
      for (int i = threadIdx.x; i < messages + of_squares; i += kThreads) {
        const bool product = i < messages;
        const int place = product ? i : i - messages;
        const float* from = product ? &sums.products[0][0][4 * place] : &sums.squares[0][4 * place];
        const float* to = product ? &own->products[0][4 * place] : &own->squares[4 * place];
        store_remote(cluster_address(shared_address(to), 0),
                     sum_of_pieces<kWarps>(from, product ? kTokens * kRows : kTokens), there);
      }
      return;
    }
  }
#endif
  for (int i = threadIdx.x; i < m * kWords; i += kThreads) {
    const int token = i / kWords, word = i % kWords;
    float4 total = sum_of_pieces<kWarps>(&sums.products[0][token][4 * word], kTokens * kRows);
    float scale = 1.0f;
#if VT_NORM
    float4 square = sum_of_pieces<kWarps>(&sums.squares[0][token / 4 * 4], kTokens);
#endif
#pragma unroll
    for (int other = 0; other < kCluster - 1; ++other) {
      total = sum_of(total, *reinterpret_cast<const float4*>(&received[other].products[token][4 * word]));
#if VT_NORM
      square = sum_of(square, *reinterpret_cast<const float4*>(&received[other].squares[token / 4 * 4]));
#endif
    }
#if VT_NORM
    const float2 pair = token % 4 < 2 ? make_float2(square.x, square.y) : make_float2(square.z, square.w);
    scale = rsqrtf(__fadd_rn(__fdiv_rn(token % 2 ? pair.y : pair.x, static_cast<float>(k)), eps));
#endif
    const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + 4 * word + j;
      if (row >= n) break;
      float y = VT_NORM ? scaled_sum(values[j], scale) : values[j];
      if (bias) y = added(y, __ldg(bias + row));
      const long long place = first_token + token;
      if (residual) y = added(y, widen(residual[place * residual_stride + row]));
      out[place * n + row] = narrow(y);
    }
  }
}
