// Steps of a consumer warpgroup of Hopper's backward kernels, for 64 keys and a tile of queries, computed transposed
// (S^T = K Q^T): mask, P, dS, the products with shared memory, and how dS, dK and dV leave the registers.
#pragma once
#include "primitives/stmatrix.cuh"
#include "primitives/wgmma_transposed.cuh"
#include "wgmma/accumulator.cuh"
#include "backward/common/score_gradients.cuh"
#include "backward/fa3_common/block.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/softcap.cuh"

// Scores that the mask hides become -inf. `key` is the lane's first in the block.
DEVICE void hide_scores_of_tile(const KeyBlock& block, float (&S_rmem)[Br / 2], QueryTile tile, int key, int lane) {
  const auto S = fragment_view(S_rmem);
  const int first_key = block.first_key() + key, row = block.q_tile(tile) * Br + S.lane_column(lane);
  if constexpr (IRREGULAR) {
    const int member = MASK_KIND == MASK_BITS ? tile.head - block.kv_head() * block.query_group_size() : 0;
    const auto mask = irregular_mask<BackwardParams>(block.p, block.batch(), block.kv_head(), member);
    hide_scores_by_keys(S, mask, first_key, row);
  } else {
    hide_scores_by_keys(S, block.mask(), first_key, row);
  }
}

// DROPOUT: the weights of a tile that a lane keeps. `key` is the lane's first in the block.
using Kept = KeptWeights<Br / 8, true>;
DEVICE void draw_kept(Kept& kept, const KeyBlock& block, QueryTile tile, int key, int lane) {
  if constexpr (DROPOUT) {
    const u32 head = u32(block.batch() * block.p.heads + tile.head);
    kept.draw(block.p, head, block.first_key() + key, block.q_tile(tile) * Br + lane % 4 * 2);
  }
}

// SCORE: the score function for the scores of a lane in a tile.
struct ScoresOfTile {
  Function function;
  int first;  // the lane's first query
  typename Function::Column columns[2];

  DEVICE ScoresOfTile(const KeyBlock& block, QueryTile tile, int key, int lane)
      : function(block.p, SCORE ? min(block.batch(), block.p.batch - 1) : 0, tile.head,
                 SCORE ? int(diagonal_of(block.p, block.sequence())) : 0) {
    if constexpr (SCORE) {
      const int first_key = block.first_key() + key;
      first = block.q_tile(tile) * Br + lane % 4 * 2;
      columns[0] = function.column(first_key, float(first_key));
      columns[1] = function.column(first_key + 8, float(first_key) + 8.0f);
    }
  }
  DEVICE auto row(int t, int e) const { return function.row(first + 8 * t + e, float(first) + float(8 * t + e)); }
};

// P = exp(S - L), packed, of 8-column tiles FROM ... TO - 1; DROPOUT: only kept weights. S becomes P times the derivative of P's
// exponent, its slope: a factor of dS. changed(s, r, t, e) is a score before ALiBi; ALiBi is subtracted here, because the slope
// needs the score without it. `distance`: from the lane's first key to its first row.
template <int FROM, int TO, typename Change>
DEVICE void exponentials_of(const KernelParams& p, float (&S_rmem)[Br / 2], u32 (&P_rmem)[Br / 4], u32 lse, const Kept& kept,
                            const Alibi& alibi, float distance, int lane, const Change& changed) {
  const auto S = fragment_view(S_rmem);
#pragma unroll
  for (int t = FROM; t < TO; ++t) {
    const vec2 stats = ld_shared_vec2(lse + t * 32 + lane % 4 * 8);
    const float L[2] = {u32_as_float(stats.x), u32_as_float(stats.y)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float P[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = S.at(r, t, e);
        const auto now = changed(s, r, t, e);
        P[e] = ex2(ALIBI ? alibi.changed(now.s, p.scale_log2, distance, (t - r) * 8 + e) - L[e]
                         : fmaf(now.s, p.scale_log2, -L[e]));
        s = now.times_slope(P[e]);
      }
      P_rmem[2 * t + r] = Element::pack(P[0], P[1]);
      if constexpr (DROPOUT) P_rmem[2 * t + r] &= kept.pair(r, t);
    }
  }
}

// A score in builds without a score function, after the soft cap.
struct CappedScore {
  float s;
  DEVICE float times_slope(float P) const { return SOFTCAP ? P * cap_slope(s) : P; }
};

// exponentials_of() for a tile whose hidden scores are already -inf. `key` is the lane's first in the block.
template <int FROM = 0, int TO = Br / 8>
DEVICE void exponentials(const KeyBlock& block, QueryTile tile, int key, float (&S_rmem)[Br / 2], u32 (&P_rmem)[Br / 4], u32 lse,
                         const Kept& kept, int lane) {
  const KernelParams& p = block.p;
  const auto S = fragment_view(S_rmem);
  const Alibi alibi = ALIBI ? Alibi(p, block.sequence(), tile.head) : Alibi(0.0f, 0);
  float distance = 0.0f;
  if constexpr (ALIBI) {
    distance = float(block.q_tile(tile) * Br + S.lane_column(lane) + alibi.diagonal - (block.first_key() + key));
  }
  auto make = [&](const auto& changed) {
    exponentials_of<FROM, TO>(p, S_rmem, P_rmem, lse, kept, alibi, distance, lane, changed);
  };
  if constexpr (!SCORE) {
    make([](float s, int, int, int) { return CappedScore{s}; });
  } else {
    const ScoresOfTile scores(block, tile, key, lane);
    auto make_with = [&](auto near) {
      make([&](float s, int r, int t, int e) {
        return ChangedScore(p, scores.function, s, scores.row(t, e), scores.columns[r], near);
      });
    };
    if constexpr (Function::HAS_TANH && Br <= 64) {  // 128 queries leave no registers
      float greatest = 0.0f;
#pragma unroll
      for (int t = FROM; t < TO; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const float s = S.at(x / 2, t, x % 2);
          const float here = scores.function.greatest(s, scores.row(t, x % 2), scores.columns[x / 2]);
          greatest = s == NEG_INF ? greatest : fmaxf(greatest, here);
        }
      }
      if (!warp_any(!is_near_0<4>(greatest, scores.function.unit()))) return make_with(Near<true>{});
    }
    make_with(Near<false>{});
  }
}

// Element e of a packed pair.
DEVICE float unpack_16bit(u32 pair, int e) { return Element::widen(u16(e == 0 ? pair : pair >> 16)); }

// Sets the accumulators to which wgmma adds dP to -D of the lane's columns. Loads twice: a copy between registers cannot be
// ordered before the product, and ptxas would serialise it (C7511).
DEVICE void begin_with_neg_delta(float (&dP_rmem)[Br / 2], u32 neg_delta, int lane) {
#pragma unroll
  for (int i = 0; i < Br / 4; ++i) {
    const vec2 stats = ld_shared_vec2(neg_delta + i / 2 * 32 + lane % 4 * 8);
    dP_rmem[2 * i] = u32_as_float(stats.x);
    dP_rmem[2 * i + 1] = u32_as_float(stats.y);
  }
}
// dP - D, if dP began with zeros: adds -D from shared memory. DROPOUT: only dP of kept weights counts.
DEVICE void add_neg_delta(const KernelParams& p, float (&dP_rmem)[Br / 2], u32 neg_delta, const Kept& kept, int lane) {
  const auto dP = fragment_view(dP_rmem);
#pragma unroll
  for (int t = 0; t < Br / 8; ++t) {
    const vec2 stats = ld_shared_vec2(neg_delta + t * 32 + lane % 4 * 8);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dP.at(r, t, 0) = add_to_kept(p, kept, dP.at(r, t, 0), u32_as_float(stats.x), r, t, 0);
      dP.at(r, t, 1) = add_to_kept(p, kept, dP.at(r, t, 1), u32_as_float(stats.y), r, t, 1);
    }
  }
}

// dS = P o (dP - D), packed; P(t, r) is the pair of this lane's row r in 8-column tile t.
template <typename Weights>
DEVICE void gradients(u32 (&dS_rmem)[Br / 4], const float (&dP_less_D)[Br / 2], Weights P) {
  const auto difference = fragment_view(dP_less_D);
#pragma unroll
  for (int t = 0; t < Br / 8; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 pair = P(t, r);
      dS_rmem[2 * t + r] = Element::pack(unpack_16bit(pair, 0) * difference.at(r, t, 0),
                                                unpack_16bit(pair, 1) * difference.at(r, t, 1));
    }
  }
}

// The same from dP, where weights are dropped: `kept` is P with zeros for dropped weights.
template <typename Params, int COUNT>
DEVICE void gradients_of_kept(const Params& p, u32 (&dS_rmem)[Br / 4], float (&dP_rmem)[Br / 2], u32 neg_delta,
                              const u32 (&P_rmem)[COUNT], const u32 (&kept)[Br / 4], int lane) {
  const auto dP = fragment_view(dP_rmem);
#pragma unroll
  for (int t = 0; t < Br / 8; ++t) {
    const vec2 stats = ld_shared_vec2(neg_delta + t * 32 + lane % 4 * 8);
    const float neg_D[2] = {u32_as_float(stats.x), u32_as_float(stats.y)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 pair = P_rmem[2 * t + r], kept_pair = kept[2 * t + r];
      float dS[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        dS[e] = fmaf(of_kept(p, unpack_16bit(kept_pair, e)), dP.at(r, t, e), unpack_16bit(pair, e) * neg_D[e]);
      }
      dS_rmem[2 * t + r] = Element::pack(dS[0], dS[1]);
    }
  }
}

// dS^T of 64 keys to shared memory, transposed: a row per query. By all warps of a warpgroup; `warp` is the index in it. An
// async_proxy_fence() must come before wgmma reads dS: by each lane that stores, or later by the warps that issue the product.
DEVICE void store_ds(u32 tile, const u32 (&dS_rmem)[Br / 4], int warp, int lane) {
  const u32 row = lane / 16 * 8 + lane % 8, unit = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
#pragma unroll
  for (int k = 0; k < Br / 16; ++k) {
    const u32 operand[4] = {dS_rmem[4 * k], dS_rmem[4 * k + 1], dS_rmem[4 * k + 2], dS_rmem[4 * k + 3]};
    stmatrix_x4_trans(tile + (k * 16 + row) * ATOM_ROW_BYTES + unit * 16, operand);
  }
}

// S (64 x N) = A B^T, as wgmma_tiles_ss(). The first HELD k-steps of A are in registers, which saves reads of shared memory.
template <int N, int STEPS, int HELD, bool ADDS = false>
DEVICE void issue_partly_held(float (&d)[N / 2], const u32 (&held)[HELD > 0 ? 4 * HELD : 1], u64 a, u64 b) {
  wgmma_registers(d);
  if constexpr (HELD == 0) {
    wgmma_tiles_ss<N, STEPS, Element, ADDS>(d, a, b);
  } else {
    wgmma_tiles_rs<N, HELD, Element, ADDS>(d, held, b);
#pragma unroll
    for (int k = HELD; k < STEPS; ++k) {
      Wgmma<N, Element::IS_BFLOAT16>::template ss<true>(d, a + k_major_step<WARPGROUP_KEYS>(k), b + k_major_step<N>(k));
    }
  }
}

// dQ = dS K, or dQ += dS K, of KEYS keys: 64 rows of dS from `dS` on, 8 * TILES columns of K from `K` on, within one atom or from
// an atom's first column.
template <int KEYS, bool ACCUMULATES, int TILES>
DEVICE void issue_dq(float (&dQ_rmem)[4 * TILES], u32 dS, u32 K) {
  const u64 a = k_major_descriptor(dS), b = mn_major_descriptor<WARPGROUP_KEYS>(K);
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    const u64 a_k = a + k_major_step<Br>(k), b_k = b + descriptor_step(k / 4 * K_TILE_BYTES) + mn_major_step(k % 4);
    if (k == 0 && !ACCUMULATES) {
      WgmmaTransposedB<TILES * 8, Element::IS_BFLOAT16>::template ss<false>(dQ_rmem, a_k, b_k);
    } else {
      WgmmaTransposedB<TILES * 8, Element::IS_BFLOAT16>::template ss<true>(dQ_rmem, a_k, b_k);
    }
  }
}

// Stores 64 rows of dK or dV, 16 per warp; `first_key` is the warp's first in the block.
template <int REGISTERS>
DEVICE void store_keys(const KeyBlock& block, void* tensor, const Strides& stride, const float (&d)[REGISTERS], float factor,
                       int first_key, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = block.first_key() + first_key + lane / 4 + 8 * r;
    char* row = head_address<DkvElement>(tensor, stride, block.batch_in_arrays(), block.kv_head()) +
                (block.key_in_arrays() + key) * stride.seq * DkvElement::BYTES;
    if constexpr (FLOAT32_DKV) {
#pragma unroll
      for (int n = 0; n < REGISTERS; n += 4) {  // a quad of lanes writes the 32 bytes of an 8-column tile
        const float* const pair = d + n + 2 * r;
        store_two<DkvElement, 16>(row + n * 8 + lane % 4 * 8, pair[0] * factor, pair[1] * factor, key < block.stored_keys());
      }
    } else {
      store_accumulator_row<REGISTERS / 4, Element>(row, d, r, factor, key < block.stored_keys(), lane);
    }
  }
}
