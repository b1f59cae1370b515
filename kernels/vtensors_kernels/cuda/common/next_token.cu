// For each row b: i = the lowest index of the largest of logits[b, :]; largest[b] = that logit; where steps[b] is not 0,
// tokens[b] = i; positions[b] += steps[b].
//
// NaN ranks above every number, so that a row with one gives the first one's index and NaN. A row is read by gridDim.x
// blocks; each leaves a key (below), and the last to be done takes the largest of them and advances the row. No order
// of blocks can change a result. Shapes: any rows; 1 .. 2^31 - 1 columns; rows stride apart, at any even address.
// counters [rows] are 0 before and after a launch; two launches with the same ones must not run side by side.
// Grid: x blocks of a row, y rows. Block: kThreads. Shared memory: static. Arch: all; dependent launch from sm_90 on.

#include "include/largest.cuh"
#include "include/ptx.cuh"
#include "include/sixteen_bits.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The key of largest.cuh; of NaN one above those of all numbers.
__device__ __forceinline__ unsigned long long ranked(float value, unsigned index) {
  return value == value ? key_of(value, index) : 0xffffffffull << 32 | (0xffffffffull - index);
}

__device__ __forceinline__ float value_of(unsigned long long key) {
  const unsigned order = static_cast<unsigned>(key >> 32);
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ __forceinline__ unsigned long long largest_of_block(unsigned long long key) {
  __shared__ unsigned long long found[kWarps];
#pragma unroll
  for (int distance = 16; distance; distance /= 2) key = max(key, __shfl_xor_sync(~0u, key, distance));
  __syncthreads();  // `found` may be in use
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = key;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) key = max(key, found[warp]);
  return key;
}

extern "C" __global__ __launch_bounds__(kThreads) void next_token(
    const unsigned short* logits,  // [rows, columns] bf16 or f16, rows stride apart; as ptx.cuh says of such inputs
    long long* tokens,             // [rows]
    int* positions,                // [rows]
    const int* steps,              // [rows]
    float* largest,                // [rows]
    unsigned long long* partial,   // [rows, gridDim.x], written here
    unsigned* counters,            // [rows]
    long long stride,
    int columns)
{
  __shared__ bool last;
  launch_dependents();
  wait_for_predecessors();
  const int row = blockIdx.y, blocks = gridDim.x, block = blockIdx.x, thread = threadIdx.x;
  const unsigned short* from = logits + row * stride;
  // Columns before the first multiple of 16 bytes, then whole chunks of eight, then the rest.
  const int before = min(static_cast<int>((0ull - reinterpret_cast<unsigned long long>(from)) % 16 / 2), columns);
  const int chunks = (columns - before) / 8, rest = before + 8 * chunks;
  const uint4* whole = reinterpret_cast<const uint4*>(from + before);
  // This thread's columns, in rising order.
  const auto visit = [&](auto take) {
    if (block == 0 && thread < before) take(from[thread], thread);
#pragma unroll 4
    for (int chunk = block * kThreads + thread; chunk < chunks; chunk += blocks * kThreads) {
      const uint4 eight = whole[chunk];
      const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        take(words[i] & 0xffffu, before + 8 * chunk + 2 * i);
        take(words[i] >> 16, before + 8 * chunk + 2 * i + 1);
      }
    }
    if (block == blocks - 1 && rest + thread < columns) take(from[rest + thread], rest + thread);
  };
  float best = __uint_as_float(0xff800000u);  // -inf
  int at = -1;
  visit([&](unsigned bits, int column) {
    const float value = widen(bits);
    // Larger, or the first NaN.
    if (!(value <= best) && best == best) best = value, at = column;
  });
  unsigned long long key = at < 0 ? 0ull : ranked(best, at);
  // Nothing but -inf.
  if (at < 0) visit([&](unsigned bits, int column) { key = max(key, ranked(widen(bits), column)); });
  key = largest_of_block(key);

  unsigned long long* keys = partial + static_cast<long long>(row) * blocks;
  if (thread == 0) {
    keys[block] = key;
    __threadfence();
    last = atomicAdd(counters + row, 1u) == static_cast<unsigned>(blocks - 1);
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  key = 0;
  for (int i = thread; i < blocks; i += kThreads) key = max(key, __ldcg(keys + i));
  key = largest_of_block(key);
  if (thread != 0) return;
  counters[row] = 0;
  largest[row] = value_of(key);
  const int step = steps[row];
  if (step) tokens[row] = 0xffffffffll - static_cast<long long>(key & 0xffffffffull);
  positions[row] += step;
}
