#pragma once
// Shared memory, and the launch: every block of the grid in turn.

#include <utility>

#include "fibers.h"

extern "C" {
extern char __start_vt_shared[] __attribute__((visibility("hidden")));
extern char __stop_vt_shared[] __attribute__((visibility("hidden")));
}

// The bytes that a block finds in its dynamic shared memory: NaN, but for tests of what hides behind one.
#ifndef VT_SHARED_FILL
#define VT_SHARED_FILL 0xff
#endif

namespace emulation {

// Static shared memory is a section of its own, so that each block can find it filled with 0xff.
__attribute__((section("vt_shared"), used)) static uint64_t anchor;

constexpr unsigned kWindow = 1024, kMostShared = 232448;  // no address is 0
alignas(1024) static unsigned char dynamic[kMostShared];
static unsigned shared_bytes;
static sigjmp_buf fault;

inline unsigned window_of(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - dynamic) + kWindow;
}

// The memory behind a 32-bit address; fails outside the block's shared memory and where it is not aligned.
inline unsigned char* shared_at(unsigned address, unsigned bytes, unsigned alignment) {
  unsigned char* p = dynamic + static_cast<int>(address - kWindow);
  const char* end = reinterpret_cast<char*>(p) + bytes;
  const bool in_dynamic = p >= dynamic && p + bytes <= dynamic + shared_bytes;
  const bool in_static = reinterpret_cast<char*>(p) >= __start_vt_shared && end <= __stop_vt_shared;
  if (!in_dynamic && !in_static)
    fail("%u bytes at shared address %d, dynamic shared memory has %u", bytes, static_cast<int>(address - kWindow),
         shared_bytes);
  if (address % alignment) fail("shared address %u is not aligned to %u", address - kWindow, alignment);
  return p;
}
template <class T>
inline T& shared_value(unsigned address) {
  return *reinterpret_cast<T*>(shared_at(address, sizeof(T), sizeof(T)));
}

inline void describe_waiting(const char* problem) {
  int at = snprintf(message, sizeof message, "%s in block (%u, %u, %u), %d of %d threads have not returned:", problem,
                    blockIdx.x, blockIdx.y, blockIdx.z, live, threads);
  for (int i = 0; i < threads && at < static_cast<int>(sizeof message) - 200;) {
    const Fiber& f = fibers[i];
    int last = i;
    const auto alike = [&](const Fiber& g) {
      return g.done == f.done && (f.done || (g.spinning == f.spinning && g.ready == f.ready && g.object == f.object));
    };
    while (last + 1 < threads && alike(fibers[last + 1])) ++last;
    const char* what = f.done ? "returned" : f.spinning ? "a spin loop" : f.what;
    at += snprintf(message + at, sizeof message - at, " threads %d-%d: %s;", i, last, what);
    i = last + 1;
  }
}

inline bool run_block(u64& seed) {
  memset(__start_vt_shared, 0xff, __stop_vt_shared - __start_vt_shared);
  memset(dynamic, VT_SHARED_FILL, shared_bytes);
  memset(barriers, 0, sizeof barriers);
  for (Barrier& b : barriers) b.all[0] = 1;
  live = threads, ++blocks_begun;
  for (int w = 0; w * 32 < threads; ++w) {
    warps[w].meetings = 0;
    warps[w].exited = threads - 32 * w < 32 ? ~0u << (threads - 32 * w) : 0u;
  }
  static int order[kMostThreads];
  for (int i = 0; i < threads; ++i) {
    const unsigned row = i / blockDim.x;
    Fiber& f = fibers[i];
    f.thread = {i % blockDim.x, row % blockDim.y, row / blockDim.y};
    f.number = i, f.done = f.spinning = false, f.ready = nullptr, f.what = "the start";
    make_context(f.context, stacks + static_cast<size_t>(i) * kStackBytes, run_fiber);
    order[i] = i;
  }
  long spins = 0;
  while (live) {
    bool ran = false, worked = false;
    for (int i = threads - 1; seed && i > 0; --i) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      const int other = static_cast<int>((seed >> 33) % (i + 1)), kept = order[i];
      order[i] = order[other], order[other] = kept;
    }
    for (int i = 0; i < threads; ++i) {
      Fiber& f = fibers[order[i]];
      if (f.done || (f.ready && !f.ready(f.object, f.value))) continue;
      f.ready = nullptr, f.spinning = false;
      now = &f;
      threadIdx = f.thread;
      switch_context(scheduler, f.context);
      if (failed) return false;
      ran = true, worked |= !f.spinning;
    }
    spins = worked ? 0 : spins + 1;
    if (live && (!ran || spins > kMostSpins)) {
      describe_waiting(ran ? "endless spinning" : "deadlock");
      return false;
    }
  }
  return true;
}

inline void on_fault(int) { siglongjmp(fault, 1); }

// Runs the grid. false: `message` says why it ended.
inline bool run_grid(const unsigned* grid, const unsigned* block, unsigned bytes, u64 seed) {
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
  threads = static_cast<int>(block[0] * block[1] * block[2]);
  shared_bytes = bytes;
  failed = false;
  if (threads < 1 || threads > kMostThreads || bytes > kMostShared || !grid[0] || !grid[1] || !grid[2]) {
    snprintf(message, sizeof message, "%d threads, %u bytes of shared memory, or an empty grid", threads, bytes);
    return false;
  }
  if (!stacks) {
    void* memory = mmap(nullptr, static_cast<size_t>(kMostThreads) * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      snprintf(message, sizeof message, "no memory for stacks");
      return false;
    }
    stacks = static_cast<char*>(memory);
  }
  static char handler_stack[64 << 10];
  stack_t stack = {}, old_stack;
  stack.ss_sp = handler_stack, stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_handler = on_fault, action.sa_flags = SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  bool done = true;
  if (sigsetjmp(fault, 1) == 0) {
    for (unsigned z = 0; done && z < grid[2]; ++z)
      for (unsigned y = 0; done && y < grid[1]; ++y)
        for (unsigned x = 0; done && x < grid[0]; ++x) {
          blockIdx = {x, y, z};
          done = run_block(seed);
        }
  } else {
    done = false;
    snprintf(message, sizeof message, "memory outside the tensors, block (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x,
             blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  return done;
}

// ---- arguments: the low bytes of 64-bit slots, as launches pass them

static const u64* slots;
template <class T>
inline T argument(int index) {
  T value;
  static_assert(sizeof(T) <= 8, "a parameter of at most 8 bytes");
  memcpy(static_cast<void*>(&value), slots + index, sizeof value);
  return value;
}
template <class... T, int... index>
inline void call_with(void (*function)(T...), std::integer_sequence<int, index...>) {
  function(argument<T>(index)...);
}
template <class... T>
inline void call_kernel(void (*function)(T...)) {
  call_with(function, std::make_integer_sequence<int, sizeof...(T)>());
}
template <class... T>
constexpr int parameters_of(void (*)(T...)) { return sizeof...(T); }

}  // namespace emulation
