// What the backward kernels of Hopper share (kernels/fa3_backward.cu, kernels/fa3_backward_wide.cu): which tiles a block
// visits, how they come, and what a warpgroup of consumers does with 64 keys and a tile of queries in registers, computed
// transposed (S^T = K Q^T): P, dS, and how dS, dQ, dK and dV leave.
#pragma once
#include "primitives/bulk_copy.cuh"
#include "primitives/stmatrix.cuh"
#include "primitives/wgmma_transposed.cuh"
#include "tiles/accumulator.cuh"
#include "tiles/backward_passes.cuh"
#include "tiles/backward_schedule.cuh"
#include "tiles/pipeline.cuh"
#include "tiles/score.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int CONSUMERS = NUM_WARPS / 4 - 1;  // warpgroup 0 is the producer
constexpr int GROUP_KEYS = 64;                // rows of S^T in one warpgroup
constexpr int KEY_GROUPS = Bc / GROUP_KEYS;
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S and dP; TMA fills the last one up with zeros
constexpr int KEY_TILE_BYTES = wgmma_tile_bytes(GROUP_KEYS, HEAD_DIM);  // K or V of 64 keys
constexpr int QUERY_TILE_BYTES = wgmma_tile_bytes(Br, HEAD_DIM);        // Q or dO
constexpr int NUMBERS_BYTES = Br * 4;                                   // L or D
constexpr int DS_PART_BYTES = Br * ATOM_ROW_BYTES;                      // dS of 64 keys: a row per query
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(ALIGNMENT == 16, "TMA needs 16-byte aligned rows");
static_assert(CONSUMERS == 2, "registers are shared out for two");
static_assert(Bc % GROUP_KEYS == 0 && Br % 16 == 0, "tiles of wgmma");
static_assert(SKIP_MASKED_TILES, "blocks that see nothing of a tile do not add to it");

// A ring of buffers with a full and an empty barrier each, of which turn n takes buffer n % STAGES: where a thread is follows
// from n, and takes no registers.
template <int STAGES>
struct Turns {
  u32 full, empty;  // first barrier of each kind

  DEVICE static int stage(int n) { return n % STAGES; }
  DEVICE u32 full_barrier(int n) const { return full + stage(n) * 8; }
  DEVICE void wait_full(int n) const { mbarrier_wait(full_barrier(n), u32(n / STAGES) & 1); }
  DEVICE void wait_empty(int n) const { mbarrier_wait(empty + stage(n) * 8, (u32(n / STAGES) & 1) ^ 1); }  // empty at first
  DEVICE void release(int n, int lane) const {  // by every warp, once it has read the buffer
    if (lane == 0) mbarrier_arrive(empty + stage(n) * 8);
  }
  DEVICE void init(u32 writers, u32 readers) const {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, writers);
      mbarrier_init(empty + 8 * i, readers);
    }
  }
};

// What all threads of a block know: its keys, and the query tiles that it visits.
struct KeyBlock {
  const BackwardParams& p;
  const KeyItem item;
  const TileRange tiles = (head_mask(p).template query_tiles<Br, Bc>(item.k_block));
  const int first_key = item.k_block * Bc;
  const int group_size = p.heads / p.kv_heads, first_head = item.kv_head * group_size;
  const int count = group_size * (tiles.end - tiles.first);  // of tiles, over all heads of the group
  const i64 batch_head = i64(item.batch) * p.heads;

  DEVICE QueryTile first() const { return {first_head, tiles.first}; }
  DEVICE BackwardWorkspace workspace() const { return BackwardWorkspace(p); }
};

// By the producer: K or V of the block.
DEVICE void load_keys(const KeyBlock& block, u32 tile, u32 barrier, const TensorMap* map) {
  for (int w = 0; w < KEY_GROUPS; ++w) {
    load_tile<GROUP_KEYS, HEAD_DIM>(tile + w * KEY_TILE_BYTES, barrier, map, block.first_key + w * GROUP_KEYS,
                                    block.item.kv_head, block.item.batch);
  }
}

// By the producer: Q or dO of a tile, with L or D of its rows.
DEVICE void load_queries(const KeyBlock& block, QueryTile tile, u32 queries, u32 numbers, u32 barrier, const TensorMap* map,
                         const float* source) {
  mbarrier_arrive_expect_tx(barrier, QUERY_TILE_BYTES + NUMBERS_BYTES);
  for (int a = 0; a < atoms(HEAD_DIM); ++a) {
    tma_load_4d(queries + a * Br * ATOM_ROW_BYTES, map, barrier, a * ATOM_COLUMNS, tile.q_tile * Br, tile.head,
                block.item.batch);
  }
  bulk_load(numbers, source, NUMBERS_BYTES, barrier);
}

// Scores that the mask hides become -inf. `key` is the lane's first.
DEVICE void hide_scores_of_tile(const KeyBlock& block, float (&S_rmem)[Br / 2], QueryTile tile, int key, int lane) {
  const auto S = fragment_view(S_rmem);
  if (!block.tiles.is_clear(tile.q_tile) || block.p.seqlen_k - block.first_key < Bc) {
    hide_scores_by_keys(S, head_mask(block.p), key, tile.q_tile * Br + S.lane_column(lane));
  }
}

// P = exp(S - L), packed. S becomes P times the slope of the softcap, which dS is a multiple of.
DEVICE void exponentials(const BackwardParams& p, float (&S_rmem)[Br / 2], u32 (&P_rmem)[Br / 4], u32 lse, int lane) {
  const auto S = fragment_view(S_rmem);
#pragma unroll
  for (int t = 0; t < Br / 8; ++t) {
    const vec2 numbers = ld_shared_vec2(lse + t * 32 + lane % 4 * 8);
    const float L[2] = {u32_as_float(numbers.x), u32_as_float(numbers.y)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float P[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = S.at(r, t, e);
        P[e] = ex2(fmaf(s, p.scale_log2, -L[e]));
        s = SOFTCAP ? P[e] * cap_slope(s) : P[e];
      }
      P_rmem[2 * t + r] = pack_16bit<BFLOAT16>(P[0], P[1]);
    }
  }
}

// dS = P o (dP - D), packed; P(t, r, e) is element e of this lane's row r in 8-column tile t.
template <typename Weights>
DEVICE void gradients(u32 (&dS_rmem)[Br / 4], const float (&dP_rmem)[Br / 2], u32 delta, int lane, Weights P) {
  const auto dP = fragment_view(dP_rmem);
#pragma unroll
  for (int t = 0; t < Br / 8; ++t) {
    const vec2 numbers = ld_shared_vec2(delta + t * 32 + lane % 4 * 8);
    const float D[2] = {u32_as_float(numbers.x), u32_as_float(numbers.y)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dS_rmem[2 * t + r] =
          pack_16bit<BFLOAT16>(P(t, r, 0) * (dP.at(r, t, 0) - D[0]), P(t, r, 1) * (dP.at(r, t, 1) - D[1]));
    }
  }
}

// dS^T of 64 keys to shared memory, transposed: a row per query. By all warps of a warpgroup; `warp` is the number in it.
DEVICE void store_ds(u32 tile, const u32 (&dS_rmem)[Br / 4], int warp, int lane) {
  const u32 row = lane / 16 * 8 + lane % 8, unit = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
#pragma unroll
  for (int k = 0; k < Br / 16; ++k) {
    const u32 operand[4] = {dS_rmem[4 * k], dS_rmem[4 * k + 1], dS_rmem[4 * k + 2], dS_rmem[4 * k + 3]};
    stmatrix_x4_trans(tile + (k * 16 + row) * ATOM_ROW_BYTES + unit * 16, operand);
  }
  async_proxy_fence();
  warp_sync();  // all lanes have stored
}

// dQ = dS K, in flight: 64 rows of dS from `dS` on, all keys, 8 TILES columns of K from `K` on, within an atom or from its
// first column.
template <int TILES>
DEVICE void issue_dq(float (&dQ_rmem)[4 * TILES], u32 dS, u32 K) {
  const u64 a = k_major_descriptor(dS), b = mn_major_descriptor<GROUP_KEYS>(K);
  wgmma_registers(dQ_rmem);
#pragma unroll
  for (int k = 0; k < Bc / 16; ++k) {
    const u64 a_k = a + k_major_step<Br>(k), b_k = b + descriptor_step(k / 4 * KEY_TILE_BYTES) + mn_major_step(k % 4);
    if (k == 0) {
      WgmmaTransposed<TILES * 8, BFLOAT16>::template ss<false>(dQ_rmem, a_k, b_k);
    } else {
      WgmmaTransposed<TILES * 8, BFLOAT16>::template ss<true>(dQ_rmem, a_k, b_k);
    }
  }
  wgmma_commit();
}

// How one warp of consumers adds what it has of dQ.
struct DqSum {
  const KeyBlock& block;
  const int lane;
  DEVICE auto turns() const { return DqTurns<Br, Bc, 4 * CONSUMERS>{block.p, block.workspace(), block.item.k_block, block.batch_head}; }

  DEVICE bool is_first(QueryTile of) const { return of.head == block.first_head && of.q_tile == block.tiles.first; }
  // 16 rows of a tile, `strip` of its strips, from accumulator `first` on.
  DEVICE float* place(QueryTile of, int strip, int first) const {
    return block.workspace().strip(block.batch_head + of.head, of.q_tile * (Br / STRIP) + strip) + first * ACCUMULATOR;
  }
  // DETERMINISTIC: until all blocks to the right have added.
  DEVICE void await_turn(QueryTile of) const {
    if constexpr (DETERMINISTIC) {
      if (lane == 0) turns().await(of, turns().count(of));
      warp_sync();  // it is this warp's turn
    }
  }
  // From registers. Of TILES accumulators those that exist.
  template <int TILES>
  DEVICE void add(float* target, const float (&d)[4 * TILES], int existing) const {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t < existing) red_add_f32x4(target + t * ACCUMULATOR + lane * 4, d[4 * t], d[4 * t + 1], d[4 * t + 2], d[4 * t + 3]);
    }
  }
  // By the copy engine, through `staged`, which the addition before has read when this is called.
  template <int TILES>
  DEVICE void add_in_bulk(float* target, const float (&d)[4 * TILES], int existing, u32 staged) const {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      st_shared_vec4(staged + t * (ACCUMULATOR * 4) + lane * 16, {float_as_u32(d[4 * t]), float_as_u32(d[4 * t + 1]),
                                                                  float_as_u32(d[4 * t + 2]), float_as_u32(d[4 * t + 3])});
    }
    async_proxy_fence();
    warp_sync();  // all of it is there
    if (lane == 0 && existing > 0) {
      bulk_add_f32(target, staged, existing * (ACCUMULATOR * 4));
      bulk_commit();
    }
  }
  // DETERMINISTIC: the next block may add to a tile, once what this warp has added is there.
  DEVICE void pass_on(QueryTile of) const {
    if constexpr (!DETERMINISTIC) return;
    warp_sync();  // all lanes have added
    if (lane == 0) {
      bulk_wait();
      turns().pass_on(of);
    }
  }
};

// 64 rows of dK or dV, 16 per warp.
DEVICE void store_keys(const KeyBlock& block, void* tensor, const Strides& stride, const float (&d)[HEAD_DIM / 2], float factor,
                       int first_key, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + lane / 4 + 8 * r;
    char* row = head_address(tensor, stride, block.item.batch, block.item.kv_head) + key * stride.seq * 2;
    store_accumulator_row<D_TILES, BFLOAT16>(row, d, r, factor, key < block.p.seqlen_k, lane);
  }
}
