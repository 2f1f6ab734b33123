// What a warpgroup of consumers of backward/fa3/kernel.cu has of its key block and of a tile of queries, which products it asks
// for, and what it does with them. In which order, the kernel says.
#pragma once
#include "backward/fa3/memory.cuh"
#include "shared/phases.cuh"

static_assert(NUM_STAGES > 1 && DO_STAGES > 1 && DS_STAGES > 1, "tiles of two turns are in use");

// Whether dP is the first product of a tile, or dQ of the tile before. If so, what a warpgroup has stored of dS is fenced by those
// who ask for dQ, a tile later, and not by who stores it: there it would wait for its stores.
constexpr bool DP_FIRST = HEAD_DIM <= 64;
// Whether dP is asked for between two halves of a tile's exponentials, and so runs under the second. No other products are in flight
// then, and half of S has gone into P: there are registers for it.
constexpr bool IN_HALVES = DP_FIRST && RUNS_ON;

// Whether dP is asked for with dQ of the tile before, and runs while that is added. With a soft cap, or where blocks run on
// beyond 96 columns, there are no registers for both: ptxas then waits for each product before it asks for the next one.
constexpr bool DP_WITH_DQ = !DP_FIRST && !SOFTCAP && (HEAD_DIM <= 96 || !RUNS_ON);

// Whether thread blocks that run on go from an item's last tile to the next item's first one as from any tile to the next.
constexpr bool LINKED = RUNS_ON && K_STAGES > 1;

// Of the key block's K and V: k-steps that a warpgroup keeps in registers, as operands of S and dP. A soft cap takes these.
constexpr int K_HELD = SOFTCAP ? 0 : K_STEPS_HELD, V_HELD = SOFTCAP ? 0 : V_STEPS_HELD;

// One warpgroup, 64 keys.
struct BackwardConsumer {
  const BackwardParams& p;
  const BackwardMemory& smem;
  const int consumer, warp, lane;
  const Ring<NUM_STAGES> Q_turns = smem.Q_turns();
  const Ring<DO_STAGES> dO_turns = smem.dO_turns();
  const Ring<DS_STAGES> dS_turns = smem.dS_turns();
  const DqHandover dQ_handover = smem.dQ_handover();

  float dK_rmem[HEAD_DIM / 2], dV_rmem[HEAD_DIM / 2];
  float S_rmem[Br / 2], dP_rmem[Br / 2];
  float dQ_rmem[DQ_TILES * 4], dQ_left_rmem[DQ_UNEVEN ? DQ_TILES_LEFT * 4 : 1];  // one of them: see dQ_of()
  u32 K_rmem[K_HELD > 0 ? 4 * K_HELD : 1], V_rmem[V_HELD > 0 ? 4 * V_HELD : 1];
  u32 P_rmem[Br / 4], W_rmem[SOFTCAP ? Br / 4 : 1], dS_rmem[Br / 4];  // W: P times the slope of the cap, which dS is a multiple of

  KeyBlock block{p, 0};
  QueryTile tile;
  bool masked;    // some score of the tile is hidden
  u32 before;       // number in the workspace of the tile before
  u32 n = 0;        // number of the tile, over all items; that of its dS is n + zeros
  u32 end = 0;      // of the item's tiles
  u32 zeros = 0;    // tiles of zeros that items have begun with
  u32 item = 0;     // number of the item
  u32 keys = 0;     // of those with tiles: whose K and V are in use
  u32 keys_before;  // and whose K dQ of the tile before needs
  u32 untold = 0;   // RUNS_ON: group of the key block that has been added to dQ while nobody has been told of it, + 1
  u64 start_ns = 0;  // TRACE
  INSIDE(PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);)
  INSIDE(DEVICE u32 number_of(QueryTile tile) const { return query_tile_number(tile.head, block.q_tile(tile)); })
  INSIDE(DEVICE u32 number() const { return number_of(tile); })

  DEVICE u64 query_tile(u64 descriptor, u32 stage) const { return descriptor + descriptor_step(QUERY_TILE_BYTES) * stage; }

  // Of this warpgroup's K or V, once it is there: the k-steps that are kept in registers.
  template <int COUNT>
  DEVICE void hold(u32 (&held)[COUNT], u32 tiles) {
    if constexpr (COUNT > 1) {
      load_swizzled_rows<GROUP_KEYS, COUNT / 4>(held, tiles + consumer * KEY_TILE_BYTES, warp * 16 + lane % 16, lane / 16);
      wgmma_registers(held);
    }
  }

  DEVICE void issue_scores(u32 n, u32 keys) {
    issue_partly_held<Br, K_HELD>(S_rmem, K_rmem, k_major_descriptor(smem.K_of(keys) + consumer * KEY_TILE_BYTES),
                                  query_tile(k_major_descriptor(smem.Q), Q_turns.stage(n)));
  }
  DEVICE void issue_dp() {
    issue_partly_held<Br, V_HELD>(dP_rmem, V_rmem, k_major_descriptor(smem.V + consumer * KEY_TILE_BYTES),
                                  query_tile(k_major_descriptor(smem.dO), dO_turns.stage(n)));
  }
  DEVICE void issue_dv() {
    wgmma_accumulate_values<HEAD_DIM, Br / 16, Element>(
        dV_rmem, P_rmem, query_tile(mn_major_descriptor<Br>(smem.dO), dO_turns.stage(n)));
    wgmma_commit();
  }
  DEVICE void issue_dk() {
    wgmma_accumulate_values<HEAD_DIM, Br / 16, Element>(
        dK_rmem, dS_rmem, query_tile(mn_major_descriptor<Br>(smem.Q), Q_turns.stage(n)));
    wgmma_commit();
  }
  // LEFT: of the consumer that has the columns which are left (DQ_UNEVEN).
  template <bool LEFT>
  DEVICE auto& dQ_of() {
    if constexpr (LEFT) {
      return dQ_left_rmem;
    } else {
      return dQ_rmem;
    }
  }
  template <bool LEFT>
  DEVICE void issue_dq(u32 turn, u32 keys) {
    constexpr int NEXT_COLUMNS = DQ_BY_ROWS ? 0 : HEAD_DIM <= ATOM_COLUMNS ? DQ_TILES * 16 : GROUP_KEYS * ATOM_ROW_BYTES;
    constexpr int NEXT_ROWS = DQ_BY_ROWS ? 64 * ATOM_ROW_BYTES : 0;
    const u32 dS = smem.dS + dS_turns.stage(turn) * (KEY_GROUPS * DS_PART_BYTES) + consumer * NEXT_ROWS;
    const u32 K = smem.K_of(keys) + consumer * NEXT_COLUMNS;
    ::issue_dq<LEFT ? DQ_TILES_LEFT : DQ_TILES>(dQ_of<LEFT>(), dS, K);
  }

  DEVICE int lane_key() const { return consumer * GROUP_KEYS + warp * 16 + lane / 4; }  // the first of this lane, in the block
  DEVICE void make_weights(u32 n) {
    begin_weights(n);
    if constexpr (!IN_HALVES) end_weights(n);
  }
  DEVICE void begin_weights(u32 n) {
    wgmma_registers(S_rmem);
    cap_scores<SOFTCAP>(fragment_view(S_rmem), p.softcap);
    if (masked) hide_scores_of_tile(block, S_rmem, tile, lane_key(), lane);
    if constexpr (IN_HALVES) exponentials_of<0, Br / 16>(n);
  }
  DEVICE void end_weights(u32 n) {
    exponentials_of<IN_HALVES ? Br / 16 : 0, Br / 8>(n);
    if constexpr (SOFTCAP) {
#pragma unroll
      for (int i = 0; i < Br / 4; ++i) W_rmem[i] = Element::pack(S_rmem[2 * i], S_rmem[2 * i + 1]);
      wgmma_registers(W_rmem);
    }
    wgmma_registers(P_rmem);
  }
  template <int FROM, int TO>
  DEVICE void exponentials_of(u32 n) {
    exponentials<FROM, TO>(block, tile, lane_key(), S_rmem, P_rmem, smem.lse + Q_turns.stage(n) * NUMBERS_BYTES, lane);
  }
  DEVICE void make_gradients() {
    take_delta(dP_rmem, smem.delta + dO_turns.stage(n) * NUMBERS_BYTES, lane);
    gradients(dS_rmem, dP_rmem, [&](int t, int r) { return (SOFTCAP ? W_rmem : P_rmem)[2 * t + r]; });
    store_ds(n + zeros);
  }
  // Where no item was before, zeros take the place of its last tile's dS, so that every tile has one before it.
  DEVICE void store_ds(u32 turn) {
    INSIDE(inside.enter(WAIT_SPACE, number());)
    dS_turns.wait_empty(turn);
    INSIDE(inside.enter(SOFTMAX, number());)
    ::store_ds(smem.dS + (dS_turns.stage(turn) * KEY_GROUPS + consumer) * DS_PART_BYTES, dS_rmem, warp, lane);
    if constexpr (!DP_FIRST) async_proxy_fence();
    warp_sync();  // all lanes have stored
    if (lane == 0) mbarrier_arrive(dS_turns.full_barrier(turn));
  }
  DEVICE void store_no_ds() {
#pragma unroll
    for (int i = 0; i < Br / 4; ++i) dS_rmem[i] = 0;
    ++zeros;
    store_ds(n - 1 + zeros);
  }

  // Of an item, a tile after its last addition, which has had the time to end.
  DEVICE void tell_added() {
    if constexpr (!BULK_ADD) warp_sync();  // all lanes have added
    if (lane == 0 && untold > 0) ::tell_added(p, untold - 1);
    untold = 0;
  }
  // dQ of the tile before has been added. If that was the last one of the item before, nothing of it is needed any more.
  DEVICE void end_item_before() {
    if (keys_before == keys) return;
    smem.items.keys.release(keys_before, lane);
    untold = KeyBlock{p, smem.items.record(item - 1)}.group() + 1;
    smem.items.release(item - 1, lane);
  }

  // dQ of the tile before has been computed. Its buffer of dS is given back; what this warp has of it is added.
  template <bool LEFT>
  DEVICE void add_dq() {
    constexpr int TILES = LEFT ? DQ_TILES_LEFT : DQ_TILES;
    auto& dQ = dQ_of<LEFT>();
    wgmma_registers(dQ);
    dS_turns.release(n - 1 + zeros, lane);
    float* const target = BackwardMemory::dq_of_warp(p, before, consumer, warp);
    const int existing = DQ_UNEVEN ? TILES : BackwardMemory::dq_tiles(consumer);
    const u32 staged = smem.staged(consumer, warp);
    if constexpr (DETERMINISTIC && BULK_ADD) {
      dQ_handover.wait_empty(n - 1);
      stage_dq<TILES>(staged, dQ, lane);
      if (lane == 0) mbarrier_arrive(dQ_handover.full_barrier(n - 1));
    } else if constexpr (BULK_ADD) {
      if (lane == 0) bulk_wait_read();
      if constexpr (RUNS_ON) tell_added();
      warp_sync();  // the tile before has been read
      stage_dq<TILES>(staged, dQ, lane);
      if (lane == 0 && existing > 0) {
        bulk_add_f32(target, staged, existing * (ACCUMULATOR * 4));
        bulk_commit();
      }
    } else {
      if constexpr (DETERMINISTIC) dQ_handover.wait_full(n - 1);
      if constexpr (RUNS_ON) tell_added();
      ::add_dq<TILES>(target, dQ, existing, lane);
      if constexpr (DETERMINISTIC) {
        warp_sync();  // all lanes have added
        dQ_handover.release(n - 1, lane);
      }
      if constexpr (LINKED) end_item_before();
    }
  }

  // dK and dV of a key block, which begin anew.
  DEVICE void store_dk(const KeyBlock& block) {
    store_keys(block, p.dk, p.dk_stride, dK_rmem, p.scale, consumer * GROUP_KEYS + warp * 16, lane);
    clear(dK_rmem);
  }
  DEVICE void store_dv(const KeyBlock& block) {
    store_keys(block, p.dv, p.dv_stride, dV_rmem, 1.0f, consumer * GROUP_KEYS + warp * 16, lane);
    clear(dV_rmem);
  }
  DEVICE static void clear(float (&gradient)[HEAD_DIM / 2]) {
#pragma unroll
    for (int x = 0; x < HEAD_DIM / 2; ++x) gradient[x] = 0.0f;
  }
};
