// FlashAttention-3 forward for float16 and bfloat16 on Hopper (sm_90a): TMA, WGMMA, warp specialisation.
// Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision", 2024.
//   Alg. 1  l. 3-10   the producer: one thread of warpgroup 0 asks TMA for tiles, in rings of shared memory
//           l. 11-23  consumers: one warpgroup for 64 query rows each, products by WGMMA
//   Alg. 2  l. 8-14   Consumer::turn(): the next tile's S = Q K^T is in flight together with this tile's O += P V
//   Sec. 3.1          ping-pong: named barriers give consumers their turns at issuing products
// Here is what consumers do when: struct Consumer. Which item one is at, what it waits for, issues and gives back is
// in forward/fa3/consumer_items.cuh, what becomes of its registers (Alg. 2, l. 9-11, Alg. 1, l. 19-20) in forward/fa3/consumer.cuh, the
// producer in forward/fa3/producer.cuh, what both share in wgmma/pipeline.cuh.
//
// Departures, and why:
// - Persistent blocks. The producer works out which query block comes next and leaves a descriptor of it in shared memory. The
//   order is fixed (PersistentItems), and who takes which too: no counter in memory. But where tiles are listed nobody knows
//   how long items are, and blocks take the next when they are ready: dealt out beforehand, 24 uneven packed documents took
//   1.2 times as long. Of a mask that the host knows, it says which items are the longest: these come first.
// - Between two items, the last O += P V of one runs while the next is begun, and O is stored while the first S = Q K^T of
//   the next runs.
// - O leaves through the buffer its Q came in: every warp stages its 16 rows and asks TMA to store them; the buffer is given
//   back a softmax later, when the copy has surely read it. Where Q's buffer is already in use again (d > 128, 128 rows), O
//   goes from registers to global memory, four lanes exchanging 16 bytes.
// - Few query blocks over many keys: their keys are split over blocks with an item each, heads may share a tile, and a second
//   launch merges (SPLIT_KEYS: forward/splits.cuh).
// - A consumer passes over tiles that its own 64 rows do not see, at both ends of a band. It still takes its turns, as the
//   rings are shared. Where tiles are listed it may see some before such tiles and some behind: the turn of one that it does not
//   see has no scores, and probabilities of 0.
// - Where tiles are looked up, or lengths are those of each sequence, a warp of the producer lists the tiles worth visiting, and
//   consumers are told beside each tile of K which it is, whether their rows need a mask and whether it is the last
//   (forward/fa3/tile_list.cuh, forward/fa3/lister.cuh).
// - O is rescaled only when a row's maximum grew by more than 2^8 (shared/softmax.cuh).
// - A soft cap of scores near 0, as most are, is part of the softmax (capped_softmax() of shared/score.cuh). A clear tile then takes
//   7.5 instructions a score, 4.5 without a cap, 10.5 with one that is a pass before the softmax.
// - Head dims need no padding to the next power: WGMMA takes N in steps of 8, TMA fills the last 16 columns with zeros.
//
// What the kernel reaches is in cufa/records, what each step brings is measured by `cufa bench --suite ladder`. In short (H200,
// bf16): ping-pong brings 5% at d128 4k causal, 1% full and 2% causal at d128 1k, else less than 1%, and costs 0.4-0.6% at d64;
// persistent blocks, which overlap items, bring 2-3% at 4k full, 8-13% at 4k causal, 17% full and 28% causal at d128 1k. Overlap
// inside a warpgroup is no switch any more: while it was one, it brought 3-5% full, 4-11% causal, and ping-pong without it up to a
// quarter at d128 and d256.
// Steps that are no switch:
// - Items published by the producer instead of worked out by every consumer (five divisions each): d128 4k full +2%, d256 +2%.
// - The order of causal items (groups of heads whose last round is full and that fit the L2 cache, instead of all that fit):
//   1.2 times at d128 4k, 1.5 at 16k, 1.6 at d256 16k; 1k as it was.
// - P packed, and its row sums added up, before the branch that rescales O instead of behind it: 1.02-1.04 at d64 and d128, 1.01 at
//   d256; each alone at the power limit, where cycles that are not needed cost energy, too, 1.03-1.06. Lists of tiles 1.03-1.05.
// - The last values beside the next item's beginning: causal 1k d64 +5%; d128, 192 rows, 1k +6%. And simpler: before, a
//   turn had to span two items, and their tiles could deadlock the V ring.
// - O by TMA brought 1% at 1k; now 0.99-1.01 where blocks have one item each (ladder). Without any store it would be 2-9%.
// - Whether a maximum grows, asked of the scores' bits as integers, three in an instruction (lane_tops()): 1.00-1.02 in turns,
//   1.00-1.05 alone at the power limit.
// - Tiles: d64 192 x 128, 10-15% over 128 x 128; with four consumers, 256 x 64, 1k takes 0.90 of the time full and 0.86 causal,
//   4k 0.99 and 0.95, 16k 1.04 and 0.96, under load likewise. 80 and 96 keys spill there. d72 to d96 192 x 96, 1.02 over 80 keys
//   full; 112 keys 1.01 in turns, 0.99 under load. d104 to d128 128 x 128 with Q in registers to 2k, causal to 4k, then 192 x 64 in
//   three stages: over 80 keys in two 1.00-1.02 in turns and 1.01-1.04 under load, documents 1.10, a prefix 0.98; 96 keys spill.
//   d136 to d192 128 x 112: over 96 keys 0.99-1.00 in turns, 1.01-1.03 under load. 64 rows, one consumer: 15-40% over cuDNN where
//   blocks are few.
// What limits: back to back, all head dims run the chip into its power limit. d64 full: products fill 62-69% of their pipe and
// exponentials 54-59% (wgmma itself runs at full rate for N = 64, operands in registers or not). At 1k an item is only a few tiles
// long: what is done once per item, about half a tile's time, is the gap to 4k, and at d64 every sixth query block of 192 rows is
// two thirds empty: that is why 256 rows are ahead there. A tile that is masked by runs of rows takes 1.6 times as long as a clear
// one (random eviction against causal, d128, 8k). Neither bringing the runs into the L1 cache beforehand (0.99 to 1.01) nor masking
// beside the products (1.0) changed that.
//
// What failed:
// - The next item's first softmax before the store of O, four registers more: d64 and d128 0.98 to 1.01 of the speed.
// - Forcing the exponentials to be computed before the wait for O += P V (ptxas hoists that wait above nearly all of them; a
//   store on an impossible condition holds it back, 66 of 66 stay in front): 3-8% slower at d64 and d128. The other consumer's
//   products fill the gap anyway, and V's buffer is given back later.
// - Giving back Q's buffer after ldmatrix with a barrier alone: a few rows in a million were wrong, in one launch of five.
//   TMA's writes need fence.proxy.async after ordinary reads too. (The executor in cuda_src/host looks for it since.)
// - Waiting for V between wgmma_fence and the only product (no other wgmma before it): ptxas inserts a fence of its own in
//   what it takes for a divergent path and serialises (C7519). Wait first, fence, then issue.
// - A consumer that finishes its values in front of tiles that it does not see, and begins anew behind them: the beginning, then
//   within a loop, is a divergent path to ptxas (C7519), and spills.
// - Carrying an item's coordinates along in registers: 76-136 bytes of spills with three consumers.
// - Writing the zeros of rows without keys in an idle warp of the producer: its 24 registers make ptxas spill in the consumers.
// - Holding back V while passing over K: the V ring fills up and everybody waits. The pending product is finished first.
#include "forward/fa3/config.cuh"
#include "shared/params.cuh"
#include "primitives/grid.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/opaque.cuh"
#include "primitives/register_budget.cuh"
#include "primitives/tma.cuh"
#include "forward/fa3/consumer_items.cuh"
#include "forward/fa3/producer.cuh"
#include "forward/fa3/lister.cuh"
#include "shared/named_barriers.cuh"
#include "shared/phases.cuh"
#include "forward/fa3/memory.cuh"
#include "wgmma/pipeline.cuh"

// Registers of each thread: of the producer, of a consumer. A lister needs more than a producer that knows its range of tiles.
struct RegisterBudget {
  int producer, consumer;
};
constexpr RegisterBudget BUDGETS[4][2] = {
    // range      list
    {{24, 240}, {64, 248}},  // 1 consumer
    {{24, 240}, {40, 232}},  // 2 consumers
    {{32, 160}, {32, 160}},
    {{32, 112}, {32, 112}},
};
constexpr RegisterBudget REGISTERS = BUDGETS[CONSUMERS - 1][LISTED];
static_assert(registers_suffice(REGISTERS.producer, CONSUMERS, REGISTERS.consumer), "setmaxnreg of a consumer would wait forever");

// Alg. 1, l. 11-23 and Alg. 2: one warpgroup, 64 query rows.
struct Consumer : ConsumerItems {
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
          const bool seen = await_tile();
          if (!seen) {
            turn_past();
            continue;
          }
          issue_products();  // what is asked of the tile is answered by then
          if (listed.masked(consumer)) {
            end_turn_of(SegmentTag<RIGHT_MASKED>{});
          } else {
            end_turn_of(SegmentTag<CLEAR>{});
          }
        }
      } else {
        --j;
        walk_tiles<MASK_KIND>(j, tiles, [&](int, auto segment) { turn(segment); });
      }
      end_queries();
      issue_last_values();
      const u32 done = descriptor;
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
          store(done);
          first_softmax();
        } else {
          store(done);
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
          store(done);
        } else {
          issue_first_scores();
          end_last_values<1>();
          store(done);
          first_softmax();
        }
      }
    }
    if constexpr (STORE_FROM_SMEM) {
      if (lane == 0) bulk_wait_read();  // shared memory ends with the block
    }
    inside.close();
  }

  // The first scores of an item, in flight.
  DEVICE void issue_first_scores() {
    K_ring.wait_full(inside, j);
    wait_turn();
    wgmma_fence();
    issue_next_scores();
    end_turn();
  }

  DEVICE void first_softmax() {
    wgmma_wait<0>(inside, j);
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
    inside.enter(NOTHING);
  }

  // One turn of the pipeline (Alg. 2, l. 8-14): the scores of tile j and the values of the tile before it are in flight
  // together; the softmax of j runs under the values.
  template <typename Tag>
  DEVICE void turn(Tag segment) {
    K_ring.wait_full(inside, j);
    issue_products();
    end_turn_of(segment);
  }
  DEVICE void issue_products() {
    wait_turn();
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    wgmma_fence();
    issue_next_scores();
    V_ring.wait_full(inside, j + 1);
    inside.enter(ISSUE, j + 1);
    issue_next_values();
    end_turn();
  }
  template <typename Tag>
  DEVICE void end_turn_of(Tag segment) {
    // A soft cap, or a mask that is looked up, needs the registers of the P in flight: it waits for these values and runs under
    // other consumers'. Not so, as long as registers suffice, a cap of scores near 0, nor one at d256, causal, clear tiles (a
    // tenth of the time).
    constexpr bool NEAR_0_FIRST = CAP_FOLDS && Tag::value == CLEAR && Bc <= 96;
    constexpr bool CAP_WAITS = SOFTCAP && !(HEAD_DIM > 128 && MASK_KIND == MASK_CAUSAL && Tag::value == CLEAR);
    constexpr bool VALUES_FIRST = (CAP_WAITS && !NEAR_0_FIRST) || (LISTED && Tag::value != CLEAR);
    wgmma_wait<VALUES_FIRST ? 0 : 1>(inside, j);
    release_scores();
    if constexpr (VALUES_FIRST) release_values();
    float alpha[2];
    bool grown;
    if constexpr (CAP_FOLDS && Tag::value == CLEAR) {
      if constexpr (LISTED) count_tile();
      grown = capped_softmax_beside<!VALUES_FIRST>(alpha);
    } else {
      change_scores<Tag>();
      mask(segment);
      grown = softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
      if constexpr (!VALUES_FIRST) end_values();
    }
    // Sums and pairs come before the branch, and are computed between exponentials, which leave every second slot to others:
    // else the compiler moves them behind it.
    pack(P_rmem, S_rmem);
    wgmma_registers(P_rmem);
    wgmma_registers(softmax.l);
    if (grown) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) O_rmem[i] *= alpha[i / 2 % 2];
    }
  }
  DEVICE void end_values() {
    wgmma_wait<0>(inside, j + 1);
    release_values();
    inside.enter(SOFTMAX, j);
  }

  // The softmax of capped scores. Each warp does what its own allow: most are nearest to 0. PENDING: values are in flight. All
  // warps wait for them at one place, between what is nearest to 0 and the rest: wgmma.wait_group is for a whole warpgroup.
  template <bool PENDING>
  DEVICE bool capped_softmax_beside(float (&alpha)[2]) {
    const auto S = fragment_view(S_rmem);
    const float unit = unit_of(p.softcap), greatest = greatest_magnitude(S);
    const bool nearest = !warp_any(!is_near_0<3>(greatest, unit));
    if constexpr (PENDING) end_values();
    if (nearest) return capped_softmax<3>(S, softmax, unit, p.scale_log2, greatest, alpha);
    wgmma_registers(S_rmem);  // or the squares of scores, which both branches need, are worked out in front of them, and spill
    if (!warp_any(!is_near_0<4>(greatest, unit))) {
      return capped_softmax<4>(S, softmax, unit, p.scale_log2, greatest, alpha);
    }
    cap_seen_scores<SOFTCAP, false>(S, p.softcap);
    return softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
  }

  // LISTED: the turn of a tile that this consumer does not see. Its values are added with probabilities of 0 in the next turn,
  // which has the shape of any other.
  DEVICE void turn_past() {
    count_tile();
    K_ring.release(lane);
    K_ring.advance();
    wait_turn();
    issue_last_values();
    end_turn();
    end_last_values<0>();
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i) P_rmem[i] = 0;
  }

  // The last values of an item, in flight.
  DEVICE void issue_last_values() {
    V_ring.wait_full(inside, j + 1);
    inside.enter(ISSUE, j + 1);
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    wgmma_fence();
    issue_next_values();
  }

  template <int PENDING>
  DEVICE void end_last_values() {
    wgmma_wait<PENDING>(inside, NO_TILE);
    release_values();
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
    registers_release_to<REGISTERS.producer>();
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
    registers_raise_to<REGISTERS.consumer>();
    if (!SPLIT_KEYS && !LISTED && some_block_is_empty(p)) {  // query blocks that never enter the pipeline
      for (u32 index; items.next(index);) {
        const WorkItem work = items.item(p, index);
        if (tiles_of(p, work.q_block).empty()) store_nothing(p, {work, index}, thread - 128);
      }
    }
    Consumer{{p, &O_map, smem, warpgroup - 1, thread / 32 % 4, thread % 32}}.run();
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
