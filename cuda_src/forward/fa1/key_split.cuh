// Warps that split the keys of a block ("split-K"), and their reductions through shared memory.
//
// A group of WARPS warps computes the same rows, each warp over its own keys. Row maxima, row sums and P V are reductions over
// the group. The columns of P V are divided: warp w sums the parts of its own columns. Parts have the layout of mma accumulators,
// 16 bytes per lane: no bank conflicts, no transposition.
#pragma once
#include "primitives/primitives.cuh"
#include "mma/fragments.cuh"
#include "shared/named_barriers.cuh"

template <int WARPS, int ROWS, int TILES>  // TILES: accumulators of a warp at a time
struct KeyGroup {
  static_assert(WARPS == 2 || WARPS == 4, "a row's values are one vector");
  static constexpr int VALUES_BYTES = ROWS * WARPS * 4;           // one float per row and warp
  static constexpr int PART_BYTES = TILES * 512;                  // one part, for one other warp
  static constexpr int PARTS_BYTES = WARPS * (WARPS - 1) * PART_BYTES;  // [receiver][sender]

  int index, warp, lane;    // of the group in the block, of this warp in the group
  u32 maxima, sums, parts;  // shared memory of this group

  // A barrier of this group: other groups compute meanwhile.
  DEVICE void sync() const { bar_sync(KEY_GROUP_BARRIER + index, WARPS * 32); }

  // Called by one lane per row.
  DEVICE void put(u32 values, int row, float x) const { st_shared_f32(values + (row * WARPS + warp) * 4, x); }

  DEVICE float max(u32 values, int row) const {
    float x[WARPS];
    get(x, values, row);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) x[0] = fmaxf(x[0], x[w]);
    return x[0];
  }
  DEVICE float sum(u32 values, int row) const {
    float x[WARPS];
    get(x, values, row);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) x[0] += x[w];
    return x[0];
  }

  // Shares are numbered from this warp on: 0 is its own, 1 the next warp's, and so on. Which accumulators are its own is then
  // known at compile time.
  DEVICE int owner(int share) const { return (warp + share) % WARPS; }

  // Writes this warp's part of a share for the warp that owns the share.
  DEVICE void give(int share, const float (&part)[TILES][4]) const {
    const u32 target = parts + (owner(share) * (WARPS - 1) + share - 1) * PART_BYTES + lane * 16;
#pragma unroll
    for (int t = 0; t < TILES; ++t) st_shared_vec4(target + t * 512, accumulator_bits(part[t]));
  }

  // Adds the parts of the other warps.
  DEVICE void take(float (&sum)[TILES][4]) const {
    const u32 source = parts + warp * (WARPS - 1) * PART_BYTES + lane * 16;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int w = 0; w < WARPS - 1; ++w) {
        float part[4];
        set_accumulator(part, ld_shared_vec4(source + w * PART_BYTES + t * 512));
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[t][e] += part[e];
      }
    }
  }

 private:
  DEVICE static void get(float (&x)[WARPS], u32 values, int row) {
    if constexpr (WARPS == 4) {
      set_accumulator(x, ld_shared_vec4(values + row * 16));
    } else {
      const vec2 v = ld_shared_vec2(values + row * 8);
      x[0] = u32_as_float(v.x);
      x[1] = u32_as_float(v.y);
    }
  }
};
