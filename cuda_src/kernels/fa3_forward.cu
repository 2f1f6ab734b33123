// FlashAttention-3 forward for float16 and bfloat16 on Hopper (sm_90a): TMA, WGMMA, warp specialisation.
// Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision", 2024.
//   Alg. 1  l. 3-10   the producer: one thread of warpgroup 0 asks TMA for tiles, in rings of shared memory
//           l. 11-23  consumers: one warpgroup for 64 query rows each, products by WGMMA
//   Alg. 2  l. 8-14   Consumer::turn(): the next tile's S = Q K^T is in flight together with this tile's O += P V
//   Sec. 3.1          ping-pong: named barriers give consumers their turns at issuing products
// Here is what consumers do when: struct Consumer. What one does with its registers (Alg. 2, l. 9-11, Alg. 1, l. 19-20) is in
// tiles/consumer.cuh, the producer in tiles/forward_producer.cuh, what both share in tiles/pipeline.cuh.
//
// Departures, and why:
// - Persistent blocks. The producer works out which query block comes next and leaves a record of it in shared memory. The
//   order is fixed (PersistentItems), and who takes which too: no counter in memory. But where tiles are listed nobody knows
//   how long items are, and blocks take the next when they are ready: dealt out beforehand, 24 uneven packed documents took
//   1.2 times as long.
// - Between two items, the last O += P V of one runs while the next is begun, and O is stored while the first S = Q K^T of
//   the next runs.
// - O leaves through the buffer its Q came in: every warp stages its 16 rows and asks TMA to store them; the buffer is given
//   back a softmax later, when the copy has surely read it. Where Q's buffer is already in use again (d > 128, 128 rows), O
//   goes from registers to global memory, four lanes exchanging 16 bytes.
// - Few query blocks over many keys: their keys are split over blocks with an item each, heads may share a tile, and a second
//   launch merges (SPLIT_KEYS: tiles/forward_splits.cuh).
// - A consumer passes over tiles that its own 64 rows do not see, at both ends of a band. It still takes its turns, as the
//   rings are shared.
// - Where tiles are looked up, or lengths are those of each sequence, a warp of the producer lists the tiles worth visiting, and
//   consumers are told beside each tile of K which it is, whether their rows need a mask and whether it is the last
//   (tiles/tile_list.cuh, tiles/listing_producer.cuh).
// - O is rescaled only when a row's maximum grew by more than 2^8 (tiles/softmax.cuh).
// - Head dims need no padding to the next power: WGMMA takes N in steps of 8, TMA fills the last 16 columns with zeros.
//
// What the kernel reaches is in cufa/records, what each step brings is measured by `cufa bench --suite ladder`. In short (H200,
// bf16, 1k to 4k): ping-pong brings up to a quarter at d128 and d256, and nothing at d64; overlap inside a warpgroup 3-5%
// full, 4-11% causal; persistent blocks, which overlap items, 3% where items are long, 15-29% at 1k.
// Steps that are no switch:
// - Items published by the producer instead of worked out by every consumer (five divisions each): d128 4k full +2%, d256 +2%.
// - The order of causal items (groups of heads whose last round is full and that fit the L2 cache, instead of all that fit):
//   1.2 times at d128 4k, 1.5 at 16k, 1.6 at d256 16k; 1k as it was.
// - The last values beside the next item's beginning: causal 1k d64 +5%; d128, 192 rows, 1k +6%. And simpler: before, a
//   turn had to span two items, and their tiles could deadlock the V ring.
// - O by TMA brings 1% at 1k; without any store it would be 2-9%.
// - Tiles: d64 192 x 128, 10-15% over 128 x 128; d128 128 x 128 with Q in registers to 2k, then 192 x 80; 96, 112, 144, 160
//   and 176 keys are behind at every length. 64 rows, one consumer: 15-40% over cuDNN where blocks are few.
// What limits: d128 and d256 run the chip into its power limit. d64: exponentials and products each fill 60% of their pipe (wgmma
// itself runs at full rate for N = 64, operands in registers or not). At 1k an item is only a few tiles long: what is done
// once per item, about half a tile's time, is the gap to 4k, and at d64 every sixth query block of 192 rows is two thirds
// empty.
// To be measured at d64 under load, where neither pipe is full (configs of tests/test_emulate_fa3.py, by config=):
// - EARLY_SOFTMAX: the next item's first softmax before the store of O, so that it runs under the other consumers' products
//   while O's turn is still open. Four registers more, no spills.
// - Four consumers, 256 x 64: S, P and O of 64 keys are 80 registers of the 112 that each has, so that one more item's
//   exponentials may run under the products of three others. Shared memory is read as often per product, barriers are twice
//   as many per key. 80 and 96 keys spill.
//
// What failed:
// - Forcing the exponentials to be computed before the wait for O += P V (ptxas hoists that wait above nearly all of them; a
//   store on an impossible condition holds it back, 66 of 66 stay in front): 3-8% slower at d64 and d128. The other consumer's
//   products fill the gap anyway, and V's buffer is given back later.
// - Giving back Q's buffer after ldmatrix with a barrier alone: a few rows in a million were wrong, in one launch of five.
//   TMA's writes need fence.proxy.async after ordinary reads too. (The executor in cuda_src/host looks for it since.)
// - Waiting for V between wgmma_fence and the only product (no other wgmma before it): ptxas inserts a fence of its own in
//   what it takes for a divergent path and serialises (C7519). Wait first, fence, then issue.
// - Carrying an item's coordinates along in registers: 76-136 bytes of spills with three consumers.
// - Writing the zeros of rows without keys in an idle warp of the producer: its 24 registers make ptxas spill in the consumers.
// - Holding back V while passing over K: the V ring fills up and everybody waits. The pending product is finished first.
#include "params.cuh"
#include "primitives/grid.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/opaque.cuh"
#include "primitives/register_budget.cuh"
#include "primitives/tma.cuh"
#include "tiles/consumer.cuh"
#include "tiles/forward_producer.cuh"
#include "tiles/listing_producer.cuh"
#include "tiles/named_barriers.cuh"
#include "tiles/phases.cuh"
#include "tiles/pipeline_memory.cuh"
#include "tiles/pipeline.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int PRODUCER_REGISTERS = CONSUMERS >= 3 ? 32 : !LISTED ? 24 : CONSUMERS == 1 ? 64 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : !LISTED ? 240 : CONSUMERS == 1 ? 248 : 232;
static_assert(registers_suffice(PRODUCER_REGISTERS, CONSUMERS, CONSUMER_REGISTERS), "a consumer would wait for ever");
static_assert(ALIGNMENT == 16, "TMA needs 16-byte aligned rows");

// Alg. 1, l. 11-23 and Alg. 2: one warpgroup, 64 query rows.
struct Consumer {
  const AttentionParams& p;
  const TensorMap* O_map;
  const SharedMemory& smem;
  const int consumer, warp, lane;
  Ring<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  Ring<Q_STAGES> Q_ring{};
  const u64 Q_desc = k_major_descriptor(smem.Q + consumer * Q_TILE_BYTES);
  const u64 K_desc = k_major_descriptor(smem.K), V_desc = mn_major_descriptor<Bc>(smem.V);

  Scores S_rmem;
  Output O_rmem = {};
  Probabilities P_rmem;
  Queries Q_rmem;
  OnlineSoftmax<2> softmax;

  u32 round = 0;
  u32 record;             // of the item at hand
  int row;                // this lane's first query row; its second is 8 further on
  int j;                  // the key tile whose scores are computed next
  TileRange tiles;        // that this consumer's rows see; LISTED: of a trace, what the item visits
  int above, below;       // tiles that the block visits after and before those
  Alibi alibi{0.0f, 0};   // ALIBI: of the item at hand
  ListedTile listed{};    // LISTED: the tile whose scores are computed, which is j
  TileTally tally[2];     // of a trace: of the item being stored, of the one at hand
  int O_buffer = -1;      // that the O at hand leaves from
  u64 start_ns[2] = {};   // of the item being stored, of the one at hand
  INSIDE(mutable PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);)

  DEVICE void run() {
    if (PING_PONG && consumer == CONSUMERS - 1) bar_arrive(TURN_BARRIER, 256);  // the first turn is consumer 0's
    bool more = begin_item(), fresh = true;
    while (more) {
      if (fresh) {
        if constexpr (LISTED) {
          pass_over_unseen();
        } else {
          pass_over(above);
        }
        issue_first_scores();
        first_softmax();
      }
      // Buffers that O leaves from are given back when its copy has read them: a softmax later, nobody waits.
      if constexpr (STORE_FROM_SMEM && Q_IN_REGISTERS) give_back_queries(consumer);
      if constexpr (STORE_FROM_SMEM && !Q_IN_REGISTERS) {
        if (O_buffer >= 0) give_back_queries(O_buffer);
      }
      if constexpr (LISTED) {
        while (!listed.last()) {
          await_tile();
          if (listed.masked(consumer)) {
            turn(SegmentTag<RIGHT_MASKED>{});
          } else {
            turn(SegmentTag<CLEAR>{});
          }
        }
      } else {
        --j;
        walk_tiles<MASK_KIND>(j, tiles, [&](int, auto segment) { turn(segment); });
      }
      end_queries();
      issue_last_values();
      const u32 done = record;
      if constexpr (TRACE) start_ns[0] = start_ns[1];
      if constexpr (TRACE && LISTED) tally[0] = tally[1];
      // The next item's first scores run beside these last values and beside the store of O. Tiles that have to be passed over
      // in between need the buffers of V, so then the values are awaited first; under a band nearly every item has such tiles.
      // Q of the next item is read before O leaves through its buffer.
      if constexpr (MASK_KIND == MASK_BAND && !LISTED) {
        end_last_values<0>();
        pass_over(below);
        more = begin_item();
        fresh = false;
        if (more) {
          pass_over(above);
          issue_first_scores();
          store(done, softmax);
          first_softmax();
        } else {
          store(done, softmax);
        }
      } else {
        more = begin_item();
        if constexpr (LISTED) {
          fresh = !more || !await_tile();
        } else {
          fresh = !more || above > 0;
        }
        if (fresh) {
          end_last_values<0>();
          store(done, softmax);
        } else {
          issue_first_scores();
          end_last_values<1>();
          if constexpr (EARLY_SOFTMAX) {
            OnlineSoftmax<2> of_done = softmax;
            first_softmax();
            store(done, of_done);
          } else {
            store(done, softmax);
            first_softmax();
          }
        }
      }
    }
    if constexpr (STORE_FROM_SMEM) {
      if (lane == 0) bulk_wait_read();  // shared memory ends with the block
    }
    INSIDE(inside.close();)
  }

  // Waits for the next item and its Q. False when there is none.
  DEVICE bool begin_item() {
    const int buffer = Q_ring.stage * CONSUMERS + consumer;
    INSIDE(inside.enter(WAIT_ITEM);)
    mbarrier_wait(smem.Q_full + 8 * buffer, Q_ring.parity);
    record = smem.item(round++);
    const Item item = read_item(record);
    if (item.q_block == NO_MORE_ITEMS) return false;
    if constexpr (TRACE) start_ns[1] = global_timer();
    INSIDE(inside.item(item.index + gridDim.x * blockIdx.y); inside.enter(NOTHING);)
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
        alibi = Alibi(p, read_sequence(record), item.head);
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
      INSIDE(inside.enter(WAIT_DATA, NO_TILE);)
      K_ring.wait_full();
      K_ring.release(lane);
      K_ring.advance();
      wait_turn();
      end_turn();
      INSIDE(inside.enter(WAIT_DATA, NO_TILE);)
      V_ring.wait_full();
      V_ring.release(lane);
      V_ring.advance();
    }
  }

  // LISTED: waits for the next tile of K and finds out which it is. False for one that this consumer's rows do not see; the
  // last is computed in any case.
  DEVICE bool await_tile() {
    INSIDE(inside.enter(WAIT_DATA, NO_TILE);)
    K_ring.wait_full();
    listed = read_tile(smem.tile(K_ring.stage));
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

  // The first scores of an item, in flight.
  DEVICE void issue_first_scores() {
    INSIDE(inside.enter(WAIT_DATA, j);)
    K_ring.wait_full();
    wait_turn();
    wgmma_fence();
    issue_next_scores();
    end_turn();
  }

  DEVICE void first_softmax() {
    INSIDE(inside.enter(WAIT_PRODUCTS, j);)
    wgmma_wait<0>();
    release_scores();
    softmax.reset();
    float alpha[2];
    change_scores<SegmentTag<RIGHT_MASKED>>();
    if constexpr (LISTED) {
      if (listed.masked(consumer)) {
        mask(SegmentTag<RIGHT_MASKED>{});
      } else {
        mask(SegmentTag<CLEAR>{});
      }
    } else {
      if (j >= tiles.clear_end) mask(SegmentTag<RIGHT_MASKED>{});
    }
    softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
    pack(P_rmem, S_rmem);
    INSIDE(inside.enter(NOTHING);)
  }

  // One turn of the pipeline (Alg. 2, l. 8-14): the scores of tile j and the values of the tile before it are in flight
  // together; the softmax of j runs under the values.
  template <typename Tag>
  DEVICE void turn(Tag segment) {
    INSIDE(inside.enter(WAIT_DATA, j);)
    if constexpr (!LISTED) K_ring.wait_full();
    wait_turn();
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    wgmma_fence();
    issue_next_scores();
    INSIDE(inside.enter(WAIT_DATA, j + 1);)
    V_ring.wait_full();
    INSIDE(inside.enter(ISSUE, j + 1);)
    issue_next_values();
    end_turn();
    INSIDE(inside.enter(WAIT_PRODUCTS, j);)
    // A soft cap, or a mask that is looked up, needs the registers of the P in flight: it waits for these values and runs under
    // other consumers'. Where there is room for both (d256, causal, clear tiles), a tenth of the time is saved.
    constexpr bool CAP_WAITS = SOFTCAP && !(HEAD_DIM > 128 && MASK_KIND == MASK_CAUSAL && Tag::value == CLEAR);
    constexpr bool VALUES_FIRST = CAP_WAITS || (LISTED && Tag::value != CLEAR);
    wgmma_wait<VALUES_FIRST ? 0 : 1>();
    release_scores();
    if constexpr (VALUES_FIRST) release_values();
    float alpha[2];
    change_scores<Tag>();
    mask(segment);
    const bool grown = softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
    if constexpr (!VALUES_FIRST) {
      INSIDE(inside.enter(WAIT_PRODUCTS, j + 1);)
      wgmma_wait<0>();
      release_values();
      INSIDE(inside.enter(SOFTMAX, j);)
    }
    if (grown) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) O_rmem[i] *= alpha[i / 2 % 2];
    }
    pack(P_rmem, S_rmem);
  }

  // The last values of an item, in flight.
  DEVICE void issue_last_values() {
    INSIDE(inside.enter(WAIT_DATA, j + 1);)
    V_ring.wait_full();
    INSIDE(inside.enter(ISSUE, j + 1);)
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    wgmma_fence();
    issue_next_values();
  }

  template <int PENDING>
  DEVICE void end_last_values() {
    INSIDE(inside.enter(WAIT_PRODUCTS, NO_TILE);)
    wgmma_wait<PENDING>();
    release_values();
  }

  // The item whose record is `done` leaves, whose rows have these maxima and sums.
  DEVICE void store(u32 done, OnlineSoftmax<2>& of_done) {
    const Item item = read_item(done);
    INSIDE(inside.enter(STORE, item.index);)
    if constexpr (SPLIT_KEYS) {
      of_done.reduce_sum();
      leave_part(p, item, consumer * GROUP_ROWS + warp * 16, 0, fragment_view(O_rmem), of_done, lane);
    } else if constexpr (LENGTHS_KIND != DENSE) {
      const int first_row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16;
      store_output(p, read_sequence(done), item, first_row, O_rmem, of_done, lane);
    } else {
      const int first_row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16;
      store_output(p, O_map, item, first_row, O_rmem, of_done, smem.Q + O_buffer * Q_TILE_BYTES, warp, lane);
    }
    if constexpr (TRACE && LISTED) {
      if (threadIdx.x == 128) write_trace_of_list(done, item);
    } else {
      if (TRACE && threadIdx.x == 128) write_trace(p, item.index, item, tiles_of(p, item.q_block), start_ns[0]);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O_rmem[i] = 0.0f;
    INSIDE(inside.enter(NOTHING);)
  }

  DEVICE void write_trace_of_list([[maybe_unused]] u32 done, const Item& item) {
    HeadMask mask = head_mask(p);
    if constexpr (LENGTHS_KIND != DENSE) mask = read_mask(done);
    if (item.q_block * Br >= mask.rows) return;  // behind the end of its sequence
    write_trace(p, item.index, item, tally[0].range((mask.keys + Bc - 1) / Bc), start_ns[0]);
  }

  // Ping-pong: consumers issue their products in turn, so that one's softmax runs under the others' products.
  DEVICE void wait_turn() const {
    INSIDE(inside.enter(WAIT_TURN, j);)
    if constexpr (PING_PONG) bar_sync(TURN_BARRIER + consumer, 256);
    INSIDE(inside.enter(ISSUE, j);)
  }
  DEVICE void end_turn() const {
    if constexpr (PING_PONG) bar_arrive(TURN_BARRIER + (consumer + 1) % CONSUMERS, 256);
  }

  DEVICE void issue_next_scores() {
    const u64 K_tile = K_desc + descriptor_step(KV_TILE_BYTES) * K_ring.stage;
    issue_scores(S_rmem, Q_rmem, Q_desc + descriptor_step(CONSUMERS * Q_TILE_BYTES) * Q_ring.stage, K_tile);
    INSIDE(inside.in_flight(SCORES, j);)
  }
  DEVICE void issue_next_values() {
    issue_values(O_rmem, P_rmem, V_desc + descriptor_step(KV_TILE_BYTES) * V_ring.stage);
    INSIDE(inside.in_flight(VALUES, j + 1);)
  }
  DEVICE void release_scores() {
    wgmma_registers(S_rmem);
    if constexpr (Q_IN_REGISTERS) wgmma_registers(Q_rmem);  // else they may be reused while wgmma still reads them
    INSIDE(inside.landed(SCORES, j); inside.enter(SOFTMAX, j);)
    K_ring.release(lane);
    K_ring.advance();
  }
  DEVICE void release_values() {
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    INSIDE(inside.landed(VALUES, NO_TILE);)
    V_ring.release(lane);
    V_ring.advance();
  }

  template <typename Tag>
  DEVICE void change_scores() {
    if constexpr (Tag::value == CLEAR) {
      cap_seen_scores<SOFTCAP>(fragment_view(S_rmem), p.softcap);
    } else {
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
      hide_scores<1, ASK_FIRST>(fragment_view(S_rmem), read_looked_up_mask(p, record), row, j * Bc, column);
    } else {
      hide_scores<RIGHT_MASKED>(fragment_view(S_rmem), read_mask(record), row, j * Bc, column);
    }
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
    if (lane == 0) {
      if constexpr (STORE_FROM_SMEM) bulk_wait_read();
      mbarrier_arrive(smem.Q_empty + 8 * buffer);
    }
  }
};

// Columns: the launch before, a warp per block of keys.
KERNEL __launch_bounds__(MASK_THREADS)
    mask_blocks(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  prepare_mask<MASK_KIND>(p, (blockIdx.x * MASK_THREADS + threadIdx.x) / 32, gridDim.x * (MASK_THREADS / 32));
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_forward(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap Q_map,
                const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
                const __grid_constant__ TensorMap O_map) {
  DYN_SMEM(start);
  const SharedMemory smem(smem_address(start));
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // uniform, and known to be

  if (thread == 0) smem.init_barriers();
  block_sync();  // nobody may wait on a barrier that is not initialised

  if constexpr (SPLIT_KEYS) grid_release_next();  // the merge may become resident as blocks end
  Items items(p);
  if (warpgroup == 0) {
    registers_release_to<PRODUCER_REGISTERS>();
    if constexpr (LISTED) {
      if (thread == 0) {
        KeyLoader{p, &Q_map, &K_map, smem}.run();
      } else if (thread / 32 == 1) {
        ValueLoader{p, &V_map, smem, thread % 32}.run();
      } else if (thread / 32 == 2) {
        Lister{p, smem}.run(items);
      }
    } else {
      if (thread == 0) Producer{p, &Q_map, &K_map, &V_map, smem}.run(items);
    }
  } else {
    registers_raise_to<CONSUMER_REGISTERS>();
    if (!SPLIT_KEYS && !LISTED && some_block_is_empty(p)) {  // query blocks that never enter the pipeline
      for (u32 index; items.next(index);) {
        const WorkItem work = items.item(p, index);
        if (tiles_of(p, work.q_block).empty()) store_nothing(p, {work, index}, thread - 128);
      }
    }
    Consumer{p, &O_map, smem, warpgroup - 1, thread / 32 % 4, thread % 32}.run();
  }
}

// Merges what splits have left. Its blocks wait for the launch before themselves.
KERNEL __launch_bounds__(COMBINE_THREADS)
    fa3_combine(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap,
                const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  if constexpr (SPLIT_KEYS) {
    grid_await_previous();
    combine_splits<Bc>(p);
  }
}
