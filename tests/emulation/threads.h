#pragma once
// What the threads of CUDA C++ do together: warp collectives, barriers, atomics; loads with hints; keywords.

#include "launching.h"
#include "numbers.h"

inline void __syncwarp(unsigned mask = ~0u) { emulation::exchange(mask, "__syncwarp", 0); }
inline void __syncthreads() {
  emulation::u64 generation;
  emulation::sync_at(0, 0, generation);
}
inline int __syncthreads_or(int predicate) {
  emulation::u64 g;
  return emulation::sync_at(0, 0, g, predicate).any[g & 1];
}
inline int __syncthreads_and(int predicate) {
  emulation::u64 g;
  return emulation::sync_at(0, 0, g, predicate).all[g & 1];
}
inline int __syncthreads_count(int predicate) {
  emulation::u64 g;
  return emulation::sync_at(0, 0, g, predicate).count[g & 1];
}

template <class T>
inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  const int lane = emulation::own_lane();
  return emulation::exchange(mask, "__shfl_sync", v)[(lane & ~(width - 1)) | (from & (width - 1))];
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int distance, int width = 32) {
  const int lane = emulation::own_lane(), from = lane ^ distance;
  return emulation::exchange(mask, "__shfl_xor_sync", v)[(from & ~(width - 1)) > (lane & ~(width - 1)) ? lane : from];
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned distance, int width = 32) {
  const int lane = emulation::own_lane(), from = lane - static_cast<int>(distance);
  return emulation::exchange(mask, "__shfl_up_sync", v)[from < (lane & ~(width - 1)) ? lane : from];
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned distance, int width = 32) {
  const int lane = emulation::own_lane(), from = lane + static_cast<int>(distance);
  return emulation::exchange(mask, "__shfl_down_sync", v)[from > (lane | (width - 1)) ? lane : from];
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto lanes = emulation::exchange(mask, "__ballot_sync", predicate != 0);
  unsigned found = 0;
  for (int i = 0; i < 32; ++i)
    if (lanes.present >> i & 1) found |= static_cast<unsigned>(lanes[i]) << i;
  return found;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  const auto lanes = emulation::exchange(mask, "__match_any_sync", value);
  unsigned found = 0;
  for (int i = 0; i < 32; ++i)
    if (lanes.present >> i & 1) found |= static_cast<unsigned>(lanes[i] == value) << i;
  return found;
}
namespace emulation {
template <class T, class Join>
inline T reduce_lanes(unsigned mask, const char* what, T value, Join join) {
  const auto lanes = exchange(mask, what, value);
  T total = value;
  for (int i = 0; i < 32; ++i)
    if ((lanes.present >> i & 1) && i != own_lane()) total = join(total, lanes[i]);
  return total;
}
}  // namespace emulation

template <class T>
inline T __reduce_add_sync(unsigned mask, T v) {
  return emulation::reduce_lanes(mask, "__reduce_add_sync", v, [](T a, T b) { return a + b; });
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T v) {
  return emulation::reduce_lanes(mask, "__reduce_max_sync", v, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T v) {
  return emulation::reduce_lanes(mask, "__reduce_min_sync", v, [](T a, T b) { return b < a ? b : a; });
}
inline unsigned __activemask() { return ~emulation::own_warp().exited; }

#define VT_ATOMIC(name, expression)                   \
  template <class T>                                  \
  inline T name(T* at, std::common_type_t<T> value) { \
    const T old = *at;                                \
    *at = expression;                                 \
    return old;                                       \
  }
VT_ATOMIC(atomicAdd, old + value)
VT_ATOMIC(atomicSub, old - value)
VT_ATOMIC(atomicExch, value)
VT_ATOMIC(atomicMax, old < value ? value : old)
VT_ATOMIC(atomicMin, value < old ? value : old)
VT_ATOMIC(atomicOr, old | value)
VT_ATOMIC(atomicAnd, old & value)
VT_ATOMIC(atomicXor, old ^ value)
VT_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
template <class T>
inline T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> value) {
  const T old = *at;
  if (old == expected) *at = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulation::spin(); }
inline void __trap() { emulation::fail("__trap"); }
inline long long clock64() { return 0; }

#define VT_LOAD(name) \
  template <class T>  \
  inline T name(const T* at) { return *at; }
#define VT_STORE(name) \
  template <class T>   \
  inline void name(T* at, std::common_type_t<T> value) { *at = value; }
VT_LOAD(__ldg)
VT_LOAD(__ldca)
VT_LOAD(__ldcg)
VT_LOAD(__ldcs)
VT_LOAD(__ldcv)
VT_LOAD(__ldlu)
VT_STORE(__stcg)
VT_STORE(__stcs)
VT_STORE(__stwb)
VT_STORE(__stwt)
inline size_t __cvta_generic_to_shared(const void* pointer) { return emulation::window_of(pointer); }

// Keywords; behind every system header, which may use these names.
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static __attribute__((section("vt_shared")))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition)
#define __CUDA_ARCH__ VT_ARCH
