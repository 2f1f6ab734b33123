// FlashAttention-2 forward for float32 on tensor cores.
#include "params.cuh"
#include "tiles/copy.cuh"
#include "tiles/half_pair.cuh"
#include "tiles/schedule.cuh"
#include "tiles/softmax.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = Br / NUM_WARPS;      // query rows of one warp
constexpr int M_TILES = WARP_ROWS / 16;        // 16-row mma tiles of one warp
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S = Q K^T; the last one may be half padding
constexpr int S_TILES = Bc / 8;                // 8-column mma tiles of S
constexpr int P_STEPS = Bc / 16;               // k16 steps of P V
constexpr int O_TILES = HEAD_DIM / 8;          // 8-column mma tiles of O
constexpr int WARP_GROUPS = (S_TILES + NUM_WARPS - 1) / NUM_WARPS;  // groups of eight keys that one warp copies and splits
constexpr int ROW_BYTES = HEAD_DIM * 4;
constexpr int PITCH = tile_pitch(ROW_BYTES, 64);
constexpr bool WITH_LO = !TF32;

constexpr int SUM_STEPS = WITH_LO && K_STEPS > 8 ? 2 : 0;
constexpr int K_STRIDE = SUM_STEPS == 0 ? 1 : SUM_STEPS;
constexpr int K_HALF = K_STEPS / 2 / K_STRIDE * K_STRIDE;
constexpr int O_GROUP = 2;
constexpr int SPLIT_STEPS = (K_STEPS + 1) / 2;
constexpr int O_HALF = O_TILES / 2 / O_GROUP * O_GROUP;
static_assert(O_GROUP % 2 == 0, "a split step goes with two octets of O");

// Shared memory: Q, K, V, each first float32, then pairs of float16 in the same place.
constexpr int Q_BYTES = Br * PITCH, KV_BYTES = Bc * PITCH;
static_assert(Q_BYTES + 2 * KV_BYTES == SMEM_BYTES, "the registry computes the same layout");
static_assert(Br % (16 * NUM_WARPS) == 0, "a warp owns whole 16-row tiles");
static_assert(Bc % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "head_dim");
static_assert(NUM_STAGES == 1, "K and V take turns: one is copied while the other is multiplied");

// P <= 2^RESCALE_THRESHOLD, times this: below 2^15, as every other operand.
constexpr float P_SCALE = 64.0f;

template <bool B>
struct Bool {
  static constexpr bool value = B;
};

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_forward_f32(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();

  // Alg. 1, l. 3: the loop over i is the grid.
  const WorkItem item = work_item<Br, CAUSAL>(p, blockIdx.x, 2 * ROW_BYTES);
  const TileRange tiles = visited_tiles<Br, Bc, CAUSAL, SKIP_MASKED_TILES>(p, item.q_block);
  const int first_row = item.q_block * Br, warp_row = first_row + warp * WARP_ROWS;
  const int kv_head = item.head / (p.heads / p.kv_heads);
  const i64 q_stride = p.q_stride.seq * 4;
  const char* Q = static_cast<const char*>(p.q) + 4 * (item.batch * p.q_stride.batch + item.head * p.q_stride.head) +
                  warp_row * q_stride;  // (WARP_ROWS, HEAD_DIM)
  const char* K = static_cast<const char*>(p.k) + 4 * (item.batch * p.k_stride.batch + kv_head * p.k_stride.head);
  const char* V = static_cast<const char*>(p.v) + 4 * (item.batch * p.v_stride.batch + kv_head * p.v_stride.head);

  const u32 Q_smem = smem_address(smem) + warp * WARP_ROWS * PITCH;  // this warp's rows
  const u32 K_smem = smem_address(smem) + Q_BYTES, V_smem = K_smem + KV_BYTES;
  // ldmatrix takes four 8x8 matrices, their row addresses from lanes 0-7, 8-15, 16-23, 24-31.
  // Q: rows 0-7, rows 8-15, then both for the next octet of columns. K: two octets, hi and then lo. V: rows 0-7, rows 8-15, hi and then lo.
  auto Q_lane = [&](int lane) { return Q_smem + lane % 16 * PITCH + lane / 16 * OCTET_BYTES; };
  auto K_lane = [&](int lane) { return K_smem + lane % 8 * PITCH + lane / 8 % 2 * OCTET_BYTES + lane / 16 * LO_OFFSET; };
  auto V_lane = [&](int lane) { return V_smem + lane % 16 * PITCH + lane / 16 * LO_OFFSET; };

  float O_rmem[M_TILES][O_TILES][4] = {};
  OnlineSoftmax<2 * M_TILES> softmax;
  softmax.reset();
  float O_unit = pair_unit(0);  // of O and V: the largest unit of V so far

  // A warp copies and splits the same rows, eight at a time: until they are split, no other warp takes part.
  auto load_rows = [&](u32 tile, const char* global, i64 stride, int j, auto last) {
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; ++i) {
      const int g = i * NUM_WARPS + warp, row = j * Bc + g * 8;
      if (S_TILES % NUM_WARPS != 0 && g >= S_TILES) break;
      copy_tile_async<8, ROW_BYTES, PITCH, 32, ALIGNMENT, decltype(last)::value>(
          tile + g * 8 * PITCH, global + row * stride, stride, p.seqlen_k - row, lane);
    }
    cp_async_commit();
  };
  auto split_tile = [&](u32 tile) {
    cp_async_wait<0>();
    warp_sync();  // the copies of the other lanes have landed too
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; ++i) {
      const int g = i * NUM_WARPS + warp;
      if (S_TILES % NUM_WARPS == 0 || g < S_TILES) split_rows<HEAD_DIM, PITCH, WITH_LO>(tile + g * 8 * PITCH, lane);
    }
  };
  using Scores = float[M_TILES][S_TILES][4];
  auto multiply_step = [&](int k, Scores& S, u32 Q_fragment, u32 K_fragment) {
    u32 Q_hi[M_TILES][4], Q_lo[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      ldmatrix_x4(Q_hi[i], Q_fragment + i * 16 * PITCH + k * 2 * OCTET_BYTES);
      if constexpr (WITH_LO) ldmatrix_x4(Q_lo[i], Q_fragment + i * 16 * PITCH + k * 2 * OCTET_BYTES + LO_OFFSET);
    }
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      if constexpr (WITH_LO) {
        u32 B[4];  // hi, lo
        ldmatrix_x4(B, K_fragment + n * 8 * PITCH + k * 2 * OCTET_BYTES);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(S[i][n], Q_lo[i], B[0], B[1]);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(S[i][n], Q_hi[i], B[2], B[3]);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(S[i][n], Q_hi[i], B[0], B[1]);
      } else {
        u32 B[2];
        ldmatrix_x2(B, K_fragment + n * 8 * PITCH + k * 2 * OCTET_BYTES);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(S[i][n], Q_hi[i], B[0], B[1]);
      }
    }
  };
  auto multiply = [&](int k, Scores& S, u32 Q_fragment, u32 K_fragment) {
    warp_sync();
    if constexpr (SUM_STEPS == 0) {
      multiply_step(k, S, Q_fragment, K_fragment);
    } else {
      Scores sum = {};
      multiply_step(k, sum, Q_fragment, K_fragment);
      if (K_STEPS % K_STRIDE == 0 || k + 1 < K_STEPS) multiply_step(k + 1, sum, Q_fragment, K_fragment);
      mma_fence();
#pragma unroll
      for (int i = 0; i < M_TILES * S_TILES * 4; ++i) {
        S[i / (S_TILES * 4)][i / 4 % S_TILES][i % 4] += sum[i / (S_TILES * 4)][i / 4 % S_TILES][i % 4];
      }
    }
  };

  // Alg. 1, l. 7-10 for key tile j.
  auto visit_tile = [&](int j) {
    // Alg. 1, l. 8: S = Q K^T, two k16 steps at a time. V arrives under the first half and is split under the second.
    float S_rmem[M_TILES][S_TILES][4] = {};
    const u32 Q_fragment = Q_lane(lane), K_fragment = K_lane(lane);
#pragma unroll 1
    for (int k = 0; k < K_STEPS; k += K_STRIDE) multiply(k, S_rmem, Q_fragment, K_fragment);
    split_tile(V_smem);
    mma_fence();
    float Q_unit[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) Q_unit[r] = ld_shared_f32(unit_address<PITCH>(Q_smem, r));
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      const float K_unit = ld_shared_f32(unit_address<PITCH>(K_smem, n));
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) S_rmem[r / 2][n][r % 2 * 2 + e] *= Q_unit[r] * K_unit;
      }
    }

    block_sync();  // V is split; all warps are done with K, which the next copies overwrite
    if (j > 0) load_rows(K_smem, K, p.k_stride.seq * 4, j - 1, Bool<false>{});

    if (j >= tiles.unmasked) {
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
        const int row = warp_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
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

    // Alg. 1, l. 9: the row maxima, and what O must be multiplied by, in its new unit.
    float m_tile[2 * M_TILES], alpha[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      m_tile[r] = NEG_INF;
#pragma unroll
      for (int n = 0; n < S_TILES; ++n) {
        m_tile[r] = fmaxf(m_tile[r], fmaxf(S_rmem[r / 2][n][r % 2 * 2], S_rmem[r / 2][n][r % 2 * 2 + 1]));
      }
      m_tile[r] = quad_max(m_tile[r]);
      alpha[r] = 1.0f;
    }
    float P_unit[S_TILES];  // brings the rows of V to one unit, that of O: the largest so far
    const float O_unit_old = O_unit;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      P_unit[n] = ld_shared_f32(unit_address<PITCH>(V_smem, n));
      O_unit = fmaxf(O_unit, P_unit[n]);
    }
    const float inverse_unit = inverse_power_of_two(O_unit);
    const bool raised = softmax.raise_max(m_tile, p.scale_log2, alpha);
    if (raised || O_unit != O_unit_old) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        const float factor[2] = {alpha[2 * i] * (O_unit_old * inverse_unit), alpha[2 * i + 1] * (O_unit_old * inverse_unit)};
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O_rmem[i][n][e] *= factor[e / 2];
        }
      }
    }

    // Alg. 1, l. 9: P = exp(S - m), in pairs. Two neighbouring accumulators of S hold what one A operand needs.
    u32 P_hi[M_TILES][P_STEPS][4], P_lo[M_TILES][P_STEPS][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
      for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {  // register h of an A operand: row h % 2, columns h / 2
          const int n = 2 * k + h / 2, r = 2 * i + h % 2;
          const float x = softmax.exp(S_rmem[i][n][h % 2 * 2], p.scale_log2, r);
          const float y = softmax.exp(S_rmem[i][n][h % 2 * 2 + 1], p.scale_log2, r);
          split_pair<WITH_LO>(x * (P_unit[n] * inverse_unit * P_SCALE), y * (P_unit[n] * inverse_unit * P_SCALE), P_hi[i][k][h], P_lo[i][k][h]);
        }
      }
    }

    // Alg. 1, l. 10: O = alpha O + P V, a few octets of columns at a time: without the barriers the compiler starts more
    // products than there are registers for. The next K has arrived by the second half, and is split under it.
    const u32 V_fragment = V_lane(lane);
#pragma unroll
    for (int n0 = 0; n0 < O_TILES; n0 += O_GROUP) {
      warp_sync();
      float sum[O_GROUP][M_TILES][4] = {};
#pragma unroll
      for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
        for (int n = 0; n < O_GROUP; ++n) {
          if (n0 + n >= O_TILES) break;
          if constexpr (WITH_LO) {
            u32 B[4];  // hi, lo
            ldmatrix_x4_trans(B, V_fragment + k * 16 * PITCH + (n0 + n) * OCTET_BYTES);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(sum[n][i], P_lo[i][k], B[0], B[1]);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(sum[n][i], P_hi[i][k], B[2], B[3]);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(sum[n][i], P_hi[i][k], B[0], B[1]);
          } else {
            u32 B[2];
            ldmatrix_x2_trans(B, V_fragment + k * 16 * PITCH + (n0 + n) * OCTET_BYTES);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(sum[n][i], P_hi[i][k], B[0], B[1]);
          }
        }
      }
      mma_fence();
#pragma unroll
      for (int n = 0; n < O_GROUP; ++n) {
        if (n0 + n >= O_TILES) break;
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            O_rmem[i][n0 + n][e] += sum[n][i][e];
          }
        }
      }
    }

    split_tile(K_smem);
    block_sync();  // K is split; all warps are done with V, which the next copies overwrite
    if (j > 0) load_rows(V_smem, V, p.v_stride.seq * 4, j - 1, Bool<false>{});
  };

  if (tiles.visited > 0) {
    // Alg. 1, l. 4: Q, and the first K and V, which may hang over the end of the keys.
    int j = tiles.visited - 1;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      copy_tile_async<8, ROW_BYTES, PITCH, 32, ALIGNMENT, true>(Q_smem + r * 8 * PITCH, Q + r * 8 * q_stride, q_stride,
                                                               p.seqlen_q - warp_row - r * 8, lane);
    }
    load_rows(K_smem, K, p.k_stride.seq * 4, j, Bool<true>{});
    split_tile(K_smem);
#pragma unroll 1
    for (int r = 0; r < 2 * M_TILES; ++r) split_rows<HEAD_DIM, PITCH, WITH_LO>(Q_smem + r * 8 * PITCH, lane);
    load_rows(V_smem, V, p.v_stride.seq * 4, j, Bool<true>{});
    block_sync();  // K is split; the rows of Q are this warp's own
    // Alg. 1, l. 6, from the last visited tile down: the masked tiles come first and the loop over the others is free
    // of masks.
#pragma unroll 1
    for (; j >= 0; --j) visit_tile(j);
  }

  // Alg. 1, l. 12-15: O = O / l, L = m + log l.
  softmax.reduce_sum();
  char* O = static_cast<char*>(p.o) + 4 * (item.batch * p.o_stride.batch + item.head * p.o_stride.head);
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = warp_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
    if (row >= p.seqlen_q) continue;
    const float factor = softmax.inverse_sum(r) * (O_unit / P_SCALE);
    char* O_row = O + row * (p.o_stride.seq * 4) + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < O_TILES; ++n) {
      const u32 x = float_as_u32(O_rmem[r / 2][n][r % 2 * 2] * factor);
      const u32 y = float_as_u32(O_rmem[r / 2][n][r % 2 * 2 + 1] * factor);
      if constexpr (ALIGNMENT >= 8) {
        st_global(O_row + n * 32, vec2{x, y});
      } else {
        st_global(O_row + n * 32, x);
        st_global(O_row + n * 32 + 4, y);
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      constexpr float LN_2 = 0.693147180559945309f;
      const float lse = softmax.l[r] == 0.0f ? NEG_INF : fmaf(softmax.m_scaled[r], LN_2, logf(softmax.l[r]));
      st_global(p.lse + (i64(item.batch) * p.heads + item.head) * p.seqlen_q + row, lse);
    }
  }

  if constexpr (TRACE) {
    block_sync();  // the record ends when the last warp has stored
    if (thread == 0) write_trace(p, blockIdx.x, item, tiles, start_ns);
  }
}
