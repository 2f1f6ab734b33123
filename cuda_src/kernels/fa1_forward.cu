// FlashAttention, forward pass, 16-bit inputs: Algorithm 1 of
//   Dao, Fu, Ermon, Rudra, Re: "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022,
// as published: the loop over key blocks is outside, the loop over query blocks inside. So every query block's O, l and
// m go out to device memory and come back once a key block, O is divided by l at every step, and a thread block
// owns a whole head: the grid is batch x heads, however long the sequences are.
//
//   Algorithm 1                                      here
//   l.1   block sizes Bc, Br                         BLOCK_KV, BLOCK_Q
//   l.2   O = 0, l = 0, m = -inf in HBM              the first key block does not read O, l and m: nothing is cleared
//   l.3-4 divide into Tr and Tc blocks               Tr, Tc
//   l.5   for j: over key blocks                     for (j)
//   l.6     load Kj, Vj to SRAM                      load_key_block
//   l.7     for i: over query blocks                 for (i), in strips of 32 rows
//   l.8       load Qi, Oi, li, mi to SRAM            copy_query_block, a block ahead; load_rows, load_slice
//   l.9       Sij = Qi Kj^T                          scores
//   l.10      m~ = rowmax S, P~ = exp(S - m~), l~    reduce_max, exponentials
//   l.11      m_new, l_new                           update_rows
//   l.12      write Oi                               output_slice (P~ Vj), update_slice, write_slice
//   l.13      write li, mi                           write_rows
//   The mask is that of the paper's Algorithm 2. Every tile is visited, as there; only the element-wise comparison is
//   left out of tiles where it could change nothing.
//
// Work within a thread block. The keys of a block are split over KEY_WARPS warps, as in the paper's own implementation
// and in figure 3(a) of the FlashAttention-2 paper: a warp holds the scores of all query rows of a strip with *its*
// keys. The row maximum, the row sum and the product P V are then sums over warps, which pass through shared memory;
// that traffic, two barriers a strip, is what FlashAttention-2 removed. What the split gives in return: a warp's
// share of Kj and Vj never changes in the inner loop, so it stays in registers when it fits there, and the inner
// loop reads from shared memory only Q and the exchanged parts.
//
// O is kept as float32 between key blocks, in a workspace: rounded to 16 bits at every step, its error would grow with
// the number of key blocks.
#include "params.cuh"
#include "tiles/copy.cuh"
#include "tiles/fragments.cuh"
#include "tiles/schedule.cuh"
#include "tiles/softmax.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int KEY_WARPS = BLOCK_KV < 64 ? 2 : 4;  // warps that share a row: a group
constexpr int GROUPS = NUM_WARPS / KEY_WARPS;
constexpr int WARP_KEYS = BLOCK_KV / KEY_WARPS;
constexpr int ROW_FRAGMENTS = 2;                    // of 16 rows
constexpr int STRIP = ROW_FRAGMENTS * 16;  // query rows a group takes at a time
static_assert(NUM_WARPS % KEY_WARPS == 0 && WARP_KEYS % 16 == 0, "a warp multiplies 16 keys at a time");
static_assert(BLOCK_Q % (GROUPS * STRIP) == 0, "a query block gives every group the same number of strips");

// Columns of O in pairs of mma tiles. P V is computed and exchanged in slices of one pair a warp, which bounds registers
// and shared memory at every head dim.
constexpr int D_PAIRS = (HEAD_DIM + 15) / 16;
constexpr int NUM_SLICES = (D_PAIRS + KEY_WARPS - 1) / KEY_WARPS;

constexpr bool KV_IN_REGISTERS = HEAD_DIM <= 64 && WARP_KEYS <= 32;  // at most 64 of them, K and V together

// Shared memory, bytes. Parts of P V overlay K and V where these live in registers.
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32);
constexpr int PART_BYTES = ROW_FRAGMENTS * 2 * 512;  // what a warp hands to another: 16 bytes a lane and tile
constexpr int K_SMEM = 0;
constexpr int V_SMEM = K_SMEM + BLOCK_KV * PITCH;
constexpr int PARTS_SMEM = KV_IN_REGISTERS ? 0 : V_SMEM + BLOCK_KV * PITCH;
constexpr int PARTS_END = PARTS_SMEM + NUM_WARPS * (KEY_WARPS - 1) * PART_BYTES;  // [NUM_WARPS][KEY_WARPS - 1]
constexpr int Q_SMEM = PARTS_END > V_SMEM + BLOCK_KV * PITCH ? PARTS_END : V_SMEM + BLOCK_KV * PITCH;
constexpr int MAX_SMEM = Q_SMEM + 2 * BLOCK_Q * PITCH;      // [GROUPS][STRIP][KEY_WARPS] row maxima
constexpr int SUM_SMEM = MAX_SMEM + NUM_WARPS * STRIP * 4;  // [GROUPS][STRIP][KEY_WARPS] row sums
static_assert(SUM_SMEM + NUM_WARPS * STRIP * 4 == SMEM_BYTES, "the registry's formula and this layout differ");

// Named barriers; 0 is the whole block's.
enum Barrier : int { GROUP_0 = 1 };  // one a group

// One head's tensors in device memory.
struct Head {
  const char *Q, *K, *V;
  char* O;
  char* O_work;  // float32 O between key blocks, as accumulators: (Tr * BLOCK_Q / 16, D_PAIRS, 2, lane, 4)
  vec2* lm;      // (Tr * BLOCK_Q): row sum, and row maximum in units of log2
};

// This thread's place in the block, and its group's shared memory.
struct Lane {
  int thread, lane, group, key_warp;
  u32 parts, maxima, sums;

  // The warps that share rows wait for each other. Groups do not: one's products fill the other's waits.
  DEVICE void group_sync() const { bar_sync(GROUP_0 + group, KEY_WARPS * 32); }
};

// This warp's keys as B operands of the two products: Q K^T (two 8-key columns an entry) and P V (two 8-wide ones).
struct KeyFragments {
  u32 K[D_PAIRS][WARP_KEYS / 16][4];
  u32 V[WARP_KEYS / 16][NUM_SLICES][KEY_WARPS][4];  // in the order of owner()
};

DEVICE void load_K(u32 (&K_rmem)[4], u32 smem, const Lane& me, int d_pair, int key_pair) {
  ldmatrix_x4(K_rmem, smem + K_SMEM + (me.key_warp * WARP_KEYS + key_pair * 16) * PITCH + d_pair * 32 +
                          lane_offset_columns_first<PITCH>(me.lane));
}
// The warp that owns pair x of a slice, in this warp's order: first its own, then the next warp's, and so on. So which
// pair is its own is known at compile time, though not which columns that is.
DEVICE int owner(const Lane& me, int x) { return (me.key_warp + x) % KEY_WARPS; }
DEVICE bool exists(int slice, int x) { return (slice + 1) * KEY_WARPS <= D_PAIRS || slice * KEY_WARPS + x < D_PAIRS; }

// V for pair x of a slice. A pair past the last column gets the slice's first instead, and its product is not stored:
// cheaper than a branch.
DEVICE void load_V(u32 (&V_rmem)[4], u32 smem, const Lane& me, int key_pair, int slice, int x) {
  const int column_pair = exists(slice, owner(me, x)) ? owner(me, x) : 0;
  ldmatrix_x4_trans(V_rmem, smem + V_SMEM + (me.key_warp * WARP_KEYS + key_pair * 16) * PITCH + column_pair * 32 +
                                lane_offset_rows_first<PITCH>(me.lane) + slice * KEY_WARPS * 32);
}

// Alg. 1, l. 6. The end of the last block is filled with zeros.
DEVICE void load_key_block(KeyFragments& kv, const AttentionParams& p, const Head& head, u32 smem, const Lane& me, int j) {
  block_sync();  // the parts of P V of the last step, which K and V overlay, have been read
  const i64 first = i64(j) * BLOCK_KV;
  const int valid = int(min(i64(BLOCK_KV), p.seqlen_k - first));
  const i64 K_row = p.k_stride.seq * 2, V_row = p.v_stride.seq * 2;
  copy_tile_async<BLOCK_KV, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(smem + K_SMEM, head.K + first * K_row, K_row,
                                                                            valid, me.thread);
  copy_tile_async<BLOCK_KV, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(smem + V_SMEM, head.V + first * V_row, V_row,
                                                                            valid, me.thread);
  if constexpr (HEAD_DIM % 16 != 0) zero_padding<2 * BLOCK_KV, ROW_BYTES, PITCH, NUM_THREADS>(smem + K_SMEM, me.thread);
  cp_async_commit();
  cp_async_wait<0>();
  block_sync();  // every thread's copies have landed
  if constexpr (KV_IN_REGISTERS) {
#pragma unroll
    for (int k = 0; k < WARP_KEYS / 16; ++k) {
#pragma unroll
      for (int d = 0; d < D_PAIRS; ++d) load_K(kv.K[d][k], smem, me, d, k);
#pragma unroll
      for (int s = 0; s < NUM_SLICES; ++s) {
#pragma unroll
        for (int x = 0; x < KEY_WARPS; ++x) load_V(kv.V[k][s][x], smem, me, k, s, x);
      }
    }
  }
}

// Alg. 1, l. 8, the part that shared memory takes: Qi, rows past the end as zeros.
DEVICE void copy_query_block(const AttentionParams& p, const Head& head, u32 Q_smem, const Lane& me, int i) {
  const i64 first = i64(i) * BLOCK_Q, row_bytes = p.q_stride.seq * 2;
  const int valid = int(min(i64(BLOCK_Q), p.seqlen_q - first));
  copy_tile_async<BLOCK_Q, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(Q_smem, head.Q + first * row_bytes, row_bytes,
                                                                           valid, me.thread);
  cp_async_commit();
}

using Scores = float[ROW_FRAGMENTS][WARP_KEYS / 8][4];  // accumulators: rows of the warp x keys of the warp

// Alg. 1, l. 9: Sij = Qi Kj^T for the strip's rows and this warp's keys.
DEVICE void scores(Scores& S_rmem, KeyFragments& kv, u32 smem, u32 Q_smem, const Lane& me) {
  const u32 Q_lane = Q_smem + lane_offset_rows_first<PITCH>(me.lane);
#pragma unroll
  for (int d = 0; d < D_PAIRS; ++d) {
    u32 Q_rmem[ROW_FRAGMENTS][4];
#pragma unroll
    for (int r = 0; r < ROW_FRAGMENTS; ++r) ldmatrix_x4(Q_rmem[r], Q_lane + r * 16 * PITCH + d * 32);
#pragma unroll
    for (int k = 0; k < WARP_KEYS / 16; ++k) {
      if constexpr (!KV_IN_REGISTERS) load_K(kv.K[d][k], smem, me, d, k);
      const u32(&K_rmem)[4] = kv.K[d][k];
#pragma unroll
      for (int r = 0; r < ROW_FRAGMENTS; ++r) {
        mma_16bit<BFLOAT16>(S_rmem[r][2 * k], Q_rmem[r], K_rmem[0], K_rmem[1]);
        mma_16bit<BFLOAT16>(S_rmem[r][2 * k + 1], Q_rmem[r], K_rmem[2], K_rmem[3]);
      }
    }
  }
  mma_fence();
}

// Rows of a strip in which a lane holds scores and output, as mma.sync lays them out.
constexpr int LANE_ROWS = 2 * ROW_FRAGMENTS;
using RowValues = float[LANE_ROWS];
DEVICE int strip_row(const Lane& me, int x) { return x * 8 + me.lane / 4; }

DEVICE void mask(Scores& S_rmem, const AttentionParams& p, const Lane& me, i64 first_row, int j) {
  const i64 first_key = i64(j) * BLOCK_KV + me.key_warp * WARP_KEYS + me.lane % 4 * 2;
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) {
    const i64 visible = visible_keys<CAUSAL>(p, int(first_row) + strip_row(me, x)) - first_key;
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; ++n) {
      if (n * 8 >= visible) S_rmem[x / 2][n][x % 2 * 2] = NEG_INF;
      if (n * 8 + 1 >= visible) S_rmem[x / 2][n][x % 2 * 2 + 1] = NEG_INF;
    }
  }
}

// A row's values from all warps of the group.
DEVICE void load_group_values(float (&x)[KEY_WARPS], u32 smem) {
  if constexpr (KEY_WARPS == 4) {
    const vec4 v = ld_shared_vec4(smem);
    x[0] = u32_as_float(v.x), x[1] = u32_as_float(v.y), x[2] = u32_as_float(v.z), x[3] = u32_as_float(v.w);
  } else {
    const vec2 v = ld_shared_vec2(smem);
    x[0] = u32_as_float(v.x), x[1] = u32_as_float(v.y);
  }
}
DEVICE float group_max(u32 smem) {
  float x[KEY_WARPS];
  load_group_values(x, smem);
  return KEY_WARPS == 4 ? fmaxf(fmaxf(x[0], x[1]), fmaxf(x[KEY_WARPS - 2], x[KEY_WARPS - 1])) : fmaxf(x[0], x[1]);
}
DEVICE float group_sum(u32 smem) {
  float x[KEY_WARPS];
  load_group_values(x, smem);
  return KEY_WARPS == 4 ? (x[0] + x[1]) + (x[KEY_WARPS - 2] + x[KEY_WARPS - 1]) : x[0] + x[1];
}

// Alg. 1, l. 10: m~ = rowmax(Sij). A warp knows the maxima over its own keys; the strip's are the maxima over warps.
DEVICE void reduce_max(RowValues& m_tile, const Scores& S_rmem, const Lane& me) {
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) {
    float largest = NEG_INF;
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; ++n) {
      largest = fmaxf(largest, fmaxf(S_rmem[x / 2][n][x % 2 * 2], S_rmem[x / 2][n][x % 2 * 2 + 1]));
    }
    largest = quad_max(largest);
    if (me.lane % 4 == 0) st_shared_f32(me.maxima + (strip_row(me, x) * KEY_WARPS + me.key_warp) * 4, largest);
  }
  me.group_sync();  // the maxima of all warps are there; also, the last strip's parts of P V and of l~ have been read
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) m_tile[x] = group_max(me.maxima + strip_row(me, x) * KEY_WARPS * 4);
}

// Maximum in units of log2; 0 where no key was seen, so that exp2(-inf - m) is 0, not NaN.
DEVICE float finite_max(float m) { return m == NEG_INF ? 0.0f : m; }

using Probabilities = u32[ROW_FRAGMENTS][WARP_KEYS / 16][4];  // A operands of P V

// Alg. 1, l. 10: P~ = exp(Sij - m~), rounded to 16 bits, and this warp's part of l~ = rowsum(P~).
DEVICE void exponentials(Probabilities& P_rmem, Scores& S_rmem, const RowValues& m_tile, float scale_log2, const Lane& me) {
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) {
    const float m = finite_max(m_tile[x] * scale_log2);
    float l = 0.0f;
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; ++n) {
      const float lo = ex2(fmaf(S_rmem[x / 2][n][x % 2 * 2], scale_log2, -m));
      const float hi = ex2(fmaf(S_rmem[x / 2][n][x % 2 * 2 + 1], scale_log2, -m));
      l += lo + hi;
      P_rmem[x / 2][n / 2][n % 2 * 2 + x % 2] = pack_16bit<BFLOAT16>(lo, hi);
    }
    l = quad_sum(l);
    if (me.lane % 4 == 0) st_shared_f32(me.sums + (strip_row(me, x) * KEY_WARPS + me.key_warp) * 4, l);
  }
}

using OwnTiles = float[2][ROW_FRAGMENTS][4];  // the pair of a slice that this warp owns

// Alg. 1, l. 12: P~ Vj for one slice. Every warp has a part of all columns, from its own keys; it hands the others
// theirs through shared memory, accumulator by accumulator, and adds what they hand over.
DEVICE void output_slice(OwnTiles& PV_rmem, const Probabilities& P_rmem, KeyFragments& kv, u32 smem, const Lane& me, int slice) {
  OwnTiles part[KEY_WARPS] = {};
#pragma unroll
  for (int k = 0; k < WARP_KEYS / 16; ++k) {
#pragma unroll
    for (int x = 0; x < KEY_WARPS; ++x) {
      u32(&V_rmem)[4] = kv.V[k][slice][x];
      if constexpr (!KV_IN_REGISTERS) load_V(V_rmem, smem, me, k, slice, x);
#pragma unroll
      for (int r = 0; r < ROW_FRAGMENTS; ++r) {
        mma_16bit<BFLOAT16>(part[x][0][r], P_rmem[r][k], V_rmem[0], V_rmem[1]);
        mma_16bit<BFLOAT16>(part[x][1][r], P_rmem[r][k], V_rmem[2], V_rmem[3]);
      }
    }
  }
  mma_fence();
  if (slice > 0) me.group_sync();  // the last slice's parts have been read
#pragma unroll
  for (int x = 1; x < KEY_WARPS; ++x) {
    const u32 target = me.parts + (owner(me, x) * (KEY_WARPS - 1) + x - 1) * PART_BYTES + me.lane * 16;
#pragma unroll
    for (int y = 0; y < 2 * ROW_FRAGMENTS; ++y) {
      const float(&a)[4] = part[x][y / ROW_FRAGMENTS][y % ROW_FRAGMENTS];
      st_shared_vec4(target + y * 512, {float_as_u32(a[0]), float_as_u32(a[1]), float_as_u32(a[2]), float_as_u32(a[3])});
    }
  }
  me.group_sync();  // the parts of all warps are there, and their row sums
  const u32 source = me.parts + me.key_warp * (KEY_WARPS - 1) * PART_BYTES + me.lane * 16;
#pragma unroll
  for (int y = 0; y < 2 * ROW_FRAGMENTS; ++y) {
    float(&sum)[4] = PV_rmem[y / ROW_FRAGMENTS][y % ROW_FRAGMENTS];
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = part[0][y / ROW_FRAGMENTS][y % ROW_FRAGMENTS][e];
#pragma unroll
    for (int w = 0; w < KEY_WARPS - 1; ++w) {
      const vec4 v = ld_shared_vec4(source + w * PART_BYTES + y * 512);
      sum[0] += u32_as_float(v.x);
      sum[1] += u32_as_float(v.y);
      sum[2] += u32_as_float(v.z);
      sum[3] += u32_as_float(v.w);
    }
  }
}

// What this lane carries of a strip from one key block to the next: l and m of its rows, O of its rows and columns.
struct StripState {
  OwnTiles O[NUM_SLICES];
  RowValues l, m;
  RowValues keep, add;  // O = keep * O + add * P~ V

  // Calls f(accumulator, its place in head.O_work, fragment of rows, first column) for this lane's tiles of a slice.
  template <typename F>
  DEVICE void for_each_tile(const Head& head, const Lane& me, i64 first_row, int slice, F f) {
    if (!exists(slice, me.key_warp)) return;
    char* const work = head.O_work + first_row * (D_PAIRS * 64) + me.key_warp * 1024 + me.lane * 16 + slice * KEY_WARPS * 1024;
#pragma unroll
    for (int r = 0; r < ROW_FRAGMENTS; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (slice * KEY_WARPS + me.key_warp) * 16 + half * 8;
        f(O[slice][half][r], work + r * D_PAIRS * 1024 + half * 512, r, column);
      }
    }
  }

  // Alg. 1, l. 8, and l. 2 at the first key block. What is read was written before the barriers of load_key_block.
  DEVICE void load_rows(const Head& head, const Lane& me, i64 first_row, bool first) {
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      vec2 lm = {0, float_as_u32(NEG_INF)};
      if (!first) lm = ld_global<vec2>(head.lm + first_row + strip_row(me, x));
      l[x] = u32_as_float(lm.x);
      m[x] = u32_as_float(lm.y);
    }
  }
  DEVICE void load_slice(const Head& head, const Lane& me, i64 first_row, int slice, bool first) {
    for_each_tile(head, me, first_row, slice, [&](float(&o)[4], const char* work, int, int) {
      vec4 v = {0, 0, 0, 0};
      if (!first) v = ld_global<vec4>(work);
      o[0] = u32_as_float(v.x), o[1] = u32_as_float(v.y), o[2] = u32_as_float(v.z), o[3] = u32_as_float(v.w);
    });
    warp_sync();  // keeps the compiler from sinking the loads to their use: they fly during the products
  }

  // Alg. 1, l. 11: m_new = max(m, m~), l_new = e^(m - m_new) l + e^(m~ - m_new) l~, and the factors of l. 12.
  DEVICE void update_rows(const RowValues& m_tile, const Lane& me, float scale_log2) {
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      const float l_tile = group_sum(me.sums + strip_row(me, x) * KEY_WARPS * 4);
      const float m_scaled = m_tile[x] * scale_log2, m_new = fmaxf(m[x], m_scaled), base = finite_max(m_new);
      const float l_kept = ex2(m[x] - base) * l[x], weight = ex2(m_scaled - base);
      const float l_new = fmaf(weight, l_tile, l_kept);
      const float inverse = l_new == 0.0f ? 0.0f : rcp(l_new);  // 0: no key seen yet, O stays zero
      keep[x] = l_kept * inverse;
      add[x] = weight * inverse;
      m[x] = m_new;
      l[x] = l_new;
    }
  }

  // Alg. 1, l. 12: the new O of one slice.
  DEVICE void update_slice(const OwnTiles& PV_rmem, int slice) {
#pragma unroll
    for (int y = 0; y < 2 * ROW_FRAGMENTS; ++y) {
      const int r = y % ROW_FRAGMENTS, half = y / ROW_FRAGMENTS;
      float(&o)[4] = O[slice][half][r];
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = fmaf(keep[2 * r + e / 2], o[e], add[2 * r + e / 2] * PV_rmem[half][r][e]);
    }
  }

  // Alg. 1, l. 12: O to device memory until the next key block or, after the last, rounded to the output.
  DEVICE void write_slice(const AttentionParams& p, const Head& head, const Lane& me, i64 first_row, int slice, bool last) {
    if (!last) {
      for_each_tile(head, me, first_row, slice, [&](const float(&o)[4], char* work, int, int) {
        st_global(work, vec4{float_as_u32(o[0]), float_as_u32(o[1]), float_as_u32(o[2]), float_as_u32(o[3])});
      });
      return;
    }
    for_each_tile(head, me, first_row, slice, [&](const float(&o)[4], char*, int r, int column) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 row = first_row + strip_row(me, 2 * r + half);
        if (row >= p.seqlen_q || column >= HEAD_DIM) continue;
        char* const target = head.O + (row * p.o_stride.seq + column + me.lane % 4 * 2) * 2;
        const u32 both = pack_16bit<BFLOAT16>(o[2 * half], o[2 * half + 1]);
        if constexpr (ALIGNMENT >= 4) {
          st_global(target, both);
        } else {
          st_global(target, u16(both));
          st_global(target + 2, u16(both >> 16));
        }
      }
    });
  }

  // Alg. 1, l. 13: l and m likewise or, after the last key block, the natural-log LSE.
  DEVICE void write_rows(const AttentionParams& p, const Head& head, const Lane& me, i64 first_row, bool last) {
    constexpr float LN_2 = 0.693147180559945309f;
    if (me.key_warp != 0 || me.lane % 4 != 0) return;
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      const i64 row = first_row + strip_row(me, x);
      if (!last) {
        st_global(head.lm + row, vec2{float_as_u32(l[x]), float_as_u32(m[x])});
      } else if (p.lse != nullptr && row < p.seqlen_q) {
        st_global(p.lse + i64(blockIdx.x) * p.seqlen_q + row, l[x] == 0.0f ? NEG_INF : (m[x] + lg2(l[x])) * LN_2);
      }
    }
  }
};

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa1_forward(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(shared);
  const u32 smem = smem_address(shared);
  Lane me;
  me.thread = threadIdx.x;
  me.lane = me.thread % 32;
  me.group = me.thread / 32 / KEY_WARPS;
  me.key_warp = me.thread / 32 % KEY_WARPS;
  me.parts = smem + PARTS_SMEM + me.group * KEY_WARPS * (KEY_WARPS - 1) * PART_BYTES;
  me.maxima = smem + MAX_SMEM + me.group * KEY_WARPS * STRIP * 4;
  me.sums = smem + SUM_SMEM + me.group * KEY_WARPS * STRIP * 4;

  // Alg. 1, l. 3-4.
  const int Tr = (p.seqlen_q - 1) / BLOCK_Q + 1, Tc = (p.seqlen_k - 1) / BLOCK_KV + 1;
  const int q_head = int(blockIdx.x % u32(p.heads)), batch = int(blockIdx.x / u32(p.heads));
  const int kv_head = q_head / (p.heads / p.kv_heads);
  const i64 rows = i64(Tr) * BLOCK_Q, first = blockIdx.x * rows, all_rows = i64(p.batch) * p.heads * rows;
  Head head;
  head.Q = static_cast<const char*>(p.q) + (batch * p.q_stride.batch + q_head * p.q_stride.head) * 2;
  head.K = static_cast<const char*>(p.k) + (batch * p.k_stride.batch + kv_head * p.k_stride.head) * 2;
  head.V = static_cast<const char*>(p.v) + (batch * p.v_stride.batch + kv_head * p.v_stride.head) * 2;
  head.O = static_cast<char*>(p.o) + (batch * p.o_stride.batch + q_head * p.o_stride.head) * 2;
  head.O_work = static_cast<char*>(p.workspace) + first * D_PAIRS * 64;
  head.lm = reinterpret_cast<vec2*>(static_cast<char*>(p.workspace) + all_rows * D_PAIRS * 64) + first;

  if constexpr (HEAD_DIM % 16 != 0) zero_padding<2 * BLOCK_Q, ROW_BYTES, PITCH, NUM_THREADS>(smem + Q_SMEM, me.thread);
  copy_query_block(p, head, smem + Q_SMEM, me, 0);
  u32 Q_stage = 0;
  KeyFragments kv;
  for (int j = 0; j < Tc; ++j) {  // l. 5
    load_key_block(kv, p, head, smem, me, j);
    for (int i = 0; i < Tr; ++i, Q_stage ^= 1) {  // l. 7
      cp_async_wait<0>();
      block_sync();  // Qi has landed; the other stage, and K and V if they moved to registers, have been read
      const u32 Q_smem = smem + Q_SMEM + Q_stage * BLOCK_Q * PITCH;
      copy_query_block(p, head, smem + Q_SMEM + (Q_stage ^ 1) * BLOCK_Q * PITCH, me, i + 1 < Tr ? i + 1 : 0);
      const TileRange tiles = visited_tiles<BLOCK_Q, BLOCK_KV, CAUSAL, SKIP_MASKED_TILES>(p, i);
      if constexpr (TRACE) {
        if (j == 0 && me.thread == 0) p.trace[i64(blockIdx.x) * Tr + i].start_ns = global_timer();
      }
      const int valid_rows = int(min(i64(BLOCK_Q), p.seqlen_q - i64(i) * BLOCK_Q));
      for (int strip = me.group * STRIP; strip < valid_rows; strip += GROUPS * STRIP) {
        const i64 first_row = i64(i) * BLOCK_Q + strip;
        StripState state;
        state.load_rows(head, me, first_row, j == 0);
        state.load_slice(head, me, first_row, 0, j == 0);
        Scores S_rmem = {};
        scores(S_rmem, kv, smem, Q_smem + strip * PITCH, me);
        if (j >= tiles.unmasked) mask(S_rmem, p, me, first_row, j);
        RowValues m_tile;
        reduce_max(m_tile, S_rmem, me);
        Probabilities P_rmem;
        exponentials(P_rmem, S_rmem, m_tile, p.scale_log2, me);
#pragma unroll
        for (int slice = 0; slice < NUM_SLICES; ++slice) {
          if (slice + 1 < NUM_SLICES) state.load_slice(head, me, first_row, slice + 1, j == 0);
          OwnTiles PV_rmem;
          output_slice(PV_rmem, P_rmem, kv, smem, me, slice);
          if (slice == 0) state.update_rows(m_tile, me, p.scale_log2);
          state.update_slice(PV_rmem, slice);
          state.write_slice(p, head, me, first_row, slice, j == Tc - 1);
        }
        state.write_rows(p, head, me, first_row, j == Tc - 1);
      }
      if constexpr (TRACE) {
        block_sync();  // all groups have finished the query block
        const u32 record = blockIdx.x * u32(Tr) + u32(i);
        if (j == Tc - 1 && me.thread == 0) write_trace(p, record, {i, q_head, batch}, tiles, p.trace[record].start_ns);
      }
    }
  }
  cp_async_wait<0>();  // the query block copied ahead of a step that does not come
}
