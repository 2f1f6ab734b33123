// The exact merge of partial attention. First the warps of a block, which read different keys, merge through shared memory. Then
// the spans of a work item merge through global memory (shared/parts.cuh) or through the shared memory of a cluster
// (decode/cluster.cuh). A slot of the workspace holds one partial result, BLOCK_Q rows (INVARIANT: only rows that exist).
#pragma once
#include "primitives/grid.cuh"
#include "decode/cluster.cuh"

// Stores vector `vector` of row `row` to the output, divided by l. `o` and `sums` cover all keys of the row. Each vector's thread
// adds the sink to its own copy of the denominator.
DEVICE void store_vector_of_row(const DecodeParams& p, const Span& span, int row, int vector, const float (&o)[4],
                           RowSums sums) {
  const int packed = span.row_block * Br + row;
  const int head = span.kv_head * p.group_size + (SEVERAL_TOKENS ? packed / p.tokens : packed);
  const int token = SEVERAL_TOKENS ? packed % p.tokens : 0;
  OnlineSoftmax<1> whole = {{sums.m}, {sums.l}};
  float inverse = row_factor(p, whole, 0, head);
  if (vector == 0 && p.lse != nullptr) {
    st_global(p.lse + (i64(span.batch) * p.heads + head) * p.tokens + token, whole.lse(0));
  }
  if constexpr (FP8_CACHE && !KEY_SCALES) inverse *= ld_global<float>(p.v_scale + span.kv_head);
  char* O = static_cast<char*>(p.o) +
            2 * (span.batch * p.o_stride.batch + head * p.o_stride.head + token * p.o_stride.seq) + vector * 8;
  store_vector(O, o, inverse);
}

// Rows of the work item's row block that exist.
DEVICE int valid_rows(const DecodeParams& p, const Span& span) {
  return min(Br, p.group_size * p.tokens - span.row_block * Br);
}

// Row `row` of partial result `part` in the workspace. INVARIANT has many partial results: their slots have no padding.
DEVICE float* row_of_part(const DecodeParams& p, const Span& span, int part, int row) {
  const int rows = INVARIANT ? min(Br, p.group_size * p.tokens) : Br;
  return p.partial + (i64(span.slot(part)) * rows + row) * SLOT_ROW;
}

// Merges one vector of a row from all partial results, in order, and stores it.
DEVICE void combine_vector(const DecodeParams& p, const Span& span, int row, int vector) {
  float o[4] = {};
  float m = NO_SCORE, l = 0.0f;
  merge_parts(o, m, l, span.num_partials, vector,
              [&](int part) { return row_of_part(p, span, part, row); });
  store_vector_of_row(p, span, row, vector, o, {m, l});
}

// Merges and stores the vectors `index`, `index` + `step`, ... of a work item's rows.
DEVICE void combine_partials(const DecodeParams& p, const Span& span, int index, int step) {
  const int vectors = valid_rows(p, span) * VECTORS;
#pragma unroll 1
  for (int i = index; i < vectors; i += step) combine_vector(p, span, i / VECTORS, i % VECTORS);
}

DEVICE float max_of_rings(u32 ml_smem, int row) {
  float m = NO_SCORE;
#pragma unroll
  for (int j = 0; j < RINGS; ++j) m = fmaxf(m, RowSums::load_m(ml_smem + (j * Br + row) * 8));
  return m;
}

// m and l of a row over all rings of the block.
DEVICE RowSums sum_rings(u32 ml_smem, int row) {
  RowSums sums = {max_of_rings(ml_smem, row), 0.0f};
#pragma unroll
  for (int j = 0; j < RINGS; ++j) {
    const RowSums ring = RowSums::load(ml_smem + (j * Br + row) * 8);
    sums.l += ring.l * ex2(ring.m - sums.m);
  }
  return sums;
}

// Merges the results of a block's warps. If the span is the whole work item, stores the merged rows to the output; else sends
// them to the other blocks of the cluster, or stores them to a slot.
DEVICE void merge_warps(const DecodeParams& p, const Span& span, TileAttention& tile, u32 smem, int thread) {
  const u32 ml_smem = smem + SharedMemory::ML;
  const int warp = thread / 32, lane = thread % 32, ring = warp / ROW_WARPS;
  const int first_row = warp % ROW_WARPS * WARP_ROWS, rows = valid_rows(p, span);
  tile.softmax.reduce_sum();
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    if (lane % 4 == 0) {
      const RowSums sums = {tile.softmax.m_scaled[r], tile.softmax.l[r]};
      st_shared_vec2(ml_smem + (ring * Br + first_row + r * 8 + lane / 4) * 8, sums.bits());
    }
  }
  block_sync();  // m and l of all rings are written, and all warps have read their rings: O may overwrite the rings
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = first_row + r * 8 + lane / 4;
    if (row < rows) {
      float weight = ex2(tile.softmax.m_scaled[r] - max_of_rings(ml_smem, row));
      if constexpr (KEY_SCALES) weight *= tile.v_unit;
      const u32 target = smem + SharedMemory::O + (ring * Br + row) * O_PITCH;
#pragma unroll
      for (int n = 0; n < O_TILES; ++n) {
        const float* o = tile.O[r / 2][n] + r % 2 * 2;
        if constexpr (FP8_CACHE) {  // tiles n and n + 1: even and odd columns of 16; four columns per lane
          if (n % 2 == 0) {
            const float* odd = tile.O[r / 2][n + 1] + r % 2 * 2;
            st_shared_vec4(target + n * 32 + lane % 4 * 16, {float_as_u32(o[0] * weight), float_as_u32(odd[0] * weight),
                                                             float_as_u32(o[1] * weight), float_as_u32(odd[1] * weight)});
          }
        } else {
          st_shared_vec2(target + n * 32 + lane % 4 * 8, {float_as_u32(o[0] * weight), float_as_u32(o[1] * weight)});
        }
      }
    }
  }
  if constexpr (CLUSTER_MERGE) cluster_wait();  // all blocks of the cluster run: their shared memory may be written
  block_sync();  // O of every ring is written, scaled to the common maximum
  const ClusterMerge cluster(smem, rows, span.num_partials);
  if (CLUSTER_MERGE && span.num_partials > 1) {
    for (int i = thread; i < Br * span.num_partials; i += NUM_THREADS) {
      const int row = i % Br, to = i / Br;
      if (row >= rows) continue;
      cluster.send_ml(span.partial, to, row, sum_rings(ml_smem, row));
    }
  }
#pragma unroll 1
  for (int row = warp; row < rows; row += NUM_WARPS) {  // one warp per row, as in combine_if_last()
    RowSums sums = sum_rings(ml_smem, row);
#pragma unroll
    for (int vector = lane; vector < VECTORS; vector += 32) {
      float o[4] = {};
#pragma unroll
      for (int j = 0; j < RINGS; ++j) {
        const vec4 x = ld_shared_vec4(smem + SharedMemory::O + (j * Br + row) * O_PITCH + vector * 16);
        o[0] += u32_as_float(x.x);
        o[1] += u32_as_float(x.y);
        o[2] += u32_as_float(x.z);
        o[3] += u32_as_float(x.w);
      }
      if (span.num_partials == 1) {
        store_vector_of_row(p, span, row, vector, o, sums);
      } else if constexpr (CLUSTER_MERGE) {
        cluster.send(span.partial, row * VECTORS + vector, o);
      } else {
        float* slot = row_of_part(p, span, span.partial, row);
        st_global<vec4>(slot + vector * 4, accumulator_bits(o));
        if (vector == 0) st_global(slot + V_DIM, sums.bits());
      }
    }
  }
}

// After merge_warps(): merges this split's share of the work item's vectors over all splits, and stores it.
DEVICE void merge_cluster(const DecodeParams& p, const Span& span, u32 smem, int thread) {
  if (span.num_partials == 1) return;
  const ClusterMerge cluster(smem, valid_rows(p, span), span.num_partials);
  cluster.await(span.partial, thread);
  for (int i = thread; i < cluster.count(span.partial); i += NUM_THREADS) {
    const int at = cluster.first(span.partial) + i, row = at / VECTORS, vector = at - row * VECTORS;
    float o[4] = {};
    const RowSums sums = cluster.merge(span.partial, i, o);
    store_vector_of_row(p, span, row, vector, o, sums);
  }
}

// The last warp that stores its rows of a work item merges all partial results: no second launch. Warp w of every block has the
// same rows and its own counter: no barrier of the block delays the chain of stores, count and loads. The last count wraps the
// counter to zero for the next launch.
DEVICE void combine_if_last(const DecodeParams& p, const Span& span, int thread) {
  const int warp = thread / 32, lane = thread % 32, rows = valid_rows(p, span);
  if (span.num_partials == 1 || warp >= rows) return;
  warp_sync();  // all lanes have stored their vectors before lane 0 counts
  u32 earlier = 0;
  const u32 last = u32(span.num_partials) - 1;
  if (lane == 0) earlier = atomic_inc_wrap(p.counters + span.item * NUM_WARPS + warp, last);
  earlier = shfl(earlier, 0);
  warp_sync();  // lane 0 has acquired the other blocks' rows: visible to all lanes now
  if (earlier != last) return;
#pragma unroll 1
  for (int row = warp; row < rows; row += NUM_WARPS) {
#pragma unroll 1
    for (int vector = lane; vector < VECTORS; vector += 32) combine_vector(p, span, row, vector);
  }
}
