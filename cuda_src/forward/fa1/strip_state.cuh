// O, l and m of a strip of query rows, which FlashAttention-1 (forward/fa1/kernel.cu; lines of its Algorithm 1 are named here)
// keeps in device memory between key blocks. A group of warps shares the rows; each warp owns some of the columns of O.
#pragma once
#include "shared/params.cuh"
#include "mma/fragments.cuh"
#include "forward/fa1/key_split.cuh"
#include "shared/store_two.cuh"
#include "shared/score.cuh"

constexpr int M_TILES = 2;           // 16-row mma tiles of a warp
constexpr int STRIP = M_TILES * 16;  // query rows that a group of KEY_WARPS warps takes at a time
constexpr int LANE_ROWS = M_TILES * 2;

// Columns of O in pairs of mma tiles. P V is computed and exchanged in slices of one pair per warp: registers and shared memory
// do not grow with the head dim.
constexpr int D_PAIRS = (HEAD_DIM + 15) / 16;
constexpr int NUM_SLICES = (D_PAIRS + KEY_WARPS - 1) / KEY_WARPS;

using Group = KeyGroup<KEY_WARPS, STRIP, 2 * M_TILES>;
using RowValues = float[LANE_ROWS];      // one per row of this lane
using OwnTiles = float[2 * M_TILES][4];  // this warp's pair of a slice: [2][M_TILES]

// One head's tensors in device memory.
struct Head {
  const char *Q, *K, *V;
  char* O;
  char* O_work;  // float32 O between key blocks, as accumulators: (Tr * BLOCK_Q / 16, D_PAIRS, 2, lane, 4)
  vec2* lm;      // (Tr * BLOCK_Q): row sum, and row maximum in units of log2
};

// The row of the strip that is row x of a lane.
DEVICE int strip_row(const Group& group, int x) { return x * 8 + group.lane / 4; }

// Alg. 1, l. 10: m~ = rowmax(Sij), the maxima of all warps of the group.
template <typename View>
DEVICE void reduce_max(RowValues& m_tile, View S, const Group& group) {
  lane_maxima<false>(m_tile, S);
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) {
    const float m = quad_max(m_tile[x]);
    if (group.lane % 4 == 0) group.put(group.maxima, strip_row(group, x), m);
  }
  group.sync();  // the maxima of all warps are written; the strip of Qi and the previous strip's parts are read
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) m_tile[x] = group.max(group.maxima, strip_row(group, x));
}

// Whether the slice's pair `x` lies within the head dim.
DEVICE bool exists(int slice, int x) { return (slice + 1) * KEY_WARPS <= D_PAIRS || slice * KEY_WARPS + x < D_PAIRS; }

// The maximum in units of log2, or 0 if the row saw no key: exp2(-inf - m) is then 0, not NaN.
DEVICE float finite_max(float m) { return m == NEG_INF ? 0.0f : m; }

// A lane's share of a strip: l and m of its rows, O of its rows and columns.
struct StripState {
  OwnTiles O[NUM_SLICES];
  RowValues l, m;
  RowValues keep, add;  // O = keep * O + add * P~ V

  // Calls f(accumulator, its place in head.O_work, its 16-row tile, its first column) for this lane's tiles of a slice.
  template <typename F>
  DEVICE void for_each_tile(const Head& head, const Group& group, i64 first_row, int slice, F f) {
    if (!exists(slice, group.warp)) return;
    char* const work = head.O_work + first_row * (D_PAIRS * 64) + group.warp * 1024 + group.lane * 16;
#pragma unroll
    for (int t = 0; t < 2 * M_TILES; ++t) {
      const int r = t % M_TILES, half = t / M_TILES;
      f(O[slice][t], work + r * D_PAIRS * 1024 + slice * KEY_WARPS * 1024 + half * 512, r,
        (slice * KEY_WARPS + group.warp) * 16 + half * 8);
    }
  }

  // Alg. 1, l. 8, and l. 2 at the first key block. The barriers of load_key_block order these loads after the stores of the
  // previous key block.
  DEVICE void load(const Head& head, const Group& group, i64 first_row, bool first) {
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      vec2 lm = {0, float_as_u32(NEG_INF)};
      if (!first) lm = ld_global<vec2>(head.lm + first_row + strip_row(group, x));
      l[x] = u32_as_float(lm.x);
      m[x] = u32_as_float(lm.y);
    }
    load_slice(head, group, first_row, 0, first);
  }
  DEVICE void load_slice(const Head& head, const Group& group, i64 first_row, int slice, bool first) {
    for_each_tile(head, group, first_row, slice, [&](float(&o)[4], const char* work, int, int) {
      set_accumulator(o, first ? vec4{0, 0, 0, 0} : ld_global<vec4>(work));
    });
    warp_sync();  // keeps the compiler from sinking the loads to their use: they overlap with the products
  }

  // Alg. 1, l. 11: m_new = max(m, m~), l_new = e^(m - m_new) l + e^(m~ - m_new) l~, and the factors of l. 12.
  DEVICE void update_rows(const RowValues& m_tile, const Group& group, float scale_log2) {
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      const float l_tile = group.sum(group.sums, strip_row(group, x));
      const float m_scaled = m_tile[x] * scale_log2, m_new = fmaxf(m[x], m_scaled), base = finite_max(m_new);
      const float l_kept = ex2(m[x] - base) * l[x], weight = ex2(m_scaled - base);
      const float l_new = fmaf(weight, l_tile, l_kept);
      const float inverse = l_new == 0.0f ? 0.0f : rcp(l_new);  // 0: no key seen yet, and O stays 0
      keep[x] = l_kept * inverse;
      add[x] = weight * inverse;
      m[x] = m_new;
      l[x] = l_new;
    }
  }

  // Alg. 1, l. 12: the new O of one slice.
  DEVICE void update_slice(const OwnTiles& PV_rmem, int slice) {
#pragma unroll
    for (int t = 0; t < 2 * M_TILES; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int x = t % M_TILES * 2 + e / 2;
        O[slice][t][e] = fmaf(keep[x], O[slice][t][e], add[x] * PV_rmem[t][e]);
      }
    }
  }

  // Alg. 1, l. 12: O to device memory until the next key block or, after the last, rounded to the output.
  DEVICE void write_slice(const AttentionParams& p, const Head& head, const Group& group, i64 first_row, int slice,
                          bool last) {
    for_each_tile(head, group, first_row, slice, [&](const float(&o)[4], char* work, int r, int column) {
      if (!last) {
        st_global(work, accumulator_bits(o));
      } else if (column < HEAD_DIM) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const i64 row = first_row + strip_row(group, 2 * r + half);
          char* const target = head.O + (row * p.o_stride.seq + column + group.lane % 4 * 2) * Element::BYTES;
          store_two<Element, ALIGNMENT>(target, o[2 * half], o[2 * half + 1], row < p.seqlen_q);
        }
      }
    });
  }

  // Alg. 1, l. 13: l and m to device memory or, after the last key block, the natural-log LSE.
  DEVICE void write_rows(const AttentionParams& p, const Head& head, const Group& group, i64 first_row, bool last) {
    if (Element::BYTES == 2 || !last) {
      write_state(p, head, group, first_row, last);
    } else if (p.lse != nullptr && group.warp == 0 && group.lane % 4 == 0) {
#pragma unroll
      for (int x = 0; x < LANE_ROWS; ++x) {
        const i64 row = first_row + strip_row(group, x);
        const float lse = exact_lse(m[x], l[x]);
        if (row < p.seqlen_q) st_global(p.lse + i64(blockIdx.x) * p.seqlen_q + row, lse);
      }
    }
  }

 private:
  DEVICE void write_state(const AttentionParams& p, const Head& head, const Group& group, i64 first_row, bool last) {
    if (group.warp != 0 || group.lane % 4 != 0) return;
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      const i64 row = first_row + strip_row(group, x);
      if (!last) {
        st_global(head.lm + row, vec2{float_as_u32(l[x]), float_as_u32(m[x])});
      } else if (p.lse != nullptr && row < p.seqlen_q) {
        st_global(p.lse + i64(blockIdx.x) * p.seqlen_q + row, natural_lse(m[x], l[x]));
      }
    }
  }
};
