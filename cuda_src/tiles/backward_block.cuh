// What the backward kernels of Hopper share (kernels/fa3_backward.cu, kernels/fa3_backward_wide.cu): which tiles a block
// visits, how they come, and what a warpgroup of consumers does with 64 keys and a tile of queries in registers, computed
// transposed (S^T = K Q^T): P, dS, and how dS, dQ, dK and dV leave.
#pragma once
#include "primitives/bulk_copy.cuh"
#include "primitives/opaque.cuh"
#include "primitives/stmatrix.cuh"
#include "primitives/wgmma_transposed.cuh"
#include "tiles/accumulator.cuh"
#include "tiles/backward_passes.cuh"
#include "tiles/backward_schedule.cuh"
#include "tiles/phases.cuh"
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

  DEVICE static u32 stage(u32 n) { return n % STAGES; }
  DEVICE u32 full_barrier(u32 n) const { return full + stage(n) * 8; }
  DEVICE void wait_full(u32 n) const { mbarrier_wait(full_barrier(n), n / STAGES & 1); }
  DEVICE void wait_empty(u32 n) const { mbarrier_wait(empty + stage(n) * 8, (n / STAGES & 1) ^ 1); }  // empty at first
  DEVICE void release(u32 n, int lane) const {  // by every warp, once it has read the buffer
    if (lane == 0) mbarrier_arrive(empty + stage(n) * 8);
  }
  DEVICE void init(u32 writers, u32 readers) const {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, writers);
      mbarrier_init(empty + 8 * i, readers);
    }
  }
};

// The key block that a thread block is busy with, and the query tiles that it visits: a record that the pass before works out
// (prepare_items), and that lies in shared memory, where it costs no registers.
constexpr int KEY_RECORDS = ITEM_FULL_BYTES / 8, RECORD_BYTES = 16 * RECORD_VECTORS;
static_assert(ITEMS_BYTES == KEY_RECORDS * RECORD_BYTES && ITEM_EMPTY_BYTES == ITEM_FULL_BYTES, "a record, two barriers");
static_assert(KV_FULL_BYTES == 16 && KV_EMPTY_BYTES == 8, "of K, of V; of both");

struct KeyBlock {
  const BackwardParams& p;
  u32 record;

  DEVICE int word(int i) const { return int(ld_shared_u32(record + 4 * i)); }
  DEVICE int k_block() const { return word(0); }
  DEVICE int kv_head() const { return word(1); }
  DEVICE int batch() const { return word(2); }
  DEVICE int count() const { return word(3); }  // of tiles, over all heads of the group
  DEVICE u32 index() const { return u32(word(8)); }
  DEVICE TileRange tiles() const { return {word(9), word(4), word(5), word(6), word(7)}; }
  DEVICE int first_key() const { return k_block() * Bc; }
  DEVICE int group_size() const { return p.heads / p.kv_heads; }

  DEVICE QueryTile first() const { return {kv_head() * group_size(), word(4)}; }
  DEVICE QueryTile next(QueryTile tile) const { return tile.next({0, word(4), word(5), 0, 0}); }
  DEVICE QueryTile previous(QueryTile tile) const { return tile.previous({0, word(4), word(5), 0, 0}); }
  // Number of a tile in the workspace.
  DEVICE u32 place(QueryTile tile) const {
    return u32(word(10)) + u32(tile.head) * BackwardWorkspace::tiles(p) + u32(tile.q_tile);
  }
  DEVICE float* workspace(QueryTile tile) const { return BackwardWorkspace::tile(p, place(tile)); }
  DEVICE bool cuts(QueryTile tile) const {  // some score of the tile is hidden
    return tile.q_tile < word(6) || tile.q_tile >= word(7) || p.seqlen_k - first_key() < Bc;
  }
};

// By the producer: K or V of the block.
DEVICE void load_keys(const KeyBlock& block, u32 tile, u32 barrier, const TensorMap* map) {
  for (int w = 0; w < KEY_GROUPS; ++w) {
    load_tile<GROUP_KEYS, HEAD_DIM>(tile + w * KEY_TILE_BYTES, barrier, map, block.first_key() + w * GROUP_KEYS,
                                    block.kv_head(), block.batch());
  }
}

// By the producer: Q or dO of a tile, with L or D of its rows.
DEVICE void load_queries(const KeyBlock& block, QueryTile tile, u32 queries, u32 numbers, u32 barrier, const TensorMap* map,
                         const float* source) {
  mbarrier_arrive_expect_tx(barrier, QUERY_TILE_BYTES + NUMBERS_BYTES);
  const int batch = block.batch();
  for (int a = 0; a < atoms(HEAD_DIM); ++a) {
    tma_load_4d(queries + a * Br * ATOM_ROW_BYTES, map, barrier, a * ATOM_COLUMNS, tile.q_tile * Br, tile.head,
                batch);
  }
  bulk_load(numbers, source, NUMBERS_BYTES, barrier);
}

// Scores that the mask hides become -inf. `key` is the lane's first in the block.
DEVICE void hide_scores_of_tile(const KeyBlock& block, float (&S_rmem)[Br / 2], QueryTile tile, int key, int lane) {
  const auto S = fragment_view(S_rmem);
  hide_scores_by_keys(S, head_mask(block.p), block.first_key() + key, tile.q_tile * Br + S.lane_column(lane));
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

// How one warp of consumers adds what it has of dQ. A tile is known by its number in the workspace.
struct DqSum {
  const KeyBlock& block;
  const int lane;

  // 16 rows of a tile, `strip` of its strips, from accumulator `first` on.
  DEVICE float* place(u32 tile, int strip, int first) const {
    return BackwardWorkspace::tile(block.p, tile) + (strip * D_TILES + first) * ACCUMULATOR;
  }
  // DETERMINISTIC: until all blocks to the right have added.
  DEVICE void await_turn(u32 tile) const {
    if constexpr (DETERMINISTIC) {
      const int q_tile = int(tile % BackwardWorkspace::tiles(block.p));
      if (lane == 0) {
        const u32 turn = 4 * CONSUMERS * key_blocks_before<Br, Bc>(block.p, q_tile, block.k_block());
        const u32* counter = BackwardWorkspace::turn(block.p, tile);
        while (ld_relaxed_gpu(counter) < turn) {
        }
      }
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
  DEVICE void pass_on(u32 tile) const {
    if constexpr (!DETERMINISTIC) return;
    warp_sync();  // all lanes have added
    if (lane == 0) {
      bulk_wait();
      red_release_gpu_add(BackwardWorkspace::turn(block.p, tile), 1);
    }
  }
};

// 64 rows of dK or dV, 16 per warp; `first_key` is the warp's first in the block.
DEVICE void store_keys(const KeyBlock& block, void* tensor, const Strides& stride, const float (&d)[HEAD_DIM / 2], float factor,
                       int first_key, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = block.first_key() + first_key + lane / 4 + 8 * r;
    char* row = head_address(tensor, stride, block.batch(), block.kv_head()) + key * stride.seq * 2;
    store_accumulator_row<D_TILES, BFLOAT16>(row, d, r, factor, key < block.p.seqlen_k, lane);
  }
}

// Barriers that both kernels have: of items, of K and V. Items take turns with two records; K and V have one buffer.
struct ItemBarriers {
  u32 records, K_full, V_full;
  Turns<KEY_RECORDS> turns;
  Turns<1> keys;  // K_full and what says that K and V are not read any more

  DEVICE explicit ItemBarriers(u32 start)
      : records(start + ITEMS_OFFSET), K_full(start + KV_FULL_OFFSET), V_full(K_full + 8),
        turns{start + ITEM_FULL_OFFSET, start + ITEM_EMPTY_OFFSET}, keys{K_full, start + KV_EMPTY_OFFSET} {}

  DEVICE u32 record(u32 i) const { return records + turns.stage(i) * RECORD_BYTES; }
  DEVICE void init() const {
    turns.init(1, 4 * CONSUMERS + 2);  // the warps of consumers, and who loads
    keys.init(KEY_GROUPS, 4 * CONSUMERS);
    mbarrier_init(V_full, KEY_GROUPS);
  }
};

// By the pass before: the records of all items.
DEVICE void prepare_items(const BackwardParams& p) {
  const BackwardWorkspace workspace(p);
  for (u32 i = blockIdx.x * PASS_THREADS + threadIdx.x; i < workspace.num_items(p); i += gridDim.x * PASS_THREADS) {
    const KeyItem item = key_item<Bc>(p, i, 8 * HEAD_DIM);
    const TileRange tiles = head_mask(p).template query_tiles<Br, Bc>(item.k_block);
    const u32 count = u32(p.heads / p.kv_heads) * u32(tiles.end - tiles.first);
    vec4* const record = workspace.items + i64(i) * RECORD_VECTORS;
    st_global(record, vec4{u32(item.k_block), u32(item.kv_head), u32(item.batch), count});
    st_global(record + 1, vec4{u32(tiles.first), u32(tiles.end), u32(tiles.clear_first), u32(tiles.clear_end)});
    st_global(record + 2, vec4{i, u32(tiles.total), u32(item.batch) * u32(p.heads) * BackwardWorkspace::tiles(p), 0});
  }
}

// One thread of the producer takes items for the block.
DEVICE void take_items(const BackwardParams& p, u32 start) {
  for (u32 i = 0;; ++i) {
    const u32 index = atomic_add(BackwardWorkspace(p).next, 1);
    const ItemBarriers items(opaque(start));
    const u32 full = items.turns.full_barrier(i);
    items.turns.wait_empty(i);
    if (index >= BackwardWorkspace::num_items(p)) {
      st_shared_u32(items.record(i), u32(NO_MORE_ITEMS));
      mbarrier_arrive(full);
      return;
    }
    mbarrier_arrive_expect_tx(full, RECORD_BYTES);
    bulk_load(items.record(i), BackwardWorkspace(p).items + i64(index) * RECORD_VECTORS, RECORD_BYTES, full);
  }
}

// Two others ask the copy engine for their tiles, as consumers need them: one for K and Q with L (FIRST), one for V and dO
// with D. Memory is what has Q_turns(), dO_turns(), items, and addresses of the tiles.
template <typename Memory, bool FIRST>
struct Loader {
  const BackwardParams& p;
  const TensorMap *queries, *keys;
  const u32 start;  // of the shared memory
  INSIDE(mutable PhaseLog inside = PhaseLog(p.trace, true);)

  DEVICE void run() const {
    u32 n = 0, loaded = 0;
    for (u32 i = 0;; ++i) {
      const ItemBarriers items(opaque(start));
      INSIDE(inside.enter(WAIT_ITEM);)
      items.turns.wait_full(i);
      const KeyBlock block{p, items.record(i)};
      INSIDE(if (block.k_block() == NO_MORE_ITEMS) inside.close();)
      if (block.k_block() == NO_MORE_ITEMS) return;
      INSIDE(inside.item(block.index());)
      const u32 count = u32(block.count());
      if (count > 0) {
        if constexpr (!FIRST) load_keys(block, loaded);
        QueryTile tile = block.first();
#pragma unroll 1  // unrolled, it takes more registers than a producer has
        for (const u32 end = n + count; n < end; ++n) {
          load_tile(block, tile, n);
          if (FIRST && n == end - count) load_keys(block, loaded);
          tile = block.next(tile);
        }
        ++loaded;
      }
      async_proxy_fence();  // the record has been read, where the copy engine writes next
      items.turns.release(i, 0);
    }
  }

  DEVICE void load_keys(const KeyBlock& block, u32 number) const {
    const Memory smem(opaque(start));
    INSIDE(inside.enter(WAIT_SPACE, NO_TILE);)
    smem.items.keys.wait_empty(number);
    INSIDE(inside.enter(COPY, NO_TILE);)
    ::load_keys(block, FIRST ? smem.K : smem.V, FIRST ? smem.items.K_full : smem.items.V_full, keys);
  }

  DEVICE void load_tile(const KeyBlock& block, QueryTile tile, u32 n) const {
    const Memory smem(opaque(start));
    INSIDE(inside.enter(WAIT_SPACE, query_tile_number(tile.head, tile.q_tile));)
    if constexpr (FIRST) {
      const auto turns = smem.Q_turns();
      turns.wait_empty(n);
      INSIDE(inside.enter(COPY, query_tile_number(tile.head, tile.q_tile));)
      load_queries(block, tile, smem.Q + turns.stage(n) * QUERY_TILE_BYTES, smem.lse + turns.stage(n) * NUMBERS_BYTES,
                   turns.full_barrier(n), queries, block.workspace(tile) + Br * HEAD_DIM);
    } else {
      const auto turns = smem.dO_turns();
      turns.wait_empty(n);
      INSIDE(inside.enter(COPY, query_tile_number(tile.head, tile.q_tile));)
      load_queries(block, tile, smem.dO + turns.stage(n) * QUERY_TILE_BYTES, smem.delta + turns.stage(n) * NUMBERS_BYTES,
                   turns.full_barrier(n), queries, block.workspace(tile) + Br * (HEAD_DIM + 1));
    }
  }
};
