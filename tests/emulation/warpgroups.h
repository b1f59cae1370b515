#pragma once
// Twins of include/wgmma_ptx.cuh and segments_ranges.cuh: counters, copies to clusters of one block, warpgroup products.
// Products are done at once; the sum of 16 of them and the old value is rounded once, where hardware rounds in its own
// way.

#include "threads.h"

inline void fence_async_proxy() {}
inline void fence_warpgroup() {}
inline void commit_warpgroup() {}
template <int groups>
inline void wait_warpgroup() {}
template <class T, int count>
inline void pin(T (&)[count]) {}
template <int registers>
inline void give_registers_back() {}
template <int registers>
inline void take_registers() {}
inline bool barrier_passed(unsigned barrier, unsigned parity) {
  return emulation::phase_done(&emulation::shared_value<emulation::Mbarrier>(barrier), parity);
}

inline void copy_bulk_to_all(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned short) {
  emulation::copy_now(to, from, bytes);
  emulation::count_bytes(barrier, -static_cast<int>(bytes));
}
inline void arrive_in_cluster(unsigned barrier) { emulation::arrive_once(barrier); }

inline unsigned count_arrival(unsigned* counter) { return (*counter)++; }
inline unsigned read_arrivals(const unsigned* counter) {
  emulation::spin();
  return *counter;
}

inline unsigned long long operand_descriptor(unsigned address, unsigned k_stride, unsigned row_stride) {
  return static_cast<unsigned long long>((address & 0x3ffffu) >> 4) |
         static_cast<unsigned long long>(k_stride >> 4) << 16 | static_cast<unsigned long long>(row_stride >> 4) << 32;
}

template <int count>
inline void multiply_warpgroup(float (&sums)[count], const unsigned (&a)[4], unsigned long long b) {
  struct Rows { float v[8]; } mine;
  for (int i = 0; i < 8; ++i) mine.v[i] = emulation::widen_half<VT_F16>(a[i / 2] >> (i % 2 * 16));
  const auto lanes = emulation::exchange(~0u, "wgmma", mine);
  const auto field = [&](int shift) { return static_cast<unsigned>(b >> shift & 0x3fffu) << 4; };
  const unsigned start = field(0), k_stride = field(16), row_stride = field(32);
  const int g = emulation::own_lane() / 4, c = emulation::own_lane() % 4;
  for (int i = 0; i < count; ++i) {
    const int token = i / 4 * 8 + 2 * c + i % 2, lower = i % 4 / 2;
    double sum = sums[i];
    for (int k = 0; k < 16; ++k) {
      const unsigned at = start + k / 8 * k_stride + token / 8 * row_stride + token % 8 * 16 + k % 8 * 2;
      const float x = emulation::widen_half<VT_F16>(emulation::shared_value<unsigned short>(at));
      sum += static_cast<double>(lanes[4 * g + k % 8 / 2].v[k / 8 * 4 + lower * 2 + k % 2]) * x;
    }
    sums[i] = static_cast<float>(sum);
  }
}
