#pragma once
// The PTX of copies into shared memory that a thread waits for by groups, in the order in which it has begun them.

// bytes: 4, 8 or 16, as both addresses are aligned. Zeros where it is not wanted, and then `from` is not read. L2 is
// asked for 256 bytes around it. Like every volatile access it stays behind wait_for_predecessors.
template <int bytes>
__device__ __forceinline__ void copy_or_zero(unsigned to, const void* from, bool wanted) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "a copy has 4, 8 or 16 bytes");
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes),
                 "r"(wanted ? bytes : 0) : "memory");
  }
}

// What this thread has begun to copy since the last time is a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most the last `groups` of this thread's groups are under way; what the others brought is there for it alone.
template <int groups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}
