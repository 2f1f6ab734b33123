// FlashAttention-3 backward for float16 and bfloat16 on Hopper (sm_90a): TMA, WGMMA, warp specialisation.
#include "backward_params.cuh"
#include "primitives/bulk_copy.cuh"
#include "primitives/register_budget.cuh"
#include "primitives/stmatrix.cuh"
#include "primitives/wgmma_transposed.cuh"
#include "tiles/accumulator.cuh"
#include "tiles/backward_passes.cuh"
#include "tiles/backward_pipeline.cuh"
#include "tiles/score.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S and dP; TMA fills the last one up with zeros
static_assert(ALIGNMENT == 16, "TMA needs 16-byte aligned rows");
static_assert(NUM_STAGES > 1 && DO_STAGES > 1 && DS_STAGES > 1, "tiles of two turns are in use");
static_assert(CONSUMERS == 2, "registers are shared out for two");
static_assert(SKIP_MASKED_TILES, "blocks that see nothing of a tile do not add to it");

// What all threads of a block know: its keys, and the query tiles that it visits.
struct KeyBlock {
  const BackwardParams& p;
  const BackwardWorkspace& workspace;
  const KeyItem item;
  const TileRange tiles = (head_mask(p).template query_tiles<Br, Bc>(item.k_block));
  const int first_key = item.k_block * Bc;
  const int group_size = p.heads / p.kv_heads, first_head = item.kv_head * group_size;
  const int count = group_size * (tiles.end - tiles.first);  // of tiles, over all heads of the group
  const i64 batch_head = i64(item.batch) * p.heads;

  DEVICE QueryTile first() const { return {first_head, tiles.first}; }
};

// One thread asks the copy engine for tiles in the order in which consumers need them.
struct Producer {
  const KeyBlock& block;
  const TensorMap *dO_map, *Q_map, *K_map, *V_map;
  const BackwardMemory& smem;

  DEVICE void run() const {
    const auto Q = smem.Q_turns();
    const auto dO = smem.dO_turns();
    QueryTile tile = block.first();
    for (int n = 0; n < block.count; ++n) {
      const i64 head = block.batch_head + tile.head;
      const int row = tile.q_tile * Br;
      if (n == 0) load_keys(smem.K, smem.K_full, K_map);
      Q.wait_empty(n);
      load_queries(smem.Q, smem.lse, Q.stage(n), Q.full_barrier(n), Q_map, tile, block.workspace.lse(head, row));
      if (n == 0) load_keys(smem.V, smem.V_full, V_map);
      dO.wait_empty(n);
      load_queries(smem.dO, smem.delta, dO.stage(n), dO.full_barrier(n), dO_map, tile, block.workspace.delta(head, row));
      tile = tile.next(block.tiles);
    }
  }

  DEVICE void load_keys(u32 tile, u32 barrier, const TensorMap* map) const {
    for (int w = 0; w < CONSUMERS; ++w) {
      load_tile<GROUP_KEYS, HEAD_DIM>(tile + w * KEY_TILE_BYTES, barrier, map, block.first_key + w * GROUP_KEYS,
                                      block.item.kv_head, block.item.batch);
    }
  }
  DEVICE void load_queries(u32 tiles, u32 numbers, int stage, u32 barrier, const TensorMap* map, QueryTile tile,
                           const float* source) const {
    mbarrier_arrive_expect_tx(barrier, QUERY_TILE_BYTES + NUMBERS_BYTES);
    for (int a = 0; a < atoms(HEAD_DIM); ++a) {
      tma_load_4d(tiles + stage * QUERY_TILE_BYTES + a * Br * ATOM_ROW_BYTES, map, barrier, a * ATOM_COLUMNS,
                  tile.q_tile * Br, tile.head, block.item.batch);
    }
    bulk_load(numbers + stage * NUMBERS_BYTES, source, NUMBERS_BYTES, barrier);
  }
};

// One warpgroup, 64 keys.
struct Consumer {
  const KeyBlock& block;
  const BackwardMemory& smem;
  const int consumer, warp, lane;
  const BackwardParams& p = block.p;
  const Turns<NUM_STAGES> Q_turns = smem.Q_turns();
  const Turns<DO_STAGES> dO_turns = smem.dO_turns();
  const Turns<DS_STAGES> dS_turns = smem.dS_turns();
  const DqTurns<Br, Bc, 4 * CONSUMERS> turns{p, block.workspace, block.item.k_block, block.batch_head};

  float dK_rmem[HEAD_DIM / 2] = {}, dV_rmem[HEAD_DIM / 2] = {};
  float S_rmem[Br / 2], dP_rmem[Br / 2], dQ_rmem[DQ_TILES * 4];
  u32 P_rmem[Br / 4], dS_rmem[Br / 4];

  QueryTile tile = block.first();
  int n = 0;  // number of the tile

  DEVICE void run() {
    if (block.count == 0) return store();
    mbarrier_wait(smem.K_full, 0);
    Q_turns.wait_full(0);
    wgmma_fence();
    issue_scores(0);
    wgmma_wait<0>();
    wgmma_registers(S_rmem);
    mbarrier_wait(smem.V_full, 0);
    while (true) {
      if constexpr (ORDER == 2) {
        dO_turns.wait_full(n);
        wgmma_fence();
        issue_dp(n);
        wgmma_commit();
      }
      mask();
      exponentials();
      if constexpr (ORDER == 0) {
        dO_turns.wait_full(n);
        begin_dv();
        issue_dv();
        wgmma_wait<1>();
        if (n > 0) add_dq(tile.previous(block.tiles), n - 1);
        wgmma_fence();
        issue_dp(n);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_registers(dV_rmem);
        wgmma_registers(P_rmem);
      } else if constexpr (ORDER == 1) {
        wgmma_wait<0>();
        if (n > 0) add_dq(tile.previous(block.tiles), n - 1);
        dO_turns.wait_full(n);
        begin_dv();
        issue_dp(n);
        wgmma_commit();
        issue_dv();
        wgmma_wait<1>();
      } else if constexpr (ORDER == 2) {
        begin_dv();
        issue_dv();
        wgmma_wait<1>();
        wgmma_registers(dQ_rmem);
      } else {
        if (n > 0) {
          dS_turns.wait_full(n - 1);
          wgmma_fence();
          issue_dq(n - 1);
          wgmma_commit();
        }
        dO_turns.wait_full(n);
        begin_dv();
        issue_dv();
        wgmma_wait<1>();
        if (n > 0) add_dq(tile.previous(block.tiles), n - 1);
        wgmma_fence();
        issue_dp(n);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_registers(dV_rmem);
        wgmma_registers(P_rmem);
      }
      wgmma_registers(dP_rmem);
      gradients();
      store_ds();
      if constexpr (ORDER == 0 || ORDER == 3) dO_turns.release(n, lane);
      wgmma_registers(dK_rmem);
      wgmma_registers(dS_rmem);
      wgmma_fence();
      issue_dk();
      if (n + 1 == block.count) break;
      Q_turns.wait_full(n + 1);
      wgmma_fence();
      issue_scores(n + 1);
      if constexpr (ORDER == 2) {
        if (n > 0) add_dq(tile.previous(block.tiles), n - 1);
      }
      if constexpr (ORDER != 3) {
        dS_turns.wait_full(n);
        wgmma_fence();
        issue_dq(n);
        wgmma_commit();
        wgmma_wait<1>();  // dK of this tile, and the next one's scores
      } else {
        wgmma_wait<0>();
      }
      wgmma_registers(S_rmem);
      wgmma_registers(dK_rmem);
      wgmma_registers(dS_rmem);
      if constexpr (ORDER == 1 || ORDER == 2) {
        wgmma_registers(dV_rmem);
        wgmma_registers(P_rmem);
        dO_turns.release(n, lane);
      }
      Q_turns.release(n, lane);
      ++n;
      tile = tile.next(block.tiles);
    }
    if (ORDER == 2 && n > 0) add_dq(tile.previous(block.tiles), n - 1);
    dS_turns.wait_full(n);
    wgmma_fence();
    issue_dq(n);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_registers(dK_rmem);
    wgmma_registers(dV_rmem);
    add_dq(tile, n);
    if constexpr (DETERMINISTIC) pass_on(tile);
    store();
    if constexpr (BULK_ADD) {
      if (lane == 0) bulk_wait_read();  // shared memory ends with the block
    }
  }

  DEVICE void begin_dv() {
    wgmma_registers(dV_rmem);
    wgmma_registers(P_rmem);
    wgmma_fence();
  }

  DEVICE u64 query_tile(u64 descriptor, int stage) const { return descriptor + descriptor_step(QUERY_TILE_BYTES) * stage; }

  DEVICE void issue_scores(int n) {
    wgmma_registers(S_rmem);
    wgmma_tiles_ss<Br, K_STEPS, BFLOAT16>(S_rmem, k_major_descriptor(smem.K + consumer * KEY_TILE_BYTES),
                                          query_tile(k_major_descriptor(smem.Q), Q_turns.stage(n)));
    wgmma_commit();
  }
  DEVICE void issue_dp(int n) {
    wgmma_registers(dP_rmem);
    wgmma_tiles_ss<Br, K_STEPS, BFLOAT16>(dP_rmem, k_major_descriptor(smem.V + consumer * KEY_TILE_BYTES),
                                          query_tile(k_major_descriptor(smem.dO), dO_turns.stage(n)));
  }
  DEVICE void issue_dv() {
    wgmma_accumulate_values<HEAD_DIM, Br / 16, BFLOAT16>(
        dV_rmem, P_rmem, query_tile(mn_major_descriptor<Br>(smem.dO), dO_turns.stage(n)));
    wgmma_commit();
  }
  DEVICE void issue_dk() {
    wgmma_accumulate_values<HEAD_DIM, Br / 16, BFLOAT16>(
        dK_rmem, dS_rmem, query_tile(mn_major_descriptor<Br>(smem.Q), Q_turns.stage(n)));
    wgmma_commit();
  }
  // dQ = dS K: 64 rows of dS, all keys, this consumer's columns of K.
  DEVICE void issue_dq(int n) {
    constexpr int NEXT_COLUMNS = DQ_BY_ROWS ? 0 : HEAD_DIM <= ATOM_COLUMNS ? DQ_TILES * 16 : GROUP_KEYS * ATOM_ROW_BYTES;
    constexpr int NEXT_ROWS = DQ_BY_ROWS ? 64 * ATOM_ROW_BYTES : 0;
    const u64 dS = k_major_descriptor(smem.dS + consumer * NEXT_ROWS) +
                   descriptor_step(CONSUMERS * DS_PART_BYTES) * dS_turns.stage(n);
    const u64 K = mn_major_descriptor<GROUP_KEYS>(smem.K + consumer * NEXT_COLUMNS);
    wgmma_registers(dQ_rmem);
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
      const u64 a = dS + k_major_step<Br>(k), b = K + descriptor_step(k / 4 * KEY_TILE_BYTES) + mn_major_step(k % 4);
      if (k == 0) {
        WgmmaTransposed<DQ_TILES * 8, BFLOAT16>::template ss<false>(dQ_rmem, a, b);
      } else {
        WgmmaTransposed<DQ_TILES * 8, BFLOAT16>::template ss<true>(dQ_rmem, a, b);
      }
    }
  }

  DEVICE void mask() {
    const auto S = fragment_view(S_rmem);
    cap_scores<SOFTCAP>(S, p.softcap);
    const bool masked = !block.tiles.is_clear(tile.q_tile) || p.seqlen_k - block.first_key < Bc;
    if (masked) {
      const int key = block.first_key + consumer * GROUP_KEYS + warp * 16 + S.lane_row(lane);
      hide_scores_by_keys(S, head_mask(p), key, tile.q_tile * Br + S.lane_column(lane));
    }
  }

  // P = exp(S - L), packed. S becomes P times the slope of the softcap, which dS is a multiple of.
  DEVICE void exponentials() {
    const auto S = fragment_view(S_rmem);
    const u32 lse = smem.lse + Q_turns.stage(n) * NUMBERS_BYTES + lane % 4 * 8;
#pragma unroll
    for (int t = 0; t < Br / 8; ++t) {
      const vec2 numbers = ld_shared_vec2(lse + t * 32);
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

  // dS = P o (dP - D), packed.
  DEVICE void gradients() {
    const auto S = fragment_view(S_rmem), dP = fragment_view(dP_rmem);
    const u32 delta = smem.delta + dO_turns.stage(n) * NUMBERS_BYTES + lane % 4 * 8;
#pragma unroll
    for (int t = 0; t < Br / 8; ++t) {
      const vec2 numbers = ld_shared_vec2(delta + t * 32);
      const float D[2] = {u32_as_float(numbers.x), u32_as_float(numbers.y)};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        dS_rmem[2 * t + r] =
            pack_16bit<BFLOAT16>(S.at(r, t, 0) * (dP.at(r, t, 0) - D[0]), S.at(r, t, 1) * (dP.at(r, t, 1) - D[1]));
      }
    }
  }

  DEVICE void store_ds() {
    dS_turns.wait_empty(n);
    const u32 row = lane / 16 * 8 + lane % 8, unit = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
    const u32 target = smem.dS + (dS_turns.stage(n) * CONSUMERS + consumer) * DS_PART_BYTES + row * ATOM_ROW_BYTES + unit * 16;
#pragma unroll
    for (int k = 0; k < Br / 16; ++k) {
      const u32 operand[4] = {dS_rmem[4 * k], dS_rmem[4 * k + 1], dS_rmem[4 * k + 2], dS_rmem[4 * k + 3]};
      stmatrix_x4_trans(target + k * 16 * ATOM_ROW_BYTES, operand);
    }
    async_proxy_fence();
    warp_sync();  // all lanes have stored
    if (lane == 0) mbarrier_arrive(dS_turns.full_barrier(n));
  }

  // dQ of a tile has been computed. Its buffer of dS is given back; what this warp has of it is added to the workspace.
  DEVICE void add_dq(QueryTile of, int number) {
    wgmma_registers(dQ_rmem);
    dS_turns.release(number, lane);
    const int first_tile = DQ_BY_ROWS ? 0 : consumer * DQ_TILES, tiles = min(DQ_TILES, D_TILES - first_tile);
    const int strip = of.q_tile * (Br / STRIP) + (DQ_BY_ROWS ? consumer * 4 : 0) + warp;
    float* const dQ = block.workspace.strip(block.batch_head + of.head, strip) + first_tile * ACCUMULATOR;
    if (DETERMINISTIC && !(of.head == block.first_head && of.q_tile == block.tiles.first)) pass_on(of.previous(block.tiles));
    if constexpr (BULK_ADD) {
      const u32 staged = smem.dQ + (consumer * 4 + warp) * DQ_WARP_BYTES;
      if (lane == 0) bulk_wait_read();
      warp_sync();  // the tile before has been read
#pragma unroll
      for (int t = 0; t < DQ_TILES; ++t) {
        st_shared_vec4(staged + t * (ACCUMULATOR * 4) + lane * 16,
                       {float_as_u32(dQ_rmem[4 * t]), float_as_u32(dQ_rmem[4 * t + 1]), float_as_u32(dQ_rmem[4 * t + 2]),
                        float_as_u32(dQ_rmem[4 * t + 3])});
      }
      async_proxy_fence();
      warp_sync();  // all of it is there
      if (lane == 0 && tiles > 0) {
        if constexpr (DETERMINISTIC) turns.await(of, turns.count(of));
        bulk_add_f32(dQ, staged, tiles * (ACCUMULATOR * 4));
        bulk_commit();
      }
    } else {
      if constexpr (DETERMINISTIC) {
        if (lane == 0) turns.await(of, turns.count(of));
        warp_sync();  // it is this warp's turn
      }
#pragma unroll
      for (int t = 0; t < DQ_TILES; ++t) {
        if (t < tiles) red_add_f32x4(dQ + t * ACCUMULATOR + lane * 4, dQ_rmem[4 * t], dQ_rmem[4 * t + 1], dQ_rmem[4 * t + 2], dQ_rmem[4 * t + 3]);
      }
    }
  }

  // DETERMINISTIC: the next block may add to a tile, once what this warp has added is there.
  DEVICE void pass_on(QueryTile of) {
    if constexpr (!BULK_ADD) warp_sync();  // all lanes have added
    if (lane == 0) {
      if constexpr (BULK_ADD) bulk_wait();
      turns.pass_on(of);
    }
  }

  DEVICE void store() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = block.first_key + consumer * GROUP_KEYS + warp * 16 + lane / 4 + 8 * r;
      char* dK = head_address(p.dk, p.dk_stride, block.item.batch, block.item.kv_head) + key * p.dk_stride.seq * 2;
      char* dV = head_address(p.dv, p.dv_stride, block.item.batch, block.item.kv_head) + key * p.dv_stride.seq * 2;
      store_accumulator_row<D_TILES, BFLOAT16>(dK, dK_rmem, r, p.scale, key < p.seqlen_k, lane);
      store_accumulator_row<D_TILES, BFLOAT16>(dV, dV_rmem, r, 1.0f, key < p.seqlen_k, lane);
    }
  }
};

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  prepare_strip(p);
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap dO_map,
                 const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
                 const __grid_constant__ TensorMap V_map) {
  DYN_SMEM(start);
  const BackwardMemory smem(smem_address(start));
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // uniform, and known to be
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();

  if (thread == 0) smem.init_barriers();
  block_sync();  // nobody may wait on a barrier that is not initialised

  const BackwardWorkspace workspace(p);
  const KeyBlock block{p, workspace, key_item<Bc>(p, blockIdx.x, 8 * HEAD_DIM)};
  if (warpgroup == 0) {
    registers_release_to<PRODUCER_REGISTERS>();
    if (thread == 0) Producer{block, &dO_map, &Q_map, &K_map, &V_map, smem}.run();
  } else {
    registers_raise_to<CONSUMER_REGISTERS>();
    Consumer{block, smem, warpgroup - 1, thread / 32 % 4, thread % 32}.run();
    if (TRACE && thread == 128) write_trace(p, blockIdx.x, {block.item.k_block, block.item.kv_head, block.item.batch}, block.tiles, start_ns);
  }
}

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_convert(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  convert_strip(p);
}
