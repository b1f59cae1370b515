#pragma once
// The PTX that kernels use, one instruction a function. Shared-memory addresses are 32-bit windows.
// VT_ARCH is the target's number: 800 for sm_80, 900 for sm_90a, 1210 for sm_121a.

#define VT_HAS_BULK_COPY (VT_ARCH >= 900)

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Loads keep their order against waits and stores (volatile), not against arithmetic.
__device__ __forceinline__ uint4 load_shared_128(unsigned address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ float4 load_shared_float4(unsigned address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ unsigned load_shared_32(unsigned address) {
  unsigned v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// 16 bits, zeros above.
__device__ __forceinline__ unsigned load_shared_16(unsigned address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}

// Zeros where `wanted` is false.
__device__ __forceinline__ uint4 load_shared_128_if(bool wanted, unsigned address) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n @wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "r"(address), "r"(static_cast<unsigned>(wanted)));
  return v;
}

__device__ __forceinline__ float4 load_shared_float4_if(bool wanted, unsigned address) {
  const uint4 v = load_shared_128_if(wanted, address);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

__device__ __forceinline__ void store_shared_128(unsigned address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_16(unsigned address, unsigned short value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void store_shared_float(unsigned address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// The value, as one that the compiler keeps in a register instead of computing it again at each use.
__device__ __forceinline__ unsigned kept(unsigned value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}
template <typename T>
__device__ __forceinline__ T* kept(T* pointer) {
  asm volatile("mov.b64 %0, %0;" : "+l"(pointer));
  return pointer;
}

// ---- mbarriers: `parity` is that of the phase waited for; a fresh barrier has completed the phase before 0.

__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to copies and to the other blocks of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
#if VT_ARCH >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

#ifndef VT_EVERY_LANE
#define VT_EVERY_LANE 0  // 1: for tools that credit an arrival to the thread that makes it alone
#endif
constexpr unsigned kArrivalsOfWarp = VT_EVERY_LANE ? 32 : 1;

// The arrivals of a warp whose lanes have met (__syncwarp).
__device__ __forceinline__ void arrive_for_warp(unsigned barrier, int lane) {
  if (VT_EVERY_LANE || lane == 0) arrive(barrier);
}

__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
#if VT_ARCH >= 900
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
#else
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
#endif
}

// ---- copies from global to shared memory

#if VT_HAS_BULK_COPY
// One arrival that also announces `bytes` of copies to come.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
               "r"(bytes) : "memory");
}

// bytes: a multiple of 16; both addresses aligned to 16.
__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ unsigned long long evict_first_policy() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_bulk_once(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                                               unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// Into the L2 cache; bytes: a multiple of 16, from: aligned to 16. A hint: what comes is read by ordinary loads.
__device__ __forceinline__ void prefetch_bulk(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#else
__device__ __forceinline__ void copy_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Arrives once all copies that this thread has issued so far are done; the arrival counts as an expected one.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

// ---- clusters

#if VT_ARCH >= 900
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores into another block of the cluster and counts the 16 bytes on its barrier.
__device__ __forceinline__ void store_remote(unsigned address, float4 v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}
#endif

// ---- programmatic dependent launch
//
// What earlier kernels write (activations, ids, keys) is read after the wait and through pointers that are not
// `const __restrict__`, nor by __ldg: those promise that the values never change while the kernel runs, and the
// compiler then moves loads above the wait. What is written once, before any launch (weights, scales), may be both.

__device__ __forceinline__ void launch_dependents() {
#if VT_ARCH >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernels before this one are complete and what they wrote can be read.
__device__ __forceinline__ void wait_for_predecessors() {
#if VT_ARCH >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A number that an earlier kernel wrote; never moved above the wait.
__device__ __forceinline__ float load_written_float(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}

// A number that an earlier kernel may yet write, for a hint before the wait: any number, if its tensor is new. It is
// asked for past the first-level cache, where an old one would be in the way of what is read behind the wait.
__device__ __forceinline__ int load_hint(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}


// Loads in the order of the source, none moved over a branch, of what another block may be writing: then they give any
// number, and leave no old one in the first-level cache.
__device__ __forceinline__ int load_relaxed(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ unsigned short load_relaxed(const unsigned short* from) {
  unsigned short v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_relaxed_float4(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void sync_threads_of(unsigned barrier, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- matrix products: d [16 x 8] += a [16 x 16] * b [16 x 8], 16-bit operands of VT_F16's kind, float32 sums

__device__ __forceinline__ void multiply_add_16x8x16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                     unsigned b0, unsigned b1) {
#if VT_F16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
