// FlashAttention, forward pass, float32 inputs: Algorithm 1 of
//   Dao, Fu, Ermon, Rudra, Re: "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022,
// as published. forward/fa1/kernel.cu is the kernel for 16-bit inputs. It explains the loops, the workspace, the mask, and how
// the warps of a group split the keys. Products are made of pairs of float16 (mma/half_pair.cuh); with TF32, of their leading
// halves alone.
//
//   Algorithm 1                                      here
//   l.2-4 O = 0, l = 0, m = -inf; Tr and Tc          the first key block reads no state; Tr, Tc
//   l.5-6 for j: load Kj, Vj to SRAM                 load_key_block: copied, then split into pairs in place
//   l.7-8 for i: load Qi, Oi, li, mi to SRAM         for (i), in strips of 32 rows; copy_strip, split_strip; StripState::load
//   l.9   Sij = Qi Kj^T                              scores
//   l.10  m~ = rowmax S, P~ = exp(S - m~), l~        reduce_max, exponentials
//   l.11-13 m_new, l_new, Oi; write Oi, li, mi       output_slice (P~ Vj), StripState
//
// Departures from the 16-bit kernel, and why:
// - A strip of Qi belongs to one group of warps. Each warp splits the rows that it copied, and only the group waits for them. The
//   same rows of the next query block are copied as soon as the scores exist: one buffer suffices. If the buffer does not fit
//   beside the parts of P V, the parts overlay it, and the copy follows them.
// - K and V stay in shared memory: as pairs they are twice the size, and registers hold the two halves of P~.
// - Tensor cores truncate sums where float32 arithmetic rounds. They sum, from zero, 16 columns of S and, of P~ Vj, a warp's own
//   keys, at most 32; the remaining sums are ordinary additions.
// - Each group of eight keys has its own unit. P~ includes the ratio of Vj's unit to the largest unit of the key block.
#include "forward/fa1_f32/config.cuh"
#include "shared/params.cuh"
#include "forward/query_block.cuh"
#include "mma/copy.cuh"
#include "mma/half_pair.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"
#include "forward/fa1/strip_state.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int GROUPS = NUM_WARPS / KEY_WARPS;
constexpr int STRIPS = BLOCK_Q / (GROUPS * STRIP);  // strips of a group in a query block
constexpr int WARP_KEYS = BLOCK_KV / KEY_WARPS;
constexpr int S_TILES = WARP_KEYS / 8;   // 8-column mma tiles of a warp's scores, and groups of eight keys
constexpr int P_STEPS = WARP_KEYS / 16;  // k16 steps of P V
static_assert(NUM_WARPS % KEY_WARPS == 0 && WARP_KEYS % 16 == 0, "a warp multiplies 16 keys at a time");
static_assert(BLOCK_Q % (GROUPS * STRIP) == 0, "a query block gives every group the same number of strips");
static_assert(BLOCK_KV % (8 * NUM_WARPS) == 0, "every warp copies and splits the same number of groups of eight keys");

constexpr int ROW_BYTES = HEAD_DIM * 4;
constexpr int PITCH = tile_pitch(ROW_BYTES, 64);
// Whether a strip is copied while the previous strip is computed. With one strip per block, parts of P V take its place.
constexpr bool Q_AHEAD = BLOCK_Q != STRIP;

// Dynamic shared memory: the offset of each buffer. K, V and Q are first float32, then pairs of float16 in the same place.
struct SharedMemory {
  static constexpr int K = 0, V = K + BLOCK_KV * PITCH, Q = V + BLOCK_KV * PITCH, Q_END = Q + BLOCK_Q * PITCH;
  static constexpr int PARTS = Q_AHEAD ? Q_END : Q;  // parts of P V that the warps of a group exchange
  static constexpr int PARTS_END = PARTS + GROUPS * Group::PARTS_BYTES;
  static constexpr int MAX = PARTS_END > Q_END ? PARTS_END : Q_END;  // row maxima of each warp,
  static constexpr int SUM = MAX + GROUPS * Group::VALUES_BYTES;     // and row sums
  static constexpr int BYTES = SUM + GROUPS * Group::VALUES_BYTES;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/fa1.py must ask for the bytes that the buffers take");
static_assert(Q_AHEAD || SharedMemory::PARTS_END <= SharedMemory::Q_END, "parts of P V take the place of the group's strip of Q");
static_assert(LENGTHS_KIND == DENSE, "fa1_forward_f32 takes dense arrays only");

using Rows = RowCopy<ROW_BYTES, PITCH, ALIGNMENT>;
using Scores = float[S_TILES][M_TILES][4];   // accumulators: the strip's rows x this warp's keys
using PairOperand = u32[P_STEPS][M_TILES][4];  // hi or lo of P~ as A operands
struct Probabilities {
  PairOperand hi, lo;
};

// Alg. 1, l. 8: this warp's share of a strip of Qi, asynchronously. Rows past the end become zeros. `lane_Q` is the lane's first
// byte of the head.
DEVICE void copy_strip(const AttentionParams& p, const char* lane_Q, u32 Q_smem, i64 first_row, const Group& group) {
  const i64 row_bytes = p.q_stride.seq * 4;
#pragma unroll
  for (int g = 0; g < STRIP / 8; g += KEY_WARPS) {
    const int offset = (g + group.warp) * 8;
    Rows::copy(Q_smem + offset * PITCH, lane_Q + (first_row + offset) * row_bytes, row_bytes,
               int(max(i64(0), min(i64(8), p.seqlen_q - first_row - offset))), group.lane);
  }
  cp_async_commit();
}

// Splits the rows of a strip that this warp copied.
DEVICE void split_strip(u32 Q_smem, const Group& group) {
  warp_sync();  // the copies of the other lanes have landed too
#pragma unroll
  for (int g = 0; g < STRIP / 8; g += KEY_WARPS) {
    split_rows<HEAD_DIM, PITCH>(Q_smem + (g + group.warp) * 8 * PITCH, group.lane);
  }
  group.sync();  // the rows of all warps are split
}

// Alg. 1, l. 6. Rows past the end become zeros. Each warp splits the rows that it copied.
DEVICE void load_key_block(const AttentionParams& p, const char* lane_K, const char* lane_V, u32 smem, int j) {
  const int warp = threadIdx.x / 32;
  block_sync();  // the previous key block is read; O, l and m are written
#pragma unroll
  for (int g = 0; g < BLOCK_KV / 8; g += NUM_WARPS) {
    const int offset = (g + warp) * 8;
    const i64 key = i64(j) * BLOCK_KV + offset, K_row = p.k_stride.seq * 4, V_row = p.v_stride.seq * 4;
    const int valid = int(max(i64(0), min(i64(8), p.seqlen_k - key)));
    Rows::copy(smem + SharedMemory::K + offset * PITCH, lane_K + key * K_row, K_row, valid, threadIdx.x % 32);
    Rows::copy(smem + SharedMemory::V + offset * PITCH, lane_V + key * V_row, V_row, valid, threadIdx.x % 32);
  }
  cp_async_commit();
  cp_async_wait<0>();
  warp_sync();  // the copies of the other lanes have landed too
#pragma unroll 1
  for (int g = 0; g < BLOCK_KV / 8; g += NUM_WARPS) {
    split_rows<HEAD_DIM, PITCH>(smem + SharedMemory::K + (g + warp) * 8 * PITCH, threadIdx.x % 32);
    split_rows<HEAD_DIM, PITCH>(smem + SharedMemory::V + (g + warp) * 8 * PITCH, threadIdx.x % 32);
  }
  block_sync();  // K and V are split
}

// The largest unit of the key block's values, which is the unit of P~ V.
DEVICE float largest_unit(u32 V_smem) {
  float unit = pair_unit(0);
#pragma unroll
  for (int g = 0; g < BLOCK_KV / 8; ++g) unit = fmaxf(unit, ld_shared_f32(unit_address<PITCH>(V_smem, g)));
  return unit;
}

// Alg. 1, l. 9: Sij = Qi Kj^T for the strip's rows and this warp's keys.
DEVICE void scores(Scores& S_rmem, u32 smem, u32 Q_smem, const Group& group) {
  const u32 K_smem = smem + SharedMemory::K + group.warp * WARP_KEYS * PITCH;
  const u32 Q_lane = Q_smem + pair_lane_a<PITCH>(group.lane), K_lane = K_smem + pair_lane_b<PITCH>(group.lane);
#pragma unroll 1
  for (int d = 0; d < D_PAIRS; ++d) {
    u32 Q_hi[M_TILES][4], Q_lo[M_TILES][4];
    load_pair_operand<false, 16 * PITCH>(Q_hi, Q_lo, Q_lane + d * 2 * OCTET_BYTES);
    Scores sum = {};
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      multiply_pairs<false>(sum[n], Q_hi, Q_lo, K_lane + n * 8 * PITCH + d * 2 * OCTET_BYTES);
    }
    mma_fence();
#pragma unroll
    for (int e = 0; e < S_TILES * M_TILES * 4; ++e) (&S_rmem[0][0][0])[e] += (&sum[0][0][0])[e];
  }
  float Q_unit[LANE_ROWS];
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) Q_unit[x] = ld_shared_f32(unit_address<PITCH>(Q_smem, x));
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    const float K_unit = ld_shared_f32(unit_address<PITCH>(K_smem, n));
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
#pragma unroll
      for (int e = 0; e < 2; ++e) S_rmem[n][x / 2][x % 2 * 2 + e] *= Q_unit[x] * K_unit;
    }
  }
}

// Alg. 1, l. 10: P~ = exp(Sij - m~) in pairs, in units of V_unit / P_SCALE, and this warp's part of l~ = rowsum(P~).
DEVICE void exponentials(Probabilities& P_rmem, const Scores& S_rmem, const RowValues& m_tile, float scale_log2,
                         u32 V_smem, float V_unit, const Group& group) {
  const float inverse_unit = inverse_power_of_two(V_unit) * P_SCALE;
  RowValues m, l = {};
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) m[x] = finite_max(m_tile[x] * scale_log2);
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
    const float factor = ld_shared_f32(unit_address<PITCH>(V_smem, group.warp * S_TILES + n)) * inverse_unit;
#pragma unroll
    for (int x = 0; x < LANE_ROWS; ++x) {
      const float first = ex2(fmaf(S_rmem[n][x / 2][x % 2 * 2], scale_log2, -m[x]));
      const float second = ex2(fmaf(S_rmem[n][x / 2][x % 2 * 2 + 1], scale_log2, -m[x]));
      l[x] += first + second;
      const int h = n % 2 * 2 + x % 2;  // register of an A operand: row x % 2, columns n % 2
      split_pair(first * factor, second * factor, P_rmem.hi[n / 2][x / 2][h], P_rmem.lo[n / 2][x / 2][h]);
    }
  }
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) {
    l[x] = quad_sum(l[x]);
    if (group.lane % 4 == 0) group.put(group.sums, strip_row(group, x), l[x]);
  }
}

// Alg. 1, l. 12: P~ Vj, the columns of one slice that this warp owns, in units of V_unit / P_SCALE.
DEVICE void output_slice(OwnTiles& PV_rmem, const Probabilities& P_rmem, u32 V_smem, const Group& group, int slice) {
  const u32 V_lane = V_smem + group.warp * WARP_KEYS * PITCH + pair_lane_b_trans<PITCH>(group.lane);
  float part[KEY_WARPS][2][M_TILES][4] = {};  // the whole slice, over this warp's keys
#pragma unroll
  for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
    for (int share = 0; share < KEY_WARPS; ++share) {
      // Past the head dim the slice's first pair is computed instead and not stored: cheaper than a branch.
      const int pair = slice * KEY_WARPS + (exists(slice, group.owner(share)) ? group.owner(share) : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_pairs<true>(part[share][half], P_rmem.hi[k], P_rmem.lo[k],
                                      V_lane + k * 16 * PITCH + (2 * pair + half) * OCTET_BYTES);
      }
    }
  }
  mma_fence();
  if (slice > 0) group.sync();  // the previous slice's parts are read
#pragma unroll
  for (int share = KEY_WARPS - 1; share >= 0; --share) {
#pragma unroll
    for (int e = 0; e < 8 * M_TILES; ++e) PV_rmem[e / 4][e % 4] = (&part[share][0][0][0])[e];
    if (share > 0) group.give(share, PV_rmem);
  }
  group.sync();  // the parts of all warps, and their row sums, are written
  group.take(PV_rmem);
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa1_forward_f32(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(shared);
  const u32 smem = smem_address(shared), V_smem = smem + SharedMemory::V;
  Group group;
  group.index = threadIdx.x / (KEY_WARPS * 32);
  group.warp = threadIdx.x / 32 % KEY_WARPS;
  group.lane = threadIdx.x % 32;
  group.parts = smem + SharedMemory::PARTS + group.index * Group::PARTS_BYTES;
  group.maxima = smem + SharedMemory::MAX + group.index * Group::VALUES_BYTES;
  group.sums = smem + SharedMemory::SUM + group.index * Group::VALUES_BYTES;

  // Alg. 1, l. 3-4.
  const int Tr = (p.seqlen_q - 1) / BLOCK_Q + 1, Tc = (p.seqlen_k - 1) / BLOCK_KV + 1;
  const int q_head = int(blockIdx.x % u32(p.heads)), batch = int(blockIdx.x / u32(p.heads));
  const int kv_head = q_head / (p.heads / p.kv_heads);
  const i64 rows = i64(Tr) * BLOCK_Q, first = blockIdx.x * rows, all_rows = i64(p.batch) * p.heads * rows;
  Head head;  // Q, K, V: this lane's first byte
  head.Q = Rows::source(p.q, p.q_stride, batch, q_head, 0, group.lane);
  head.K = Rows::source(p.k, p.k_stride, batch, kv_head, 0, group.lane);
  head.V = Rows::source(p.v, p.v_stride, batch, kv_head, 0, group.lane);
  head.O = static_cast<char*>(p.o) + (batch * p.o_stride.batch + q_head * p.o_stride.head) * 4;
  head.O_work = static_cast<char*>(p.workspace) + first * D_PAIRS * 64;
  head.lm = reinterpret_cast<vec2*>(static_cast<char*>(p.workspace) + all_rows * D_PAIRS * 64) + first;

  for (int s = 0; s < STRIPS; ++s) {
    const int strip = (s * GROUPS + group.index) * STRIP;
    copy_strip(p, head.Q, smem + SharedMemory::Q + strip * PITCH, strip, group);
  }
  for (int j = 0; j < Tc; ++j) {  // l. 5
    const bool last = j == Tc - 1;
    load_key_block(p, head.K, head.V, smem, j);
    const float V_unit = largest_unit(V_smem);
    for (int i = 0; i < Tr; ++i) {  // l. 7
      const TileRange tiles = visited_tiles<BLOCK_Q, BLOCK_KV>(p, i);
      const u32 record = blockIdx.x * u32(Tr) + u32(i);
      if constexpr (TRACE) {
        if (j == 0 && threadIdx.x == 0) p.trace[record].start_ns = global_timer();
      }
#pragma unroll 1
      for (int s = 0; s < STRIPS; ++s) {
        const int strip = (s * GROUPS + group.index) * STRIP;
        const i64 first_row = i64(i) * BLOCK_Q + strip, next_row = i64(i + 1 < Tr ? i + 1 : 0) * BLOCK_Q + strip;
        const u32 Q_smem = smem + SharedMemory::Q + strip * PITCH;
        const bool past_the_end = first_row >= p.seqlen_q;
        StripState state;
        if (!past_the_end) state.load(head, group, first_row, j == 0);
        cp_async_wait<STRIPS - 1>();  // the strip's copies have landed; copies of the group's other strips came later
        if (past_the_end) {
          copy_strip(p, head.Q, Q_smem, next_row, group);
          continue;
        }
        split_strip(Q_smem, group);
        Scores S_rmem = {};
        scores(S_rmem, smem, Q_smem, group);
        const auto S = fragment_view_by_columns(S_rmem);
        cap_scores<SOFTCAP, true>(S, p.softcap);
        if (!tiles.is_clear(j)) {
          hide_scores<RIGHT_MASKED>(S, head_mask(p), int(first_row) + S.lane_row(group.lane), j * BLOCK_KV,
                                    group.warp * WARP_KEYS + S.lane_column(group.lane));
        }
        RowValues m_tile;
        reduce_max(m_tile, S, group);
        if constexpr (Q_AHEAD) copy_strip(p, head.Q, Q_smem, next_row, group);
        Probabilities P_rmem;
        exponentials(P_rmem, S_rmem, m_tile, p.scale_log2, V_smem, V_unit, group);
#pragma unroll
        for (int slice = 0; slice < NUM_SLICES; ++slice) {
          if (slice + 1 < NUM_SLICES) state.load_slice(head, group, first_row, slice + 1, j == 0);
          OwnTiles PV_rmem;
          output_slice(PV_rmem, P_rmem, V_smem, group, slice);
          if (slice == 0) {
            state.update_rows(m_tile, group, p.scale_log2);
#pragma unroll
            for (int x = 0; x < LANE_ROWS; ++x) state.add[x] *= V_unit / P_SCALE;
          }
          state.update_slice(PV_rmem, slice);
          state.write_slice(p, head, group, first_row, slice, last);
        }
        state.write_rows(p, head, group, first_row, last);
        if constexpr (!Q_AHEAD) {
          group.sync();  // the parts that overlay the strip are read
          copy_strip(p, head.Q, Q_smem, next_row, group);
        }
      }
      if constexpr (TRACE) {
        block_sync();  // all groups have finished the query block
        if (last && threadIdx.x == 0) write_trace(p, record, {i, q_head, batch}, tiles, p.trace[record].start_ns);
      }
    }
  }
  cp_async_wait<0>();  // the last query block was copied for a step that does not exist
}
