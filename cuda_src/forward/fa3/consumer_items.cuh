// The state of a consumer warpgroup (struct Consumer of kernel.cu), and its operations that do not decide the order of the
// pipeline: beginning an item, waits, products, giving back buffers, storing an item.
#pragma once
#include "forward/fa3/tiles.cuh"
#include "forward/params.cuh"
#include "shared/named_barriers.cuh"

// For small scores the soft cap is a polynomial inside the softmax (capped_softmax() of fast_softcap.cuh). It is a pass of its
// own if ALiBi comes between cap and softmax, if registers do not suffice, or INVARIANT: the rows of a warp choose together.
constexpr bool CAP_FOLDS =
    SOFTCAP && !INVARIANT && !ALIBI && !SCORE && !is_irregular(MASK_KIND) && !(HEAD_DIM > 128 && MASK_KIND == MASK_BAND);

struct ConsumerItems {
  const ForwardParams& p;
  const TensorMap* O_map;
  const SharedMemory& smem;
  const int consumer, warp, lane;
  RingCursor<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  RingCursor<Q_STAGES> Q_ring{};
  const u64 Q_desc = k_major_descriptor(MASK_KIND == MASK_BITS ? shfl(Q_tiles(), 0) : Q_tiles());
  const u64 K_desc = k_major_descriptor(smem.K), V_desc = mn_major_descriptor<Bc>(smem.V);

  Scores S_rmem;
  Output O_rmem = {};
  Probabilities P_rmem;
  Queries Q_rmem;
  Softmax softmax;

  u32 round = 0;
  u32 descriptor;         // address of the current item's descriptor
  int row;                // this lane's first query row; its second is row + 8
  Tiles tiles;            // of the current item
  Alibi alibi{0.0f, 0};   // ALIBI: of the current item
  ScoreFunction<ForwardParams> function{p, 0, 0, 0};  // SCORE: of the current item
  PhiloxRows<CONSUMERS <= 3 && V_DIM <= 128> philox{};  // DROPOUT: of the current item
  int O_buffer = -1;      // the buffer of Q that the next O leaves through
  u64 start_ns[2] = {};   // TRACE: of the item being stored, of the current one
  mutable PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);

  DEVICE u32 Q_tiles() const { return smem.Q + consumer * Q_TILE_BYTES; }

  // Waits for the next item and its Q. False when there is none.
  DEVICE bool begin_item() {
    const int buffer = Q_ring.stage * CONSUMERS + consumer;
    inside.enter(WAIT_ITEM);
    mbarrier_wait(smem.Q_full + 8 * buffer, Q_ring.phase);
    descriptor = smem.item(round++);
    const Item item = read_shared<Item>(descriptor);
    if (item.q_block == NO_MORE_ITEMS) return false;
    if constexpr (TRACE) start_ns[1] = global_timer();
    inside.item(item.index + gridDim.x * blockIdx.y);
    inside.enter(NOTHING);
    if constexpr (Q_IN_REGISTERS) {
      load_queries(Q_rmem, smem.Q + buffer * Q_TILE_BYTES, warp, lane);
      if constexpr (!STORE_FROM_SMEM) give_back_queries(buffer);
      Q_ring.advance();
    }
    row = tiles.begin(p, item, consumer, warp, lane);
    const int own_head = item.head + head_of_row(consumer * GROUP_ROWS + warp * 16);
    if constexpr (ALIBI) alibi = Alibi(p, sequence_of_item(p, item, descriptor), own_head);
    if constexpr (DROPOUT) {
      philox = {p, u32(item.batch * p.heads + own_head), row, KeptWeights<S_TILES, false>::first_drawn(lane % 4 * 2)};
    }
    if constexpr (SCORE) {
      const int diagonal = int(diagonal_of(p, sequence_of_item(p, item, descriptor)));
      function = ScoreFunction<ForwardParams>(p, min(item.batch, p.batch - 1), own_head, diagonal);
    }
    return true;
  }

  // Gives back `count` tiles of K and V that this consumer does not need.
  DEVICE void pass_over(int count) {
    for (int i = 0; i < count; ++i) {
      K_ring.wait_full(inside, NO_TILE);
      K_ring.release(lane);
      K_ring.advance();
      begin_slot();
      end_slot();
      V_ring.wait_full(inside, NO_TILE);
      V_ring.release(lane);
      V_ring.advance();
    }
  }

  // Stores the item with descriptor `done`.
  DEVICE void store(u32 done) {
    const Item item = read_shared<Item>(done);
    inside.enter(STORE, item.index);
    if constexpr (SPLIT_KEYS) {
      softmax.reduce_sum();
      leave_part(p, item, consumer * GROUP_ROWS + warp * 16, 0, fragment_view(O_rmem), softmax, lane);
    } else {
      const int first_row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16;
      store_output(p, O_map, item, sequence_of_item(p, item, done), first_row, O_rmem, softmax,
                   smem.Q + O_buffer * Q_TILE_BYTES, warp, lane);
    }
    if (TRACE && threadIdx.x == 128) {
      const TileRange visited = tiles.visited(p, item, done);
      if (visited.total >= 0) write_trace(p, item.index, item, visited, start_ns[0]);
    }
#pragma unroll
    for (int i = 0; i < V_DIM / 2; ++i) O_rmem[i] = 0.0f;
    inside.enter(NOTHING);
  }

  // Ping-pong: consumers issue their products one after another, so that the softmax of one overlaps with the products of others.
  DEVICE void begin_slot() const {
    inside.enter(WAIT_TURN, tiles.j);
    if constexpr (PING_PONG) bar_sync(PING_PONG_BARRIER + consumer, 256);
    inside.enter(ISSUE, tiles.j);
  }
  DEVICE void end_slot() const {
    if constexpr (PING_PONG) bar_arrive(PING_PONG_BARRIER + (consumer + 1) % CONSUMERS, 256);
  }

  DEVICE u64 K_tile_desc() const { return K_desc + descriptor_step(K_TILE_BYTES) * K_ring.stage; }
  DEVICE void issue_next_scores() {
    const u64 K_tile = K_tile_desc();
    issue_scores(S_rmem, Q_rmem, Q_desc + descriptor_step(CONSUMERS * Q_TILE_BYTES) * Q_ring.stage, K_tile, inside, tiles.j);
  }
  DEVICE void issue_next_values() {
    issue_values(O_rmem, P_rmem, V_desc + descriptor_step(V_TILE_BYTES) * V_ring.stage, inside, tiles.j + 1);
  }
  DEVICE void release_scores() {
    wgmma_registers(S_rmem);
    if constexpr (Q_IN_REGISTERS) wgmma_registers(Q_rmem);  // else ptxas may reuse them while wgmma still reads them
    inside.landed(SCORES, tiles.j);
    inside.enter(SOFTMAX, tiles.j);
    K_ring.release(lane);
    K_ring.advance();
  }
  DEVICE void release_values() {
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    inside.landed(VALUES, NO_TILE);
    V_ring.release(lane);
    V_ring.advance();
  }

  // No further product of this item reads Q.
  DEVICE void end_queries() {
    if constexpr (Q_IN_REGISTERS) {
      O_buffer = consumer;
    } else {
      O_buffer = Q_ring.stage * CONSUMERS + consumer;
      if constexpr (!STORE_FROM_SMEM) give_back_queries(O_buffer);
      Q_ring.advance();
    }
  }
  DEVICE void give_back_queries(int buffer) const {
    if constexpr (LISTED) warp_sync();  // all lanes have read the item's descriptor, which the producer overwrites next
    if (lane == 0) {
      if constexpr (STORE_FROM_SMEM) bulk_wait_read();
      mbarrier_arrive(smem.Q_empty + 8 * buffer);
    }
  }

  // DROPOUT: the draw stands here because exponentials leave issue slots free. While scores are in flight, ptxas puts the draw
  // between two products, and the second product starts late.
  DEVICE void pack_weights() {
    pack(P_rmem, S_rmem);
    if constexpr (DROPOUT) {
      KeptWeights<S_TILES, false> kept;
      kept.draw(philox, tiles.j * Bc);
#pragma unroll
      for (int i = 0; i < Bc / 4; ++i) P_rmem[i] &= kept.pair(i % 2, i / 4 * 2 + i % 4 / 2);
    }
  }

  template <typename Tag>
  DEVICE void change_scores() {
    const auto S = fragment_view(S_rmem);
    if constexpr (SCORE) apply_function<INVARIANT>(S, function, row, tiles.j * Bc + S.lane_column(lane));
    if constexpr (SOFTCAP && !INVARIANT && Tag::value == CLEAR) {
      // The polynomial is tried first where that is faster (NOTES.md); under irregular masks it would spill.
      constexpr bool MOSTLY_NEAR_0 = HEAD_DIM <= 128 && !is_irregular(MASK_KIND);
      cap_clear_scores<MOSTLY_NEAR_0>(S, p.softcap);
    } else if (!CAP_FOLDS || !cap_near_0(S, p.softcap)) {
      if constexpr (CAP_FOLDS) wgmma_registers(S_rmem);
      cap_scores<SOFTCAP>(S, p.softcap);
    }
    if constexpr (ALIBI) alibi.change(S, p.scale_log2, row, tiles.j * Bc + lane % 4 * 2);
  }
  DEVICE void load_mask() { tiles.load_mask(p, descriptor, row, lane, smem.tree(K_ring.stage)); }
  template <typename Tag>
  DEVICE void mask(Tag) {
    tiles.hide<Tag::value>(fragment_view(S_rmem), p, descriptor, row, lane);
  }
};
