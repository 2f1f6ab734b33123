// A consumer warpgroup of the kernels of head dims to 128: its registers for 64 keys of a key block, its products for a tile of
// queries, and the steps between products. Each kernel has its own order of steps (backward/fa3_narrow64,
// backward/fa3_narrow128).
//
// A kernel defines first: DQ_FIRST, whether dQ of the previous tile is the first product of a tile; IN_HALVES, whether the first
// half of the exponentials comes before dP; V_HELD and K_HELD, the k-steps of V and K kept in registers.
#pragma once
#include "backward/fa3_common/gradients.cuh"
#include "backward/fa3_common/narrow_memory.cuh"

constexpr u32 NO_PENDING_TILE = ~0u;

// The successor of a tile: another tile of the item; where items overlap, the next item's first tile; or none.
enum Following { NEXT_TILE, NEXT_ITEM, NOTHING_MORE };

struct NarrowConsumer : TracedConsumer {
  const NarrowMemory& smem;
  const int consumer;

  // Every member has a value at entry: with undefined values ptxas runs out of registers and serialises wgmma (C7512).
  float dK_rmem[HEAD_DIM / 2]{}, dV_rmem[V_DIM / 2]{};
  float S_rmem[Br / 2]{}, dP_rmem[Br / 2]{};
  float dQ_rmem[DQ_TILES * 4]{}, dQ_last_rmem[DQ_IS_UNEVEN ? LAST_DQ_TILES * 4 : 1]{};  // one is used: dQ_of()
  u32 K_rmem[K_HELD > 0 ? 4 * K_HELD : 1]{}, V_rmem[V_HELD > 0 ? 4 * V_HELD : 1]{};
  u32 P_rmem[Br / 4]{}, dS_rmem[Br / 4]{};
  u32 P_slope_rmem[DS_HAS_WEIGHTS ? Br / 4 : 1]{};  // P times the slope of soft cap and score function, a factor of dS

  SumsOfArrays sums;
  bool masked = false;   // the tile has hidden scores
  u32 pending_tile = 0;  // index in the workspace of the previous tile, whose dQ is pending
  u32 n = 0;           // counts tiles over all items: the position in the rings of Q and dO; in the ring of dS, n + zero_tiles
  u32 end = 0;         // of the item's tiles
  u32 zero_tiles = 0;  // tiles of zeros in the ring of dS: see store_zero_ds()
  u32 item_n = 0;      // counts items: the position in the ring of descriptors
  u32 kv = 0;          // counts items with tiles: the position in the rings of K and V
  u32 pending_kv = 0;  // kv of the item whose K the pending dQ needs
  u32 unpublished_batch_plus_1 = 0;  // IS_PERSISTENT: head batch whose dQ additions are done but not yet counted; 0: none
  u64 start_ns = 0;    // TRACE
  Kept kept{};         // DROPOUT: of the tile. Last member: placed earlier, it changes builds without dropout

  DEVICE NarrowConsumer(const KernelParams& p, const NarrowMemory& smem, int consumer, int thread)
      : TracedConsumer(p, thread), smem(smem), consumer(consumer) {}

  DEVICE KeyBlock at(u32 item_n) const { return {p, smem.rings.descriptor(item_n)}; }
  DEVICE u32 pending_dS() const { return n - 1 + zero_tiles; }  // its position in the ring

  // Calls visit_tiles() for each item of the thread block that has tiles and that no earlier call has visited.
  template <typename VisitTiles>
  DEVICE void for_each_item(const VisitTiles& visit_tiles) {
    clear(dK_rmem);
    clear(dV_rmem);
    log.enter(WAIT_ITEM);
    for (; smem.rings.has(item_n); ++item_n) {
      block.descriptor_smem = at(item_n).descriptor_smem;
      begin_trace();
      const int count = block.count();
      // Publish the finished head batch before waiting for this item's first tile: the warp that prepares that tile's rows may
      // itself wait for the publication.
      if (IS_PERSISTENT && (count == 0 || block.head_batch() > unpublished_batch_plus_1)) publish();
      if (count > 0) {
        tile = block.first();
        masked = block.has_hidden_scores(tile);
        n = uniform(n);
        end = n + count;
        pending_kv = kv = uniform(kv);
        visit_tiles();
        ++kv;
      }
      store_dk(block);
      store_dv(block);
      if constexpr (IS_PERSISTENT) unpublished_batch_plus_1 = block.head_batch() + 1;
      end_trace();
      smem.rings.release(item_n, lane);
      log.enter(WAIT_ITEM);
    }
    sums.finish_all(p);
    if constexpr (IS_PERSISTENT) {
      publish();
    } else if constexpr (BULK_ADD && !DETERMINISTIC) {
      if (lane == 0) bulk_wait_read();  // shared memory ends with the block
    }
    log.close();
  }

  // P of an item's first tile. No product is in flight before and after: ptxas would serialise products that cross a join.
  DEVICE void begin_first_tile() {
    store_zero_ds();
    take_keys(kv);
    wait_full(smem.Q_ring, n);
    begin_products();
    issue_scores(n, kv, stamp_of(tile));
    await<0>(SCORES);
    make_weights(n);
    take_values();
    wait_full(smem.dO_ring, n);
    pending_tile = NO_PENDING_TILE;
  }
  template <Following NEXT>
  DEVICE void issue_next_scores() {
    if constexpr (NEXT == NEXT_ITEM) take_keys(kv + 1);
    wait_full(smem.Q_ring, n + 1);
    begin_products();
    issue_scores(n + 1, kv + (NEXT == NEXT_ITEM), TRACE_INSIDE && NEXT == NEXT_TILE ? stamp_of(block.next(tile)) : NO_TILE);
  }
  // While dK is in flight: the next tile becomes the current tile, and its P is made.
  template <Following NEXT>
  DEVICE void finish_tile() {
    pending_tile = block.workspace_tile(tile);
    pending_kv = kv;
    if constexpr (NEXT == NEXT_ITEM) {
      store_dv(block);
      block.descriptor_smem = at(item_n + 1).descriptor_smem;
    }
    if constexpr (NEXT != NOTHING_MORE) {
      tile = NEXT == NEXT_ITEM ? block.first() : block.next(tile);
      masked = block.has_hidden_scores(tile);
      await<1>(SCORES);
      make_weights(n + 1);
      wait_full(smem.dO_ring, n + 1);
    }
    await<0>(KEY_GRADIENTS);
    log.enter(NOTHING);
    wgmma_registers(dK_rmem);
    wgmma_registers(dS_rmem);
    smem.Q_ring.release(n, lane);
    if constexpr (NEXT == NEXT_ITEM) change_items();
    ++n;
  }
  // After the last tile of an item, once P of the next item's first tile is made.
  DEVICE void change_items() {
    store_dk(at(item_n));
    end_trace();
    ++item_n;
    begin_trace();
    kv = uniform(kv + 1);
    take_values();
  }
  // Calls visit_last_tile() if items overlap here: there is a next item with tiles, and its head batch is at most one after the
  // oldest unpublished one. (The warps that prepare later head batches wait for that publication: see background.cuh.) If this
  // item has one tile, the previous item's dQ is pending and still needs the K buffer that the next item would overwrite. Early
  // returns lead to the call: with one joined condition, the compiler keeps a second copy of end_previous_item() in
  // visit_last_tile().
  template <typename VisitLastTile>
  DEVICE bool goes_on_to_next_item(const VisitLastTile& visit_last_tile) {
    if constexpr (!ITEMS_OVERLAP) {
      return false;
    } else {
      if (pending_kv != kv || !smem.rings.has(item_n + 1)) return false;
      const KeyBlock next = at(item_n + 1);
      const int count = next.count();
      if (count == 0 || next.head_batch() > (unpublished_batch_plus_1 > 0 ? unpublished_batch_plus_1 : block.head_batch() + 1)) {
        return false;
      }
      visit_last_tile();
      end = n + uniform(u32(count));
      return true;
    }
  }
  // dQ of the last tile, when no other product is in flight.
  template <bool LAST>
  DEVICE void end_last_tile() {
    begin_dq<LAST>();
    await<0>(QUERY_GRADIENTS);
    enter(ADD);
    wgmma_registers(dK_rmem);
    wgmma_registers(dV_rmem);
    smem.rings.K.release(kv, lane);
    add_dq<LAST>();
  }

  // Once K or V has arrived: loads the k-steps of this warpgroup's part that stay in registers.
  template <int COUNT>
  DEVICE void hold(u32 (&held)[COUNT], u32 tile) {
    if constexpr (COUNT > 1) {
      load_swizzled_rows<WARPGROUP_KEYS, COUNT / 4>(held, tile, warp * 16 + lane % 16, lane / 16);
      wgmma_registers(held);
    }
  }
  DEVICE void take_keys(u32 kv) {
    wait_full(smem.rings.K, kv);
    hold(K_rmem, smem.K_of(kv) + consumer * K_TILE_BYTES);
  }
  DEVICE void take_values() {
    wait_full(smem.rings.V, kv);
    hold(V_rmem, smem.V + consumer * V_TILE_BYTES);
  }

  DEVICE static u64 Q_tile(u64 descriptor, u32 stage) { return descriptor + descriptor_step(Q_TILE_BYTES) * stage; }
  DEVICE static u64 dO_tile(u64 descriptor, u32 stage) { return descriptor + descriptor_step(DO_TILE_BYTES) * stage; }
  DEVICE void issue_scores(u32 n, u32 kv, u32 stamp) {
    issue_partly_held<Br, K_STEPS, K_HELD>(S_rmem, K_rmem, k_major_descriptor(smem.K_of(kv) + consumer * K_TILE_BYTES),
                                           Q_tile(k_major_descriptor(smem.Q), smem.Q_ring.stage(n)));
    commit(SCORES, stamp);
  }
  DEVICE void issue_dp() {
    begin_products();
    issue_partly_held<Br, V_STEPS, V_HELD>(dP_rmem, V_rmem, k_major_descriptor(smem.V + consumer * V_TILE_BYTES),
                                           dO_tile(k_major_descriptor(smem.dO), smem.dO_ring.stage(n)));
    commit(WEIGHT_GRADIENTS, stamp_of(tile));
  }
  DEVICE void issue_dv() {
    wgmma_accumulate_values<V_DIM, Br / 16, Element>(
        dV_rmem, P_rmem, dO_tile(mn_major_descriptor<Br>(smem.dO), smem.dO_ring.stage(n)));
    commit(VALUE_GRADIENTS, stamp_of(tile));
  }
  DEVICE void issue_dk() {
    wgmma_accumulate_values<HEAD_DIM, Br / 16, Element>(
        dK_rmem, dS_rmem, Q_tile(mn_major_descriptor<Br>(smem.Q), smem.Q_ring.stage(n)));
    commit(KEY_GRADIENTS, stamp_of(tile));
  }
  DEVICE void await_dv() {
    await<0>(VALUE_GRADIENTS);
    wgmma_registers(dV_rmem);
    wgmma_registers(P_rmem);
  }

  // dQ of the previous tile. LAST: in the consumer that has the last columns (DQ_IS_UNEVEN).
  template <bool LAST>
  DEVICE auto& dQ_of() {
    if constexpr (LAST) {
      return dQ_last_rmem;
    } else {
      return dQ_rmem;
    }
  }
  template <bool LAST>
  DEVICE void begin_dq() {
    wait_full(smem.dS_ring, pending_dS(), WAIT_TURN);
    if constexpr (!DQ_FIRST) async_proxy_fence();  // dS has been stored, and -D read where the copy engine writes next
    begin_products();
    constexpr int NEXT_COLUMNS = DQ_BY_ROWS ? 0 : HEAD_DIM <= ATOM_COLUMNS ? DQ_TILES * 16 : ATOM_BYTES;
    constexpr int NEXT_ROWS = DQ_BY_ROWS ? 64 * ATOM_ROW_BYTES : 0;
    const u32 dS = smem.dS_of(pending_dS(), 0) + consumer * NEXT_ROWS;
    const u32 K = smem.K_of(pending_kv) + consumer * NEXT_COLUMNS;
    auto& dQ = dQ_of<LAST>();
    wgmma_registers(dQ);
    issue_dq<Bc, false, LAST ? LAST_DQ_TILES : DQ_TILES>(dQ, dS, K);
    commit(QUERY_GRADIENTS, NO_TILE);
  }
  // Adds the dQ of begin_dq(). YOUNGER: wgmma groups issued since, which stay pending. At an item's first tile there is no dQ to
  // add, unless items overlap.
  template <bool LAST, int YOUNGER>
  DEVICE void end_dq() {
    await<YOUNGER>(QUERY_GRADIENTS);
    enter(ADD);
    if (pending_tile != NO_PENDING_TILE) {
      add_dq<LAST>();
    } else {
      wgmma_registers(dQ_of<LAST>());
      smem.dS_ring.release(pending_dS(), lane);
    }
  }
  // dQ of the previous tile has landed: releases its buffer of dS, and adds this warp's part.
  template <bool LAST>
  DEVICE void add_dq() {
    constexpr int TILES = LAST ? LAST_DQ_TILES : DQ_TILES;
    auto& dQ = dQ_of<LAST>();
    wgmma_registers(dQ);
    smem.dS_ring.release(pending_dS(), lane);
    float* const target = NarrowMemory::dq_of_warp(p, pending_tile, consumer, warp);
    const int existing = DQ_IS_UNEVEN ? TILES : NarrowMemory::dq_tiles(consumer);
    const u32 staged = smem.staged(consumer, warp);
    const DqHandover handover = smem.dQ_handover;
    if constexpr (DETERMINISTIC && BULK_ADD) {
      handover.wait_empty(n - 1);
      stage_dq<TILES>(staged, dQ, lane);
      if (lane == 0) mbarrier_arrive(handover.full_barrier(n - 1));
    } else if constexpr (BULK_ADD) {
      if (lane == 0) bulk_wait_read();
      if constexpr (IS_PERSISTENT) publish();
      warp_sync();  // the copy engine has read what the warp staged before
      stage_dq<TILES>(staged, dQ, lane);
      if (lane == 0 && existing > 0) {
        bulk_add_f32(target, staged, existing * (ACCUMULATOR * 4));
        bulk_commit();
      }
    } else {
      if constexpr (DETERMINISTIC) handover.wait_full(n - 1);
      if constexpr (IS_PERSISTENT) publish();
      ::add_dq<TILES>(target, dQ, existing, lane);
      if constexpr (DETERMINISTIC) {
        warp_sync();  // all lanes have added
        handover.release(n - 1, lane);
      }
      if constexpr (ITEMS_OVERLAP) end_previous_item();
    }
  }
  // Publishes the additions of an item one tile after the last of them, which has had time to complete.
  DEVICE void publish() {
    if constexpr (!BULK_ADD) warp_sync();  // all lanes have added
    if (lane == 0 && unpublished_batch_plus_1 > 0) publish_added(p, unpublished_batch_plus_1 - 1);
    unpublished_batch_plus_1 = 0;
  }
  // If the dQ just added was the previous item's last one, this warp needs nothing of that item any more.
  DEVICE void end_previous_item() {
    if (pending_kv == kv) return;
    smem.rings.K.release(pending_kv, lane);
    unpublished_batch_plus_1 = at(item_n - 1).head_batch() + 1;
    smem.rings.release(item_n - 1, lane);
  }

  DEVICE int lane_key() const { return consumer * WARPGROUP_KEYS + warp * 16 + lane / 4; }  // the lane's first in the block
  DEVICE void make_weights(u32 n) {
    begin_weights(n);
    if constexpr (!IN_HALVES) end_weights(n);
  }
  DEVICE void begin_weights(u32 n) {
    enter(SOFTMAX);
    wgmma_registers(S_rmem);
    cap_scores<SOFTCAP && !SCORE>(fragment_view(S_rmem), p.softcap);
    if (masked) hide_scores_of_tile(block, S_rmem, tile, lane_key(), lane);
    draw_kept(kept, block, tile, lane_key(), lane);
    if constexpr (IN_HALVES) exponentials_of<0, Br / 16>(n);
  }
  DEVICE void end_weights(u32 n) {
    exponentials_of<IN_HALVES ? Br / 16 : 0, Br / 8>(n);
    if constexpr (DS_HAS_WEIGHTS) {
#pragma unroll
      for (int i = 0; i < Br / 4; ++i) P_slope_rmem[i] = Element::pack(S_rmem[2 * i], S_rmem[2 * i + 1]);
      wgmma_registers(P_slope_rmem);
    }
    wgmma_registers(P_rmem);
  }
  template <int FROM, int TO>
  DEVICE void exponentials_of(u32 n) {
    exponentials<FROM, TO>(block, tile, lane_key(), S_rmem, P_rmem, smem.lse + smem.Q_ring.stage(n) * TILE_STATS_BYTES, kept,
                           lane);
  }
  DEVICE void make_gradients() {
    const u32 neg_delta = smem.neg_delta + smem.dO_ring.stage(n) * TILE_STATS_BYTES;
    if constexpr (DROPOUT && !SOFTCAP && !SCORE) {
      gradients_of_kept(p, dS_rmem, dP_rmem, neg_delta, P_slope_rmem, P_rmem, lane);
    } else {
      add_neg_delta(p, dP_rmem, neg_delta, kept, lane);
      if constexpr (SCORE_GRADIENTS) add_array_gradients(sums);
      gradients(dS_rmem, dP_rmem, [&](int t, int r) { return (DS_HAS_WEIGHTS ? P_slope_rmem : P_rmem)[2 * t + r]; });
    }
    store_ds(n + zero_tiles);
  }
  // SCORE: dP_rmem holds dP - D. If the function has no slope, P_slope_rmem holds P times the slope of a soft cap.
  template <typename Sums>
  DEVICE void add_array_gradients(Sums& sums) {
    constexpr bool SERVES = !Function::WEIGHTS_READ_SCORES && !((SOFTCAP || DROPOUT) && Function::HAS_SLOPE);
    static_assert(!SCORE_GRADIENTS || SERVES, "fa2_backward serves gradients that need the score, or two slopes");
    const ScoresOfTile scores(block, tile, lane_key(), lane);
    const auto difference = fragment_view(dP_rmem);
    sums.template add_all<2, Br / 8>(
        p, scores.function, scores.columns, [&](int t, int e) { return scores.row(t, e); }, [](int, int, int) { return 0.0f; },
        [&](int r, int t, int e) {
          return unpack_16bit((SOFTCAP || DROPOUT ? P_slope_rmem : P_rmem)[2 * t + r], e) * difference.at(r, t, e);
        });
  }
  // If dQ comes late in a tile, the warps that issue dQ fence dS: a fence here would wait for this warp's stores.
  DEVICE void store_ds(u32 position) {
    wait_empty(smem.dS_ring, position);
    ::store_ds(smem.dS_of(position, consumer), dS_rmem, warp, lane);
    if constexpr (DQ_FIRST) async_proxy_fence();
    warp_sync();  // all lanes have stored
    if (lane == 0) mbarrier_arrive(smem.dS_ring.full_barrier(position));
  }
  // If items do not overlap here: zeros take the place of the previous tile's dS, so that every tile has a previous one.
  DEVICE void store_zero_ds() {
#pragma unroll
    for (int i = 0; i < Br / 4; ++i) dS_rmem[i] = 0;
    ++zero_tiles;
    store_ds(pending_dS());
  }

  // Store dK or dV of a key block, and clear it for the next key block.
  DEVICE void store_dk(const KeyBlock& block) {
    log.enter(STORE);
    store_keys(block, p.dk, p.dk_stride, dK_rmem, p.scale, consumer * WARPGROUP_KEYS + warp * 16, lane);
    clear(dK_rmem);
  }
  DEVICE void store_dv(const KeyBlock& block) {
    log.enter(STORE);
    store_keys(block, p.dv, p.dv_stride, dV_rmem, of_kept(p, 1.0f), consumer * WARPGROUP_KEYS + warp * 16, lane);
    clear(dV_rmem);
  }
  template <int REGISTERS>
  DEVICE static void clear(float (&gradient)[REGISTERS]) {
#pragma unroll
    for (int x = 0; x < REGISTERS; ++x) gradient[x] = 0.0f;
  }

  DEVICE void begin_trace() {
    if constexpr (TRACE) start_ns = global_timer();
    enter_item();
  }
  DEVICE void end_trace() const {
    const KeyBlock ended = at(item_n);
    if (TRACE && threadIdx.x == 128 && (!RAGGED || ended.first_key() < ended.keys())) {
      write_trace(p, ended.index(), {ended.k_block(), ended.kv_head(), ended.batch()}, ended.tiles(), start_ns);
    }
  }
  // A value that ptxas cannot prove warp-uniform costs two instructions per wgmma: its descriptor is built in vector registers
  // and moved to uniform ones. The position n of a persistent block's tile follows from shared memory.
  DEVICE static u32 uniform(u32 x) { return IS_PERSISTENT ? shfl(x, 0) : x; }
};
