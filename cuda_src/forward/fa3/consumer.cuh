// Operations of a consumer warpgroup on the registers of its 64 query rows: products by WGMMA, softmax, store of O. Their
// order and the waits between them are in kernel.cu. Lines are those of Algorithms 1 and 2 of the paper.
#pragma once
#include "forward/fa3/fast_softcap.cuh"
#include "forward/fa3/integer_maxima.cuh"
#include "forward/fa3/memory.cuh"
#include "forward/query_block.cuh"
#include "forward/running.cuh"
#include "primitives/register_budget.cuh"
#include "forward/params.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/dropout.cuh"
#include "wgmma/accumulator.cuh"

constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S = Q K^T; TMA fills the last one up with zeros
constexpr int O_TILES = V_DIM / 8;             // 8-column tiles of O
constexpr int S_TILES = Bc / 8;
// O leaves by TMA through the buffer its Q came in, if O fits it and it is free by then; else from registers. With lengths O
// always leaves from registers: the rows after those of a sequence may belong to another sequence.
constexpr bool STORE_FROM_SMEM = STORE_BY_TMA && (Q_IN_REGISTERS || Q_STAGES > 1) && LENGTHS_KIND == DENSE &&
                                 O_TILE_BYTES <= Q_TILE_BYTES && !RUNNING;
static_assert(!RUNNING || (LENGTHS_KIND == DENSE && !SINK && !SPLIT_KEYS && !SCORE && !DROPOUT),
              "RUNNING takes neither lengths, sinks, split keys, scores nor dropout: a sink is the first running result");

// Accumulators and operands of one thread.
using Scores = float[Bc / 2];
using Output = float[V_DIM / 2];
using Probabilities = u32[Bc / 4];
using Queries = u32[4 * K_STEPS];  // used when Q_IN_REGISTERS
// INVARIANT: without slack, rows that share a warp do not decide on each other's maxima.
using Softmax = OnlineSoftmax<2, INVARIANT ? 0 : 8>;

// Whether some query block sees no key. Under a band, only the first or the last query block can be empty.
DEVICE bool some_block_is_empty(const AttentionParams& p) {
  if constexpr (MASK_KIND == MASK_FULL) return false;
  return tiles_of(p, 0).empty() || (MASK_KIND == MASK_BAND && tiles_of(p, (p.seqlen_q - 1) / Br).empty());
}

// Q from shared memory to registers. The fence orders these reads before TMA's next writes to the buffer; a barrier alone would
// not, as TMA writes through the async proxy.
DEVICE void load_queries(Queries& Q_rmem, u32 Q_smem, int warp, int lane) {
  load_swizzled_rows<GROUP_ROWS, K_STEPS>(Q_rmem, Q_smem, warp * 16 + lane % 16, lane / 16);
  async_proxy_fence();
  warp_sync();  // all lanes have read
}

// Alg. 2, l. 9: S = Q K^T, in flight. Q from registers or from shared memory.
DEVICE void issue_scores(Scores& S_rmem, const Queries& Q_rmem, u64 Q_desc, u64 K_desc, PhaseLog& inside, int tile) {
  if constexpr (Q_IN_REGISTERS) {
    wgmma_tiles_rs<Bc, K_STEPS, Element>(S_rmem, Q_rmem, K_desc);
  } else {
    wgmma_tiles_ss<Bc, K_STEPS, Element>(S_rmem, Q_desc, K_desc);
  }
  wgmma_commit(inside, SCORES, tile);
}

// Alg. 2, l. 10: O += P V, in flight.
DEVICE void issue_values(Output& O_rmem, const Probabilities& P_rmem, u64 V_desc, PhaseLog& inside, int tile) {
  wgmma_accumulate_values<V_DIM, Bc / 16, Element>(O_rmem, P_rmem, V_desc);
  wgmma_commit(inside, VALUES, tile);
}

// Alg. 2, l. 11: the maxima and exponentials of S. True when O must be multiplied by alpha.
DEVICE bool softmax_of_tile(Scores& S_rmem, Softmax& softmax, float scale_log2, float (&alpha)[2]) {
  const auto S = fragment_view(S_rmem);
  int top[2];
  lane_tops(top, S);
  bool grown = false;
  if (may_grow(softmax, top, scale_log2)) {
    float m_tile[2];
    lane_maxima<true>(m_tile, S);
    grown = softmax.raise_max_by_lanes(m_tile, scale_log2, alpha);
  }
  exponentials<S_TILES>(S, 0, softmax, scale_log2);
  return grown;
}

DEVICE void pack(Probabilities& P_rmem, const Scores& S_rmem) {
#pragma unroll
  for (int i = 0; i < Bc / 4; ++i) P_rmem[i] = operand_pair<Element>(fragment_view(S_rmem), 0, i / 4, i % 4);
}

// Alg. 1, l. 19-20: O = O / l, L = m + log l, 16 rows per warp. By TMA through `O_smem`, or straight from registers. Rows
// past the end of a padded sequence are stored too: O is 0, L is -inf.
template <typename Sequence>
DEVICE void store_output(const ForwardParams& p, const TensorMap* O_map, const Item& item, const Sequence& sequence,
                         int first_row, Output& O_rmem, Softmax& softmax, [[maybe_unused]] u32 O_smem, int warp,
                         int lane) {
  // Exponentials read m of both rows alternately: in two registers of one bank, the reads conflict (NOTES.md).
  if constexpr (LENGTHS_KIND == DENSE) pair_registers(softmax.m_scaled[0], softmax.m_scaled[1], p.seqlen_q < 0);
  softmax.reduce_sum();
  if constexpr (RUNNING) {
    const AttentionParams& base = p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      join_running_row<O_TILES, Element>(static_cast<const RunningParams&>(base), item.head, item.batch,
                                         first_row + lane / 4 + 8 * r, O_rmem, r, softmax.inverse_sum(r), softmax.lse(r), lane);
    }
    return;
  }
  const i64 rows_before = LENGTHS_KIND == DENSE ? 0 : row_stats_index(p, sequence, i64(sequence.batch()) * p.heads + item.head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane / 4 + 8 * r;
    const bool exists = row < sequence.rows(), stored = LENGTHS_KIND == DENSE ? exists : row < sequence.stored_rows();
    const float factor = SINK ? row_factor(p, softmax, r, item.head) : 0.0f;  // the sink changes l: before softmax.lse()
    const WorkItem place = {item.q_block, item.head, sequence.batch()};
    if (p.lse != nullptr && lane % 4 == 0 && stored) {
      float* const lse = LENGTHS_KIND == DENSE ? lse_row(p, place, row) : p.lse + rows_before + row;
      st_global(lse, exists ? softmax.lse(r) : NEG_INF);
    }
    if constexpr (STORE_FROM_SMEM) {
      stage_accumulator_row<GROUP_ROWS, O_TILES, Element>(O_smem, O_rmem, r,
                                                            of_kept(p, SINK ? factor : softmax.inverse_sum(r)), warp, lane);
    } else {
      constexpr bool ALL_EXIST = LENGTHS_KIND == DENSE;  // every row that is stored exists
      if (!ALL_EXIST && !exists) {  // rows past the end may hold NaN
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) O_rmem[4 * n + 2 * r] = O_rmem[4 * n + 2 * r + 1] = 0.0f;
      }
      store_accumulator_row<O_TILES, Element>(output_row(p, place, int(sequence.first_row()) + row), O_rmem, r,
                                              ALL_EXIST || exists ? of_kept(p, SINK ? factor : softmax.inverse_sum(r)) : 0.0f,
                                              stored, lane);
    }
  }
  if constexpr (STORE_FROM_SMEM) {
    async_proxy_fence();
    warp_sync();  // the warp's 16 rows are complete; other warps store their own
    if (lane == 0) {
      for (int a = 0; a < atoms(V_DIM); ++a) {
        tma_store_4d(O_map, O_smem + (a * GROUP_ROWS + warp * 16) * ATOM_ROW_BYTES, a * ATOM_COLUMNS, first_row, item.head,
                     item.batch);
      }
      bulk_commit();
    }
  }
}

// Stores a query block whose rows see no key, by all consumers: O is 0, and the log-sum-exp is the sink or -inf.
DEVICE void store_nothing(const AttentionParams& p, const Item& item, int thread) {
  const u64 start_ns = TRACE ? global_timer() : 0;
  if constexpr (RUNNING) {
    const Output nothing = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.q_block * Br + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
      join_running_row<O_TILES, Element>(static_cast<const RunningParams&>(p), item.head, item.batch, row, nothing, r, 0.0f,
                                         NEG_INF, thread % 32);
    }
  }
  const int rows = RUNNING ? 0 : min(Br, p.seqlen_q - item.q_block * Br);
  for (int i = thread; i < rows * O_TILES; i += CONSUMERS * 128) {
    const int row = item.q_block * Br + i / O_TILES;
    st_global(output_row(p, item, row) + i % O_TILES * 16, vec4{0, 0, 0, 0});
    if (p.lse != nullptr && i % O_TILES == 0) {
      st_global(lse_row(p, item, row), SINK ? load_sink(p.sink + item.head) : NEG_INF);
    }
  }
  if (TRACE && thread == 0) write_trace(p, item.index, item, tiles_of(p, item.q_block), start_ns);
}
