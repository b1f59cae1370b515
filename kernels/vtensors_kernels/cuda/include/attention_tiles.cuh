#pragma once
// Tiles of 16 tokens of one key-value head on their way through a warp's own ring in shared memory, by bulk copies.
//
// A page is kTiles tiles, first those of its keys, then of its values. Bulk copies keep a token's bytes together, so
// that lanes which read the same bytes of several tokens would meet in the banks: every few tokens begin a little
// further on. Of a tile of keys the rows of the products are its tokens in the order of key_token, for the same reason.

#include "include/attention_tokens.cuh"

#ifndef VT_SLOTS
#define VT_SLOTS 2
#endif
constexpr int kSlots = VT_SLOTS;  // of a ring, a tile each
constexpr int kTileTokens = 16;
constexpr int kPageTiles = kPageTokens / kTileTokens;  // of keys, and as many of values
constexpr int kTiles = 2 * kPageTiles;
constexpr int kKeyPiece = 8, kValuePiece = 2;  // tokens that one copy brings
constexpr int kKeyPitch = kKeyPiece * kRowBytes + 64, kValuePitch = kValuePiece * kRowBytes + 32;
constexpr int kSlotBytes = kTileTokens * kRowBytes + 256;
static_assert(1 <= kSlots && kSlots <= kTiles, "VT_SLOTS is 1 .. 8: a slot's next tile is of this page or the next");

// Of a tile of keys, the token that is row g + 8 r of the products.
__device__ __forceinline__ int key_token(int g, int r) { return 8 * (g % 2) + 4 * r + g / 2; }

// The rings' part of a block's shared memory.
template <int warps>
struct Rings {
  alignas(16) unsigned char slots[warps][kSlots][kSlotBytes];
  alignas(16) unsigned long long barriers[warps][kSlots];  // of a slot: its tile has come
};

// One warp's ring: tiles enter and leave in one order, and a slot is filled again once all lanes have read it.
struct Ring {
  const unsigned char* memory;  // of the first slot
  unsigned slots, barriers;     // their addresses
  int lane;
  unsigned slot, parity;        // of the tile that is next to be read

  template <int warps>
  __device__ __forceinline__ Ring(Rings<warps>& rings, int warp, int lane_)
      : memory(rings.slots[warp][0]), slots(shared_address(rings.slots[warp])),
        barriers(shared_address(rings.barriers[warp])), lane(lane_), slot(0), parity(0) {
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) init_barrier(barriers + 8 * s, 1);
      fence_barrier_init();
    }
    __syncwarp();
  }
  // All lanes begin to copy a tile of keys or values into a slot. from: the tile's first token. tokens: how many of it
  // there are, from 0 to 16: those behind them stay what they were.
  __device__ __forceinline__ void fill(unsigned to, const unsigned char* from, bool of_keys, int tokens) const {
    const int piece = of_keys ? kKeyPiece : kValuePiece, pitch = of_keys ? kKeyPitch : kValuePitch;
    const int own = min(piece, tokens - lane * piece);
    if (lane == 0) arrive_expecting(barriers + 8 * to, tokens * kRowBytes);
    if (own > 0)
      copy_bulk(slots + to * kSlotBytes + lane * pitch, from + lane * piece * kRowBytes, own * kRowBytes,
                barriers + 8 * to);
  }
  __device__ __forceinline__ void wait() const { wait_barrier(barriers + 8 * slot, parity); }
  __device__ __forceinline__ void pass() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ void load(Keys& keys, int g, int c) const {
    const unsigned char* own = memory + slot * kSlotBytes + g % 2 * kKeyPitch + g / 2 * kRowBytes + c * kKeyUnit;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kKeyUnits; ++i)
        load_unit<kKeyUnit>(&keys.words[r][i * (kKeyUnit / 4)], own + 4 * r * kRowBytes + i * 4 * kKeyUnit);
  }
  // All parts of D.
  __device__ __forceinline__ void load(Values (&values)[kValueWarps], int g, int c) const {
    const unsigned char* own = memory + slot * kSlotBytes + g * kValueUnit;
#pragma unroll
    for (int w = 0; w < kValueWarps; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = Values::token(i, c);
        load_unit<kValueUnit>(values[w].words[i], own + token / kValuePiece * kValuePitch +
                                                      token % kValuePiece * kRowBytes + w * 8 * kValueUnit);
      }
  }
};

// The token at `place` of the tile is `row`, as Keys::replace has it for tokens in order.
__device__ __forceinline__ void replace_key(Keys& keys, int place, const unsigned char* row, int g, int c) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (key_token(g, r) == place)
#pragma unroll
      for (int i = 0; i < kKeyUnits; ++i)
        load_unit<kKeyUnit>(&keys.words[r][i * (kKeyUnit / 4)], row + (4 * i + c) * kKeyUnit);
}

// The token at `place` is `row`, those behind it are zeros: what lies there has no weight, but may be a NaN.
__device__ __forceinline__ void end_values(Values (&values)[kValueWarps], int place, const unsigned char* row, int g,
                                           int c) {
#pragma unroll
  for (int w = 0; w < kValueWarps; ++w) {
    values[w].replace(place, row, w, g, c);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (Values::token(i, c) > place)
#pragma unroll
        for (int t = 0; t < kValueUnit / 4; ++t) values[w].words[i][t] = 0;
  }
}
