// What a warp of fa2_backward computes of a query tile and its own keys: P and dS, and their products with dO and Q for dV and
// dK.
#pragma once
#include "backward/fa2/shape.cuh"
#include "backward/common/schedule.cuh"
#include "backward/common/score_gradients.cuh"
#include "shared/named_barriers.cuh"
#include "mma/product.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/fragment_view.cuh"
#include "shared/softcap.cuh"

// Where the A operand of a product comes from.
using FromRegisters = Size<0>;
using FromMemory = Size<1>;

// SCORE: S of 8-column tiles 2k and 2k + 1 goes through the score function and becomes P; `slope` receives the function's
// derivatives. Adds to the gradients of arrays. `first`: the lane's first query of tile 2k; `key`: its first key.
template <typename View, typename RowStats, typename Exponentials, typename Difference>
DEVICE void change_two_tiles(const KernelParams& p, const Function& function, View S, int k, int first, int key,
                             float (&slope)[2][2 * View::ROWS], ArrayGradients& sums, const RowStats& row_stats,
                             const Exponentials& exponentials, const Difference& difference) {
  typename Function::Column columns[View::ROWS];
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) columns[r] = function.column(key + 8 * r, float(key) + float(8 * r));
  auto row = [&](int n, int e) { return function.row(first + 8 * n + e, float(first) + float(8 * n + e)); };
  float old[2][2 * View::ROWS], cap[2][2 * View::ROWS], D[2][2];  // read if arrays have gradients
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int x = 0; x < 2 * View::ROWS; ++x) {
      float& s = S.at(x / 2, 2 * k + n, x % 2);
      const ChangedScore changed(p, function, s, row(n, x % 2), columns[x / 2]);
      old[n][x] = s;
      s = changed.s;
      slope[n][x] = changed.slope;
      cap[n][x] = changed.cap;
    }
    exponentials(2 * k + n);
    if constexpr (SCORE_GRADIENTS) {
      float L[2];
      row_stats(2 * k + n, L, D[n]);
    }
  }
  if constexpr (SCORE_GRADIENTS) {
    sums.add_all<View::ROWS, 2>(
        p, function, columns, row, [&](int r, int n, int e) { return old[n][2 * r + e]; },
        [&](int r, int n, int e) {
          return S.at(r, 2 * k + n, e) * cap[n][2 * r + e] * difference(r, 2 * k + n, e, D[n][e]);
        });
  }
}

// Alg. 2, l. 10-14 and 16 for one query tile; dS stays in shared memory for dQ. The addresses of operands (Q and dO: of this
// tile; P_keys and dS_keys: of this warp's keys) and the warp's share of them are parameters: with a struct of them, ptxas needs
// more registers than there are at head dim 128. copy_next(k) issues part k of the copies of the next tile. `number` names the
// query tile in an inside trace.
template <typename Sequence, typename ParkedItem, typename MaskOfHead, typename CopyNext>
DEVICE void visit_query_tile(const KernelParams& p, const Sequence& sequence, const KeyItem& item, QueryTile tile, u32 stage,
                             bool masked, u32 Q, u32 dO, u32 P_keys, u32 dS_keys, u32 K_smem, u32 V_smem, u32 rows_smem,
                             u32 rows_first, u32 columns_first, u32 warp_keys, int key_group, int part, int first_tile,
                             int first_key, int lane, float (&dK_rmem)[KEY_TILES][K_TILES][4],
                             float (&dV_rmem)[KEY_TILES][V_TILES][4], ParkedItem parked_item, MaskOfHead mask_of_head,
                             CopyNext copy_next, PhaseLog& inside, u32 number) {
  constexpr bool IRREGULAR = is_irregular(MASK_KIND);
  // dV or dK += A B for the queries from `first` on, B from a tile of dO or Q.
  auto accumulate = [&](auto of, Phase phase, auto& D, u32 tile, int first, auto from_memory, auto load_a, auto between) {
    using Of = decltype(of);
    // The lane's offset is recomputed: registers are scarce.
    const u32 B_lane =
        tile + first * Of::PITCH + Of::first_tile(first_tile, part) * 16 + lane_offset_rows_first<Of::PITCH>(lane_id());
    multiply<Element, CHUNK / 16, decltype(from_memory)::value>(
        {inside, phase, number}, D, load_a,
        [&](u32(&B)[4], int n, int k) { load_b_pair<true>(B, B_lane + k * 16 * Of::PITCH + n * 16, n + 1 < Of::TILES); },
        between);
  };

  [[maybe_unused]] ArrayGradients sums;

#pragma unroll
  for (int c = 0; c < PART_QUERIES; c += CHUNK) {
    const int first = part * PART_QUERIES + c;
    float S_rmem[KEY_TILES][S_TILES][4] = {}, dP_rmem[KEY_TILES][S_TILES][4] = {};
    const auto S = fragment_view(S_rmem), dP = fragment_view(dP_rmem);
    KeptWeights<S_TILES, true> kept[KEY_TILES];  // DROPOUT
    const u32 stats_lane = rows_smem + stage * TILE_STATS_BYTES + (first + S.lane_column(lane)) * ROW_STATS_BYTES;
    // L and D of this lane's two queries in 8-column tile n.
    auto row_stats = [&](int n, float(&L)[2], float(&D)[2]) {
      const vec4 stats = ld_shared_vec4(stats_lane + n * 8 * ROW_STATS_BYTES);
      L[0] = u32_as_float(stats.x), D[0] = u32_as_float(stats.y);
      L[1] = u32_as_float(stats.z), D[1] = u32_as_float(stats.w);
    };
    auto multiply_keys = [&](auto operands, Phase phase, float(&D)[KEY_TILES][S_TILES][4], u32 keys, u32 queries,
                             auto between) {
      constexpr int PITCH = decltype(operands)::PITCH;
      const u32 A_rows = PITCH == ::PITCH ? rows_first : lane_offset_rows_first<PITCH>(lane_id());
      const u32 B_columns = PITCH == ::PITCH ? columns_first : lane_offset_columns_first<PITCH>(lane_id());
      const u32 A_lane = keys + warp_keys * PITCH + A_rows, B_lane = queries + first * PITCH + B_columns;
      multiply<Element, decltype(operands)::STEPS, true>(
          {inside, phase, number}, D,
          [&](u32(&A)[KEY_TILES][4], int k) {
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) ldmatrix_x4(A[i], A_lane + i * 16 * PITCH + k * 32);
          },
          [&](u32(&B)[4], int n, int k) { ldmatrix_x4(B, B_lane + n * 8 * PITCH + k * 32); }, between);
    };
    // ALiBi: the distance of the lane's first query from its first key.
    const Alibi alibi = ALIBI ? Alibi(p, sequence, tile.head) : Alibi(0.0f, 0);
    const int block_key = ALIBI && IRREGULAR ? parked_item().k_block * Bc : first_key;
    const float distance = float(tile.q_tile * Br + first + S.lane_column(lane) + alibi.diagonal -
                                 (block_key + int(warp_keys) + S.lane_row(lane)));
    // SCORE: the function, and the lane's first query and key.
    auto function_of = [&] {
      const KeyItem own = IRREGULAR ? parked_item() : item;
      return Function(p, min(own.batch, p.batch - 1), tile.head, int(diagonal_of(p, sequence)));
    };
    auto row_of = [&] { return tile.q_tile * Br + first + S.lane_column(lane_id()); };
    auto key_of = [&] {
      return (IRREGULAR ? parked_item().k_block * Bc : first_key) + int(warp_keys) + S.lane_row(lane_id());
    };
    // Alg. 2, l. 11
    auto exponentials = [&](int n) {
      float L[2], D[2];
      row_stats(n, L, D);
#pragma unroll
      for (int x = 0; x < 4 * KEY_TILES; ++x) {
        float& s = S.at(x / 2, n, x % 2);
        if constexpr (ALIBI) {
          s = ex2(alibi.changed(s, p.scale_log2, distance, 8 * n + x % 2 - x / 2 * 8) - L[x % 2]);
        } else {
          s = ex2(fmaf(s, p.scale_log2, -L[x % 2]));
        }
      }
    };
    // dP - D.
    auto difference = [&](int r, int n, int e, float D) {
      return add_to_kept(p, kept[r / 2], dP.at(r, n, e), -D, r, n, e);
    };
    // Alg. 2, l. 14
    auto gradients = [&](int n) {
      float L[2], D[2];
      row_stats(n, L, D);
#pragma unroll
      for (int x = 0; x < 4 * KEY_TILES; ++x) S.at(x / 2, n, x % 2) *= difference(x / 2, n, x % 2, D[x % 2]);
    };

    // Alg. 2, l. 10
    multiply_keys(OfKeys{}, SCORES, S_rmem, K_smem, Q, [&](int k) {
      if (c == 0) copy_next(k);
    });
    mma_fence({inside, SOFTMAX, number});
    if constexpr (DROPOUT) {
      const u32 head = u32((IRREGULAR ? parked_item() : item).batch * p.heads + tile.head);
#pragma unroll
      for (int i = 0; i < KEY_TILES; ++i) kept[i].draw(p, head, key_of() + 16 * i, row_of());
    }
    cap_scores<SOFTCAP && !SCORE>(S, p.softcap);
    if (masked) {
      const KeyItem own = IRREGULAR ? parked_item() : item;
      const int key = (IRREGULAR ? own.k_block * Bc : first_key) + int(warp_keys) + S.lane_row(lane_id());
      const int row = tile.q_tile * Br + first + S.lane_column(lane_id());
      if constexpr (IRREGULAR) {
        const int member = tile.head - own.kv_head * (p.heads / p.kv_heads);
        // A row past the end has no lse: a score function or ALiBi may give it weights beyond 16 bits.
        hide_scores_by_keys<SCORE || ALIBI>(S, irregular_mask<BackwardParams>(p, own.batch, own.kv_head, member), key, row);
      } else {
        hide_scores_by_keys(S, mask_of_head(), key, row);
      }
    }
    // Alg. 2, l. 13; exponentials overlap with the products.
    multiply_keys(OfValues{}, WEIGHT_GRADIENTS, dP_rmem, V_smem, dO, [&](int k) {
      if constexpr (!SOFTCAP && !SCORE) {
#pragma unroll
        for (int n = k * S_TILES / V_STEPS; n < (k + 1) * S_TILES / V_STEPS; ++n) exponentials(n);
      }
    });
    mma_fence();

    // Alg. 2, l. 12 and 16, for this warp's own queries; dS overlaps with the products.
    u32 dS_operand[CHUNK / 16][KEY_TILES][4];
    accumulate(
        OfValues{}, VALUE_GRADIENTS, dV_rmem, dO, first, FromRegisters{},
        [&](u32(&P)[KEY_TILES][4], int k) {
          float slope[2][4 * KEY_TILES];  // derivative of the soft cap or the score function: a factor of dS
          if constexpr (SCORE) {
            change_two_tiles(p, function_of(), S, k, row_of() + 16 * k, key_of(), slope, sums, row_stats, exponentials,
                             difference);
          } else if constexpr (SOFTCAP) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
              for (int x = 0; x < 4 * KEY_TILES; ++x) slope[n][x] = cap_slope(S.at(x / 2, 2 * k + n, x % 2));
              exponentials(2 * k + n);
            }
          }
#pragma unroll
          for (int i = 0; i < KEY_TILES; ++i) {
#pragma unroll
            for (int h = 0; h < 4; ++h) {
              P[i][h] = operand_pair<Element>(S, i, k, h);
              if constexpr (DROPOUT) P[i][h] &= kept[i].pair(h % 2, 2 * k + h / 2);
            }
            if constexpr (SHARED_KEYS) store_operand<S_PITCH>(P_keys + i * 16 * S_PITCH + (first + k * 16) * 2, P[i], lane);
          }
          if constexpr (DS_HAS_SLOPE) {
#pragma unroll
            for (int x = 0; x < 8 * KEY_TILES; ++x) {
              const int n = x / (4 * KEY_TILES), y = x % (4 * KEY_TILES);
              S.at(y / 2, 2 * k + n, x % 2) *= slope[n][y];
            }
          }
        },
        [&](int k) {
          gradients(2 * k);
          gradients(2 * k + 1);
#pragma unroll
          for (int i = 0; i < KEY_TILES; ++i) {
#pragma unroll
            for (int h = 0; h < 4; ++h) dS_operand[k][i][h] = operand_pair<Element>(S, i, k, h);
            store_operand<S_PITCH>(dS_keys + i * 16 * S_PITCH + (first + k * 16) * 2, dS_operand[k][i], lane);
          }
        });
    accumulate(
        OfKeys{}, KEY_GRADIENTS, dK_rmem, Q, first, FromRegisters{},
        [&](u32(&dS)[KEY_TILES][4], int k) {
#pragma unroll
          for (int i = 0; i < KEY_TILES; ++i) {
#pragma unroll
            for (int h = 0; h < 4; ++h) dS[i][h] = dS_operand[k][i][h];
          }
        },
        [](int) {});
  }

  if constexpr (SCORE_GRADIENTS) sums.finish_all(p);

  // dV and dK for the queries of the other warps that share this warp's keys.
  if constexpr (SHARED_KEYS) {
    inside.enter(WAIT_TURN, number);
    bar_sync(KEY_PARTS_BARRIER + key_group, PARTS * 32);  // these warps have stored their P and dS
#pragma unroll
    for (int x = 1; x < PARTS; ++x) {
#pragma unroll
      for (int c = 0; c < PART_QUERIES; c += CHUNK) {
        const int first = (part + x) % PARTS * PART_QUERIES + c;
        auto load_from = [&](u32 keys) {
          return [=](u32(&A)[KEY_TILES][4], int k) {
            const u32 A_lane = keys + lane_offset_rows_first<S_PITCH>(lane) + (first + k * 16) * 2;
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) ldmatrix_x4(A[i], A_lane + i * 16 * S_PITCH);
          };
        };
        accumulate(OfValues{}, VALUE_GRADIENTS, dV_rmem, dO, first, FromMemory{}, load_from(P_keys), [](int) {});
        accumulate(OfKeys{}, KEY_GRADIENTS, dK_rmem, Q, first, FromMemory{}, load_from(dS_keys), [](int) {});
      }
    }
  }
  mma_fence();
}
