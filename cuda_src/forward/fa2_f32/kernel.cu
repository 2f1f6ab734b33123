// FlashAttention-2 forward for float32 on the 16-bit tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 1.
// Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
// performance", 2022: every float32 becomes a pair of float16, every product three products (mma/half_pair.cuh). With TF32 the
// small halves are left out: one product of 11-bit factors, the precision of tf32 at the speed of float16.
//
//   Alg. 1, l. 3     one thread block per query block        l. 9      m, P, l: shared/softmax.cuh
//           l. 4, 6  copy, then split into pairs             l. 10     O = alpha O + P V
//           l. 8     S = Q K^T                               l. 12-15  O / l, log-sum-exp
//
// Departures from Algorithm 1, and why:
// - K and V alternate in the pipeline: V arrives while S is computed, the next K while P V is. Each warp splits the rows that it
//   copied, in place: a tile costs two block barriers and no second buffer (99 KB at d128).
// - Tensor cores truncate sums towards zero, where float32 arithmetic rounds. They sum, from zero, 16 or 32 columns of S and one
//   tile of P V; the remaining sums are ordinary additions.
// - Each group of eight rows has its own unit. O is kept in the largest unit of V so far, and P includes the ratio.
// - O is rescaled where it is added to, in one instruction, at no cost. So the maximum is kept exact: P <= 1 can use the whole
//   range of float16, and rows of V may be 2^16 smaller than others before their P loses bits.
// Do not change: both ways to add to O stand behind one branch (see there). Registers are scarce: lane numbers are read again
// where they are used. Accuracy, measurements and failed experiments: NOTES.md.
#include "forward/fa2_f32/config.cuh"
#include "mma/copy.cuh"
#include "mma/half_pair.cuh"
#include "shared/block_order.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/dropout.cuh"
#include "forward/params.cuh"
#include "forward/irregular_scores.cuh"
#include "forward/block_item.cuh"
#include "forward/query_block.cuh"
#include "shared/store_two.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = Br / NUM_WARPS;      // query rows of one warp
constexpr int M_TILES = WARP_ROWS / 16;        // 16-row mma tiles of one warp
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S = Q K^T; the last one may be half padding
constexpr int S_TILES = Bc / 8;                // 8-column mma tiles of S, and groups of eight keys
constexpr int P_STEPS = Bc / 16;               // k16 steps of P V
constexpr int O_TILES = V_DIM / 8;             // 8-column mma tiles of O
constexpr int ROW_BYTES = HEAD_DIM * 4, V_ROW_BYTES = V_DIM * 4;
constexpr int PITCH = tile_pitch(ROW_BYTES, 64), V_PITCH = tile_pitch(V_ROW_BYTES, 64);
constexpr int SUM_STEPS = M_TILES == 1 ? 2 : 1;  // k16 steps of S that the tensor cores sum: enough to keep them busy
constexpr int O_GROUP = BLOCKS_PER_SM > 2 ? 3 : 4;  // 8-column tiles of O computed at a time: more take more registers
constexpr int RUNS_AT_ONCE = BLOCKS_PER_SM > 2 ? 1 : 2;  // runs of rows loaded at a time (irregular masks)

// Dynamic shared memory: the offset of each tile. Each is first float32, then pairs of float16 in the same place.
struct SharedMemory {
  static constexpr int Q = 0, K = Q + Br * PITCH, V = K + Bc * PITCH, BYTES = V + Bc * V_PITCH;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/fa2_f32.py must ask for the bytes that the tiles take");
static_assert(!CACHED, "fa2_forward_f32 takes keys that lie in an array");
static_assert(Br % (16 * NUM_WARPS) == 0, "a warp owns whole 16-row tiles");
static_assert(Bc % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 8, at most 256");
static_assert(V_DIM % 8 == 0 && V_DIM <= 256, "V_DIM is a multiple of 8, at most 256");

// The columns of Q and K, and of V.
struct OfKeys {
  static constexpr int COLUMNS = HEAD_DIM, PITCH = ::PITCH;
  using Rows = RowCopy<ROW_BYTES, PITCH, ALIGNMENT>;
};
struct OfValues {
  static constexpr int COLUMNS = V_DIM, PITCH = V_PITCH;
  using Rows = RowCopy<V_ROW_BYTES, PITCH, ALIGNMENT>;
};

// A separate first launch, only for masks with runs of rows: one warp per block of keys.
KERNEL __launch_bounds__(MASK_THREADS) mask_blocks(const __grid_constant__ ForwardParams p) {
  prepare_mask<MASK_KIND>(p, (blockIdx.x * MASK_THREADS + threadIdx.x) / 32, gridDim.x * (MASK_THREADS / 32));
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_forward_f32(const __grid_constant__ ForwardParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();

  // Alg. 1, l. 3: the grid is the loop over i.
  const WorkItem item = work_item<Br>(p, blockIdx.x, ROW_BYTES + V_ROW_BYTES);
  const auto sequence = sequence_of(p, item.batch);
  if (LENGTHS_KIND == PACKED && item.q_block * Br >= sequence.stored_rows()) return;  // past its sequence
  TileRange tiles = LENGTHS_KIND == DENSE ? visited_tiles<Br, Bc>(p, item.q_block)
                                          : visited_tiles<Br, Bc>(head_mask(p, sequence), item.q_block);
  // Irregular masks: the next tile. `tiles` ends after the first tile that is visited.
  constexpr bool IRREGULAR = is_irregular(MASK_KIND);
  TileWalk<true> walk(tiles.end - 1);
  TileTally tally;
  WalkedTile next{-1};
  auto find_next = [&](const WorkItem& item) {
    next = walk.next(0, [&](int tile) { return class_of_key_tile(p, item, tile); });
  };
  if constexpr (IRREGULAR) {
    find_next(item);
    tiles.end = next.tile() + 1;
  }
  const int warp_row = item.q_block * Br + warp * WARP_ROWS;
  const int kv_head = item.head / (p.heads / p.kv_heads);
  // This lane's first byte of this warp's rows of Q, and of the tile of K and of V that is visited first.
  using Rows = OfKeys::Rows;
  const i64 kv_row = sequence.first_key() + i64(tiles.end - 1) * Bc + warp * 8;
  const char* Q = Rows::source(p.q, p.q_stride, sequence.batch(), item.head, sequence.first_row() + warp_row, lane);
  const char* K = Rows::source(p.k, p.k_stride, sequence.batch(), kv_head, kv_row, lane);
  const char* V = OfValues::Rows::source(p.v, p.v_stride, sequence.batch(), kv_head, kv_row, lane);

  const u32 Q_smem = smem_address(smem) + SharedMemory::Q + warp * WARP_ROWS * PITCH;  // this warp's rows
  const u32 K_smem = smem_address(smem) + SharedMemory::K, V_smem = smem_address(smem) + SharedMemory::V;
  // Parked in a gap of this warp's rows of Q: what each tile, or the end, reads once.
  const u32 saved_smem = gap_address<PITCH>(Q_smem, 1);
  if (lane == 0) {
    park_item(saved_smem, item, u32(tiles.clear_end));
    if constexpr (MASK_KIND == MASK_BAND) st_shared_u32(saved_smem + PITCH, u32(tiles.clear_first));
  }
  warp_sync();

  float O_rmem[O_TILES][M_TILES][4] = {};
  OnlineSoftmax<2 * M_TILES, 0> softmax;
  softmax.reset();
  float O_unit = pair_unit(0);  // of O and V: the largest unit of V so far

  // The warp that copies a row also splits it: eight rows of every 8 * NUM_WARPS. The last tile, which is copied first, may
  // extend past the end of the keys.
  auto load_tile = [&](auto columns, u32 tile, const char*& source, i64 stride_bytes, bool is_last) {
    using Of = decltype(columns);
#pragma unroll
    for (int g = 0; g < S_TILES; g += NUM_WARPS) {
      if (S_TILES % NUM_WARPS != 0 && g + warp >= S_TILES) break;
      const int valid_rows = is_last ? sequence.keys() - (tiles.end - 1) * Bc - (g + warp) * 8 : 8;
      Of::Rows::copy(tile + (g + warp) * 8 * Of::PITCH, source + g * 8 * stride_bytes, stride_bytes, valid_rows, lane_id());
    }
    source -= Bc * stride_bytes;
    cp_async_commit();
  };
  auto split_tile = [&](auto columns, u32 tile) {
    using Of = decltype(columns);
    cp_async_wait<0>();
    warp_sync();  // the copies of the other lanes have landed too
#pragma unroll
    for (int g = 0; g < S_TILES; g += NUM_WARPS) {
      if (S_TILES % NUM_WARPS != 0 && g + warp >= S_TILES) break;
      split_rows<Of::COLUMNS, Of::PITCH>(tile + (g + warp) * 8 * Of::PITCH, lane_id());
    }
  };

  // Copies the next tile; under an irregular mask its address is computed again, as registers are scarce.
  auto load_next = [&](auto columns, u32 tile, const void* tensor, const Strides& stride, const char*& source) {
    if constexpr (IRREGULAR) {
      // Not the whole vector: the first lane may already be writing its last word for the next tile.
      const int head = int(ld_shared_u32(saved_smem + 4)), batch = int(ld_shared_u32(saved_smem + 8));
      const auto sequence = sequence_of(p, batch);
      const i64 row = sequence.first_key() + i64(next.tile()) * Bc + thread_id() / 32 * 8;
      source = decltype(columns)::Rows::source(tensor, stride, sequence.batch(), head / (p.heads / p.kv_heads), row, lane_id());
    }
    load_tile(columns, tile, source, stride.seq * 4, false);
  };

  // S += Q K^T over one k16 step.
  using Scores = float[S_TILES][M_TILES][4];
  auto multiply_q_k = [&](Scores& S, int k, u32 Q_lane, u32 K_lane) {
    u32 Q_hi[M_TILES][4], Q_lo[M_TILES][4];
    load_pair_operand<false, 16 * PITCH>(Q_hi, Q_lo, Q_lane + k * 2 * OCTET_BYTES);
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      multiply_pairs<false>(S[n], Q_hi, Q_lo, K_lane + n * 8 * PITCH + k * 2 * OCTET_BYTES);
    }
  };

  // Alg. 1, l. 7-10 for key tile j. Row r of a lane is row r / 2 * 16 + r % 2 * 8 + lane / 4 of the warp.
  auto visit_tile = [&](int j) {
    // Alg. 1, l. 8: S = Q K^T, while V arrives. The lane's addresses are those of pair_lane_a() and pair_lane_b(), written out so
    // that the lane is read again for each term.
    float S_rmem[S_TILES][M_TILES][4] = {};
    const u32 Q_lane = Q_smem + lane_id() % 16 * PITCH + lane_id() / 16 * OCTET_BYTES;
    const u32 K_lane = K_smem + lane_id() % 8 * PITCH + lane_id() / 8 % 2 * OCTET_BYTES + lane_id() / 16 * LO_OFFSET;
#pragma unroll 1
    for (int k = 0; k < K_STEPS; k += SUM_STEPS) {
      Scores sum = {};
#pragma unroll
      for (int step = 0; step < SUM_STEPS; ++step) {
        if (K_STEPS % SUM_STEPS == 0 || k + step < K_STEPS) multiply_q_k(sum, k + step, Q_lane, K_lane);
      }
      mma_fence();
#pragma unroll
      for (int e = 0; e < S_TILES * M_TILES * 4; ++e) (&S_rmem[0][0][0])[e] += (&sum[0][0][0])[e];
    }
    split_tile(OfValues{}, V_smem);
    float Q_unit[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) Q_unit[r] = ld_shared_f32(unit_address<PITCH>(Q_smem, r));
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      const float K_unit = ld_shared_f32(unit_address<PITCH>(K_smem, n));
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) S_rmem[n][r / 2][r % 2 * 2 + e] *= Q_unit[r] * K_unit;
      }
    }
    block_sync();  // V is split, and all warps have read K, which the next copies overwrite
    if (IRREGULAR ? next.exists() : j > tiles.first) load_next(OfKeys{}, K_smem, p.k, p.k_stride, K);

    const auto S = fragment_view_by_columns(S_rmem);
    auto lane_row_of = [&](const WorkItem& item) { return item.q_block * Br + warp * WARP_ROWS + S.lane_row(lane_id()); };
    if constexpr (SCORE) {
      const WorkItem item = parked_item(saved_smem);
      const int batch = min(item.batch, p.batch - 1);  // rows after the last packed sequence have no scores
      const ScoreFunction<ForwardParams> function(p, batch, item.head, int(diagonal_of(p, sequence_of(p, item.batch))));
      apply_function(S, function, lane_row_of(item), j * Bc + S.lane_column(lane_id()));
    }
    cap_scores<SOFTCAP, true>(S, p.softcap);
    if constexpr (ALIBI) {
      const WorkItem item = parked_item(saved_smem);
      const Alibi alibi(p, sequence_of(p, item.batch), item.head);
      alibi.change(S, p.scale_log2, lane_row_of(item), j * Bc + S.lane_column(lane_id()));
    }
    // One loop body for all tiles, which tests both edges: another body would take more registers.
    if constexpr (IRREGULAR) {
      const vec4 saved = ld_shared_vec4(saved_smem);
      const WalkedTile walked{int(saved.w)};
      if (walked.masked()) {
        const int group = p.heads / p.kv_heads, head = int(saved.y);
        const auto mask = irregular_mask(p, int(saved.z), head / group, head % group);
        const int row = int(saved.x) * Br + warp * WARP_ROWS + S.lane_row(lane_id());
        hide_scores<RUNS_AT_ONCE>(S, mask, row, walked.tile() * Bc, S.lane_column(lane_id()));
      }
    } else if (j >= int(ld_shared_u32(saved_smem + 12)) ||
        (MASK_KIND == MASK_BAND && j < int(ld_shared_u32(saved_smem + PITCH)))) {
      if constexpr (LENGTHS_KIND == DENSE) {
        const int row = int(ld_shared_u32(saved_smem)) * Br + warp * WARP_ROWS + S.lane_row(lane_id());
        hide_scores<RIGHT_MASKED>(S, head_mask(p), row, j * Bc, S.lane_column(lane_id()));
      } else {
        const WorkItem item = parked_item(saved_smem);
        const HeadMask mask = head_mask(p, sequence_of(p, item.batch));
        hide_scores<RIGHT_MASKED>(S, mask, lane_row_of(item), j * Bc, S.lane_column(lane_id()));
      }
    }

    // Alg. 1, l. 9: the row maxima, and alpha, which brings O to the new maximum and the new unit.
    float m_tile[2 * M_TILES], alpha[2 * M_TILES];
    lane_maxima<false>(m_tile, S);
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      m_tile[r] = quad_max(m_tile[r]);
      alpha[r] = 1.0f;
    }
    float P_factor[S_TILES];  // ratio of the units of V to the unit of O
    const float O_unit_old = O_unit;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      P_factor[n] = ld_shared_f32(unit_address<V_PITCH>(V_smem, n));
      O_unit = fmaxf(O_unit, P_factor[n]);
    }
    const float inverse_unit = inverse_power_of_two(O_unit);
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) P_factor[n] *= inverse_unit * P_SCALE;
    const bool raised = softmax.raise_max(m_tile, softmax_scale(p), alpha);
    const bool rescale = raised || O_unit != O_unit_old;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) alpha[r] *= O_unit_old * inverse_unit;

    // Alg. 1, l. 9: P = exp(S - m), in pairs. Two neighbouring accumulators of S hold one A operand.
    u32 P_hi[P_STEPS][M_TILES][4], P_lo[P_STEPS][M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      KeptWeights<S_TILES, false> kept;
      if constexpr (DROPOUT) {
        const vec4 saved = ld_shared_vec4(saved_smem);
        const int row = int(saved.x) * Br + warp * WARP_ROWS + 16 * i + S.lane_row(lane_id());
        kept.draw(p, saved.z * u32(p.heads) + saved.y, row, j * Bc + S.lane_column(lane_id()));
      }
#pragma unroll
      for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {  // register h of an A operand: row h % 2, columns h / 2
          const int n = 2 * k + h / 2, r = 2 * i + h % 2;
          float x = softmax.exp(S_rmem[n][i][h % 2 * 2], softmax_scale(p), r) * P_factor[n];
          float y = softmax.exp(S_rmem[n][i][h % 2 * 2 + 1], softmax_scale(p), r) * P_factor[n];
          if constexpr (DROPOUT) x = kept.value(x, h % 2, n, 0), y = kept.value(y, h % 2, n, 1);
          split_pair(x, y, P_hi[k][i][h], P_lo[k][i][h]);
        }
      }
    }

    // Alg. 1, l. 10: O = alpha O + P V, a few columns at a time, while the next K arrives.
    const u32 V_lane = V_smem + lane_id() % 16 * V_PITCH + lane_id() / 16 * LO_OFFSET;
#pragma unroll
    for (int n0 = 0; n0 < O_TILES; n0 += O_GROUP) {
      constexpr int LAST_GROUP = (O_TILES - 1) % O_GROUP + 1;
      const int group = n0 + O_GROUP <= O_TILES ? O_GROUP : LAST_GROUP;
      float sum[O_GROUP][M_TILES][4] = {};
#pragma unroll
      for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
        for (int n = 0; n < group; ++n) {
          multiply_pairs<true>(sum[n], P_hi[k], P_lo[k], V_lane + k * 16 * V_PITCH + (n0 + n) * OCTET_BYTES);
        }
      }
      mma_fence();
      // Both ways to add stand behind one branch: ptxas would otherwise delay the additions past the next products, and spill.
      if (rescale) {
#pragma unroll
        for (int n = 0; n < group; ++n) {
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              O_rmem[n0 + n][i][e] = fmaf(O_rmem[n0 + n][i][e], alpha[2 * i + e / 2], sum[n][i][e]);
            }
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < group; ++n) {
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) O_rmem[n0 + n][i][e] += sum[n][i][e];
          }
        }
      }
    }
    if (IRREGULAR ? next.exists() : j > tiles.first) split_tile(OfKeys{}, K_smem);
    block_sync();  // K is split, and all warps have read V, which the next copies overwrite
    if (IRREGULAR ? next.exists() : j > tiles.first) load_next(OfValues{}, V_smem, p.v, p.v_stride, V);
  };

  if (!tiles.empty()) {
    // Alg. 1, l. 4: Q, and the first K and V.
    const i64 q_stride_bytes = p.q_stride.seq * 4;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      Rows::copy(Q_smem + r * 8 * PITCH, Q + r * 8 * q_stride_bytes, q_stride_bytes,
                 sequence.rows() - warp_row - r * 8, lane);
    }
    load_tile(OfKeys{}, K_smem, K, p.k_stride.seq * 4, true);
    split_tile(OfKeys{}, K_smem);
    load_tile(OfValues{}, V_smem, V, p.v_stride.seq * 4, true);
#pragma unroll 1
    for (int r = 0; r < 2 * M_TILES; ++r) split_rows<HEAD_DIM, PITCH>(Q_smem + r * 8 * PITCH, lane);
    block_sync();  // K is split; each warp reads its own rows of Q only
    // Alg. 1, l. 6, from the last tile to the first: masked tiles come first.
    if constexpr (IRREGULAR) {
#pragma unroll 1
      while (next.exists()) {
        const WalkedTile walked = next;
        if (lane == 0) st_shared_u32(saved_smem + 12, u32(walked.code));  // band masks keep the end of the clear tiles there
        warp_sync();  // the other lanes may read the code
        if constexpr (TRACE) tally.count(walked.tile(), walked.masked());
        find_next(parked_item(saved_smem));
        visit_tile(walked.tile());
      }
    } else {
#pragma unroll 1
      for (int j = tiles.end - 1; j >= tiles.first; --j) visit_tile(j);
    }
  }

  // Alg. 1, l. 12-15: O = O / l, L = m + log l.
  softmax.reduce_sum();
  const auto [q_block, head, batch] = parked_item(saved_smem);
  const auto ended = sequence_of(p, batch);
  char* O = static_cast<char*>(p.o) +
            4 * (ended.batch() * p.o_stride.batch + head * p.o_stride.head + ended.first_row() * p.o_stride.seq);
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = q_block * Br + warp * WARP_ROWS + r / 2 * 16 + r % 2 * 8 + lane / 4;
    if (row >= ended.stored_rows()) continue;
    const bool exists = LENGTHS_KIND == DENSE || row < ended.rows();  // padding: zeros, and an LSE of -inf
    const float factor = exists ? of_kept(p, row_factor(p, softmax, r, head) * (O_unit / P_SCALE)) : 0.0f;
    char* O_row = O + 4 * (row * p.o_stride.seq + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < O_TILES; ++n) {
      const float* o = O_rmem[n][r / 2] + r % 2 * 2;
      store_two<Element, ALIGNMENT>(O_row + n * 32, o[0] * factor, o[1] * factor);
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      const float lse = exists ? exact_lse(softmax.m_scaled[r], softmax.l[r]) : NEG_INF;
      st_global(p.lse + row_stats_index(p, ended, i64(ended.batch()) * p.heads + head) + row, lse);
    }
  }

  if constexpr (TRACE) {
    block_sync();  // the trace record ends when the last warp has stored
    if constexpr (IRREGULAR) tiles = tally.range(tiles.total);
    const bool exists = LENGTHS_KIND == DENSE || q_block * Br < ended.rows();
    if (thread == 0 && exists) write_trace(p, blockIdx.x, {q_block, head, batch}, tiles, start_ns);
  }
}
