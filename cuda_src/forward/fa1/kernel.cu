// FlashAttention, forward pass, 16-bit inputs: Algorithm 1 of
//   Dao, Fu, Ermon, Rudra, Re: "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022,
// as published: the outer loop runs over key blocks, the inner loop over query blocks. So each query block's O, l and m go to
// device memory and come back once per key block. O is divided by l at every step. A thread block owns a whole head: the grid
// is batch x heads.
//
//   Algorithm 1                                      here
//   l.1   block sizes Bc, Br                         BLOCK_KV, BLOCK_Q
//   l.2   O = 0, l = 0, m = -inf in HBM              the first key block does not read O, l and m: nothing is cleared
//   l.3-4 divide into Tr and Tc blocks               Tr, Tc
//   l.5   for j: over key blocks                     for (j)
//   l.6     load Kj, Vj to SRAM                      load_key_block
//   l.7     for i: over query blocks                 for (i), in strips of 32 rows
//   l.8       load Qi, Oi, li, mi to SRAM            copy_query_block, a block ahead; StripState::load
//   l.9       Sij = Qi Kj^T                          scores
//   l.10      m~ = rowmax S, P~ = exp(S - m~), l~    reduce_max, exponentials
//   l.11      m_new, l_new                           StripState::update_rows
//   l.12      write Oi                               output_slice (P~ Vj), StripState::update_slice, write_slice
//   l.13      write li, mi                           StripState::write_rows
//   StripState (strip_state.cuh) is a thread's share of Oi, li and mi. The mask follows the paper's Algorithm 2: every tile
//   is visited, but scores are compared only in tiles where the mask can hide some.
//
// Work within a thread block. KEY_WARPS warps share a group of query rows and split the keys of a block, as the paper's
// implementation does (figure 3(a) of the FlashAttention-2 paper). Row maximum, row sum and P V are then reductions over warps
// through shared memory (key_split.cuh): the traffic and barriers that FlashAttention-2 removed. In return a warp's share of Kj
// and Vj does not change in the inner loop and stays in registers if it fits.
//
// Departure: between key blocks O is float32, in a workspace, in the layout of accumulators. Rounded to 16 bits at every step,
// its error would grow with the number of key blocks. Limits and experiments: NOTES.md.
#include "forward/fa1/config.cuh"
#include "shared/params.cuh"
#include "forward/query_block.cuh"
#include "mma/copy.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"
#include "forward/fa1/strip_state.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int GROUPS = NUM_WARPS / KEY_WARPS;
constexpr int WARP_KEYS = BLOCK_KV / KEY_WARPS;
static_assert(NUM_WARPS % KEY_WARPS == 0 && WARP_KEYS % 16 == 0, "a warp multiplies 16 keys at a time");
static_assert(BLOCK_Q % (GROUPS * STRIP) == 0, "a query block gives every group the same number of strips");

// A warp keeps its K and V in registers if they take at most 64.
constexpr bool KV_IN_REGISTERS = HEAD_DIM <= 64 && WARP_KEYS <= 32;
// Whether O, l and m are loaded a strip ahead. In other builds addresses take the registers for it.
constexpr bool LOAD_AHEAD = D_PAIRS % KEY_WARPS == 0 && ALIGNMENT == 16;

using Scores = float[M_TILES][WARP_KEYS / 8][4];        // accumulators: the strip's rows x this warp's keys
using Probabilities = u32[M_TILES][WARP_KEYS / 16][4];  // P~ as A operands

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32);

// Dynamic shared memory: the offset of each buffer. K and V are adjacent: their padding is filled as one tile's.
struct SharedMemory {
  static constexpr int K = 0, V = K + BLOCK_KV * PITCH, KV_END = V + BLOCK_KV * PITCH;
  // Parts of P V that the warps of a group exchange. They overlay K and V if these are in registers.
  static constexpr int PARTS = KV_IN_REGISTERS ? K : KV_END, PARTS_END = PARTS + GROUPS * Group::PARTS_BYTES;
  static constexpr int Q = PARTS_END > KV_END ? PARTS_END : KV_END;  // two query blocks
  static constexpr int MAX = Q + 2 * BLOCK_Q * PITCH;                // row maxima of each warp,
  static constexpr int SUM = MAX + GROUPS * Group::VALUES_BYTES;     // and row sums
  static constexpr int BYTES = SUM + GROUPS * Group::VALUES_BYTES;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/fa1.py must ask for the bytes that the buffers take");
static_assert(LENGTHS_KIND == DENSE, "fa1_forward takes dense arrays only");

// This warp's share of K and V as B operands.
struct KeyFragments {
  u32 K[D_PAIRS][WARP_KEYS / 16][4];
  u32 V[WARP_KEYS / 16][NUM_SLICES][KEY_WARPS][4];  // a slice's pairs in the order of Group::owner
};

DEVICE void load_K(u32 (&K_rmem)[4], u32 smem, const Group& group, int d, int k) {
  const u32 K_lane = smem + SharedMemory::K + group.warp * WARP_KEYS * PITCH + lane_offset_columns_first<PITCH>(group.lane);
  ldmatrix_x4(K_rmem, K_lane + k * 16 * PITCH + d * 32);
}

// For a pair of columns past the head dim the slice's first pair is loaded instead, and its product is not stored: cheaper than a
// branch.
DEVICE void load_V(u32 (&V_rmem)[4], u32 smem, const Group& group, int k, int slice, int share) {
  const u32 V_lane = smem + SharedMemory::V + group.warp * WARP_KEYS * PITCH + lane_offset_rows_first<PITCH>(group.lane);
  const int pair = exists(slice, group.owner(share)) ? group.owner(share) : 0;
  ldmatrix_x4_trans(V_rmem, V_lane + pair * 32 + k * 16 * PITCH + slice * KEY_WARPS * 32);
}

template <int ROWS>
DEVICE void copy_rows(u32 smem, const char* rows, i64 row_stride_bytes, int valid) {
  // If a thread does not keep its column, the copies go in parts: the addresses of all would not fit in registers.
  constexpr bool REGULAR = ALIGNMENT == 16 && NUM_THREADS % (ROW_BYTES / 16) == 0;
  constexpr int PART = REGULAR ? ROWS : 32;
#pragma unroll 1
  for (int row = 0; row < ROWS; row += PART) {
    copy_tile_async<PART, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(
        smem + row * PITCH, rows + row * row_stride_bytes, row_stride_bytes, valid - row, threadIdx.x);
  }
}

// Alg. 1, l. 6. Rows past the end become zeros.
DEVICE void load_key_block(KeyFragments& kv, const AttentionParams& p, const Head& head, u32 smem, const Group& group,
                           int j) {
  const i64 first = i64(j) * BLOCK_KV, K_row = p.k_stride.seq * 2, V_row = p.v_stride.seq * 2;
  const int valid = int(min(i64(BLOCK_KV), p.seqlen_k - first));
  block_sync();  // the previous key block, and the parts of P V that overlay it, are read; O, l and m are written
  copy_rows<BLOCK_KV>(smem + SharedMemory::K, head.K + first * K_row, K_row, valid);
  copy_rows<BLOCK_KV>(smem + SharedMemory::V, head.V + first * V_row, V_row, valid);
  if constexpr (HEAD_DIM % 16 != 0) {
    zero_padding<2 * BLOCK_KV, ROW_BYTES, PITCH, NUM_THREADS>(smem + SharedMemory::K, threadIdx.x);
  }
  cp_async_commit();
  cp_async_wait<0>();
  block_sync();  // the copies of all threads have landed
  if constexpr (KV_IN_REGISTERS) {
#pragma unroll
    for (int k = 0; k < WARP_KEYS / 16; ++k) {
#pragma unroll
      for (int d = 0; d < D_PAIRS; ++d) load_K(kv.K[d][k], smem, group, d, k);
#pragma unroll
      for (int x = 0; x < NUM_SLICES * KEY_WARPS; ++x) {
        load_V(kv.V[k][x / KEY_WARPS][x % KEY_WARPS], smem, group, k, x / KEY_WARPS, x % KEY_WARPS);
      }
    }
  }
}

// Alg. 1, l. 8: Qi to shared memory. Rows past the end become zeros.
DEVICE void copy_query_block(const AttentionParams& p, const Head& head, u32 Q_smem, int i) {
  const i64 first = i64(i) * BLOCK_Q, Q_row = p.q_stride.seq * 2;
  copy_rows<BLOCK_Q>(Q_smem, head.Q + first * Q_row, Q_row, int(min(i64(BLOCK_Q), p.seqlen_q - first)));
  cp_async_commit();
}

// Alg. 1, l. 9: Sij = Qi Kj^T for the strip's rows and this warp's keys.
DEVICE void scores(Scores& S_rmem, KeyFragments& kv, u32 smem, u32 Q_smem, const Group& group) {
  const u32 Q_lane = Q_smem + lane_offset_rows_first<PITCH>(group.lane);
#pragma unroll
  for (int d = 0; d < D_PAIRS; ++d) {
    u32 Q_rmem[M_TILES][4];
#pragma unroll
    for (int r = 0; r < M_TILES; ++r) ldmatrix_x4(Q_rmem[r], Q_lane + r * 16 * PITCH + d * 32);
#pragma unroll
    for (int k = 0; k < WARP_KEYS / 16; ++k) {
      u32(&K_rmem)[4] = kv.K[d][k];
      if constexpr (!KV_IN_REGISTERS) load_K(K_rmem, smem, group, d, k);
#pragma unroll
      for (int r = 0; r < M_TILES; ++r) {
        mma_m16n8k16<Element>(S_rmem[r][2 * k], Q_rmem[r], K_rmem[0], K_rmem[1]);
        mma_m16n8k16<Element>(S_rmem[r][2 * k + 1], Q_rmem[r], K_rmem[2], K_rmem[3]);
      }
    }
  }
  mma_fence();
}

// Alg. 1, l. 10: P~ = exp(Sij - m~), rounded to 16 bits, and this warp's part of l~ = rowsum(P~).
DEVICE void exponentials(Probabilities& P_rmem, const Scores& S_rmem, const RowValues& m_tile, float scale_log2,
                         const Group& group) {
#pragma unroll
  for (int x = 0; x < LANE_ROWS; ++x) {
    const float m = finite_max(m_tile[x] * scale_log2);
    float l = 0.0f;
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; ++n) {
      const float lo = ex2(fmaf(S_rmem[x / 2][n][x % 2 * 2], scale_log2, -m));
      const float hi = ex2(fmaf(S_rmem[x / 2][n][x % 2 * 2 + 1], scale_log2, -m));
      l += lo + hi;
      P_rmem[x / 2][n / 2][n % 2 * 2 + x % 2] = Element::pack(lo, hi);
    }
    l = quad_sum(l);
    if (group.lane % 4 == 0) group.put(group.sums, strip_row(group, x), l);
  }
}

// Alg. 1, l. 12: P~ Vj, the columns of one slice that this warp owns.
DEVICE void output_slice(OwnTiles& PV_rmem, const Probabilities& P_rmem, KeyFragments& kv, u32 smem, const Group& group,
                         int slice) {
  OwnTiles part[KEY_WARPS] = {};  // the whole slice, over this warp's keys
#pragma unroll
  for (int k = 0; k < WARP_KEYS / 16; ++k) {
#pragma unroll
    for (int share = 0; share < KEY_WARPS; ++share) {
      u32(&V_rmem)[4] = kv.V[k][slice][share];
      if constexpr (!KV_IN_REGISTERS) load_V(V_rmem, smem, group, k, slice, share);
#pragma unroll
      for (int r = 0; r < M_TILES; ++r) {
        mma_m16n8k16<Element>(part[share][r], P_rmem[r][k], V_rmem[0], V_rmem[1]);
        mma_m16n8k16<Element>(part[share][M_TILES + r], P_rmem[r][k], V_rmem[2], V_rmem[3]);
      }
    }
  }
  mma_fence();
  if (slice > 0) group.sync();  // the previous slice's parts are read
#pragma unroll
  for (int share = 1; share < KEY_WARPS; ++share) group.give(share, part[share]);
  group.sync();  // the parts of all warps, and their row sums, are written
#pragma unroll
  for (int t = 0; t < 2 * M_TILES; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) PV_rmem[t][e] = part[0][t][e];
  }
  group.take(PV_rmem);
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa1_forward(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(shared);
  const u32 smem = smem_address(shared);
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
  Head head;
  head.Q = static_cast<const char*>(p.q) + (batch * p.q_stride.batch + q_head * p.q_stride.head) * 2;
  head.K = static_cast<const char*>(p.k) + (batch * p.k_stride.batch + kv_head * p.k_stride.head) * 2;
  head.V = static_cast<const char*>(p.v) + (batch * p.v_stride.batch + kv_head * p.v_stride.head) * 2;
  head.O = static_cast<char*>(p.o) + (batch * p.o_stride.batch + q_head * p.o_stride.head) * 2;
  head.O_work = static_cast<char*>(p.workspace) + first * D_PAIRS * 64;
  head.lm = reinterpret_cast<vec2*>(static_cast<char*>(p.workspace) + all_rows * D_PAIRS * 64) + first;

  if constexpr (HEAD_DIM % 16 != 0) {
    zero_padding<2 * BLOCK_Q, ROW_BYTES, PITCH, NUM_THREADS>(smem + SharedMemory::Q, threadIdx.x);
  }
  copy_query_block(p, head, smem + SharedMemory::Q, 0);
  u32 Q_stage = 0;
  KeyFragments kv;
  for (int j = 0; j < Tc; ++j) {  // l. 5
    const bool last = j == Tc - 1;
    load_key_block(kv, p, head, smem, group, j);
    StripState next;  // state of the group's next strip
    if (LOAD_AHEAD && group.index * STRIP < p.seqlen_q) next.load(head, group, group.index * STRIP, j == 0);
    for (int i = 0; i < Tr; ++i, Q_stage ^= 1) {  // l. 7
      cp_async_wait<0>();
      block_sync();  // Qi has landed; the other stage, and K and V if they are in registers now, are read
      const u32 Q_smem = smem + SharedMemory::Q + Q_stage * BLOCK_Q * PITCH;
      copy_query_block(p, head, smem + SharedMemory::Q + (Q_stage ^ 1) * BLOCK_Q * PITCH, i + 1 < Tr ? i + 1 : 0);
      const TileRange tiles = visited_tiles<BLOCK_Q, BLOCK_KV>(p, i);
      const u32 record = blockIdx.x * u32(Tr) + u32(i);
      if constexpr (TRACE) {
        if (j == 0 && threadIdx.x == 0) p.trace[record].start_ns = global_timer();
      }
      const int valid_rows = int(min(i64(BLOCK_Q), p.seqlen_q - i64(i) * BLOCK_Q));
      for (int strip = group.index * STRIP; strip < valid_rows; strip += GROUPS * STRIP) {
        const i64 first_row = i64(i) * BLOCK_Q + strip, next_row = first_row + GROUPS * STRIP;
        StripState state;
        if constexpr (LOAD_AHEAD) {
          state = next;
          if (next_row < p.seqlen_q) next.load(head, group, next_row, j == 0);
        } else {
          state.load(head, group, first_row, j == 0);
        }
        Scores S_rmem = {};
        scores(S_rmem, kv, smem, Q_smem + strip * PITCH, group);
        const auto S = fragment_view(S_rmem);
        cap_scores<SOFTCAP>(S, p.softcap);
        if (!tiles.is_clear(j)) {
          hide_scores<RIGHT_MASKED>(S, head_mask(p), int(first_row) + S.lane_row(group.lane), j * BLOCK_KV,
                                    group.warp * WARP_KEYS + S.lane_column(group.lane));
        }
        RowValues m_tile;
        reduce_max(m_tile, S, group);
        Probabilities P_rmem;
        exponentials(P_rmem, S_rmem, m_tile, p.scale_log2, group);
#pragma unroll
        for (int slice = 0; slice < NUM_SLICES; ++slice) {
          if (slice + 1 < NUM_SLICES) state.load_slice(head, group, first_row, slice + 1, j == 0);
          OwnTiles PV_rmem;
          output_slice(PV_rmem, P_rmem, kv, smem, group, slice);
          if (slice == 0) state.update_rows(m_tile, group, p.scale_log2);
          state.update_slice(PV_rmem, slice);
          state.write_slice(p, head, group, first_row, slice, last);
        }
        state.write_rows(p, head, group, first_row, last);
      }
      if constexpr (TRACE) {
        block_sync();  // all groups have finished the query block
        if (last && threadIdx.x == 0) write_trace(p, record, {i, q_head, batch}, tiles, p.trace[record].start_ns);
      }
    }
  }
  cp_async_wait<0>();  // the last query block was copied for a step that does not exist
}
