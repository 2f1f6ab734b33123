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
//   l.7     for i: over query blocks                 for (i)
//   l.8       load Qi, Oi, li, mi to SRAM            copy_query_block (one block ahead), RowState::load
//   l.9       Sij = Qi Kj^T                          scores
//   l.10      m~ = rowmax S, P~ = exp(S - m~), l~    reduce_max, exponentials
//   l.11      m_new, l_new                           RowState::update
//   l.12      write Oi                               partial_output, RowState::write
//   l.13      write li, mi                           RowState::finish
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
constexpr int KEY_WARPS = BLOCK_KV < 64 ? BLOCK_KV / 16 : 4;  // warps that share a row
constexpr int ROW_WARPS = NUM_WARPS / KEY_WARPS;
constexpr int WARP_KEYS = BLOCK_KV / KEY_WARPS;
constexpr int ROW_FRAGMENTS = ROW_WARPS == 1 ? 2 : 1;  // 16-row fragments of a warp
constexpr int WARP_ROWS = ROW_FRAGMENTS * 16;
constexpr int STRIP = ROW_WARPS * WARP_ROWS;  // query rows between two exchanges
static_assert(NUM_WARPS % KEY_WARPS == 0 && WARP_KEYS % 16 == 0, "a warp multiplies 16 keys at a time");
static_assert(BLOCK_Q % STRIP == 0, "a query block is a whole number of strips");

// P V is exchanged in slices of at most 64 columns (4 pairs of 8), which bounds registers and shared memory at every head dim.
constexpr int D_PAIRS = (HEAD_DIM + 15) / 16;
constexpr int NUM_SLICES = (D_PAIRS + 3) / 4;
constexpr int SLICE_PAIRS = (D_PAIRS + NUM_SLICES - 1) / NUM_SLICES;
constexpr int SLICE_DIM = SLICE_PAIRS * 16;

// In the update a row of O belongs to eight lanes, which read and write it in units of four float32.
constexpr int ROW_LANES = 8;
constexpr int UPDATE_ROWS = STRIP / (NUM_WARPS * 32 / ROW_LANES);  // of a lane
constexpr int UPDATE_UNITS = (SLICE_DIM / 4 + ROW_LANES - 1) / ROW_LANES;
static_assert(UPDATE_ROWS >= 1, "a strip gives every lane a row");

constexpr bool KV_IN_REGISTERS = WARP_KEYS * HEAD_DIM <= 2048;  // K and V take WARP_KEYS * HEAD_DIM / 32 together

// Shared memory, bytes. Parts of P V overlay K and V where these live in registers.
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32);
constexpr int PART_PITCH = (SLICE_DIM + 8) * 4;  // 8 mod 16 words: accumulator pairs store without bank conflicts
constexpr int K_SMEM = 0;
constexpr int V_SMEM = K_SMEM + BLOCK_KV * PITCH;
constexpr int PARTS_SMEM = KV_IN_REGISTERS ? 0 : V_SMEM + BLOCK_KV * PITCH;
constexpr int PARTS_END = PARTS_SMEM + KEY_WARPS * STRIP * PART_PITCH;
constexpr int Q_SMEM = PARTS_END > V_SMEM + BLOCK_KV * PITCH ? PARTS_END : V_SMEM + BLOCK_KV * PITCH;
constexpr int MAX_SMEM = Q_SMEM + 2 * BLOCK_Q * PITCH;         // two query blocks; [2][KEY_WARPS][STRIP] row maxima
constexpr int SUM_SMEM = MAX_SMEM + 2 * KEY_WARPS * STRIP * 4;  // [KEY_WARPS][STRIP] row sums
static_assert(SUM_SMEM + KEY_WARPS * STRIP * 4 == SMEM_BYTES, "the registry's formula and this layout differ");

// One head's tensors in device memory.
struct Head {
  const char *Q, *K, *V;
  char* O;
  float* O_work;  // (Tr * BLOCK_Q, HEAD_DIM): O between key blocks
  float *l, *m;   // (Tr * BLOCK_Q): row sum; row maximum in units of log2
  float* lse;     // (seqlen_q), or null
};

// This thread's place in the block.
struct Lane {
  int thread, warp, lane, key_warp, row_warp;
};

// This warp's keys as B operands of the two products: Q K^T (two 8-key columns an entry) and P V (two 8-wide ones).
struct KeyFragments {
  u32 K[D_PAIRS][WARP_KEYS / 16][4];
  u32 V[WARP_KEYS / 16][D_PAIRS][4];
};

DEVICE void load_K(u32 (&K_rmem)[4], u32 smem, const Lane& me, int d_pair, int key_pair) {
  ldmatrix_x4(K_rmem, smem + K_SMEM + (me.key_warp * WARP_KEYS + key_pair * 16) * PITCH + d_pair * 32 +
                          lane_offset_columns_first<PITCH>(me.lane));
}
DEVICE void load_V(u32 (&V_rmem)[4], u32 smem, const Lane& me, int key_pair, int d_pair) {
  ldmatrix_x4_trans(V_rmem, smem + V_SMEM + (me.key_warp * WARP_KEYS + key_pair * 16) * PITCH + d_pair * 32 +
                                lane_offset_rows_first<PITCH>(me.lane));
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
    for (int d = 0; d < D_PAIRS; ++d) {
#pragma unroll
      for (int k = 0; k < WARP_KEYS / 16; ++k) {
        load_K(kv.K[d][k], smem, me, d, k);
        load_V(kv.V[k][d], smem, me, k, d);
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
  const u32 Q_lane = Q_smem + me.row_warp * WARP_ROWS * PITCH + lane_offset_rows_first<PITCH>(me.lane);
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

// Row of the strip that element e (0..3) of fragment r belongs to.
DEVICE int strip_row(const Lane& me, int r, int e) { return me.row_warp * WARP_ROWS + r * 16 + e / 2 * 8 + me.lane / 4; }

DEVICE void mask(Scores& S_rmem, const AttentionParams& p, const Lane& me, int first_row, int j) {
  const i64 first_key = i64(j) * BLOCK_KV + me.key_warp * WARP_KEYS + me.lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < ROW_FRAGMENTS; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 visible = visible_keys<CAUSAL>(p, first_row + strip_row(me, r, 2 * half)) - first_key;
#pragma unroll
      for (int n = 0; n < WARP_KEYS / 8; ++n) {
        if (n * 8 >= visible) S_rmem[r][n][2 * half] = NEG_INF;
        if (n * 8 + 1 >= visible) S_rmem[r][n][2 * half + 1] = NEG_INF;
      }
    }
  }
}

// Alg. 1, l. 10: m~ = rowmax(Sij). A warp knows the maxima over its own keys; the strip's are the maxima over warps.
DEVICE void reduce_max(float (&m_tile)[2 * ROW_FRAGMENTS], const Scores& S_rmem, u32 max_smem, const Lane& me) {
#pragma unroll
  for (int x = 0; x < 2 * ROW_FRAGMENTS; ++x) {
    float largest = NEG_INF;
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; ++n) {
      largest = fmaxf(largest, fmaxf(S_rmem[x / 2][n][x % 2 * 2], S_rmem[x / 2][n][x % 2 * 2 + 1]));
    }
    largest = quad_max(largest);
    if (me.lane % 4 == 0) st_shared_f32(max_smem + (me.key_warp * STRIP + strip_row(me, x / 2, x % 2 * 2)) * 4, largest);
  }
  block_sync();  // the maxima of the warps that share a row; also, the last strip's parts of P V have been read
#pragma unroll
  for (int x = 0; x < 2 * ROW_FRAGMENTS; ++x) {
    m_tile[x] = NEG_INF;
#pragma unroll
    for (int w = 0; w < KEY_WARPS; ++w) {
      m_tile[x] = fmaxf(m_tile[x], ld_shared_f32(max_smem + (w * STRIP + strip_row(me, x / 2, x % 2 * 2)) * 4));
    }
  }
}

// Maximum in units of log2; 0 where no key was seen, so that exp2(-inf - m) is 0, not NaN.
DEVICE float finite_max(float m) { return m == NEG_INF ? 0.0f : m; }

using Probabilities = u32[ROW_FRAGMENTS][WARP_KEYS / 16][4];  // A operands of P V

// Alg. 1, l. 10: P~ = exp(Sij - m~), rounded to 16 bits, and this warp's part of l~ = rowsum(P~).
DEVICE void exponentials(Probabilities& P_rmem, Scores& S_rmem, const float (&m_tile)[2 * ROW_FRAGMENTS], float scale_log2,
                         u32 smem, const Lane& me) {
#pragma unroll
  for (int x = 0; x < 2 * ROW_FRAGMENTS; ++x) {
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
    if (me.lane % 4 == 0) st_shared_f32(smem + SUM_SMEM + (me.key_warp * STRIP + strip_row(me, x / 2, x % 2 * 2)) * 4, l);
  }
}

// This warp's part of P~ Vj, columns of one slice, into shared memory.
DEVICE void partial_output(const Probabilities& P_rmem, KeyFragments& kv, u32 smem, const Lane& me, int slice) {
  float O_rmem[ROW_FRAGMENTS][SLICE_PAIRS * 2][4] = {};
#pragma unroll
  for (int k = 0; k < WARP_KEYS / 16; ++k) {
#pragma unroll
    for (int d = 0; d < SLICE_PAIRS; ++d) {
      const int pair = slice * SLICE_PAIRS + d;
      if (pair >= D_PAIRS) continue;
      if constexpr (!KV_IN_REGISTERS) load_V(kv.V[k][pair], smem, me, k, pair);
      const u32(&V_rmem)[4] = kv.V[k][pair];
#pragma unroll
      for (int r = 0; r < ROW_FRAGMENTS; ++r) {
        mma_16bit<BFLOAT16>(O_rmem[r][2 * d], P_rmem[r][k], V_rmem[0], V_rmem[1]);
        if (pair * 16 + 8 < HEAD_DIM) mma_16bit<BFLOAT16>(O_rmem[r][2 * d + 1], P_rmem[r][k], V_rmem[2], V_rmem[3]);
      }
    }
  }
  mma_fence();
  const u32 part = smem + PARTS_SMEM + me.key_warp * STRIP * PART_PITCH + me.lane % 4 * 8;
#pragma unroll
  for (int r = 0; r < ROW_FRAGMENTS; ++r) {
#pragma unroll
    for (int n = 0; n < SLICE_PAIRS * 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        st_shared_vec2(part + strip_row(me, r, e) * PART_PITCH + n * 32,
                       {float_as_u32(O_rmem[r][n][e]), float_as_u32(O_rmem[r][n][e + 1])});
      }
    }
  }
}

// Four values of a row of O rounded to 16 bits, in stores as wide as the alignment allows.
DEVICE void store_output(char* o, const float (&x)[4]) {
  const u32 lo = pack_16bit<BFLOAT16>(x[0], x[1]), hi = pack_16bit<BFLOAT16>(x[2], x[3]);
  if constexpr (ALIGNMENT >= 8) {
    st_global(o, vec2{lo, hi});
  } else if constexpr (ALIGNMENT == 4) {
    st_global(o, lo);
    st_global(o + 4, hi);
  } else {
    st_global(o, u16(lo));
    st_global(o + 2, u16(lo >> 16));
    st_global(o + 4, u16(hi));
    st_global(o + 6, u16(hi >> 16));
  }
}

// The rows of O, l and m that this lane updates.
struct RowState {
  float O[NUM_SLICES][UPDATE_ROWS][UPDATE_UNITS][4];
  float l[UPDATE_ROWS], m[UPDATE_ROWS];
  float keep[UPDATE_ROWS], add[UPDATE_ROWS];  // O = keep * O + add * P~ V

  static DEVICE int row(const Lane& me, int x) { return (me.warp * UPDATE_ROWS + x) * (32 / ROW_LANES) + me.lane / ROW_LANES; }
  static DEVICE int column(const Lane& me, int slice, int unit) {
    return slice * SLICE_DIM + (unit * ROW_LANES + me.lane % ROW_LANES) * 4;
  }
  static DEVICE bool has(const Lane& me, int slice, int unit) {
    return column(me, 0, unit) < SLICE_DIM && column(me, slice, unit) < HEAD_DIM;
  }

  // Alg. 1, l. 8, and l. 2 at the first key block. Issued before the products and used after them. A row is read by
  // the warp that wrote it, with a barrier since then.
  DEVICE void load(const Head& head, const Lane& me, i64 first_row, bool first) {
#pragma unroll
    for (int x = 0; x < UPDATE_ROWS; ++x) {
      const i64 r = first_row + row(me, x);
      l[x] = first ? 0.0f : ld_global<float>(head.l + r);
      m[x] = first ? NEG_INF : ld_global<float>(head.m + r);
#pragma unroll
      for (int s = 0; s < NUM_SLICES; ++s) {
#pragma unroll
        for (int u = 0; u < UPDATE_UNITS; ++u) {
          vec4 v = {0, 0, 0, 0};
          if (!first && has(me, s, u)) v = ld_global<vec4>(head.O_work + r * HEAD_DIM + column(me, s, u));
          O[s][x][u][0] = u32_as_float(v.x);
          O[s][x][u][1] = u32_as_float(v.y);
          O[s][x][u][2] = u32_as_float(v.z);
          O[s][x][u][3] = u32_as_float(v.w);
        }
      }
    }
  }

  // Alg. 1, l. 11: m_new = max(m, m~), l_new = e^(m - m_new) l + e^(m~ - m_new) l~, and the factors of l. 12.
  DEVICE void update(u32 smem, u32 max_smem, const Lane& me, float scale_log2) {
#pragma unroll
    for (int x = 0; x < UPDATE_ROWS; ++x) {
      float m_tile = NEG_INF, l_tile = 0.0f;
#pragma unroll
      for (int w = 0; w < KEY_WARPS; ++w) {
        m_tile = fmaxf(m_tile, ld_shared_f32(max_smem + (w * STRIP + row(me, x)) * 4));
        l_tile += ld_shared_f32(smem + SUM_SMEM + (w * STRIP + row(me, x)) * 4);
      }
      m_tile *= scale_log2;
      const float m_new = fmaxf(m[x], m_tile), base = finite_max(m_new);
      const float l_kept = ex2(m[x] - base) * l[x], weight = ex2(m_tile - base);
      const float l_new = fmaf(weight, l_tile, l_kept);
      const float inverse = l_new == 0.0f ? 0.0f : 1.0f / l_new;  // 0: no key seen yet, O stays zero
      keep[x] = l_kept * inverse;
      add[x] = weight * inverse;
      m[x] = m_new;
      l[x] = l_new;
    }
  }

  // Alg. 1, l. 12: one slice of O. The last key block's result is the output.
  DEVICE void write(const AttentionParams& p, const Head& head, u32 smem, const Lane& me, i64 first_row, int slice, bool last) {
#pragma unroll
    for (int x = 0; x < UPDATE_ROWS; ++x) {
      const i64 r = first_row + row(me, x);
#pragma unroll
      for (int u = 0; u < UPDATE_UNITS; ++u) {
        if (!has(me, slice, u)) continue;
        float(&o)[4] = O[slice][x][u];
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < KEY_WARPS; ++w) {
          const vec4 part = ld_shared_vec4(smem + PARTS_SMEM + (w * STRIP + row(me, x)) * PART_PITCH + column(me, 0, u) * 4);
          sum[0] += u32_as_float(part.x);
          sum[1] += u32_as_float(part.y);
          sum[2] += u32_as_float(part.z);
          sum[3] += u32_as_float(part.w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = fmaf(keep[x], o[e], add[x] * sum[e]);
        if (!last) {
          st_global(head.O_work + r * HEAD_DIM + column(me, slice, u),
                    vec4{float_as_u32(o[0]), float_as_u32(o[1]), float_as_u32(o[2]), float_as_u32(o[3])});
        } else if (r < p.seqlen_q) {
          store_output(head.O + (r * p.o_stride.seq + column(me, slice, u)) * 2, o);
        }
      }
    }
  }

  // Alg. 1, l. 13, or the natural-log LSE after the last key block.
  DEVICE void finish(const AttentionParams& p, const Head& head, const Lane& me, i64 first_row, bool last) {
    constexpr float LN_2 = 0.693147180559945309f;
    if (me.lane % ROW_LANES != 0) return;
#pragma unroll
    for (int x = 0; x < UPDATE_ROWS; ++x) {
      const i64 r = first_row + row(me, x);
      if (!last) {
        st_global(head.l + r, l[x]);
        st_global(head.m + r, m[x]);
      } else if (head.lse != nullptr && r < p.seqlen_q) {
        st_global(head.lse + r, l[x] == 0.0f ? NEG_INF : (m[x] + lg2(l[x])) * LN_2);
      }
    }
  }
};

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa1_forward(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(shared);
  const u32 smem = smem_address(shared);
  const int warp = threadIdx.x / 32;
  const Lane me = {int(threadIdx.x), warp, int(threadIdx.x % 32), warp % KEY_WARPS, warp / KEY_WARPS};

  // Alg. 1, l. 3-4.
  const int Tr = (p.seqlen_q - 1) / BLOCK_Q + 1, Tc = (p.seqlen_k - 1) / BLOCK_KV + 1;
  const int q_head = int(blockIdx.x % u32(p.heads)), batch = int(blockIdx.x / u32(p.heads));
  const int kv_head = q_head / (p.heads / p.kv_heads);
  const i64 rows = i64(Tr) * BLOCK_Q, first = blockIdx.x * rows, all_rows = i64(p.batch) * p.heads * rows;
  float* const work = static_cast<float*>(p.workspace);
  Head head;
  head.Q = static_cast<const char*>(p.q) + (batch * p.q_stride.batch + q_head * p.q_stride.head) * 2;
  head.K = static_cast<const char*>(p.k) + (batch * p.k_stride.batch + kv_head * p.k_stride.head) * 2;
  head.V = static_cast<const char*>(p.v) + (batch * p.v_stride.batch + kv_head * p.v_stride.head) * 2;
  head.O = static_cast<char*>(p.o) + (batch * p.o_stride.batch + q_head * p.o_stride.head) * 2;
  head.O_work = work + first * HEAD_DIM;
  head.l = work + all_rows * HEAD_DIM + first;
  head.m = head.l + all_rows;
  head.lse = p.lse == nullptr ? nullptr : p.lse + i64(blockIdx.x) * p.seqlen_q;

  if constexpr (HEAD_DIM % 16 != 0) zero_padding<2 * BLOCK_Q, ROW_BYTES, PITCH, NUM_THREADS>(smem + Q_SMEM, me.thread);
  copy_query_block(p, head, smem + Q_SMEM, me, 0);
  u32 Q_stage = 0, max_stage = 0;
  KeyFragments kv;
  for (int j = 0; j < Tc; ++j) {  // l. 5
    load_key_block(kv, p, head, smem, me, j);
    const bool last = j == Tc - 1;
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
      for (int strip = 0; strip < valid_rows; strip += STRIP, max_stage ^= 1) {
        const i64 first_row = i64(i) * BLOCK_Q + strip;
        // Two sets of maxima: a warp may be here while another still updates the last strip's rows from the other set.
        const u32 max_smem = smem + MAX_SMEM + max_stage * KEY_WARPS * STRIP * 4;
        RowState state;
        state.load(head, me, first_row, j == 0);
        Scores S_rmem = {};
        scores(S_rmem, kv, smem, Q_smem + strip * PITCH, me);
        if (j >= tiles.unmasked) mask(S_rmem, p, me, int(first_row), j);
        float m_tile[2 * ROW_FRAGMENTS];
        reduce_max(m_tile, S_rmem, max_smem, me);
        Probabilities P_rmem;
        exponentials(P_rmem, S_rmem, m_tile, p.scale_log2, smem, me);
#pragma unroll
        for (int slice = 0; slice < NUM_SLICES; ++slice) {
          if (slice > 0) block_sync();  // the last slice's parts have been read
          partial_output(P_rmem, kv, smem, me, slice);
          block_sync();  // every warp's part of P V and of l~ is there
          if (slice == 0) state.update(smem, max_smem, me, p.scale_log2);
          state.write(p, head, smem, me, first_row, slice, last);
        }
        state.finish(p, head, me, first_row, last);
      }
      if constexpr (TRACE) {
        const u32 record = blockIdx.x * u32(Tr) + u32(i);
        if (last && me.thread == 0) write_trace(p, record, {i, q_head, batch}, tiles, p.trace[record].start_ns);
      }
    }
  }
  cp_async_wait<0>();  // the query block copied ahead of a step that does not come
}
