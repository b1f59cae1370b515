// For each row b with settings[b].temperature > 0, steps[b] not 0 and a finite largest[b]: tokens[b] = the lowest token
// whose sum of weights up to itself exceeds point * (sum of all weights), weights as drawing.cuh has them, where of all
// tokens stay
//   top_k of them in descending order of scores, the lowest of equal ones; 0 is off
//   of these the fewest that together reach top_p of their mass; 1 is off
//   of these the ones with a weight of at least min_p.
// Other rows keep their token.
//
// A block has one row and sums are of integers, so that a row's token depends on nothing but the row. Each warp adds up
// one part of the row in the order of columns, then the block the part in which the point lies.
// Shapes: any rows; 1 .. 2^18 columns; rows stride apart, at any even address.
// Grid: x rows. Block: kThreads. Shared memory: 4 * kWindow bytes. Arch: sm_80 and newer (redux); dependent launch from
// sm_90 on.

#include "include/drawing_cut.cuh"
#include "include/ptx.cuh"

constexpr int kSettings = 5;  // temperature, top_k, top_p, min_p, point
constexpr float kLeastTemperature = 1e-30f, kLargestFloat = 3.402823466e38f;

// Some tokens in the order of their columns. over, above: number and mass of those above the cut's score; equal: number
// of those with the score.
struct Tally {
  unsigned over, equal;
  Mass above;
};

// What is drawn from: the cut if there is one, and the mass of a token with its score.
struct Drawn {
  Scale scale;
  Cut cut;
  float least;  // weight
  Mass of_equal;
};

__device__ __forceinline__ Mass mass_above(float score, float least) {
  const float weight = weight_of(score);
  return weight >= least ? mass_of(weight) : Mass{0};
}

template <bool kCut>
__device__ __forceinline__ void add_token(Tally& tally, unsigned bits, const Drawn& drawn) {
  const float value = widen(bits);
  if (!kCut) {
    tally.above += mass_above(score_of(value, drawn.scale), drawn.least);
    return;
  }
  if (value < drawn.cut.floor) return;
  const float score = score_of(value, drawn.scale);
  if (score > drawn.cut.score) {
    ++tally.over;
    tally.above += mass_above(score, drawn.least);
  } else {
    ++tally.equal;  // the floor has this score
  }
}

// Some pieces, `step` apart.
template <bool kCut>
__device__ __forceinline__ Tally tally_of(const Logits& row, int first, int last, int step, const Drawn& drawn) {
  Tally tally = {0, 0, 0};
#pragma unroll 1
  for (int piece = first; piece < last; piece += step)
    visit_piece(row, piece, [&](unsigned bits, int) { add_token<kCut>(tally, bits, drawn); });
  return tally;
}

// How many of `equal` tokens stay where `before` equal ones are in front of them and `stay` of all may.
__device__ __forceinline__ unsigned staying(unsigned stay, unsigned before, unsigned equal) {
  return stay > before ? min(stay - before, equal) : 0u;
}

extern "C" __global__ __launch_bounds__(kThreads) void sample_token(
    const unsigned short* logits,  // [rows, columns] bf16 or f16, rows stride apart; as ptx.cuh says of such inputs
    const double* settings,        // [rows, kSettings]
    const float* largest,          // [rows], the largest logit
    const int* steps,              // [rows]
    long long* tokens,             // [rows]
    long long stride,
    int columns)
{
  extern __shared__ uint4 memory_of_counts[];
  __shared__ CutMemory memory;
  __shared__ Tally parts[kWarps];
  launch_dependents();
  wait_for_predecessors();
  const long long place = blockIdx.x;
  const double* own = settings + kSettings * place;
  const float most = largest[place];
  if (!(own[0] > 0) || !steps[place] || !(fabsf(most) <= kLargestFloat)) return;
  const float temperature = fminf(fmaxf(static_cast<float>(own[0]), kLeastTemperature), kLargestFloat);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Logits row = logits_at(logits + place * stride, columns);
  const unsigned top_k = own[1] < columns ? static_cast<unsigned>(own[1]) : 0u;
  Drawn drawn = {{most, temperature, __fdiv_rn(1.0f, temperature)}, {}, static_cast<float>(own[3]), 0};
  const bool cut = top_k || own[2] < 1;
  if (cut) {
    drawn.cut = find_cut(top_k, own[2], row, drawn.scale, reinterpret_cast<unsigned*>(memory_of_counts), memory);
    drawn.of_equal = mass_above(drawn.cut.score, drawn.least);
  }

  const int of_warp = (row.pieces + kWarps - 1) / kWarps;
  const int end = min((warp + 1) * of_warp, row.pieces);
  Tally tally = cut ? tally_of<true>(row, warp * of_warp + lane, end, 32, drawn)
                    : tally_of<false>(row, warp * of_warp + lane, end, 32, drawn);
  tally = {prefix_of_warp(tally.over).all, prefix_of_warp(tally.equal).all, prefix_of_warp(tally.above).all};
  if (lane == 0) parts[warp] = tally;
  __syncthreads();

  // Every warp: lane l has part l.
  tally = parts[lane];
  unsigned stay = drawn.cut.kept - prefix_of_warp(tally.over).all;
  const unsigned equal_before = prefix_of_warp(tally.equal).before;
  const Mass own_mass = tally.above + staying(stay, equal_before, tally.equal) * drawn.of_equal;
  const Prefix<Mass> mass = prefix_of_warp(own_mass);
  Mass point = min(static_cast<Mass>(own[4] * static_cast<double>(mass.all)), mass.all - 1);
  const int part = __ffs(__ballot_sync(~0u, point < mass.before + own_mass)) - 1;
  point -= __shfl_sync(~0u, mass.before, part);
  const unsigned gone = __shfl_sync(~0u, equal_before, part);
  stay = stay > gone ? stay - gone : 0u;

  // The part in which the point lies, some pieces side by side a thread.
  const int of_thread = (of_warp + kThreads - 1) / kThreads;
  const int first = part * of_warp + of_thread * static_cast<int>(threadIdx.x);
  const int last = min(first + of_thread, min((part + 1) * of_warp, row.pieces));
  tally = cut ? tally_of<true>(row, first, last, 1, drawn) : tally_of<false>(row, first, last, 1, drawn);
  unsigned before = prefix_of_block(tally.equal, memory.numbers).before;
  const Mass here = tally.above + staying(stay, before, tally.equal) * drawn.of_equal;
  Mass sum = prefix_of_block(here, memory.masses).before;
  if (point < sum || point >= sum + here) return;
  for (int piece = first; piece < last; ++piece)
    visit_piece(row, piece, [&](unsigned bits, int column) {
      Tally one = {0, 0, 0};
      if (cut) add_token<true>(one, bits, drawn);
      else add_token<false>(one, bits, drawn);
      const Mass next = sum + one.above + staying(stay, before, one.equal) * drawn.of_equal;
      if (sum <= point && point < next) tokens[place] = column;
      sum = next, before += one.equal;
    });
}
