// Shared by forward kernels for e4m3: indexes of scales, and the way from scores to weights in e4m3.
#pragma once
#include "forward/float8_params.cuh"
#include "primitives/float8.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/score.cuh"

constexpr int QUERY_BLOCK = 64;  // query rows that share a scale of OF_BLOCK

// What shares a scale: the array, a head of a sequence, or a block of rows (64 queries, or the keys of a tile).
enum ScaleOf { OF_TENSOR, OF_HEAD, OF_BLOCK };
static_assert(Q_SCALE <= OF_BLOCK && K_SCALE <= OF_BLOCK && V_SCALE <= OF_HEAD, "support.py refuses other scales");

// Index of the scale of sequence `batch` and `head`; OF_BLOCK: of the sequence's first block of BLOCK tokens. `room`: tokens of a
// dense sequence, padding included. Packed: the array has `total` tokens, and the sequence begins at token `first`.
template <int MODE, int BLOCK>
DEVICE i64 scale_index(const Float8Params& p, int batch, int heads, int head, int room, int total, int first) {
  if constexpr (MODE == OF_TENSOR) return 0;
  if constexpr (MODE == OF_HEAD) return i64(batch) * heads + head;
  if constexpr (LENGTHS_KIND == PACKED) return i64(head) * (total / BLOCK + p.batch) + first_packed_block<BLOCK>(first, batch);
  return (i64(batch) * heads + head) * ((room - 1) / BLOCK + 1);
}

DEVICE i64 query_scale_index(const Float8Params& p, int batch, int head, int first_row) {
  return scale_index<Q_SCALE, QUERY_BLOCK>(p, batch, p.heads, head, p.seqlen_q, p.total_q, first_row);
}
// Index of the scale of a KV head's keys; OF_BLOCK: of its first key tile.
DEVICE i64 key_scale_index(const Float8Params& p, int batch, int kv_head, int first_key) {
  return scale_index<K_SCALE, BLOCK_KV>(p, batch, p.kv_heads, kv_head, p.seqlen_k, p.total_k, first_key);
}
DEVICE i64 value_scale_index(const Float8Params& p, int batch, int kv_head) {
  return scale_index<V_SCALE, BLOCK_KV>(p, batch, p.kv_heads, kv_head, p.seqlen_k, p.total_k, 0);
}

// Weights are 448 exp(s - m): they use all of e4m3's range.
constexpr float LOG2_448 = 8.8073549220576041f, LN_448 = 6.1047932324149849f;

// The scores of two rows of a lane become weights; l sums them before they are rounded.
template <typename View, typename Softmax>
DEVICE void scores_to_weights(View S, Softmax& softmax, float scale_log2) {
  static_assert(View::ROWS == 2, "one 16-row tile");
  const float shift[2] = {LOG2_448 - softmax.m_scaled[0], LOG2_448 - softmax.m_scaled[1]};
  float sums[4] = {};  // two chains of additions for each row: with one chain, exponentials would wait
#pragma unroll
  for (int n = 0; n < View::TILES; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = S.at(r, n, e);
        s = ex2(fmaf(s, scale_log2, shift[r]));
        sums[n % 2 * 2 + r] += s;
      }
    }
  }
  softmax.l[0] += sums[0] + sums[2];
  softmax.l[1] += sums[1] + sums[3];
}

// Register i of the operand P: four weights of one row, from two neighbouring 8-column tiles. The keys of V^T have the same order
// (cufa/problem/float8.py), so P needs no shuffles and no byte permutations.
template <typename View>
DEVICE u32 pack_e4m3(View P, int i) {
  const int n = i / 2 * 2, r = i % 2;
  return cvt_e4m3x2(P.at(r, n, 0), P.at(r, n, 1)) | cvt_e4m3x2(P.at(r, n + 1, 0), P.at(r, n + 1, 1)) << 16;
}
