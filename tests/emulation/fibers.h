#pragma once
// Threads of a block as fibers of one thread of the operating system. A fiber runs until it has to wait; which one is
// next is round robin, or drawn anew each round with a seed. Blocks run one after the other. When no fiber can go on,
// the launch ends with a message that says who waits where.

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include <sys/mman.h>

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulation {

using u64 = unsigned long long;
using Ready = bool (*)(const void* object, u64 value);  // whether a waiting fiber may go on
constexpr int kMostThreads = 1024, kStackBytes = 256 << 10, kMostMeetings = 16, kMostBytes = 64;
constexpr long kMostSpins = 200000;

#if defined(__x86_64__)
using Context = void*;
extern "C" __attribute__((visibility("hidden"))) void vt_switch(void** from, void* to);
asm(".text\n.p2align 4\nvt_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n movq %rsp, (%rdi)\n"
    " movq %rsi, %rsp\n popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
inline void switch_context(Context& from, Context& to) { vt_switch(&from, to); }
inline void make_context(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}
#else
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

struct Fiber {
  Context context;
  uint3 thread;
  int number;
  bool done, spinning;
  Ready ready;
  const void* object;
  u64 value;
  const char* what;
};

// Lanes of one mask that come together: what each brings lies in one of two places by the parity of the generation.
struct Meeting {
  unsigned mask, arrived, present[2];
  u64 generation;
  const char* what[32];
  alignas(16) unsigned char data[2][32][kMostBytes];
};
struct Warp {
  unsigned exited;
  int meetings;
  Meeting list[kMostMeetings];
};
struct Barrier {
  unsigned arrived, expected;  // 0 expected: every thread that has not returned
  int any[2], all[2], count[2];
  u64 generation;
};

static Fiber fibers[kMostThreads];
static Warp warps[kMostThreads / 32];
static Barrier barriers[16];
static Fiber* now;
static Context scheduler;
static int threads, live;
static u64 blocks_begun;
static bool failed;
static char message[2000];
static char* stacks;
static void (*kernel)();

[[noreturn]] inline void fail(const char* format, ...) {
  char text[500];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  snprintf(message, sizeof message, "block (%u, %u, %u), thread (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z,
           now->thread.x, now->thread.y, now->thread.z, text);
  failed = true;
  switch_context(now->context, scheduler);
  __builtin_unreachable();
}

inline void wait(const char* what, Ready ready, const void* object, u64 value) {
  if (ready(object, value)) return;
  now->ready = ready, now->object = object, now->value = value, now->what = what;
  switch_context(now->context, scheduler);
}
inline bool moved_on(const void* generation, u64 value) { return *static_cast<const u64*>(generation) != value; }

// A turn of a loop that waits for another thread: lets the others run.
inline void spin() {
  now->ready = nullptr, now->spinning = true;
  switch_context(now->context, scheduler);
}

inline Warp& own_warp() { return warps[now->number / 32]; }
inline int own_lane() { return now->number % 32; }

inline void close_meeting(const Warp& warp, Meeting& m) {
  const unsigned wanted = m.mask & ~warp.exited;
  if (!m.arrived || (m.arrived & wanted) != wanted) return;
  const char* first = m.what[__builtin_ctz(m.arrived)];
  for (int lane = 0; lane < 32; ++lane)
    if ((m.arrived >> lane & 1) && strcmp(m.what[lane], first))
      fail("lanes meet in different instructions: %s and, in lane %d, %s", first, lane, m.what[lane]);
  m.present[m.generation & 1] = m.arrived;
  m.arrived = 0;
  ++m.generation;
}

// What every lane of the mask has brought.
template <class T>
struct Lanes {
  const unsigned char (*data)[kMostBytes];
  unsigned present;
  const T& operator[](int lane) const {
    if (lane < 0 || lane > 31 || !(present >> lane & 1)) fail("lane %d is read, which does not take part", lane);
    return *reinterpret_cast<const T*>(data[lane]);
  }
};

// Waits for all lanes of the mask that have not returned.
template <class T>
inline Lanes<T> exchange(unsigned mask, const char* what, const T& mine) {
  static_assert(sizeof(T) <= kMostBytes, "what a lane brings");
  const int lane = own_lane();
  Warp& warp = own_warp();
  if (!(mask >> lane & 1)) fail("%s: the mask %08x lacks the lane itself, %d", what, mask, lane);
  Meeting* m = warp.list;
  while (m != warp.list + warp.meetings && m->mask != mask) ++m;
  if (m == warp.list + warp.meetings) {
    if (++warp.meetings > kMostMeetings) fail("more than %d masks in one warp", kMostMeetings);
    memset(static_cast<void*>(m), 0, sizeof *m);
    m->mask = mask;
  }
  const u64 generation = m->generation;
  memcpy(m->data[generation & 1][lane], &mine, sizeof mine);
  m->what[lane] = what;
  m->arrived |= 1u << lane;
  close_meeting(warp, *m);
  wait(what, moved_on, &m->generation, generation);
  return {m->data[generation & 1], m->present[generation & 1]};
}

inline void close_barrier(Barrier& b) {
  if (!b.arrived || b.arrived < (b.expected ? b.expected : static_cast<unsigned>(live))) return;
  b.arrived = 0;
  const int next = ++b.generation & 1;
  b.any[next] = 0, b.all[next] = 1, b.count[next] = 0;
}

// Arrives at bar `number`; `expected` threads, 0 for all. The generation that the arrival belongs to.
inline u64 arrive_at(unsigned number, unsigned expected, int predicate = 0) {
  if (number > 15) fail("barrier %u: there are 16", number);
  Barrier& b = barriers[number];
  if (b.arrived && b.expected != expected) fail("barrier %u: %u and %u threads expected", number, b.expected, expected);
  const u64 generation = b.generation;
  b.expected = expected;
  b.any[generation & 1] |= predicate != 0, b.all[generation & 1] &= predicate != 0;
  b.count[generation & 1] += predicate != 0;
  ++b.arrived;
  close_barrier(b);
  return generation;
}
inline const Barrier& sync_at(unsigned number, unsigned expected, u64& generation, int predicate = 0) {
  generation = arrive_at(number, expected, predicate);
  wait(expected ? "bar.sync" : "__syncthreads", moved_on, &barriers[number].generation, generation);
  return barriers[number];
}

inline void leave() {
  now->done = true;
  --live;
  Warp& warp = own_warp();
  warp.exited |= 1u << own_lane();
  for (int i = 0; i < warp.meetings; ++i) close_meeting(warp, warp.list[i]);
  for (Barrier& b : barriers)
    if (!b.expected) close_barrier(b);
}
inline void run_fiber() {
  kernel();
  leave();
  switch_context(now->context, scheduler);
}

}  // namespace emulation
