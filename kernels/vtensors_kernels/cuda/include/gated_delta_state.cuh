#pragma once
// A piece of a value head's state in registers, and what one token does to it. kSharers lanes of a warp share columns,
// each with kRows of the kKey rows; the order of every sum depends on kKey alone, not on how many columns a lane has.
//
// Lane r * kLanesOfRow + c holds columns `columns` * c .. of the rows row_of(i, r), i < kRows.

#include "include/gated_delta.cuh"
#include "include/ptx.cuh"

constexpr int kSharers = kKey > 128 ? 16 : 8;
constexpr int kLanesOfRow = 32 / kSharers;
constexpr int kRows = kKey / kSharers;
// Neighbouring rows of a lane, read at once.
constexpr int kRun = kRows % 4 == 0 ? 4 : kRows % 2 == 0 ? 2 : 1;

__device__ __forceinline__ constexpr int row_of(int i, int r) {
  return i / kRun * (kRun * kSharers) + r * kRun + i % kRun;
}

// A lane's neighbouring rows i .. i + kRun - 1 of a vector [kKey] in shared memory, aligned to 16 bytes. Volatile: read
// where they are used, and again at the next use, rather than held in registers.
struct SharedRows {
  unsigned at;
  __device__ __forceinline__ SharedRows(const float* from, int r) : at(shared_address(from) + 4 * kRun * r) {}
  __device__ __forceinline__ void run(int i, float (&to)[kRun]) const {
    const unsigned place = at + 4 * kSharers * i;
    if constexpr (kRun == 4) {
      const float4 v = load_shared_float4(place);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) to[j] = __uint_as_float(load_shared_32(place + 4 * j));
    }
  }
};

// The same in registers.
struct HeldRows {
  float rows[kRows];
  __device__ __forceinline__ void load(const SharedRows& from) {
#pragma unroll
    for (int i = 0; i < kRows; i += kRun) {
      float part[kRun];
      from.run(i, part);
#pragma unroll
      for (int j = 0; j < kRun; ++j) rows[i + j] = part[j];
    }
  }
  __device__ __forceinline__ void run(int i, float (&to)[kRun]) const {
#pragma unroll
    for (int j = 0; j < kRun; ++j) to[j] = rows[i + j];
  }
};

template <int columns>
__device__ __forceinline__ void load_columns(const float* from, float (&to)[columns]) {
  if constexpr (columns == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (columns == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *from;
  }
}

// Not read again before the next step. The intrinsics keep the four together, which plain stores do not always.
template <int columns>
__device__ __forceinline__ void store_columns(float* to, const float (&from)[columns]) {
  if constexpr (columns == 4) __stcs(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
  else if constexpr (columns == 2) __stcs(reinterpret_cast<float2*>(to), make_float2(from[0], from[1]));
  else __stcs(to, from[0]);
}

template <int columns>
struct StatePart {
  static_assert(columns == 1 || columns == 2 || columns == 4, "up to 128 bits of a row");
  float s[kRows][columns];

  // from: [kKey, kValue] at the lane's first column.
  __device__ __forceinline__ void load(const float* from, int r) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_columns(from + row_of(i, r) * kValue, s[i]);
  }
  // The same of what may be another block's to write (then the numbers are any); for four columns.
  __device__ __forceinline__ void load_relaxed(const float* from, int r) {
    static_assert(columns == 4, "one load a row");
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 v = load_relaxed_float4(from + row_of(i, r) * kValue);
      s[i][0] = v.x, s[i][1] = v.y, s[i][2] = v.z, s[i][3] = v.w;
    }
  }
  __device__ __forceinline__ void store(float* to, int r) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) store_columns(to + row_of(i, r) * kValue, s[i]);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < columns; ++c) s[i][c] = 0.0f;
  }

  // Moves the state on by a token; gives o of column output_column(r), right in every lane. A whole warp.
  template <typename Rows>
  __device__ __forceinline__ float advance(const Rows& k, const Rows& q, const float (&v)[columns], const Factors& f,
                                           int r) {
    float read[columns], seen[columns];
    dot(k, read);
#pragma unroll
    for (int distance = 1; distance < kSharers; distance *= 2)
#pragma unroll
      for (int c = 0; c < columns; ++c) read[c] = __fadd_rn(read[c], from_row(read[c], distance));
    dot(q, seen);
    float write[columns], change[columns];
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      change[c] = __fmul_rn(f.beta, __fmaf_rn(-f.read_key, read[c], v[c]));
      write[c] = __fmul_rn(f.write_key, change[c]);
    }
#pragma unroll
    for (int i = 0; i < kRows; i += kRun) {
      float part[kRun];
      k.run(i, part);
#pragma unroll
      for (int j = 0; j < kRun; ++j)
#pragma unroll
        for (int c = 0; c < columns; ++c)
          s[i + j][c] = __fmaf_rn(part[j], write[c], __fmul_rn(f.decay, s[i + j][c]));
    }
    return __fmaf_rn(f.product, pick(change, r), __fmul_rn(f.read_query, folded(seen, r)));
  }

  // The column of those of a lane whose o advance gives it.
  __device__ __forceinline__ static int output_column(int r) {
    if constexpr (columns == 4) return (r & 1) * 2 + (r >> 1 & 1);
    else return columns == 2 ? r & 1 : 0;
  }

 private:
  __device__ __forceinline__ static float from_row(float value, int distance) {
    return __shfl_xor_sync(kWholeWarp, value, distance * kLanesOfRow);
  }
  template <typename Rows>
  __device__ __forceinline__ void dot(const Rows& x, float (&sums)[columns]) const {
#pragma unroll
    for (int i = 0; i < kRows; i += kRun) {
      float part[kRun];
      x.run(i, part);
#pragma unroll
      for (int j = 0; j < kRun; ++j)
#pragma unroll
        for (int c = 0; c < columns; ++c)
          sums[c] = i + j ? __fmaf_rn(s[i + j][c], part[j], sums[c]) : __fmul_rn(s[0][c], part[0]);
    }
  }
  __device__ __forceinline__ static float pick(const float (&values)[columns], int r) {
    float held[columns];
#pragma unroll
    for (int c = 0; c < columns; ++c) held[c] = values[c];
    if constexpr (columns == 4) held[0] = r & 1 ? held[2] : held[0], held[1] = r & 1 ? held[3] : held[1];
    if constexpr (columns >= 2) held[0] = r >> (columns / 4) & 1 ? held[1] : held[0];
    return held[0];
  }
  // The sum over all rows of column output_column(r): each exchange with another row halves the columns that a lane
  // still adds up; the order of the sum is that of adding up all of them everywhere.
  __device__ __forceinline__ static float folded(float (&sums)[columns], int r) {
    int distance = 1;
#pragma unroll
    for (int count = columns / 2; count; count /= 2, distance *= 2)
#pragma unroll
      for (int c = 0; c < count; ++c) {
        const bool upper = r & distance;
        const float given = upper ? sums[c] : sums[c + count], kept = upper ? sums[c + count] : sums[c];
        sums[c] = __fadd_rn(kept, from_row(given, distance));
      }
#pragma unroll
    for (; distance < kSharers; distance *= 2) sums[0] = __fadd_rn(sums[0], from_row(sums[0], distance));
    return sums[0];
  }
};
