// FlashAttention-2 forward for float16 and bfloat16 on tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 1.
#include "params.cuh"
#include "tiles/copy.cuh"
#include "tiles/fragments.cuh"
#include "tiles/schedule.cuh"
#include "tiles/softmax.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = Br / NUM_WARPS;       // query rows of one warp
constexpr int M_TILES = WARP_ROWS / 16;         // 16-row mma tiles of one warp
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;   // k16 steps of S = Q K^T; the last one may be half padding
constexpr int S_TILES = Bc / 8;                 // 8-column mma tiles of S
constexpr int O_TILES = HEAD_DIM / 8;           // 8-column mma tiles of O
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PITCH = tile_pitch(ROW_BYTES, 32);
constexpr bool PADDED = HEAD_DIM % 16 != 0;

// Shared memory: Q (later O), then NUM_STAGES pairs of K and V.
constexpr int Q_BYTES = Br * PITCH, KV_BYTES = Bc * PITCH;
constexpr int STAGE_BYTES = 2 * KV_BYTES;
static_assert(Q_BYTES + NUM_STAGES * STAGE_BYTES == SMEM_BYTES, "the registry computes the same layout");
static_assert(Br % (16 * NUM_WARPS) == 0, "a warp owns whole 16-row tiles");
static_assert(Bc % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "head_dim");
static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "one or two K/V tiles in flight");

// Q stays in registers where O, S and Q together leave room for the rest of the loop (about 48 registers).
constexpr int REGISTER_LIMIT = 65536 / (NUM_THREADS * BLOCKS_PER_SM) < 255 ? 65536 / (NUM_THREADS * BLOCKS_PER_SM) : 255;
constexpr bool Q_IN_REGISTERS = M_TILES * 4 * (K_STEPS + S_TILES + O_TILES) + 48 <= REGISTER_LIMIT;

template <bool B>
struct Bool {
  static constexpr bool value = B;
};

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_forward(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();

  // Alg. 1, l. 3: the loop over i is the grid.
  const WorkItem item = work_item<Br, CAUSAL>(p, blockIdx.x, 2 * ROW_BYTES);
  const TileRange tiles = visited_tiles<Br, Bc, CAUSAL, SKIP_MASKED_TILES>(p, item.q_block);
  const int first_row = item.q_block * Br;
  const int kv_head = item.head / (p.heads / p.kv_heads);
  const i64 q_stride = p.q_stride.seq * 2, k_stride = p.k_stride.seq * 2, v_stride = p.v_stride.seq * 2;
  const char* Q = static_cast<const char*>(p.q) + 2 * (item.batch * p.q_stride.batch + item.head * p.q_stride.head) +
                  first_row * q_stride;  // (Br, HEAD_DIM)
  const char* K = static_cast<const char*>(p.k) + 2 * (item.batch * p.k_stride.batch + kv_head * p.k_stride.head);
  const char* V = static_cast<const char*>(p.v) + 2 * (item.batch * p.v_stride.batch + kv_head * p.v_stride.head);

  const u32 Q_smem = smem_address(smem);
  const u32 KV_smem = Q_smem + Q_BYTES;
  const u32 Q_warp = Q_smem + warp * WARP_ROWS * PITCH;
  const u32 Q_lane = Q_warp + lane_offset_rows_first<PITCH>(lane);
  const u32 K_lane = KV_smem + lane_offset_columns_first<PITCH>(lane);
  const u32 V_lane = KV_smem + KV_BYTES + lane_offset_rows_first<PITCH>(lane);

  float O_rmem[M_TILES][O_TILES][4] = {};
  OnlineSoftmax<2 * M_TILES> softmax;
  softmax.reset();
  u32 Q_rmem[M_TILES][K_STEPS][4];

  auto load_k = [&](int j, int stage, auto last) {
    copy_tile_async<Bc, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, decltype(last)::value>(
        KV_smem + stage * STAGE_BYTES, K + i64(j) * Bc * k_stride, k_stride, p.seqlen_k - j * Bc, thread);
  };
  auto load_v = [&](int j, int stage, auto last) {
    copy_tile_async<Bc, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, decltype(last)::value>(
        KV_smem + KV_BYTES + stage * STAGE_BYTES, V + i64(j) * Bc * v_stride, v_stride, p.seqlen_k - j * Bc, thread);
  };

  // Alg. 1, l. 7-10 for key tile j.
  auto visit_tile = [&](int j, int stage, auto masked) {
    float S_rmem[M_TILES][S_TILES][4] = {};
    // Before the first product: K (and with two stages V) has landed for all threads, and all warps are done with
    // the buffers that the next copies overwrite.
    cp_async_wait<0>();
    block_sync();
    if constexpr (NUM_STAGES == 2) {
      if (j > 0) {
        load_k(j - 1, stage ^ 1, Bool<false>{});
        load_v(j - 1, stage ^ 1, Bool<false>{});
        cp_async_commit();
      }
    } else {
      load_v(j, 0, masked);
      cp_async_commit();
    }
    const u32 K_tile = K_lane + stage * STAGE_BYTES, V_tile = V_lane + stage * STAGE_BYTES;

    // Alg. 1, l. 8: S = Q K^T
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      u32 A[M_TILES][4];
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if constexpr (Q_IN_REGISTERS) {
#pragma unroll
          for (int e = 0; e < 4; ++e) A[i][e] = Q_rmem[i][k][e];
        } else {
          ldmatrix_x4(A[i], Q_lane + i * 16 * PITCH + k * 32);
        }
      }
#pragma unroll
      for (int n = 0; n < S_TILES; n += 2) {
        u32 B[4];
        ldmatrix_x4(B, K_tile + n * 8 * PITCH + k * 32);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          mma_16bit<BFLOAT16>(S_rmem[i][n], A[i], B[0], B[1]);
          mma_16bit<BFLOAT16>(S_rmem[i][n + 1], A[i], B[2], B[3]);
        }
      }
    }
    mma_fence();

    if constexpr (NUM_STAGES == 1) {
      // V has landed for all threads; all warps are done with K, which the next copies overwrite.
      cp_async_wait<0>();
      block_sync();
      if (j > 0) {
        load_k(j - 1, 0, Bool<false>{});
        cp_async_commit();
      }
    }

    if constexpr (decltype(masked)::value) {
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        const int row = first_row + warp * WARP_ROWS + r / 2 * 16 + r % 2 * 8 + lane / 4;
        // Column limit relative to this lane's first column of the tile.
        const int limit = visible_keys<CAUSAL>(p, row) - j * Bc - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = S_rmem[r / 2][n][r % 2 * 2 + e];
            s = n * 8 + e < limit ? s : NEG_INF;
          }
        }
      }
    }

    // Alg. 1, l. 9: the row maxima.
    float m_tile[2 * M_TILES], alpha[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      m_tile[r] = NEG_INF;
#pragma unroll
      for (int n = 0; n < S_TILES; ++n) {
        m_tile[r] = fmaxf(m_tile[r], fmaxf(S_rmem[r / 2][n][r % 2 * 2], S_rmem[r / 2][n][r % 2 * 2 + 1]));
      }
      m_tile[r] = quad_max(m_tile[r]);
    }
    if (softmax.raise_max(m_tile, p.scale_log2, alpha)) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O_rmem[i][n][e] *= alpha[i * 2 + e / 2];
        }
      }
    }

    // Alg. 1, l. 9-10, sixteen keys at a time: P = exp(S - m), O += P V. The exponentials of the next keys
    // run under the products of these.
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
      u32 P[M_TILES][4];
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {  // register h of an A operand: row h % 2, columns h / 2
          const float(&S)[4] = S_rmem[i][2 * k + h / 2];
          const float lo = softmax.exp(S[h % 2 * 2], p.scale_log2, 2 * i + h % 2);
          const float hi = softmax.exp(S[h % 2 * 2 + 1], p.scale_log2, 2 * i + h % 2);
          P[i][h] = pack_16bit<BFLOAT16>(lo, hi);
        }
      }
#pragma unroll
      for (int n = 0; n < O_TILES; n += 2) {
        u32 B[4];
        if (n + 1 < O_TILES) {
          ldmatrix_x4_trans(B, V_tile + k * 16 * PITCH + n * 16);
        } else {
          u32 half[2];
          ldmatrix_x2_trans(half, V_tile + k * 16 * PITCH + n * 16);
          B[0] = half[0];
          B[1] = half[1];
        }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          mma_16bit<BFLOAT16>(O_rmem[i][n], P[i], B[0], B[1]);
          if (n + 1 < O_TILES) mma_16bit<BFLOAT16>(O_rmem[i][n + 1], P[i], B[2], B[3]);
        }
      }
    }
    mma_fence();
  };

  if (tiles.visited > 0) {
    if constexpr (PADDED) {
      zero_padding<Br, ROW_BYTES, PITCH, NUM_THREADS>(Q_smem, thread);
#pragma unroll
      for (int s = 0; s < NUM_STAGES; ++s) {
        zero_padding<Bc, ROW_BYTES, PITCH, NUM_THREADS>(KV_smem + s * STAGE_BYTES, thread);
      }
    }
    // Alg. 1, l. 4: Q, and the first K and V, which may hang over the end of the keys.
    copy_tile_async<Br, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(Q_smem, Q, q_stride, p.seqlen_q - first_row, thread);
    if constexpr (Q_IN_REGISTERS) {
      cp_async_commit();
    }
    int j = tiles.visited - 1, stage = 0;
    load_k(j, 0, Bool<true>{});
    if constexpr (NUM_STAGES == 2) load_v(j, 0, Bool<true>{});
    cp_async_commit();
    if constexpr (Q_IN_REGISTERS) {
      cp_async_wait<1>();
      block_sync();  // Q has landed for all threads
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) ldmatrix_x4(Q_rmem[i][k], Q_lane + i * 16 * PITCH + k * 32);
      }
    }
    // Alg. 1, l. 6, from the last visited tile down: the masked tiles come first and the loop over the others is free
    // of masks.
    for (; j >= tiles.unmasked; --j) {
      visit_tile(j, stage, Bool<true>{});
      if constexpr (NUM_STAGES == 2) stage ^= 1;
    }
    for (; j >= 0; --j) {
      visit_tile(j, stage, Bool<false>{});
      if constexpr (NUM_STAGES == 2) stage ^= 1;
    }
  }

  // Alg. 1, l. 12-15: O = O / l, L = m + log l. A warp overwrites its own rows of Q only, which no other warp reads.
  softmax.reduce_sum();
  warp_sync();
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = r / 2 * 16 + r % 2 * 8 + lane / 4;  // of the warp
    const float inverse = softmax.inverse_sum(r);
#pragma unroll
    for (int n = 0; n < O_TILES; ++n) {
      const float* o = O_rmem[r / 2][n] + r % 2 * 2;
      st_shared_u32(Q_warp + row * PITCH + n * 16 + lane % 4 * 4, pack_16bit<BFLOAT16>(o[0] * inverse, o[1] * inverse));
    }
    const int q_row = first_row + warp * WARP_ROWS + row;
    if (p.lse != nullptr && lane % 4 == 0 && q_row < p.seqlen_q) {
      st_global(p.lse + (i64(item.batch) * p.heads + item.head) * p.seqlen_q + q_row, softmax.lse(r));
    }
  }
  warp_sync();
  const int warp_row = first_row + warp * WARP_ROWS;
  char* O = static_cast<char*>(p.o) +
            2 * (item.batch * p.o_stride.batch + item.head * p.o_stride.head + warp_row * p.o_stride.seq);
  store_tile<WARP_ROWS, ROW_BYTES, PITCH, ALIGNMENT>(O, p.o_stride.seq * 2, Q_warp, p.seqlen_q - warp_row, lane);

  if constexpr (TRACE) {
    block_sync();  // the record ends when the last warp has stored
    if (thread == 0) write_trace(p, blockIdx.x, item, tiles, start_ns);
  }
}
