// Exact merging of partial attention, twice: the warps of a block, which saw different keys, through shared memory; then the
// pieces of an item through global memory (parts.cuh), or through the shared memory of a cluster (decode_cluster.cuh). A
// part in the workspace ("slot") is BLOCK_Q rows.
#pragma once
#include "primitives/grid.cuh"
#include "decode/cluster.cuh"

// Vector `vector` of an item's row `row`, not divided by l yet, to where it belongs in the output. All of the row's keys
// are in it: here, once, its sink joins them.
DEVICE void store_row_part(const DecodeParams& p, const Piece& piece, int row, int vector, const float (&o)[4],
                           RowSums sums) {
  const int packed = piece.row_block * Br + row;
  const int head = piece.kv_head * p.group_size + (SEVERAL_TOKENS ? packed / p.tokens : packed);
  const int token = SEVERAL_TOKENS ? packed % p.tokens : 0;
  OnlineSoftmax<1> whole = {{sums.m}, {sums.l}};
  float inverse = row_factor(p, whole, 0, head);
  if (vector == 0 && p.lse != nullptr) {
    st_global(p.lse + (i64(piece.batch) * p.heads + head) * p.tokens + token, whole.lse(0));
  }
  if constexpr (FP8_CACHE) inverse *= ld_global<float>(p.v_scale + piece.kv_head);
  char* O = static_cast<char*>(p.o) +
            2 * (piece.batch * p.o_stride.batch + head * p.o_stride.head + token * p.o_stride.seq) + vector * 8;
  store_vector(O, o, inverse);
}

// Rows of this item's block of rows that exist.
DEVICE int valid_rows(const DecodeParams& p, const Piece& piece) {
  return min(Br, p.group_size * p.tokens - piece.row_block * Br);
}

// One row's vector of columns, from all parts of its item in order, to the output.
DEVICE void combine_vector(const DecodeParams& p, const Piece& piece, int row, int vector) {
  float o[4] = {};
  float m = NO_SCORE, l = 0.0f;
  merge_parts(o, m, l, piece.num_parts, vector,
              [&](int part) { return p.partial + (i64(piece.slot(part)) * Br + row) * SLOT_ROW; });
  store_row_part(p, piece, row, vector, o, {m, l});
}

// The vectors `index`, `index` + `step`, ... of an item's rows.
DEVICE void combine_parts(const DecodeParams& p, const Piece& piece, int index, int step) {
  const int vectors = valid_rows(p, piece) * VECTORS;
#pragma unroll 1
  for (int i = index; i < vectors; i += step) combine_vector(p, piece, i / VECTORS, i % VECTORS);
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

// What the warps of a block have of one piece becomes the output, when the piece is all of its item; else it is sent to
// other blocks of the cluster, or left in a slot.
DEVICE void merge_warps(const DecodeParams& p, const Piece& piece, TileAttention& tile, u32 smem, int thread) {
  const u32 ml_smem = smem + SharedMemory::ML;
  const int warp = thread / 32, lane = thread % 32, ring = warp / ROW_WARPS;
  const int first_row = warp % ROW_WARPS * WARP_ROWS, rows = valid_rows(p, piece);
  tile.softmax.reduce_sum();
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    if (lane % 4 == 0) {
      const RowSums sums = {tile.softmax.m_scaled[r], tile.softmax.l[r]};
      st_shared_vec2(ml_smem + (ring * Br + first_row + r * 8 + lane / 4) * 8, sums.bits());
    }
  }
  block_sync();  // m and l of all rings are written, and the rings are free
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = first_row + r * 8 + lane / 4;
    if (row < rows) {
      const float weight = ex2(tile.softmax.m_scaled[r] - max_of_rings(ml_smem, row));
      const u32 target = smem + SharedMemory::O + (ring * Br + row) * O_PITCH;
#pragma unroll
      for (int n = 0; n < O_TILES; ++n) {
        const float* o = tile.O[r / 2][n] + r % 2 * 2;
        if constexpr (FP8_CACHE) {  // tiles n and n + 1: even and odd of 16 columns, four consecutive ones per lane
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
  if constexpr (CLUSTER_MERGE) cluster_wait();  // all blocks of the cluster have begun: their memory may be written
  block_sync();  // every ring's O, in units of the common maximum
  const ClusterMerge cluster(smem, rows, piece.num_parts);
  if (CLUSTER_MERGE && piece.num_parts > 1) {
    for (int i = thread; i < Br * piece.num_parts; i += NUM_THREADS) {
      const int row = i % Br, to = i / Br;
      if (row >= rows) continue;
      cluster.send_ml(piece.part, to, row, sum_rings(ml_smem, row));
    }
  }
#pragma unroll 1
  for (int row = warp; row < rows; row += NUM_WARPS) {  // a warp a row, as in combine_if_last()
    RowSums sums = sum_rings(ml_smem, row);
#pragma unroll
    for (int vector = lane; vector < VECTORS; vector += 32) {
      float o[4] = {};
#pragma unroll
      for (int j = 0; j < RINGS; ++j) {
        const vec4 part = ld_shared_vec4(smem + SharedMemory::O + (j * Br + row) * O_PITCH + vector * 16);
        o[0] += u32_as_float(part.x);
        o[1] += u32_as_float(part.y);
        o[2] += u32_as_float(part.z);
        o[3] += u32_as_float(part.w);
      }
      if (piece.num_parts == 1) {
        store_row_part(p, piece, row, vector, o, sums);
      } else if constexpr (CLUSTER_MERGE) {
        cluster.send(piece.part, row * VECTORS + vector, o);
      } else {
        float* slot = p.partial + (i64(piece.slot(piece.part)) * Br + row) * SLOT_ROW;
        st_global<vec4>(slot + vector * 4, accumulator_bits(o));
        if (vector == 0) st_global(slot + HEAD_DIM, sums.bits());
      }
    }
  }
}

// After merge_warps(): this part's share of the output, from all parts.
DEVICE void merge_cluster(const DecodeParams& p, const Piece& piece, u32 smem, int thread) {
  if (piece.num_parts == 1) return;
  const ClusterMerge cluster(smem, valid_rows(p, piece), piece.num_parts);
  cluster.await(piece.part, thread);
  for (int i = thread; i < cluster.count(piece.part); i += NUM_THREADS) {
    const int at = cluster.first(piece.part) + i, row = at / VECTORS, vector = at - row * VECTORS;
    float o[4] = {};
    const RowSums sums = cluster.merge(piece.part, i, o);
    store_row_part(p, piece, row, vector, o, sums);
  }
}

// The last to leave a part of an item combines all of them: no second launch. Every warp counts for itself, for the rows that
// it has left: no barrier of the block is in the way of the stores, the count and the loads, which wait for each other.
// Counters wrap to zero at the last part.
DEVICE void combine_if_last(const DecodeParams& p, const Piece& piece, int thread) {
  const int warp = thread / 32, lane = thread % 32, rows = valid_rows(p, piece);
  if (piece.num_parts == 1 || warp >= rows) return;
  warp_sync();  // the rows are stored before the warp counts itself in
  u32 earlier = 0;
  const u32 last = u32(piece.num_parts) - 1;
  if (lane == 0) earlier = atomic_inc_wrap(p.counters + piece.item * NUM_WARPS + warp, last);
  earlier = shfl(earlier, 0);
  warp_sync();  // what lane 0 sees of other blocks, all lanes see
  if (earlier != last) return;
#pragma unroll 1
  for (int row = warp; row < rows; row += NUM_WARPS) {
#pragma unroll 1
    for (int vector = lane; vector < VECTORS; vector += 32) combine_vector(p, piece, row, vector);
  }
}
