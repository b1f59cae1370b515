#pragma once
// The PTX of warpgroup products (sm_90a alone) and what goes with them, beside ptx.cuh.

#include "include/ptx.cuh"

#ifndef VT_F16
#define VT_F16 0  // operands: 0 bfloat16, 1 float16
#endif

// ---- memory

// Orders generic accesses before asynchronous ones (bulk copies, warpgroup products) of the same memory.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Copies to the same offset of every block of the cluster in `blocks` (a bit each), counted on the barrier at
// the same offset of each. bytes: a multiple of 16; addresses aligned to 16.
__device__ __forceinline__ void copy_bulk_to_all(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                                                 unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
          to), "l"(from), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}

// An arrival at a barrier of any block of the cluster, by its cluster_address. It orders no generic accesses
// of other blocks' memory: what it hands over was read by products that are done.
__device__ __forceinline__ void arrive_in_cluster(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Adds 1 and returns what was there; what was written before is visible to whoever reads the sum.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// What count_arrival has counted so far; what those wrote before is visible to whoever reads the sum.
__device__ __forceinline__ unsigned read_arrivals(const unsigned* counter) {
  unsigned now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// ---- 16-bit pairs

// A warp's 8 x 8 matrix of 16-bit values, transposed: lane 4 r + c holds columns 2 c, 2 c + 1 of row r.
__device__ __forceinline__ unsigned transpose_8x8(unsigned pair) {
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Two floats to nearest even, `low` in the low half.
__device__ __forceinline__ unsigned round_pair(float low, float high) {
  unsigned pair;
#if VT_F16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// Half `which` of a pair, exact.
template <int which>
__device__ __forceinline__ float widen_half(unsigned pair) {
#if VT_F16
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(which ? pair >> 16 : pair)));
  return value;
#else
  return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
#endif
}

// ---- registers: every warp of a warpgroup changes its limit together

template <int registers>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- warpgroup products

// Before the first product and after every write to its registers.
__device__ __forceinline__ void fence_warpgroup() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void commit_warpgroup() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `groups` of the newest groups are in flight.
template <int groups>
__device__ __forceinline__ void wait_warpgroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Keeps the compiler from moving accesses of these registers across this point.
template <int count>
__device__ __forceinline__ void pin(unsigned (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Shared-memory descriptor of a K-major operand without swizzle: core matrices of 8 rows x 16 bytes, 128
// contiguous bytes each; k_stride, row_stride: bytes between neighbours along K and along the rows.
__device__ __forceinline__ unsigned long long operand_descriptor(unsigned address, unsigned k_stride,
                                                                 unsigned row_stride) {
  return static_cast<unsigned long long>((address & 0x3ffffu) >> 4) |
         static_cast<unsigned long long>(k_stride >> 4) << 16 | static_cast<unsigned long long>(row_stride >> 4) << 32;
}

// sums [64, tokens] += A [64, 16] * B [16, tokens], asynchronously; tokens = 2 * the number of sums.
// A: lane 4 g + c of warp i holds rows 16 i + g, + 8 at k = 2 c, 2 c + 1 (a[0], a[1]) and k + 8 (a[2], a[3]).
// B: descriptor. Sums 4 j ..: rows g (0, 1) and g + 8 (2, 3) of tokens 8 j + 2 c, + 1.
#if VT_F16
#define VT_OPERANDS "f16.f16"
#else
#define VT_OPERANDS "bf16.bf16"
#endif
#define VT_SUMS_8(i)                                                                                         \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define VT_OPERANDS_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[8], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." VT_OPERANDS " "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, 0; }"
      : VT_SUMS_8(0) : VT_OPERANDS_A);
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[12], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32." VT_OPERANDS " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, add, 1, 1, 0; }"
      : VT_SUMS_8(0), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]) : VT_OPERANDS_A);
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[16], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." VT_OPERANDS " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, 0; }"
      : VT_SUMS_8(0), VT_SUMS_8(8) : VT_OPERANDS_A);
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[24], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n48k16.f32." VT_OPERANDS " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23}, {%24, %25, %26, %27}, %28, add, 1, 1, 0; }"
      : VT_SUMS_8(0), VT_SUMS_8(8), VT_SUMS_8(16) : VT_OPERANDS_A);
}

__device__ __forceinline__ void multiply_warpgroup(float (&sums)[32], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." VT_OPERANDS " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
      : VT_SUMS_8(0), VT_SUMS_8(8), VT_SUMS_8(16), VT_SUMS_8(24) : VT_OPERANDS_A);
}
