// FlashAttention-2 backward for float32 on the 16-bit tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 2. Every float32 is a
// pair of float16 and every product three products (mma/half_pair.cuh); with TF32 the small halves are left out.
//
//   l. 3-4    dQ = 0, D = rowsum(dO o O)           fa2_backward_f32_prepare
//   l. 5-7    key blocks j; K_j, V_j, dK, dV = 0   the grid: one thread block per key block and key/value head
//   l. 8-9    query blocks i; Q_i, dO_i, L_i, D_i  the loop, copied and split during the previous tile
//   l. 10-11  S = Q_i K_j^T, P = exp(S - L_i)      visit_tile(), as S^T = K_j Q_i^T
//   l. 12     dV += P^T dO_i                       visit_tile()
//   l. 13-14  dP = dO_i V_j^T, dS = P o (dP - D)   visit_tile(), transposed too
//   l. 15     dQ_i += dS K_j                       add_dq()
//   l. 16     dK += dS^T Q_i                       visit_tile()
//   l. 18     dK, dV                               epilogue; dQ: fa2_backward_f32_convert
//
// Departures, and why:
// - P, dS for dK and dS for dQ of a warp's own keys lie in one buffer, one after another. Each is scaled and split for its
//   product: the other operand (dO, Q or K) has units that differ along the sum, so a factor includes the ratio of each unit to
//   the largest one.
// - dS has one unit in a block, that of its largest element; warps exchange their largest elements while dV is computed.
// - Tensor cores truncate sums, so they sum little, from zero: 32 columns of S and dP, the queries of one tile for dK and dV, the
//   keys of one block for dQ. Ordinary additions do the rest.
// Registers are scarce: lane and thread numbers are read again where they are used. Measurements: NOTES.md.
#include "backward/fa2_f32/config.cuh"
#include "backward/fa2_f32/shape.cuh"
#include "backward/common/passes.cuh"
#include "backward/common/query_walk.cuh"
#include "backward/common/score_gradients.cuh"
#include "backward/common/tickets.cuh"
#include "mma/half_pair.cuh"
#include "shared/dropout.cuh"
#include "shared/named_barriers.cuh"
#include "shared/softcap.cuh"

KERNEL __launch_bounds__(PASS_THREADS) fa2_backward_f32_prepare(const __grid_constant__ KernelParams p) {
  if (found_tickets<PASS_THREADS>(p)) return;
  prepare_strip(p);
  zero_score_gradients<PASS_THREADS>(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_backward_f32(const __grid_constant__ KernelParams p) {
  DYN_SMEM(smem);
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();

  const u32 smem_base = smem_address(smem);
  const u32 K_smem = smem_base + SharedMemory::K, V_smem = smem_base + SharedMemory::V, Q_smem = smem_base + SharedMemory::Q;
  const u32 dO_smem = smem_base + SharedMemory::DO, rows_smem = smem_base + SharedMemory::ROWS;
  const u32 S_smem = smem_base + SharedMemory::S, largest_smem = smem_base + SharedMemory::LARGEST;

  // Alg. 2, l. 5
  TileRange tiles;
  QueryTile tile;
  // The work item and the clear tiles are parked in gaps of V, because each tile, or the end, reads them once. LENGTHS: so are
  // the sequence and its mask.
  const u32 saved_smem = gap_address<V_PITCH>(V_smem, 1);
  constexpr bool RAGGED = LENGTHS_KIND != DENSE;
  {
    const KeyItem item = key_item<Bc>(p, blockIdx.x, 12 * HEAD_DIM + 4 * V_DIM);
    const auto sequence = sequence_of(p, item.batch);
    if (LENGTHS_KIND == PACKED && item.k_block * Bc >= sequence.stored_keys()) return;  // the key block lies past its sequence
    const HeadMask mask = head_mask(p, sequence);
    tiles = visited_queries<Br, Bc>(mask, item.k_block);
    tile = {item.kv_head * (p.heads / p.kv_heads), tiles.first};
    if (thread_id() == 0) {
      st_shared_vec4(saved_smem, vec4{u32(item.k_block), u32(item.kv_head), u32(item.batch), u32(tiles.clear_end)});
      st_shared_u32(saved_smem + V_PITCH, u32(tiles.clear_first));
      if constexpr (RAGGED) {
        st_shared_vec4(saved_smem + 2 * V_PITCH, {u32(mask.rows), u32(mask.keys), u32(mask.first), u32(mask.last)});
        st_shared_vec2(saved_smem + 3 * V_PITCH, {u32(sequence.first_row()), u32(sequence.first_key())});
      }
    }
    block_sync();
  }
  auto key_block = [&] { return int(ld_shared_u32(saved_smem)); };
  auto kv_head = [&] { return int(ld_shared_u32(saved_smem + 4)); };
  auto batch = [&] { return int(ld_shared_u32(saved_smem + 8)); };
  auto parked_mask = [&]() -> HeadMask {
    if constexpr (!RAGGED) return head_mask(p);
    const vec4 found = ld_shared_vec4(saved_smem + 2 * V_PITCH);
    return {int(found.x), int(found.y), int(found.z), int(found.w)};
  };
  auto num_rows = [&] { return RAGGED ? int(ld_shared_u32(saved_smem + 2 * V_PITCH)) : p.seqlen_q; };
  auto num_keys = [&] { return RAGGED ? int(ld_shared_u32(saved_smem + 2 * V_PITCH + 4)) : p.seqlen_k; };
  // PACKED: the first row and key of the sequence in arrays without a batch axis. Else the arrays have one.
  auto first_row = [&] { return LENGTHS_KIND == PACKED ? int(ld_shared_u32(saved_smem + 3 * V_PITCH)) : 0; };
  auto first_key = [&] { return LENGTHS_KIND == PACKED ? int(ld_shared_u32(saved_smem + 3 * V_PITCH + 4)) : 0; };
  auto array_batch = [&] { return LENGTHS_KIND == PACKED ? 0 : batch(); };
  auto is_clear = [&](int q_tile) {
    return q_tile >= int(ld_shared_u32(saved_smem + V_PITCH)) && q_tile < int(ld_shared_u32(saved_smem + 12)) &&
           (key_block() + 1) * Bc <= num_keys();
  };
  auto batch_head = [&] { return i64(array_batch()) * p.heads; };
  // Irregular masks: the current tile and the next one.
  constexpr bool IRREGULAR = is_irregular(MASK_KIND);
  QueryWalk query_walk;
  WalkedTile walked{-1}, walked_next{-1};
  TileTally tally;
  auto find_next = [&] {
    walked_next = query_walk.next(p, key_block(), batch(), kv_head());
    return QueryTile{kv_head() * (p.heads / p.kv_heads) + query_walk.head, walked_next.tile()};
  };

  // Alg. 2, l. 7
  float dK_rmem[OfKeys::TILES][KEY_TILES][4] = {}, dV_rmem[OfValues::TILES][KEY_TILES][4] = {};

  // The warp that copies a row also splits it: until then no other warp reads it.
  auto copy_rows = [&](auto of, auto rows, int first_group, u32 tile, const void* tensor, const Strides& stride, int head,
                       int first_of_sequence, int first, int end) {
    using Of = decltype(of);
#pragma unroll
    for (int g = 0; g < decltype(rows)::value / 8; g += NUM_WARPS) {
      const int row = (g + first_group) * 8;
      if (decltype(rows)::value / 8 % NUM_WARPS != 0 && row >= decltype(rows)::value) break;
      Of::Copy::copy(tile + row * Of::PITCH,
                     Of::Copy::source(tensor, stride, array_batch(), head, first_of_sequence + first + row, lane_id()),
                     stride.seq * 4, end - first - row, lane_id());
    }
  };
  auto split_tile = [&](auto of, auto rows, int first_group, u32 tile) {
    using Of = decltype(of);
#pragma unroll
    for (int g = 0; g < decltype(rows)::value / 8; g += NUM_WARPS) {
      const int row = (g + first_group) * 8;
      if (decltype(rows)::value / 8 % NUM_WARPS != 0 && row >= decltype(rows)::value) break;
      split_rows<Of::COLUMNS, Of::PITCH>(tile + row * Of::PITCH, lane_id());
    }
  };
  // Alg. 2, l. 9, asynchronously. Rows past the end become zeros, which add nothing to dK and dV, although their P is exp2(0 - 0)
  // = 1.
  auto copy_do = [&](QueryTile tile) {
    copy_rows(OfValues{}, Size<Br>{}, Share().first_dO_group(), dO_smem, p.dout, p.dout_stride, tile.head, first_row(),
              tile.q_tile * Br, num_rows());
    const int row = tile.q_tile * Br + thread_id();
    if (thread_id() < Br) {
      i64 number = (batch_head() + tile.head) * (LENGTHS_KIND == PACKED ? p.total_q : p.seqlen_q) + row;
      if constexpr (LENGTHS_KIND == PACKED) number += first_row();
      cp_async_small<ROW_STATS_BYTES>(rows_smem + thread_id() * ROW_STATS_BYTES,
                                       BackwardWorkspace(p).rows + number * ROW_STATS_BYTES, row < num_rows());
    }
    cp_async_commit();
  };
  auto copy_q = [&](QueryTile tile) {
    copy_rows(OfKeys{}, Size<Br>{}, Share().first_Q_group(), Q_smem, p.q, p.q_stride, tile.head, first_row(), tile.q_tile * Br,
              num_rows());
    cp_async_commit();
  };
  auto split_queries = [&] {
    cp_async_wait<0>();
    warp_sync();  // the copies of the other lanes have landed too
    split_tile(OfValues{}, Size<Br>{}, Share().first_dO_group(), dO_smem);
    split_tile(OfKeys{}, Size<Br>{}, Share().first_Q_group(), Q_smem);
  };
  // Warps that share keys wait for one another, until all have written, or read, their parts of P or dS.
  auto sync_keys = [&] {
    if constexpr (PARTS > 1) {
      bar_sync(KEY_PARTS_BARRIER + Share().key_group(), PARTS * 32);
    } else {
      warp_sync();
    }
  };
  auto largest_unit = [&](auto of, u32 tile, auto rows) {
    constexpr int PITCH = decltype(of)::PITCH;
    float largest = ld_shared_f32(unit_address<PITCH>(tile, 0));
#pragma unroll
    for (int g = 1; g < decltype(rows)::value / 8; ++g) largest = fmaxf(largest, ld_shared_f32(unit_address<PITCH>(tile, g)));
    return largest;
  };

  using Scores = float[S_TILES][KEY_TILES][4];
  // S^T or dP^T: keys times queries, summed over columns.
  auto multiply_rows = [&](auto of, Scores& D, u32 keys, u32 queries) {
    constexpr int PITCH = decltype(of)::PITCH, STEPS = decltype(of)::STEPS;
    const u32 warp_keys = keys + Share().keys() * PITCH, warp_queries = queries + Share().queries() * PITCH;
    const u32 A_lane = warp_keys + pair_lane_a<PITCH>(lane_id()), B_lane = warp_queries + pair_lane_b<PITCH>(lane_id());
#pragma unroll 1
    for (int k = 0; k < STEPS; k += SUM_STEPS) {
      Scores sum = {};
#pragma unroll
      for (int x = k; x < k + SUM_STEPS; ++x) {
        if (STEPS % SUM_STEPS != 0 && x >= STEPS) break;
        u32 A_hi[KEY_TILES][4], A_lo[KEY_TILES][4];
        load_pair_operand<false, 16 * PITCH>(A_hi, A_lo, A_lane + x * 2 * OCTET_BYTES);
        multiply_pair_tiles<false, 8 * PITCH, S_TILES>(sum, A_hi, A_lo, B_lane + x * 2 * OCTET_BYTES);
      }
      mma_fence();
#pragma unroll
      for (int e = 0; e < S_TILES * KEY_TILES * 4; ++e) (&D[0][0][0])[e] += (&sum[0][0][0])[e];
    }
    float key_unit[2 * KEY_TILES];
#pragma unroll
    for (int r = 0; r < 2 * KEY_TILES; ++r) key_unit[r] = ld_shared_f32(unit_address<PITCH>(warp_keys, r));
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      const float query_unit = ld_shared_f32(unit_address<PITCH>(warp_queries, n));
#pragma unroll
      for (int e = 0; e < KEY_TILES * 4; ++e) (&D[n][0][0])[e] *= query_unit * key_unit[e / 2];
    }
  };
  // This warp's part of P^T or dS^T to shared memory, times factor(n, r) for its queries 8n ... and keys 8r ...
  auto store_scores = [&](const Scores& X, auto factor) {
    const u32 target = S_smem + (Share().keys() + lane_id() / 4) * S_PITCH + Share().queries() * 4 + lane_id() % 4 * 4;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
      for (int r = 0; r < 2 * KEY_TILES; ++r) {
        const float f = factor(n, r);
        u32 hi, lo;
        split_pair(X[n][r / 2][r % 2 * 2] * f, X[n][r / 2][r % 2 * 2 + 1] * f, hi, lo);
        st_shared_u32(target + r * 8 * S_PITCH + n * OCTET_BYTES, hi);
        if constexpr (WITH_LO) st_shared_u32(target + r * 8 * S_PITCH + n * OCTET_BYTES + LO_OFFSET, lo);
      }
    }
  };
  // dV += factor * P^T dO, or dK += factor * dS^T Q, a few columns at a time.
  auto accumulate = [&](auto of, auto& D, u32 queries, float factor) {
    constexpr int PITCH = decltype(of)::PITCH;
    const u32 A_lane = S_smem + Share().keys() * S_PITCH + pair_lane_a<S_PITCH>(lane_id());
    const u32 B_lane = queries + Share().first_tile(of) * OCTET_BYTES + pair_lane_b_trans<PITCH>(lane_id());
    u32 A_hi[Br / 16][KEY_TILES][4], A_lo[Br / 16][KEY_TILES][4];
#pragma unroll
    for (int k = 0; k < Br / 16; ++k) {
      load_pair_operand<false, 16 * S_PITCH>(A_hi[k], A_lo[k], A_lane + k * 2 * OCTET_BYTES);
    }
    for_groups<decltype(of)::TILES, O_GROUP>([&](int n0, auto count) {
      float sum[decltype(count)::value][KEY_TILES][4] = {};
#pragma unroll
      for (int k = 0; k < Br / 16; ++k) {
        multiply_pair_tiles<true, OCTET_BYTES, decltype(count)::value>(sum, A_hi[k], A_lo[k],
                                                                       B_lane + k * 16 * PITCH + n0 * OCTET_BYTES);
      }
      mma_fence();
#pragma unroll
      for (int e = 0; e < decltype(count)::value * KEY_TILES * 4; ++e) {
        float& d = (&D[n0][0][0])[e];
        d = fmaf((&sum[0][0][0])[e], factor, d);
      }
    });
  };

  // Alg. 2, l. 10-14 and 16 for one query tile; dS stays in shared memory for add_dq(), in the unit that is returned.
  auto visit_tile = [&](QueryTile tile, auto copy_next_do) {
    // Alg. 2, l. 10
    float S_rmem[S_TILES][KEY_TILES][4] = {}, dP_rmem[S_TILES][KEY_TILES][4] = {};
    const auto S = fragment_view_by_columns(S_rmem);
    // The lane's first key and query.
    auto lane_key = [&] { return key_block() * Bc + int(Share().keys()) + S.lane_row(lane_id()); };
    auto lane_query = [&] { return tile.q_tile * Br + int(Share().queries()) + S.lane_column(lane_id()); };
    multiply_rows(OfKeys{}, S_rmem, K_smem, Q_smem);
    cap_scores<SOFTCAP && !SCORE, true>(S, p.softcap);
    if (IRREGULAR ? walked.masked() || (key_block() + 1) * Bc > num_keys() : !is_clear(tile.q_tile)) {
      const int key = lane_key(), row = lane_query();
      if constexpr (IRREGULAR) {
        const int member = tile.head - kv_head() * (p.heads / p.kv_heads);
        const auto mask = irregular_mask<BackwardParams>(p, batch(), kv_head(), member);
        // A row past the end has no lse: a score function or ALiBi may give it infinite weights.
        hide_scores_by_keys<SCORE || ALIBI>(S, mask, key, row);
      } else {
        hide_scores_by_keys(S, parked_mask(), key, row);
      }
    }
    // Alg. 2, l. 13
    multiply_rows(OfValues{}, dP_rmem, V_smem, dO_smem);

    // Alg. 2, l. 11 and 14
    KeptWeights<S_TILES, true> kept[KEY_TILES];
    if constexpr (DROPOUT) {
#pragma unroll
      for (int i = 0; i < KEY_TILES; ++i) {
        kept[i].draw(p, u32(batch() * p.heads + tile.head), lane_key() + 16 * i, lane_query());
      }
    }
    // ALiBi: the distance of the lane's first query from its first key.
    const Alibi alibi = ALIBI ? Alibi(p, sequence_of(p, batch()), tile.head) : Alibi(0.0f, 0);
    const float distance = ALIBI ? float(lane_query() + alibi.diagonal - lane_key()) : 0.0f;
    // SCORE: the function, and what it computes for each key.
    const Function function(p, SCORE ? min(batch(), p.batch - 1) : 0, tile.head,
                            SCORE ? int(diagonal_of(p, sequence_of(p, batch()))) : 0);
    typename Function::Column columns[2 * KEY_TILES];
#pragma unroll
    for (int r = 0; SCORE && r < 2 * KEY_TILES; ++r) {
      const int key = lane_key() + 8 * r;
      columns[r] = function.column(key, float(key));
    }
    ArrayGradients sums;
    u32 largest = NO_MAGNITUDE;
    const u32 stats_lane = rows_smem + (Share().queries() + S.lane_column(lane_id())) * ROW_STATS_BYTES;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      const vec4 stats = ld_shared_vec4(stats_lane + n * 8 * ROW_STATS_BYTES);
      const Exponent exponent[2] = {u32_as_float(stats.x), u32_as_float(stats.z)};
      const float D[2] = {u32_as_float(stats.y), u32_as_float(stats.w)};
      auto row = [&](int, int e) { return function.row(lane_query() + 8 * n + e, float(lane_query() + 8 * n + e)); };
      float old[4 * KEY_TILES], cap[4 * KEY_TILES];  // SCORE_GRADIENTS: scores before the function, dS without its derivative
#pragma unroll
      for (int e = 0; e < KEY_TILES * 4; ++e) {
        float &s = (&S_rmem[n][0][0])[e], &dp = (&dP_rmem[n][0][0])[e];
        float slope = SOFTCAP ? cap_slope(s) : 1.0f;
        if constexpr (SCORE) {
          const ChangedScore changed(p, function, s, row(0, e % 2), columns[e / 2]);
          old[e] = s, s = changed.s, slope = changed.slope, cap[e] = changed.cap;
        }
        if constexpr (ALIBI) s = alibi.changed(s, p.scale_log2, distance, 8 * n + e % 2 - e / 2 * 8);
        s = exponent[e % 2].weight(s, softmax_scale(p));
        dp = s * add_to_kept(p, kept[e / 4], dp, -D[e % 2], e % 4 / 2, n, e % 2);
        if constexpr (SCORE_GRADIENTS) cap[e] *= dp;
        dp *= slope;
        if constexpr (DROPOUT) s = kept[e / 4].value(s, e % 4 / 2, n, e % 2);
        largest = max(largest, magnitude(float_as_u32(dp)));
      }
      if constexpr (SCORE_GRADIENTS) {
        sums.add_all<2 * KEY_TILES, 1>(
            p, function, columns, row, [&](int r, int, int e) { return old[2 * r + e]; },
            [&](int r, int, int e) { return cap[2 * r + e]; });
      }
    }
    if constexpr (SCORE_GRADIENTS) sums.finish_all(p);
    largest = redux_max(largest);
    if (lane_id() == 0) st_shared_u32(largest_smem + Share().warp * 4, largest);

    // Alg. 2, l. 12
    const float dO_unit = largest_unit(OfValues{}, dO_smem, Size<Br>{});
    const float P_factor = inverse_power_of_two(dO_unit) * P_SCALE;
    store_scores(S_rmem, [&](int n, int) {
      return ld_shared_f32(unit_address<V_PITCH>(dO_smem + Share().queries() * V_PITCH, n)) * P_factor;
    });
    sync_keys();
    accumulate(OfValues{}, dV_rmem, dO_smem, dO_unit / P_SCALE);

    block_sync();  // all warps have written their largest dS, and have read dO and P
    copy_next_do();
    const float dS_unit = unit_of_largest(redux_max(ld_shared_u32(largest_smem + lane_id() % NUM_WARPS * 4)));
    const float dS_scale = inverse_power_of_two(dS_unit);

    // Alg. 2, l. 16
    const float Q_unit = largest_unit(OfKeys{}, Q_smem, Size<Br>{}), Q_factor = inverse_power_of_two(Q_unit);
    store_scores(dP_rmem, [&](int n, int) {
      return ld_shared_f32(unit_address<PITCH>(Q_smem + Share().queries() * PITCH, n)) * Q_factor * dS_scale;
    });
    sync_keys();
    accumulate(OfKeys{}, dK_rmem, Q_smem, dS_unit * Q_unit);
    sync_keys();
    const float K_factor = inverse_power_of_two(largest_unit(OfKeys{}, K_smem, Size<Bc>{}));
    store_scores(dP_rmem, [&](int, int r) {
      return ld_shared_f32(unit_address<PITCH>(K_smem + Share().keys() * PITCH, r)) * K_factor * dS_scale;
    });
    return dS_unit;
  };

  // Alg. 2, l. 15: each warp computes all rows of a share of the columns.
  auto add_dq = [&](QueryTile tile, float dS_unit) {
    const float factor = dS_unit * largest_unit(OfKeys{}, K_smem, Size<Bc>{});
    const Share share;
    const BackwardWorkspace workspace(p);
    const u32 A_lane = S_smem + pair_lane_a_trans<S_PITCH>(lane_id());
    const u32 B_lane = K_smem + share.first_dq_tile() * OCTET_BYTES + pair_lane_b_trans<PITCH>(lane_id());
    const int strip = tile.q_tile * Q_TILES;
    const int strips = LENGTHS_KIND == PACKED ? (num_rows() - 1) / STRIP + 1 : workspace.strips;
    const int first_strip = LENGTHS_KIND == PACKED ? first_packed_block<STRIP>(first_row(), batch()) : 0;
    float* const dQ = workspace.strip(batch_head() + tile.head, first_strip + strip) + share.first_dq_tile() * ACCUMULATOR;
    for_groups<DQ_TILES, DQ_GROUP>([&](int n0, auto count) {
      float sum[decltype(count)::value][Q_TILES][4] = {};
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) {
        u32 A_hi[Q_TILES][4], A_lo[Q_TILES][4];
        load_pair_operand<true, 2 * OCTET_BYTES>(A_hi, A_lo, A_lane + k * 16 * S_PITCH);
        multiply_pair_tiles<true, OCTET_BYTES, decltype(count)::value>(sum, A_hi, A_lo,
                                                                       B_lane + k * 16 * PITCH + n0 * OCTET_BYTES);
      }
      mma_fence();
#pragma unroll
      for (int n = 0; n < decltype(count)::value; ++n) {
        if (share.others_dq(share.first_dq_tile() + n0 + n)) continue;
#pragma unroll
        for (int i = 0; i < Q_TILES; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[n][i][e] *= factor;
          if (strip + i < strips) add_accumulator(dQ + (i * D_TILES + n0 + n) * ACCUMULATOR, sum[n][i], lane_id());
        }
      }
    });
  };

  int remaining = p.heads / p.kv_heads * (tiles.end - tiles.first);
  if constexpr (IRREGULAR) {
    tile = find_next();
    remaining = walked_next.exists();  // 1 or 0
  }
  if (remaining > 0) {
    // Alg. 2, l. 6
    copy_rows(OfKeys{}, Size<Bc>{}, Share().warp, K_smem, p.k, p.k_stride, kv_head(), first_key(), key_block() * Bc,
              num_keys());
    copy_rows(OfValues{}, Size<Bc>{}, Share().warp, V_smem, p.v, p.v_stride, kv_head(), first_key(), key_block() * Bc,
              num_keys());
    copy_do(tile);
    copy_q(tile);
    split_queries();
    split_tile(OfKeys{}, Size<Bc>{}, Share().warp, K_smem);
    split_tile(OfValues{}, Size<Bc>{}, Share().warp, V_smem);
    block_sync();
  }
  // Alg. 2, l. 8
#pragma unroll 1
  while (remaining > 0) {
    walked = walked_next;
    const QueryTile next = IRREGULAR ? find_next() : tile.next(tiles);
    if constexpr (IRREGULAR) {
      remaining = walked_next.exists();
      if (TRACE && tile.head == kv_head() * (p.heads / p.kv_heads)) tally.count(walked.tile(), walked.masked());
    } else {
      --remaining;
    }
    const BackwardWorkspace workspace(p);
    const HeadMask mask = parked_mask();
    const u32 first_ticket = LENGTHS_KIND == PACKED ? first_packed_block<Br>(first_row(), batch()) : 0;
    const DqTickets<Br, Bc> tickets{p, workspace, key_block(), batch_head(), &mask, first_ticket, batch()};
    u32 count = 0;
    if (DETERMINISTIC && thread_id() == 0) count = tickets.count(tile);  // read long before it is needed
    const float dS_unit = visit_tile(tile, [&] {
      if (remaining > 0) copy_do(next);
    });
    if (DETERMINISTIC && thread_id() == 0) tickets.await(tile, count);
    block_sync();  // dS is written, and all warps have read Q
    if (remaining > 0) copy_q(next);
    add_dq(tile, dS_unit);
    if (remaining > 0) split_queries();
    block_sync();  // the next tile is split, and all warps have read dS
    if (DETERMINISTIC && thread_id() == 0) tickets.pass_on(tile);
    tile = next;
  }

  // Alg. 2, l. 18
  auto store = [&](auto of, void* tensor, const Strides& stride, const auto& D, float factor) {
    const Share share;
    const int lane = lane_id();
    char* head =
        head_address<DkvElement>(tensor, stride, array_batch(), kv_head()) + first_key() * (stride.seq * 4) + lane % 4 * 8;
    const int stored_keys = RAGGED ? sequence_of(p, batch()).stored_keys() : p.seqlen_k;
#pragma unroll
    for (int r = 0; r < 2 * KEY_TILES; ++r) {
      const int row = key_block() * Bc + int(share.keys()) + r * 8 + lane / 4;
      if (row >= stored_keys) continue;
      char* target = head + row * (stride.seq * 4);
#pragma unroll
      for (int n = 0; n < decltype(of)::TILES; ++n) {
        const int tile = share.first_tile(of) + n;
        if (share.others(of, tile)) continue;
        const u32 x = float_as_u32(D[n][r / 2][r % 2 * 2] * factor), y = float_as_u32(D[n][r / 2][r % 2 * 2 + 1] * factor);
        if constexpr (ALIGNMENT >= 8) {
          st_global(target + tile * 32, vec2{x, y});
        } else {
          st_global(target + tile * 32, x);
          st_global(target + tile * 32 + 4, y);
        }
      }
    }
  };
  store(OfKeys{}, p.dk, p.dk_stride, dK_rmem, p.scale);
  store(OfValues{}, p.dv, p.dv_stride, dV_rmem, of_kept(p, 1.0f));

  if constexpr (TRACE) {
    block_sync();  // the trace record ends when the last warp has stored
    TileRange traced = visited_queries<Br, Bc>(parked_mask(), key_block());
    if constexpr (IRREGULAR) traced = tally.range(traced.total);
    const bool exists = !RAGGED || key_block() * Bc < num_keys();
    if (thread_id() == 0 && exists) write_trace(p, blockIdx.x, {key_block(), kv_head(), batch()}, traced, start_ns);
  }
}

KERNEL __launch_bounds__(PASS_THREADS) fa2_backward_f32_convert(const __grid_constant__ KernelParams p) {
  convert_strip(p);
  round_score_gradients<PASS_THREADS>(p);
}
