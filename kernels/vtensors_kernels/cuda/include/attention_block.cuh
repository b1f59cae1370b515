#pragma once
// A block of decode attention before and after its pages: whose queries it has, the new token, where sums go.

#include "include/attention_softmax.cuh"
#include "include/attention_splits.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kOwnHeads = kHeads / kWarps;  // whose queries a warp prepares

// A block has up to kHeads query heads that share a key-value head, of one row.
struct BlockHeads {
  int kv_head, tile, first, own;  // tile: of the heads that share kv_head; first: its first head; own: how many
  __device__ __forceinline__ BlockHeads(int heads, int kv_heads) {
    const int shared_heads = heads / kv_heads, tiles = (shared_heads + kHeads - 1) / kHeads;
    kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
    first = kv_head * shared_heads + tile * kHeads;
    own = min(kHeads, shared_heads - tile * kHeads);
  }
};

// What the lanes of a warp hold of the row's new token: two queries, of which the second may lack, and in the last two
// warps of the block that meets it its key and its value.
struct NewToken {
  int warp, lane;
  bool makes_new, is_key;
  float q_gains[kMostOfLane], k_gains[kMostOfLane];
  Head own[kOwnHeads], fresh;

  // Before earlier kernels are waited for. Gains: [D] or null.
  __device__ __forceinline__ NewToken(const float* q_gain, const float* k_gain, int warp_, int lane_)
      : warp(warp_), lane(lane_), makes_new(warp >= kWarps - 2), is_key(warp == kWarps - 2) {
    load_gain(q_gains, q_gain, kDim, lane);
    load_gain(k_gains, is_key ? k_gain : nullptr, kDim, lane);
  }
  // queries: [own_heads, q_head] of the block. key, value: [D].
  __device__ __forceinline__ void load(const unsigned short* queries, int q_head, int own_heads,
                                       const unsigned short* key, const unsigned short* value) {
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i)
      own[i].load(queries + static_cast<long long>(min(warp + kWarps * i, own_heads - 1)) * q_head, kDim, lane);
    if (makes_new) fresh.load(is_key ? key : value, kDim, lane);
  }
  // Norms, where there are gains, and rotation. turning: shared memory, the warp's rows of it alone. has_new: whether
  // this warp makes the new token's key or value.
  __device__ __forceinline__ void prepare(const Turn& turn, unsigned short (&turning)[kHeads + 1][kDim], bool norm_q,
                                          bool norm_k, float eps, bool has_new) {
    if (norm_q)
#pragma unroll
      for (int i = 0; i < kOwnHeads; ++i) own[i].norm(q_gains, eps, kDim);
    if (norm_k && has_new && is_key) fresh.norm(k_gains, eps, kDim);
    if (!turn.rotary) return;
    const auto put = [&](const Head& head, int place) {
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        if (32 * i >= turn.rotary) break;
        turning[place][lane + 32 * i] = narrow(head.x[i]);
      }
    };
    const auto rotate = [&](Head& head, int place) {
      head.rotate(turn, [&](int d) { return widen(turning[place][d]); }, kDim, lane);
    };
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) put(own[i], warp + kWarps * i);
    if (has_new && is_key) put(fresh, kHeads);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) rotate(own[i], warp + kWarps * i);
    if (has_new && is_key) rotate(fresh, kHeads);
  }
  // queries: shared memory, laid out as query_place says; zeros where there is no head.
  __device__ __forceinline__ void put_queries(unsigned short* queries, int own_heads) const {
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
      const int head = warp + kWarps * i;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j)
        queries[32 * head + query_place(lane + 32 * j)] = head < own_heads ? narrow(own[i].x[j]) : 0;
    }
  }
  // As stored, into shared memory and, if it is wanted, the cache.
  __device__ __forceinline__ void put_new(Stored* to, Stored* cache, bool wanted, float scale) const {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const Stored stored = to_stored(fresh.x[i], scale);
      to[lane + 32 * i] = stored;
      if (wanted) cache[lane + 32 * i] = stored;
    }
  }
};

// Where the sums of a block's heads go.
struct Results {
  const unsigned short* queries;  // [own, q_head] with the gates, as of NewToken
  unsigned short* out;            // [own, D]
  float *parts, *tops;            // [own, most_splits, D] and [own, most_splits, 2]
  int own, q_head, most_splits;
  float factor, v_scale;

  // The end of `split`, one of `count`: its sums, or the result where it is the only one. part: the first of Running's.
  template <int parts_of_warp>
  __device__ __forceinline__ void put(const Running<parts_of_warp>& running, int split, int count, int part, int g,
                                      int c) const {
    float weight = running.weight, column_weights[2];
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      weight = __fadd_rn(weight, __shfl_xor_sync(0xffffffffu, weight, distance));
    of_columns(column_weights, weight, c);
    if (count > 1 && part == 0 && c == 0 && g < own)
      *reinterpret_cast<float2*>(tops + 2 * (static_cast<long long>(g) * most_splits + split)) =
          make_float2(__fmul_rn(running.top, factor), weight);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = 2 * c + j;
      if (head >= own || part >= kValueWarps) break;
#pragma unroll
      for (int w = 0; w < parts_of_warp; ++w) {
        const float(&sums)[kOwnSteps][4] = running.sums[w];
        const int first = Values::first_dim(part + w, g);
        if (count > 1) {
          float* to = parts + (static_cast<long long>(head) * most_splits + split) * kDim + first;
          if constexpr (kOwnSteps % 2 == 0) {
#pragma unroll
            for (int a = 0; a < kOwnSteps; a += 2)
              *reinterpret_cast<float4*>(to + 2 * a) =
                  make_float4(sums[a][j], sums[a][2 + j], sums[a + 1][j], sums[a + 1][2 + j]);
          } else {
#pragma unroll
            for (int a = 0; a < kOwnSteps; ++a)
              *reinterpret_cast<float2*>(to + 2 * a) = make_float2(sums[a][j], sums[a][2 + j]);
          }
        } else {
          const unsigned short* gates = queries + head * static_cast<long long>(q_head) + kDim + first;
          unsigned short* to = out + head * kDim + first;
#pragma unroll
          for (int d = 0; d < kUnitDims; ++d) {
            float value = __fmul_rn(__fdividef(sums[d / 2][d % 2 * 2 + j], column_weights[j]), v_scale);
            if (q_head > kDim) value = __fmul_rn(value, sigmoid(widen(gates[d])));
            to[d] = narrow(value);
          }
        }
      }
    }
  }
};
