// FlashAttention-2 forward for float16 and bfloat16 on tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 1:
//
//   l. 1-3    query blocks i                       the grid: one thread block per (query block, head); work_item()
//   l. 4-5    load Q_i; O = 0, l = 0, m = -inf     before the loops
//   l. 6      key blocks j                         walk_tiles(), last tile first, one loop per kind of masking
//   l. 7      load K_j, V_j                        copied during tile j + 1
//   l. 8      S = Q_i K_j^T                        visit_tile(), first half
//   l. 9-10   m, P = exp(S - m), l, O              visit_tile(), second half
//   l. 12-15  O / l, L = m + log l, store          store_output()
//
// Section 3.3 of the paper: rows are split over warps, 32 per warp, so that warps share nothing but K and V. For head dims over
// 128 the O of 32 rows does not fit in a warp's registers: a pair of warps shares the rows, splits the columns of S and of O, and
// exchanges row maxima and P through shared memory (COLUMN_WARPS = 2).
//
// Departures, and why:
//   - Tiles run from last to first: a causal mask touches only the last tiles, and only the last can pass the end of the keys.
//   - O is rescaled only when a maximum has grown by more than 2^8 (shared/softmax.cuh): exact, and rare after the first tile.
//   - P is made 16 keys at a time between the products that use it, so that exponentials overlap with products.
//   - Operands of S are loaded one k16 step ahead, and copies of the next tile are spread over the steps: ldmatrix and cp.async
//     share one queue.
//   - One barrier per tile says both that the tile has landed and that the other stage is free.
//   - Under an irregular mask (shared/irregular_mask.cuh) one loop body serves all tiles. The next tile is found before the
//     current one is visited, because its copies are issued meanwhile.
//   - Few query blocks over many keys: the keys are split over thread blocks, heads may share a tile, and a second launch merges
//     (SPLIT_KEYS: forward/splits.cuh).
// Registers are scarce: what only the epilogue needs is parked in padding of Q. Measurements: NOTES.md.
#include "forward/fa2/config.cuh"
#include "forward/fa2/store.cuh"
#include "forward/fa2/page_stream.cuh"
#include "forward/fa2/tile_stream.cuh"
#include "mma/copy.cuh"
#include "mma/fragments.cuh"
#include "mma/traced_waits.cuh"
#include "forward/params.cuh"
#include "forward/block_item.cuh"
#include "forward/splits.cuh"
#include "forward/tree_scores.cuh"
#include "shared/block_order.cuh"
#include "shared/named_barriers.cuh"
#include "shared/alibi_sink.cuh"
#include "forward/irregular_scores.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"

// A separate first launch, only for masks with runs of rows: one warp per block of keys.
KERNEL __launch_bounds__(MASK_THREADS) mask_blocks(const __grid_constant__ ForwardParams p) {
  prepare_mask<MASK_KIND>(p, (blockIdx.x * MASK_THREADS + threadIdx.x) / 32, gridDim.x * (MASK_THREADS / 32));
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_forward(const __grid_constant__ ForwardParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row_group = warp / COLUMN_WARPS, part = warp % COLUMN_WARPS;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  PhaseLog inside(p.trace, lane == 0, blockIdx.x + gridDim.x * blockIdx.y, COPY);

  // Alg. 1, l. 3
  const WorkItem item = work_item<HEAD_ROWS, PACKED_HEADS>(p, blockIdx.x, ROW_BYTES + V_ROW_BYTES);
  const auto sequence = sequence_of(p, item.batch);
  if (LENGTHS_KIND == PACKED && item.q_block * Br >= sequence.stored_rows()) return inside.close();  // past its sequence
  const HeadMask mask = head_mask(p, sequence);
  TileRange tiles = block_tiles<Bc>(p, mask, item.q_block);
  if constexpr (TREE) tiles.clear_end = min(tiles.clear_end, max(mask.keys - mask.rows, 0) / Bc);
  if (SPLIT_KEYS && tiles.empty()) return inside.close();  // uniform: the merge ignores a split without tiles
  // Irregular masks: the current tile and the next one. Tiles are visited downwards: the first one sets `tiles.end`.
  constexpr bool IRREGULAR = is_irregular(MASK_KIND);
  static_assert(!DROPOUT || !TREE, "dropout takes no trees");
  TileWalk<true> walk(tiles.end - 1);
  TileTally tally;
  WalkedTile walked{-1}, next{-1};
  auto find_next = [&](const WorkItem& item) {
    next = walk.next(SPLIT_KEYS ? tiles.first : 0, [&](int tile) { return class_of_key_tile(p, item, tile); });
  };
  if constexpr (IRREGULAR) {
    find_next(item);
    tiles.end = next.tile() + 1;
  }
  const int first_row = item.q_block * HEAD_ROWS;
  const int kv_head = item.head / (p.heads / p.kv_heads);
  const i64 q_stride = p.q_stride.seq * 2, k_stride = p.k_stride.seq * 2, v_stride = p.v_stride.seq * 2;
  const char* Q = static_cast<const char*>(p.q) + 2 * (sequence.batch() * p.q_stride.batch + item.head * p.q_stride.head) +
                  (sequence.first_row() + first_row) * q_stride;
  const char* K = static_cast<const char*>(p.k) + 2 * (sequence.batch() * p.k_stride.batch + kv_head * p.k_stride.head) +
                  sequence.first_key() * k_stride;
  const char* V = static_cast<const char*>(p.v) + 2 * (sequence.batch() * p.v_stride.batch + kv_head * p.v_stride.head) +
                  sequence.first_key() * v_stride;

  const u32 Q_smem = smem_address(smem) + SharedMemory::Q;
  const u32 K_smem = smem_address(smem) + SharedMemory::STAGES, V_smem = K_smem + K_BYTES;
  const u32 Q_lane = Q_smem + row_group * WARP_ROWS * Q_PITCH + lane_offset_rows_first<Q_PITCH>(lane);
  const u32 K_lane = K_smem + part * WARP_KEYS * PITCH + lane_offset_columns_first<PITCH>(lane);
  const u32 V_lane = V_smem + part * O_TILES * 16 + lane_offset_rows_first<V_PITCH>(lane);
  const u32 P_warp = smem_address(smem) + SharedMemory::P + row_group * WARP_ROWS * P_PITCH;
  const u32 M_warp = smem_address(smem) + SharedMemory::M + row_group * WARP_ROWS * 8;

  // Parked in the last 16 bytes of rows of Q, padding that no tile uses. First row: what the epilogue needs.
  const u32 parked_smem = Q_smem + Q_PITCH - 16;
  if (thread == 0) park_item(parked_smem, item, Q_smem);
  // Second row: the end of the clear tiles, if masked tiles are not skipped.
  constexpr bool PARK_CLEAR_END = !SKIP_MASKED_TILES && MASK_KIND != MASK_FULL && !IRREGULAR;
  if (PARK_CLEAR_END && thread == 0) st_shared_u32(parked_smem + Q_PITCH, u32(tiles.clear_end));
  // Third row: the mask of the sequence. Fourth row: ALiBi's slope and diagonal; packed heads: one row for each head.
  constexpr bool PARK_MASK = LENGTHS_KIND != DENSE;
  if (PARK_MASK && thread == 0) {
    st_shared_vec4(parked_smem + 2 * Q_PITCH, {u32(mask.rows), u32(mask.keys), u32(mask.first), u32(mask.last)});
  }
  if (ALIBI && thread == 0) {
#pragma unroll
    for (int h = 0; h < PACKED_HEADS; ++h) {
      const Alibi alibi(p, sequence, item.head + h);
      st_shared_vec2(parked_smem + (3 + h) * Q_PITCH, {float_as_u32(alibi.slope), u32(alibi.diagonal)});
    }
  }

  // Alg. 1, l. 5
  float O_rmem[M_TILES][O_TILES][4] = {};
  // INVARIANT: without slack, rows that share a warp do not decide on each other's maxima.
  OnlineSoftmax<2 * M_TILES, INVARIANT ? 0 : 8> softmax;
  softmax.reset();
  u32 Q_rmem[M_TILES][K_STEPS][4];  // read if Q_IN_REGISTERS
  KeptWeights<S_TILES, false> kept[M_TILES];  // DROPOUT: of the current tile

  // Copies inside the loops begin with the second tile that is visited.
  auto stream = [&](const auto& of_array, const void* cache, const Strides& step, u32 smem) {
    if constexpr (CACHED) {
      return PageStream(p, cache, step, kv_head, smem, item.batch, tiles.end - 1, mask.keys_begin(first_row), sequence.keys(),
                        thread);
    } else {
      return of_array;
    }
  };
  auto K_stream = stream(TileStream<Bc, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, K_STEPS>(
      K_smem, K + (tiles.end - 2) * (Bc * k_stride), k_stride, thread), p.k, p.k_stride, K_smem);
  auto V_stream = stream(TileStream<Bc, V_ROW_BYTES, V_PITCH, NUM_THREADS, ALIGNMENT, K_STEPS>(
      V_smem, V + (tiles.end - 2) * (Bc * v_stride), v_stride, thread), p.v, p.v_stride, V_smem);

  // The value of the pair's other warp for each row.
  auto exchange = [&](const float(&mine)[2 * M_TILES], float(&other)[2 * M_TILES]) {
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      if (lane % 4 == 0) st_shared_f32(M_warp + (part * WARP_ROWS + r * 8 + lane / 4) * 4, mine[r]);
    }
    bar_sync(ROW_PAIR_BARRIER + row_group, 64);  // both warps have written, and both have read P of the previous tile
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      other[r] = ld_shared_f32(M_warp + ((part ^ 1) * WARP_ROWS + r * 8 + lane / 4) * 4);
    }
  };

  // Alg. 1, l. 9: P = exp(S - m) for 16 keys of this warp, as an A operand.
  auto probabilities = [&](u32(&P)[M_TILES][4], float(&S_rmem)[M_TILES][S_TILES][4], int k) {
    const auto S = fragment_view(S_rmem);
    exponentials<2>(S, 2 * k, softmax, softmax_scale(p));
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        P[i][h] = operand_pair<Element>(S, i, k, h);
        if constexpr (DROPOUT) P[i][h] &= kept[i].pair(h % 2, 2 * k + h / 2);
      }
    }
  };

  // Alg. 1, l. 10: O += P V for 16 keys.
  auto accumulate = [&](const u32(&P)[M_TILES][4], u32 V_rows) {
#pragma unroll
    for (int n = 0; n < O_TILES; n += 2) {
      u32 B[4];
      if (n + 1 < O_TILES) {
        ldmatrix_x4_trans(B, V_rows + n * 16);
      } else {
        u32 half[2];
        ldmatrix_x2_trans(half, V_rows + n * 16);
        B[0] = half[0];
        B[1] = half[1];
      }
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        mma_m16n8k16<Element>(O_rmem[i][n], P[i], B[0], B[1]);
        if (n + 1 < O_TILES) mma_m16n8k16<Element>(O_rmem[i][n + 1], P[i], B[2], B[3]);
      }
    }
  };

  // Alg. 1, l. 7-10 for key tile j.
  auto visit_tile = [&](int j, u32 stage, auto segment) {
    constexpr Segment SEGMENT = decltype(segment)::value;
    u32 A[2][M_TILES][4], B[2][S_TILES / 2][4];  // Q and K of two k16 steps
    auto load_q = [&](int k) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if constexpr (!Q_IN_REGISTERS) ldmatrix_x4(A[k % 2][i], Q_lane + i * 16 * Q_PITCH + k * 32);
      }
    };
    auto load_k = [&](int k, int n) { ldmatrix_x4(B[k % 2][n / 2], K_lane + stage + n * 8 * PITCH + k * 32); };
    load_q(0);
    // K and V have landed for all threads, and all warps are done with tile j + 1, whose buffers the copies below fill.
    await_copies<0>(inside, j, SCORES);

    // Alg. 1, l. 8: S = Q K^T.
    float S_rmem[M_TILES][S_TILES][4] = {};
#pragma unroll
    for (int n = 0; n < S_TILES; n += 2) load_k(0, n);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      K_stream.copy(k, stage ^ STAGE_BYTES, k_stride, IRREGULAR ? next.exists() : j > tiles.first);
      V_stream.copy(k, stage ^ STAGE_BYTES, v_stride, IRREGULAR ? next.exists() : j > tiles.first);
      if (k + 1 < K_STEPS) load_q(k + 1);
#pragma unroll
      for (int n = 0; n < S_TILES; n += 2) {
        const u32(&K_k)[4] = B[k % 2][n / 2];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          const u32(&Q_k)[4] = Q_IN_REGISTERS ? Q_rmem[i][k] : A[k % 2][i];
          mma_m16n8k16<Element>(S_rmem[i][n], Q_k, K_k[0], K_k[1]);
          mma_m16n8k16<Element>(S_rmem[i][n + 1], Q_k, K_k[2], K_k[3]);
        }
        if (k + 1 < K_STEPS) load_k(k + 1, n);
      }
    }
    cp_async_commit();
    mma_fence({inside, SOFTMAX, u32(j)});

    // Alg. 1, l. 9: the row maxima.
    const auto S = fragment_view(S_rmem);
    if constexpr (SCORE) {
      const WorkItem item = parked_item(parked_smem);
      const int batch = min(item.batch, p.batch - 1);  // rows after the last packed sequence have no scores
      const ScoreFunction<ForwardParams> function(p, batch, item.head + head_of_row(row_group * WARP_ROWS),
                                                  int(diagonal_of(p, sequence_of(p, item.batch))));
      const int row = item.q_block * HEAD_ROWS + query_of_row(row_group * WARP_ROWS) + S.lane_row(lane_id());
      apply_function<INVARIANT>(S, function, row, j * Bc + part * WARP_KEYS + S.lane_column(lane_id()));
    }
    cap_scores<SOFTCAP>(S, p.softcap);
    if constexpr (ALIBI) {
      const int row = int(ld_shared_u32(parked_smem)) * HEAD_ROWS + query_of_row(row_group * WARP_ROWS) + S.lane_row(lane_id());
      const vec2 found = ld_shared_vec2(parked_smem + (3 + head_of_row(row_group * WARP_ROWS)) * Q_PITCH);
      const int key = j * Bc + part * WARP_KEYS + S.lane_column(lane_id());
      Alibi{u32_as_float(found.x), int(found.y)}.change(S, p.scale_log2, row, key);
    }
    if (SEGMENT != CLEAR && (!IRREGULAR || walked.masked())) {
      const int row = int(ld_shared_u32(parked_smem)) * HEAD_ROWS + query_of_row(row_group * WARP_ROWS) + S.lane_row(lane_id());
      const int column = S.lane_column(PAIRED ? lane_id() : lane);  // PAIRED: lane_id() again, as a kept `lane` would spill
      if constexpr (IRREGULAR) {
        const WorkItem item = parked_item(parked_smem);
        const int group = p.heads / p.kv_heads;
        const auto mask = irregular_mask<AttentionParams>(p, item.batch, item.head / group, item.head % group);
        hide_scores(S, mask, row, j * Bc + part * WARP_KEYS, column);
      } else if constexpr (PARK_MASK) {
        const vec4 found = ld_shared_vec4(parked_smem + 2 * Q_PITCH);
        const HeadMask mask{int(found.x), int(found.y), int(found.z), int(found.w)};
        const int first_key = j * Bc + part * WARP_KEYS;
        hide_scores<SEGMENT>(S, mask, row, first_key, column);
        if constexpr (TREE) {
          hide_tree(S, p, int(ld_shared_u32(parked_smem + 8)), row, first_key + column - (mask.keys - mask.rows));
        }
      } else {
        hide_scores<SEGMENT>(S, head_mask(p), row, j * Bc + part * WARP_KEYS, column);
      }
    }
    if constexpr (DROPOUT) {
      const WorkItem item = parked_item(parked_smem);
      const int row = item.q_block * HEAD_ROWS + query_of_row(row_group * WARP_ROWS) + S.lane_row(lane_id());
      const u32 head = u32(item.batch * p.heads + item.head + head_of_row(row_group * WARP_ROWS));
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        kept[i].draw(p, head, row + 16 * i, j * Bc + part * WARP_KEYS + S.lane_column(lane_id()));
      }
    }
    float m_tile[2 * M_TILES];
    lane_maxima<false>(m_tile, S);
    if constexpr (PAIRED) {
      float m_other[2 * M_TILES];
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) m_tile[r] = quad_max(m_tile[r]);
      exchange(m_tile, m_other);
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) m_tile[r] = fmaxf(m_tile[r], m_other[r]);
    }
    float alpha[2 * M_TILES];
    if (softmax.raise_max_by_lanes(m_tile, softmax_scale(p), alpha)) scale_rows(O_rmem, alpha);  // l. 10: diag(alpha) O
    inside.enter(VALUES, j);

    if constexpr (PAIRED) {
      u32 P[S_TILES / 2][M_TILES][4];
#pragma unroll
      for (int k = 0; k < S_TILES / 2; ++k) {
        probabilities(P[k], S_rmem, k);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          store_a_operand<P_PITCH>(P_warp + i * 16 * P_PITCH + (part * WARP_KEYS + k * 16) * 2, P[k][i], lane);
        }
      }
#pragma unroll
      for (int k = 0; k < S_TILES / 2; ++k) {
        accumulate(P[k], V_lane + stage + (part * WARP_KEYS + k * 16) * V_PITCH);
      }
      bar_sync(ROW_PAIR_BARRIER + row_group, 64);  // both halves of P are written; this warp's own half is already used
      const u32 P_lane = P_warp + (part ^ 1) * WARP_KEYS * 2 + lane_offset_rows_first<P_PITCH>(lane);
#pragma unroll
      for (int k = 0; k < S_TILES / 2; ++k) {
        u32 P_other[M_TILES][4];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) ldmatrix_x4(P_other[i], P_lane + i * 16 * P_PITCH + k * 32);
        accumulate(P_other, V_lane + stage + ((part ^ 1) * WARP_KEYS + k * 16) * V_PITCH);
      }
    } else {
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) {
        u32 P[M_TILES][4];
        probabilities(P, S_rmem, k);
        accumulate(P, V_lane + stage + k * 16 * V_PITCH);
      }
    }
    mma_fence();
  };

  if (!tiles.empty()) {
    zero_paddings(Q_smem, K_smem, thread);
    // Alg. 1, l. 4 and 7: Q, and the first K and V. The tile that is visited first alone can extend past the end of the keys.
    int j = tiles.end - 1;
    const int valid_keys = sequence.keys() - j * Bc;
#pragma unroll
    for (int h = 0; h < PACKED_HEADS; ++h) {
      copy_tile_async<HEAD_ROWS, ROW_BYTES, Q_PITCH, NUM_THREADS, ALIGNMENT, true>(  //
          Q_smem + h * HEAD_ROWS * Q_PITCH, Q + 2 * h * p.q_stride.head, q_stride, sequence.rows() - first_row, thread);
    }
    cp_async_commit();
    K_stream.copy_first(K_smem, K + j * (Bc * k_stride), k_stride, valid_keys);
    V_stream.copy_first(V_smem, V + j * (Bc * v_stride), v_stride, valid_keys);
    cp_async_commit();
    await_copies<1>(inside, j, NOTHING);  // Q has landed for all threads
    if constexpr (Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) ldmatrix_x4(Q_rmem[i][k], Q_lane + i * 16 * Q_PITCH + k * 32);
      }
    }
    u32 stage = 0;
    if constexpr (IRREGULAR) {
      while (next.exists()) {
        walked = next;
        find_next(parked_item(parked_smem));
        K_stream.skip(walked.tile() - 1 - next.tile(), k_stride);
        V_stream.skip(walked.tile() - 1 - next.tile(), v_stride);
        visit_tile(walked.tile(), stage, SegmentTag<RIGHT_MASKED>{});
        stage ^= STAGE_BYTES;
        if constexpr (TRACE) tally.count(walked.tile(), walked.masked());
      }
    } else {
      walk_tiles<MASK_KIND>(j, tiles, [&](int j, auto segment) {  // Alg. 1, l. 6
        visit_tile(j, stage, segment);
        stage ^= STAGE_BYTES;
        if constexpr (PARK_CLEAR_END) tiles.clear_end = int(ld_shared_u32(parked_smem + Q_PITCH));
      });
    }
  } else {
    block_sync();  // the parked values are visible
  }

  inside.enter(STORE);
  // Alg. 1, l. 12-15: O = O / l, L = m + log l.
  softmax.reduce_sum();
  if constexpr (PAIRED) {
    float l_other[2 * M_TILES];
    exchange(softmax.l, l_other);
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) softmax.l[r] += l_other[r];
  }
  if constexpr (SPLIT_KEYS) {
    leave_part(p, parked_item(parked_smem), row_group * WARP_ROWS, part * O_TILES * 8, fragment_view(O_rmem), softmax, lane);
  } else {
    store_output(p, parked_smem, row_group, part, O_rmem, softmax, lane);
  }

  inside.close();
  if constexpr (TRACE) {
    block_sync();  // the trace record ends when the last warp has stored
    if constexpr (IRREGULAR) tiles = tally.range(tiles.total);
    const WorkItem done = parked_item(parked_smem);
    const bool exists = LENGTHS_KIND == DENSE || done.q_block * Br < sequence_of(p, done.batch).rows();
    if (thread == 0 && exists) write_trace(p, blockIdx.x, done, tiles, start_ns);
  }
}

// SPLIT_KEYS, the second launch: merges the parts.
KERNEL __launch_bounds__(COMBINE_THREADS) fa2_combine(const __grid_constant__ ForwardParams p) {
  if constexpr (SPLIT_KEYS) combine_splits<Bc>(p);
}
