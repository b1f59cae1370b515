#pragma once
// Twins of the functions that hold inline PTX (include/ptx.cuh, conversions.cuh and others), under the same names.
// The loader cuts those out of a source; a twin takes their place. Copies that mbarriers count are done at once; clusters
// have one block.

#include <vector>

#include "threads.h"

#ifndef VT_F16
#define VT_F16 0
#endif

// ---- shared memory by 32-bit address

inline uint4 load_shared_128(unsigned address) { return emulation::shared_value<uint4>(address); }
inline float4 load_shared_float4(unsigned address) { return emulation::shared_value<float4>(address); }
inline unsigned load_shared_32(unsigned address) { return emulation::shared_value<unsigned>(address); }
inline unsigned load_shared_16(unsigned address) { return emulation::shared_value<unsigned short>(address); }
inline uint4 load_shared_128_if(bool wanted, unsigned address) {
  return wanted ? load_shared_128(address) : make_uint4(0, 0, 0, 0);
}
inline void store_shared_128(unsigned address, uint4 v) { emulation::shared_value<uint4>(address) = v; }
inline void store_shared_16(unsigned address, unsigned short v) { emulation::shared_value<unsigned short>(address) = v; }
inline void store_shared_float(unsigned address, float v) { emulation::shared_value<float>(address) = v; }
inline unsigned kept(unsigned value) { return value; }
template <typename T>
inline T* kept(T* pointer) { return pointer; }

// ---- mbarriers

namespace emulation {

struct Mbarrier {
  unsigned short expected, pending : 15, phase : 1;
  int bytes;  // of copies announced and not done
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 64 bits");
inline void close_phase(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.expected;
}
inline void arrive_once(unsigned barrier) {
  Mbarrier& b = shared_value<Mbarrier>(barrier);
  if (!b.pending || b.pending > b.expected) fail("an arrival at mbarrier %u that it does not expect", barrier - kWindow);
  b.pending = b.pending - 1;
  close_phase(b);
}
inline void count_bytes(unsigned barrier, int bytes) {
  Mbarrier& b = shared_value<Mbarrier>(barrier);
  b.bytes += bytes;
  close_phase(b);
}
inline bool phase_done(const void* barrier, u64 parity) {
  return static_cast<const Mbarrier*>(barrier)->phase != (parity & 1);
}
inline void copy_now(unsigned to, const void* from, unsigned bytes) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("a copy of %u bytes from %p: not whole 16", bytes, from);
  memcpy(shared_at(to, bytes, 16), from, bytes);
}

}  // namespace emulation

inline void init_barrier(unsigned barrier, unsigned arrivals) {
  auto& b = emulation::shared_value<emulation::Mbarrier>(barrier);
  b.expected = b.pending = arrivals, b.phase = 0, b.bytes = 0;
}
inline void fence_barrier_init() {}
inline void arrive(unsigned barrier) { emulation::arrive_once(barrier); }
inline void wait_barrier(unsigned barrier, unsigned parity) {
  emulation::wait(parity ? "an mbarrier, parity 1" : "an mbarrier, parity 0", emulation::phase_done,
                  &emulation::shared_value<emulation::Mbarrier>(barrier), parity);
}
inline void arrive_expecting(unsigned barrier, unsigned bytes) {
  emulation::shared_value<emulation::Mbarrier>(barrier).bytes += static_cast<int>(bytes);
  emulation::arrive_once(barrier);
}

// ---- copies from global to shared memory

inline void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  emulation::copy_now(to, from, bytes);
  emulation::count_bytes(barrier, -static_cast<int>(bytes));
}
inline unsigned long long evict_first_policy() { return 0; }
inline void prefetch_bulk(const void* from, unsigned bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulation::fail("a prefetch of %u bytes from %p", bytes, from);
  // Both ends must be there, as on a device.
  (void)*static_cast<const volatile char*>(from);
  (void)*(static_cast<const volatile char*>(from) + bytes - 1);
}
inline void copy_bulk_once(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long) {
  copy_bulk(to, from, bytes, barrier);
}
inline void copy_16(unsigned to, const void* from) { emulation::copy_now(to, from, 16); }
inline void arrive_after_copies(unsigned barrier) { emulation::arrive_once(barrier); }

// Copies waited for by groups (staged_copies_ptx.cuh): every other lane's are done at once, the others' as late as may
// be, so that both what is read too early and what is written again too early shows.
namespace emulation {

struct LateCopy {
  unsigned to, bytes;
  const void* from;  // null: zeros
  u64 group;
};
struct LateCopies {
  u64 block, groups;  // block: whose copies these are
  std::vector<LateCopy> list;
};
static LateCopies late_copies[kMostThreads];
inline LateCopies& own_copies() {
  LateCopies& own = late_copies[now->number];
  if (own.block != blocks_begun) own = {blocks_begun, 0, {}};
  return own;
}
inline void do_copy(const LateCopy& copy) {
  void* to = shared_at(copy.to, copy.bytes, copy.bytes);
  copy.from ? memcpy(to, copy.from, copy.bytes) : memset(to, 0, copy.bytes);
}

}  // namespace emulation

template <int bytes>
inline void copy_or_zero(unsigned to, const void* from, bool wanted) {
  if (reinterpret_cast<uintptr_t>(from) % bytes) emulation::fail("a copy of %d bytes from %p", bytes, from);
  auto& own = emulation::own_copies();
  const emulation::LateCopy copy = {to, bytes, wanted ? from : nullptr, own.groups};
  if (emulation::own_lane() % 2) own.list.push_back(copy);
  else emulation::do_copy(copy);
}
inline void commit_copies() { emulation::own_copies().groups++; }
template <int groups>
inline void wait_copies() {
  auto& own = emulation::own_copies();
  size_t done = 0;
  for (; done < own.list.size() && own.list[done].group + groups < own.groups; ++done) emulation::do_copy(own.list[done]);
  own.list.erase(own.list.begin(), own.list.begin() + done);
}

// ---- loads before the wait (experts_early_ptx.cuh)

inline int load_early(const int* from) { return *from; }
inline float load_early(const float* from) { return *from; }
inline unsigned short load_early(const unsigned short* from) { return *from; }
inline unsigned load_early_apart(const unsigned short* from) { return *from; }

// ---- clusters of one block

inline unsigned cluster_rank() { return 0; }
inline unsigned cluster_address(unsigned address, unsigned rank) {
  if (rank) emulation::fail("block %u of the cluster: clusters have one block here", rank);
  return address;
}
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline void store_remote(unsigned address, float4 v, unsigned barrier) {
  emulation::shared_value<float4>(address) = v;
  emulation::count_bytes(barrier, -16);
}

// ---- launches, barriers

inline void launch_dependents() {}
inline void wait_for_predecessors() {}
inline float load_written_float(const float* from) { return *from; }
inline int load_hint(const int* from) { return *from; }
inline int load_relaxed(const int* from) { return *from; }
inline unsigned short load_relaxed(const unsigned short* from) { return *from; }
inline float4 load_relaxed_float4(const float* from) { return *reinterpret_cast<const float4*>(from); }
inline void sync_threads_of(unsigned barrier, unsigned threads) {
  emulation::u64 generation;
  emulation::sync_at(barrier, threads, generation);
}

// ---- conversions and pairs

inline float widen_f16(unsigned short bits) { return emulation::widen_f16(bits); }
inline unsigned narrow_f16_pair(float low, float high) {
  return emulation::narrow_f16(low) | emulation::narrow_f16(high) << 16;
}
inline unsigned narrow_bf16_pair(float low, float high) {
  return emulation::narrow_bf16(low) | emulation::narrow_bf16(high) << 16;
}
inline unsigned f16_bits(float value) { return emulation::narrow_f16(value); }
inline unsigned round_pair(float low, float high) {
  return emulation::narrow_half<VT_F16>(low) | emulation::narrow_half<VT_F16>(high) << 16;
}
template <int which>
inline float widen_half(unsigned pair) { return emulation::widen_half<VT_F16>(which ? pair >> 16 : pair); }
inline unsigned multiply_pairs(unsigned a, unsigned b) {
  unsigned out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const double x = emulation::widen_half<VT_F16>(a >> shift), y = emulation::widen_half<VT_F16>(b >> shift);
    out |= emulation::narrow_half<VT_F16>(emulation::rounded_to_odd(x * y)) << shift;
  }
  return out;
}
inline unsigned transpose_8x8(unsigned pair) {
  const int lane = emulation::own_lane(), row = lane / 4, column = lane % 4 * 2;
  const auto lanes = emulation::exchange(~0u, "movmatrix", pair);
  const auto at = [&](int r, int c) { return lanes[4 * r + c / 2] >> (c % 2 * 16) & 0xffffu; };
  return at(column, row) | at(column + 1, row) << 16;
}

inline float power_of_two(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

// ---- matrix products; the sum of 16 products and the old value is rounded once, where hardware rounds in its own way

inline void multiply_add_16x8x16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                 unsigned b1) {
  struct Parts { float a[8], b[4]; } mine;
  const unsigned pairs[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 12; ++i) {
    const float value = emulation::widen_half<VT_F16>(pairs[i / 2] >> (i % 2 * 16));
    (i < 8 ? mine.a[i] : mine.b[i - 8]) = value;
  }
  const auto lanes = emulation::exchange(~0u, "mma", mine);
  const int g = emulation::own_lane() / 4, c = emulation::own_lane() % 4;
  double sums[4] = {d[0], d[1], d[2], d[3]};
  for (int part = 0; part < 4; ++part) {
    const Parts &row = lanes[4 * g + part], &first = lanes[8 * c + part], &second = lanes[8 * c + 4 + part];
    for (int i = 0; i < 4; ++i) {  // k = 2 part, + 1, + 8, + 9
      const double upper = row.a[i % 2 + i / 2 * 4], lower = row.a[i % 2 + i / 2 * 4 + 2];
      sums[0] += upper * first.b[i], sums[1] += upper * second.b[i];
      sums[2] += lower * first.b[i], sums[3] += lower * second.b[i];
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(sums[i]);
}

// ---- block-scaled 4-bit formats (block_scaled_ptx.cuh): the nearest of all codes, ties to the even one

namespace emulation {

// The value of a code with an exponent of that bias above `mantissa` bits, without sign.
inline double value_of_code(unsigned code, int mantissa, int bias) {
  const int exponent = static_cast<int>(code >> mantissa);
  const double fraction = code & ((1u << mantissa) - 1);
  return exponent ? std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa)
                  : std::ldexp(fraction, 1 - bias - mantissa);
}
inline unsigned nearest_of_codes(double magnitude, unsigned largest, int mantissa, int bias) {
  unsigned best = 0;
  for (unsigned code = 1; code <= largest; ++code) {
    const double now = std::fabs(value_of_code(code, mantissa, bias) - magnitude);
    const double least = std::fabs(value_of_code(best, mantissa, bias) - magnitude);
    if (now < least || (now == least && code % 2 == 0)) best = code;
  }
  return best;
}
inline float value_of_e2m1(unsigned code) {
  const float size = static_cast<float>(value_of_code(code & 7u, 1, 1));
  return code & 8u ? -size : size;
}
inline double value_of_ue4m3(unsigned byte) {
  return (byte & 0x7fu) == 0x7fu ? std::nan("") : value_of_code(byte & 0x7fu, 3, 7);
}

}  // namespace emulation

inline unsigned narrow_e4m3(float value) {
  const unsigned sign = std::signbit(value) ? 0x80u : 0u;
  if (value != value) return sign | 0x7fu;
  return sign | emulation::nearest_of_codes(std::fmin(std::fabs(value), 448.0), 0x7eu, 3, 7);
}
inline unsigned convert_e4m3_pair(float low, float high) {
  const auto code = [](float v) { return v != v ? 0x7fu : narrow_e4m3(v); };
  return code(low) | code(high) << 8;
}
inline unsigned narrow_e2m1(const float (&v)[8]) {
  unsigned word = 0;
  for (int i = 0; i < 8; ++i) {
    const unsigned size = v[i] != v[i] ? 7u : emulation::nearest_of_codes(std::fmin(std::fabs(v[i]), 6.0), 7u, 1, 1);
    word |= (size | (std::signbit(v[i]) && v[i] == v[i] ? 8u : 0u)) << (4 * i);
  }
  return word;
}
inline void multiply_add_e2m1_16x8x64(float (&d)[4], uint4 a, unsigned b0, unsigned b1, unsigned scale_a,
                                      unsigned scale_b) {
  struct Parts { unsigned a[4], b[2], scale_a, scale_b; } mine = {{a.x, a.y, a.z, a.w}, {b0, b1}, scale_a, scale_b};
  const auto lanes = emulation::exchange(~0u, "block-scaled mma", mine);
  const int g = emulation::own_lane() / 4, c = emulation::own_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * c + i % 2;
    const unsigned row_scales = lanes[4 * (row % 8) + row / 8].scale_a, column_scales = lanes[4 * column].scale_b;
    double sum = d[i];
    for (int k = 0; k < 64; ++k) {
      const int owner = k % 32 / 8, high = k / 32, place = 4 * (k % 8), block = 8 * (k / 16);
      const float x = emulation::value_of_e2m1(lanes[4 * (row % 8) + owner].a[row / 8 + 2 * high] >> place & 15u);
      const float y = emulation::value_of_e2m1(lanes[4 * column + owner].b[high] >> place & 15u);
      sum += x * emulation::value_of_ue4m3(row_scales >> block) * y * emulation::value_of_ue4m3(column_scales >> block);
    }
    d[i] = static_cast<float>(sum);
  }
}

// ---- include/weights_ptx.cuh
inline uint4 load_weights_128(const unsigned char* from) { return *reinterpret_cast<const uint4*>(from); }
inline uint4 load_weights_128_early_if(bool wanted, const unsigned char* from) {
  return wanted ? load_weights_128(from) : make_uint4(0, 0, 0, 0);
}
inline unsigned load_weights_32(const unsigned char* from) { return *reinterpret_cast<const unsigned*>(from); }
inline unsigned load_weights_16(const unsigned char* from) { return *reinterpret_cast<const unsigned short*>(from); }

#include "warpgroups.h"
