// A consumer warpgroup of FlashAttention-3 (forward/fa3/kernel.cu, whose Consumer this is a part of): what it has, which item
// and which tile it is at, what it waits for, issues and gives back, and how an item leaves. What becomes of its registers is in
// consumer.cuh; when it does what, in the kernel.
#pragma once
#include "shared/params.cuh"
#include "primitives/mbarrier.cuh"
#include "forward/fa3/consumer.cuh"
#include "shared/named_barriers.cuh"
#include "shared/phases.cuh"
#include "wgmma/pipeline.cuh"
#include "forward/fa3/memory.cuh"
#include "forward/fa3/tile_list.cuh"

// A cap of scores near 0 is part of the softmax (capped_softmax() of shared/score.cuh). Else it is a pass of its own: where ALiBi
// comes between the two, and where registers do not suffice.
constexpr bool CAP_FOLDS = SOFTCAP && !ALIBI && !is_looked_up(MASK_KIND) && !(HEAD_DIM > 128 && MASK_KIND == MASK_BAND);

struct ConsumerItems {
  const AttentionParams& p;
  const TensorMap* O_map;
  const SharedMemory& smem;
  const int consumer, warp, lane;
  RingCursor<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  RingCursor<Q_STAGES> Q_ring{};
  const u64 Q_desc = k_major_descriptor(smem.Q + consumer * Q_TILE_BYTES);
  const u64 K_desc = k_major_descriptor(smem.K), V_desc = mn_major_descriptor<Bc>(smem.V);

  Scores S_rmem;
  Output O_rmem = {};
  Probabilities P_rmem;
  Queries Q_rmem;
  OnlineSoftmax<2> softmax;

  u32 round = 0;
  u32 descriptor;             // of the item at hand
  int row;                // this lane's first query row; its second is 8 further on
  int j;                  // the key tile whose scores are computed next
  TileRange tiles;        // that this consumer's rows see; LISTED: of a trace, what the item visits
  int above, below;       // tiles that the block visits after and before those
  Alibi alibi{0.0f, 0};   // ALIBI: of the item at hand
  ListedTile listed{};    // LISTED: the tile whose scores are computed, which is j
  TileTally tally[2];     // of a trace: of the item being stored, of the one at hand
  int O_buffer = -1;      // that the O at hand leaves from
  u64 start_ns[2] = {};   // of the item being stored, of the one at hand
  mutable PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);

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
    begin_tiles(item);
    if constexpr (ALIBI) {
      if constexpr (LENGTHS_KIND == DENSE) {
        alibi = Alibi(p, sequence_of(p, item.batch), item.head);
      } else {
        alibi = Alibi(p, read_sequence(descriptor), item.head);
      }
    }
    return true;
  }

  // The rows of one consumer may see fewer tiles than the block visits. Rows past the end need none, but one is computed
  // all the same, to keep the pipeline's shape; so it is for rows that see none, and all of it is masked.
  // Where keys are split, there are few masked tiles and one item: all rows visit the same.
  DEVICE void begin_tiles(const Item& item) {
    if constexpr (LISTED) {
      row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16 + lane / 4;
      if constexpr (TRACE) tally[1] = {};
      return;
    }
    if constexpr (SPLIT_KEYS) {
      row = item.q_block * HEAD_ROWS + query_of_row(consumer * GROUP_ROWS + warp * 16) + lane / 4;
      tiles = tiles_of(p, item.q_block);
      j = tiles.end - 1;
      above = below = 0;
      return;
    }
    const int group = item.q_block * CONSUMERS + consumer;
    const bool exists = group * GROUP_ROWS < p.seqlen_q;
    row = group * GROUP_ROWS + warp * 16 + lane / 4;
    tiles = visited_tiles<GROUP_ROWS, Bc>(p, group);
    const TileRange block = tiles_of(p, item.q_block);
    if constexpr (MASK_KIND == MASK_BAND) {
      if (!exists || tiles.empty()) tiles = {block.total, block.first, block.first + 1, block.first, block.first};
      j = tiles.end - 1;
      below = tiles.first - block.first;
    } else {
      j = exists ? max(tiles.end, 1) - 1 : 0;
    }
    above = block.end - 1 - j;
  }

  // Tiles that the block visits and this consumer does not need.
  DEVICE void pass_over(int count) {
    for (int i = 0; i < count; ++i) {
      K_ring.wait_full(inside, NO_TILE);
      K_ring.release(lane);
      K_ring.advance();
      wait_turn();
      end_turn();
      V_ring.wait_full(inside, NO_TILE);
      V_ring.release(lane);
      V_ring.advance();
    }
  }

  // LISTED: waits for the next tile of K and finds out which it is. False for one that this consumer's rows do not see; the
  // last is computed in any case.
  DEVICE bool await_tile() {
    K_ring.wait_full(inside, NO_TILE);
    listed = read_shared<ListedTile>(smem.tile(K_ring.stage));
    warp_sync();  // all lanes have read it before one of them gives the buffer back
    j = listed.tile;
    return listed.seen(consumer) || listed.last();
  }
  DEVICE void count_tile() {
    if (TRACE && !listed.stands_for_none()) tally[1].count(j, listed.block_masked());
  }
  DEVICE void pass_over_unseen() {
    while (!await_tile()) {
      count_tile();
      pass_over(1);
    }
  }

  // The item whose descriptor is `done` leaves.
  DEVICE void store(u32 done) {
    const Item item = read_shared<Item>(done);
    inside.enter(STORE, item.index);
    if constexpr (SPLIT_KEYS) {
      softmax.reduce_sum();
      leave_part(p, item, consumer * GROUP_ROWS + warp * 16, 0, fragment_view(O_rmem), softmax, lane);
    } else if constexpr (LENGTHS_KIND != DENSE) {
      const int first_row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16;
      store_output(p, read_sequence(done), item, first_row, O_rmem, softmax, lane);
    } else {
      const int first_row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16;
      store_output(p, O_map, item, first_row, O_rmem, softmax, smem.Q + O_buffer * Q_TILE_BYTES, warp, lane);
    }
    if constexpr (TRACE && LISTED) {
      if (threadIdx.x == 128) write_trace_of_list(done, item);
    } else {
      if (TRACE && threadIdx.x == 128) write_trace(p, item.index, item, tiles_of(p, item.q_block), start_ns[0]);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O_rmem[i] = 0.0f;
    inside.enter(NOTHING);
  }

  DEVICE void write_trace_of_list([[maybe_unused]] u32 done, const Item& item) {
    HeadMask mask = head_mask(p);
    if constexpr (LENGTHS_KIND != DENSE) mask = read_mask(done);
    if (item.q_block * Br >= mask.rows) return;  // behind the end of its sequence
    write_trace(p, item.index, item, tally[0].range((mask.keys + Bc - 1) / Bc), start_ns[0]);
  }

  // Ping-pong: consumers issue their products in turn, so that one's softmax runs under the others' products.
  DEVICE void wait_turn() const {
    inside.enter(WAIT_TURN, j);
    if constexpr (PING_PONG) bar_sync(TURN_BARRIER + consumer, 256);
    inside.enter(ISSUE, j);
  }
  DEVICE void end_turn() const {
    if constexpr (PING_PONG) bar_arrive(TURN_BARRIER + (consumer + 1) % CONSUMERS, 256);
  }

  DEVICE void issue_next_scores() {
    const u64 K_tile = K_desc + descriptor_step(KV_TILE_BYTES) * K_ring.stage;
    issue_scores(S_rmem, Q_rmem, Q_desc + descriptor_step(CONSUMERS * Q_TILE_BYTES) * Q_ring.stage, K_tile, inside, j);
  }
  DEVICE void issue_next_values() {
    issue_values(O_rmem, P_rmem, V_desc + descriptor_step(KV_TILE_BYTES) * V_ring.stage, inside, j + 1);
  }
  DEVICE void release_scores() {
    wgmma_registers(S_rmem);
    if constexpr (Q_IN_REGISTERS) wgmma_registers(Q_rmem);  // else they may be reused while wgmma still reads them
    inside.landed(SCORES, j);
    inside.enter(SOFTMAX, j);
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

  // No product of this item reads Q any more.
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
    if constexpr (LISTED) warp_sync();  // all lanes have read the descriptor that goes with it
    if (lane == 0) {
      if constexpr (STORE_FROM_SMEM) bulk_wait_read();
      mbarrier_arrive(smem.Q_empty + 8 * buffer);
    }
  }

  template <typename Tag>
  DEVICE void change_scores() {
    if constexpr (Tag::value == CLEAR) {
      // Measured, of caps that are a pass of their own: d128 1.07, d64 1.21 of the speed, d256 0.97. Where masks are looked up it
      // would spill.
      constexpr bool MOSTLY_NEAR_0 = HEAD_DIM <= 128 && !is_looked_up(MASK_KIND);
      cap_seen_scores<SOFTCAP, MOSTLY_NEAR_0>(fragment_view(S_rmem), p.softcap);
    } else if (!CAP_FOLDS || !cap_near_0(fragment_view(S_rmem), p.softcap)) {
      if constexpr (CAP_FOLDS) wgmma_registers(S_rmem);
      cap_scores<SOFTCAP>(fragment_view(S_rmem), p.softcap);
    }
    if constexpr (ALIBI) alibi.change(fragment_view(S_rmem), p.scale_log2, row, j * Bc + lane % 4 * 2);
  }
  template <typename Tag>
  DEVICE void mask(Tag) {
    if constexpr (LISTED) {
      count_tile();
      if constexpr (Tag::value != CLEAR) hide_listed();
    } else {
      hide_scores<Tag::value>(fragment_view(S_rmem), head_mask(p), row, j * Bc, lane % 4 * 2);
    }
  }
  DEVICE void hide_listed() {
    // What follows from these is worked out here, and kept in no registers between tiles.
    const int row = int(opaque(u32(this->row))), column = int(opaque(u32(lane))) % 4 * 2;
    if constexpr (is_looked_up(MASK_KIND)) {
      constexpr bool ASK_FIRST = !(Q_IN_REGISTERS && HEAD_DIM > 64);  // where that spills no register
      hide_scores<1, ASK_FIRST>(fragment_view(S_rmem), read_looked_up_mask(p, descriptor), row, j * Bc, column);
    } else {
      hide_scores<RIGHT_MASKED>(fragment_view(S_rmem), read_mask(descriptor), row, j * Bc, column);
    }
  }
};
