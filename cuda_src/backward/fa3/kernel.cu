// FlashAttention-3 backward for float16 and bfloat16 on Hopper (sm_90a): TMA, WGMMA, warp specialisation. Head dims to 128;
// wider heads have a kernel of their own (fa3_backward_wide.cu).
// Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision", 2024, section 3 and appendix B; Dao, "FlashAttention-2", 2023, Algorithm 2, whose lines are:
//
//   l. 3-4    dQ = 0, D = rowsum(dO o O)           fa3_backward_prepare, which also writes down the items; and, beside
//                                                  the tiles, Background::prepare()
//   l. 5-7    key blocks j; K_j, V_j, dK, dV = 0   thread blocks that run on from one to the next (RUNS_ON), or one for each
//   l. 8-9    query blocks i; Q_i, dO_i, L_i, D_i  Loader, by the copy engine, in rings; for all heads of the group
//   l. 10-11  S = Q_i K_j^T, P = exp(S - L_i)      issue_scores(), make_weights(), as S^T = K_j Q_i^T: 64 keys a warpgroup,
//                                                  so that P^T and dS^T are operands of dV and dK as they lie in registers
//   l. 12     dV += P^T dO_i                       issue_dv()
//   l. 13-14  dP = dO_i V_j^T, dS = P o (dP - D)   issue_dp(), make_gradients(), likewise transposed
//   l. 15     dQ_i += dS K_j                       begin_dq(), end_dq(): of the tile before
//   l. 16     dK += dS^T Q_i                       issue_dk()
//   l. 18     dK, dV                               store_dk(), store_dv(); dQ: fa3_backward_convert and Background::convert()
//
// Departures from FlashAttention-3's kernel, and why:
// - dQ needs the dS of both warpgroups. It is computed one tile later, so that neither waits for the other: one group's
//   exponentials run under the other's products, as in the forward, without turns that are kept by barriers.
// - P is kept only as the operand of dV, rounded to 16 bits, and dS is worked out from that. The registers that this leaves let
//   products run under a group's own pointwise work: dV under dS, and dK under the exponentials of the next tile.
// - Thread blocks run on from key block to key block, and two warps of the producer, which had nothing to do, prepare and convert
//   most of dQ meanwhile (backward/fa3_common/background.cuh): the passes before and after took a fifth of causal attention's time at 1k.
// - Up to 96 columns they go from the last tile of a key block to the first of the next as from any tile to the next (LINKED,
//   runs_on()): S of the new one is in flight while dV and dK of the old one are stored, and its last dQ is computed beside the new
//   one's first products. K has two buffers for that, in the room where dQ would be staged.
// - dQ leaves as accumulators lie: each warp stages its 16 rows and asks the copy engine to add them, 4 KiB in a row; or, LINKED,
//   adds them from registers, by red. No warp waits for another, and the last pass puts dQ in order (backward/common/passes.cuh,
//   shared with fa2_backward).
// - Beyond 64 columns a warpgroup has dQ's columns of an atom of K. Where fewer are left for the second one, it asks for those alone,
//   in code of its own (DQ_UNEVEN): 128 columns for 72 were 13% of all products in vain.
// - Beyond 64 columns dP is asked for with dQ of the tile before and with dV, where registers suffice (DP_WITH_DQ): it runs while dQ
//   is added, and dV while dS is worked out.
// - Of heads wider than 64 columns a warpgroup keeps parts of its V and K in registers, as operands of dP and S, as far as there is
//   room (held_steps() of kernels/fa3_backward_config.py): every tile reads them from shared memory otherwise.
// - At d64, where blocks run on, dP is asked for between two halves of a tile's exponentials, and runs under the second. Half of S
//   has gone into P then, and no other product is in flight; the loop begins there.
// - At d64 those who ask for dQ, a tile later, fence dS between the proxies, and not those who store it: they would wait for their
//   stores each tile.
// - A block keeps the gradients of a group's keys over all of its query heads.
// - Where a block is among its keys and queries lies in shared memory and is read there while products run: in registers it
//   would make d128 spill.
// - Where tiles are looked up a warp lists, before all else, the query tiles that its key block visits: in shared memory, for all
//   heads of the group. With lengths loaders are warps, which clear what lies behind the end of a sequence.
// - DETERMINISTIC: threads of the producer wait for turns and add what consumers have staged (backward/fa3_common/sums.cuh).
//
// What was measured (H200, bfloat16, 16k tokens, all launches, as a ratio of speed: in turns / each alone):
// - P rounded, dP first, dV under dS and dK under the exponentials: d64 4k full 1.09 to 1.11 / 1.03 to 1.06, causal and 1k 1.02 to
//   1.05 / 1.0 to 1.04. At d128 dP alone first is 0.96 to 1.0 (DP_FIRST).
// - Blocks that run on, over that: 0.92 to 1.05 in turns, as the compiler took the tile's number, which follows from what is in
//   shared memory, for one that differs from lane to lane, and worked every descriptor out in vector registers: 160 instructions a
//   tile more. Told otherwise (uniform()): 1.02 to 1.08 at 1k, 0.99 to 1.04 at 4k.
// - The passes beside the tiles, over that: d64 4k 1.02 to 1.07 / 1.02 to 1.05 and 1k 1.0 to 1.02, d128 1k causal 1.06 / 1.05. A
//   first version was 0.5 to 0.7 at 1k: one warp, rows asked for one lane after another (a bulk copy takes uniform addresses), a
//   release per strip. Strips asked for across batches, and as many of them as suffices (core/key_order.py): 1k another 1.01 to 1.05.
// - Additions told of a tile later (tell_added()), over that: 1k d64 1.02 to 1.04, d128 1.01. An inside trace had shown it: behind
//   the last addition of a key block, dK and dV and the wait for that addition took 5,000 cycles of 33,000 (d64, 1k, causal).
// - LINKED, over that, with the figures of one day: d64 1k full 1.05 to 1.09 / 1.05, causal 1.04 to 1.05 / 1.03 to 1.04, 4k full 1.03 /
//   1.04, causal 1.05 / 1.03 to 1.06; d96 1k causal 1.04 / 1.04, 4k causal 1.07 / 1.05; d80 1.08 / 1.06 and 1.09 / 1.05; d112 0.99, d128
//   0.98 to 0.99, where dQ is staged instead. An inside trace: from one key block to the next a warpgroup had lost 3.5 us, with
//   tiles of 2.7 us, and loses 1.4 (d64, 1k, causal).
// - Strips of the passes beside the tiles asked for two ahead instead of one: d64 1.0 / 0.99, d128 0.97 / 0.97.
// - DQ_UNEVEN, a block each: d72 4k full 1.16 / 1.11, d80 1.16 / 1.13 and causal 1.14 / 1.10, d96 1.10 / 1.07 and 1.08 / 1.06, d112 4k
//   causal 1.04 / 1.04. Where blocks run on 0.96 to 0.98: they have twice the code then, and with the passes' more than is cached.
// - DP_WITH_DQ: d128 4k full 1.07 / 1.01, causal 1.09 / 1.03, 1k 1.02 to 1.07 / 1.01; d96 1.0 / 1.01, LINKED 1.03 to 1.05 / 1.01 to
//   1.03. Where blocks run on beyond 96 columns, with 232 registers instead of 240, ptxas waits for every product, and says nothing:
//   0.85. (A wgmma fence for each product shows it: `cufa compile` looks.)
// - dK and dV by way of shared memory, in whole rows, instead of by shuffles: 0.99 to 1.01.
// - The next key block asked for with the last tiles of one instead of an item ahead: 0.97 to 1.0. Where key blocks take long, or
//   are few, that is too early: a block each 1.01 to 1.2 (16k; GQA 32/8 at 4k), and plans have one (kernels/fa3_backward.py).
// - Groups of at least as many key blocks as SMs: GQA 32/8 at 4k causal 1.17, at 8k 1.07, a block for each, in the order of groups.
//   Where blocks run on, the first key blocks had waited for the strips of several groups besides.
// - -D in the accumulators that dP is added to, as wide heads have it: d64 1.0 to 1.01, d128 0.99 to 1.0. With each D twice in
//   shared memory, for one load of 16 bytes instead of two of 8: d128 0.90 to 0.96 (it reads four times 32 bytes, whatever they are).
// - dS as a product of pairs in bfloat16 (mul.bf16x2), with that: d64 1.01 to 1.04, d128 1.0. Not taken, for dP - D is rounded
//   once more: errors of dQ and dK 1.13 times as large.
// - Two blocks of a cluster that share Q and dO by multicast: 0.68 to 0.70 in turns, 0.79 to 0.80 alone at the power limit.
// - dQ of the tile before under the exponentials as well: 1.0 to 1.01 at d128; at d64 ptxas serialises (C7512).
// - dQ staged when it is there and added behind the next products, so that no warp waits for what it has stored: d64 0.97 to 1.01,
//   d96 1.01, d128 0.96 to 0.99. dS told of behind S and dK as well: d128 0.93 to 0.98, in a fixed order 0.99. A later message
//   keeps the other warpgroup waiting.
// - 64 query rows a tile at d64, with all products in flight beside all pointwise work: 0.80 to 0.88.
// - V and K in registers as far as there is room (H100): d96 4k full 1.08 / 1.05, causal 1.06 / 1.04; d104 1.04 / 1.03; d112 1.04 /
//   1.02; d80 1.04 / 1.01; 1k 1.0 to 1.01. d128, of V 48 to 80 columns: 1.0 to 1.03 / 0.98 to 1.02, for which dP beside dQ leaves no
//   room. d64 0.99 to 1.01, so 128 rows have none.
// - dS fenced by its readers, and one wait less (H100): d64 4k full 1.03 / 1.01, causal 1.02 / 1.01, 16k 1.03 / 1.02 to 1.05, 1k 1.0
//   / 0.99. At d128, where dQ comes first, 1.0.
// - dP between two halves of the exponentials (H100), d64 over that: 1.0. With dQ by red besides 4k full 1.04 / 1.01, causal 1.0, 16k
//   causal 1.02, 1k 1.0. (Red alone 1.0.) d96 has no room for it beside V and K in registers, d128 none at all.
// - What a warp has staged of dQ fenced and added by a thread of the producer (H100): d64 0.98, d128 1.0 to 1.01 / 0.97 to 1.0.
// - dQ by the copy engine instead of by red from registers: d128 1.01 to 1.02, d64 with 64 rows a tile 0.95 to 0.97.
// - DETERMINISTIC with turns kept by each warp of consumers, and items taken ahead: 2 to 17 times the time. With one thread that
//   adds, to learn of a turn, to add and to pass it on takes longer than a tile of d128; so two add by turns. Causal key blocks
//   from left to right, the longest first: 1.15 of the time, for each waits at its first tile for all others of its head.
// - Programmatic early launches: 0.98 to 1.00. Not taken: the launches could not be one graph then (cufa/run/cuda/launches.py).
// What failed:
// - No pass behind: each query tile converted by the block that adds to it last 0.89 to 0.96, all of a head by the block that ends
//   last 0.92 to 0.98: each block then waits for its additions and for its count before it ends.
// - dQ of this very tile, as in FlashAttention-3: no registers at d128. dV still in flight while dQ and S are asked for, or S while
//   dS is worked out: no registers at d128, nor at d64 (C7512).
// - 80 rows a tile, dQ as dQ^T = K^T dS^T, over 64 rows in today's order: d128 4k full 0.99 / 0.99, 8k 1.0 / 0.98, 16k 1.01 / 0.98
//   full and 1.01 / 1.0 causal; in a fixed order 0.99 to 1.03 / 0.97 to 1.03. Over 64 rows in the order before it had been 1.04 to
//   1.08, and dP beside dQ brings as much without it.
// - A first tile without a dQ of the tile before, by a condition: 512 bytes of spills at d128. Zeros take the place of its dS.
#include "shared/element.cuh"
using Element = SixteenBit<BFLOAT16>;
#include "backward/params.cuh"
#include "primitives/register_budget.cuh"
#include "backward/fa3_common/background.cuh"
#include "backward/fa3/consumer.cuh"
#include "shared/phases.cuh"

constexpr u32 NO_TILE_BEFORE = ~0u;

// What comes behind a tile: another one of the item; LINKED, the first one of the next item; or none.
enum Then { NEXT_TILE, NEXT_ITEM, NOTHING_MORE };

struct Consumer : BackwardConsumer {
  // LEFT: see dQ_of().
  template <bool LEFT>
  DEVICE void run() {
    clear(dK_rmem);
    clear(dV_rmem);
    INSIDE(inside.enter(WAIT_ITEM);)
    for (; smem.items.has(item); ++item) {
      block.record = at(item).record;
      begin_trace();
      const int count = block.count();
      // Told before the first tile is waited for, where its strips may be prepared by who waits for this (Background).
      if (RUNS_ON && (count == 0 || block.group() > untold)) tell_added();
      if (count > 0) {
        tile = block.first();
        masked = block.cuts(tile);
        n = uniform(n);
        end = n + count;
        keys_before = keys = uniform(keys);
        visit_tiles<LEFT>();
        ++keys;
      }
      INSIDE(inside.enter(STORE);)
      store_dk(block);
      store_dv(block);
      if constexpr (RUNS_ON) untold = block.group() + 1;
      end_trace();
      smem.items.release(item, lane);
      INSIDE(inside.enter(WAIT_ITEM);)
    }
    if constexpr (RUNS_ON) {
      tell_added();
    } else if constexpr (BULK_ADD && !DETERMINISTIC) {
      if (lane == 0) bulk_wait_read();  // shared memory ends with the block
    }
    INSIDE(inside.close();)
  }
  DEVICE void begin_trace() {
    if constexpr (TRACE) start_ns = global_timer();
    INSIDE(inside.item(block.index()); inside.enter(NOTHING);)
  }
  DEVICE void end_trace() const {
    const KeyBlock ended = at(item);
    if (TRACE && threadIdx.x == 128 && (!RAGGED || ended.first_key() < ended.keys())) {
      write_trace(p, ended.index(), {ended.k_block(), ended.kv_head(), ended.batch()}, ended.tiles(), start_ns);
    }
  }
  DEVICE KeyBlock at(u32 item) const { return {p, smem.items.record(item)}; }

  // What the compiler does not know to be the same in all lanes, though it is, costs two instructions for each product: its
  // descriptors are worked out in each lane, and then brought to where products take them from.
  DEVICE static u32 uniform(u32 x) { return RUNS_ON ? shfl(x, 0) : x; }

  // The loop begins and ends where no products are in flight: those that cross a join ptxas would serialise.
  template <bool LEFT>
  DEVICE void visit_tiles() {
    store_no_ds();
    INSIDE(inside.enter(WAIT_DATA, number());)
    smem.items.keys.wait_full(keys);
    hold(K_rmem, smem.K_of(keys));
    Q_turns.wait_full(n);
    INSIDE(inside.enter(ISSUE, number());)
    wgmma_fence();
    issue_scores(n, keys);
    INSIDE(inside.in_flight(SCORES, number()); inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    INSIDE(inside.landed(SCORES, number()); inside.enter(SOFTMAX, number());)
    make_weights(n);
    INSIDE(inside.enter(WAIT_DATA, number());)
    smem.items.values.wait_full(keys);
    hold(V_rmem, smem.V);
    dO_turns.wait_full(n);
    before = NO_TILE_BEFORE;
    do {
      while (n + 1 < end) visit<LEFT, NEXT_TILE>();
    } while (runs_on<LEFT>());
    visit<LEFT, NOTHING_MORE>();
    begin_dq<LEFT>();
    INSIDE(inside.enter(WAIT_PRODUCTS, NO_TILE);)
    wgmma_wait<0>();
    INSIDE(inside.landed(QUERY_GRADIENTS, NO_TILE); inside.enter(ADD, NO_TILE);)
    wgmma_registers(dK_rmem);
    wgmma_registers(dV_rmem);
    smem.items.keys.release(keys, lane);
    add_dq<LEFT>();
  }

  // From an item's last tile to the next item, if there is one with tiles whose strips may be waited for before this item is told
  // of (Background). Of an item with a single tile the one before is still to be added, whose K lies where the next one's will.
  template <bool LEFT>
  DEVICE bool runs_on() {
    if constexpr (!LINKED) {
      return false;
    } else {
      if (keys_before != keys || !smem.items.has(item + 1)) return false;
      const KeyBlock next = at(item + 1);
      const int count = next.count();
      if (count == 0 || next.group() > (untold > 0 ? untold : block.group() + 1)) return false;
      visit<LEFT, NEXT_ITEM>();
      end = n + uniform(u32(count));
      return true;
    }
  }

  // One tile, whose P is there: the gradients that follow from it, dQ of the tile before, and P of the next one.
  template <bool LEFT, Then THEN>
  DEVICE void visit() {
    constexpr bool MORE = THEN != NOTHING_MORE, CHANGES = THEN == NEXT_ITEM;
    wgmma_registers(dV_rmem);
    if constexpr (IN_HALVES) {
      begin_dp();
      INSIDE(inside.enter(SOFTMAX, number());)
      end_weights(n);
    }
    wgmma_registers(P_rmem);
    if constexpr (DP_FIRST) {
      if constexpr (!IN_HALVES) begin_dp();
      INSIDE(inside.enter(ISSUE, number());)
      wgmma_fence();
      issue_dv();
      INSIDE(inside.in_flight(VALUE_GRADIENTS, number()); inside.enter(WAIT_PRODUCTS, number());)
      wgmma_wait<1>();
      INSIDE(inside.landed(WEIGHT_GRADIENTS, number());)
    } else {
      begin_dq<LEFT>();
      if constexpr (DP_WITH_DQ) begin_dp();
      issue_dv();
      INSIDE(inside.in_flight(VALUE_GRADIENTS, number());)
      end_dq<LEFT, DP_WITH_DQ ? 2 : 1>();
      if constexpr (!DP_WITH_DQ) begin_dp();
      if constexpr (DP_WITH_DQ) {
        INSIDE(inside.enter(WAIT_PRODUCTS, number());)
        wgmma_wait<1>();
      } else {
        end_dv();
      }
      INSIDE(inside.landed(WEIGHT_GRADIENTS, number());)
    }
    INSIDE(inside.enter(SOFTMAX, number());)
    wgmma_registers(dP_rmem);
    if constexpr (THEN != NEXT_TILE) smem.items.values.release(keys, lane);
    make_gradients();
    if constexpr (DP_FIRST || DP_WITH_DQ) end_dv();
    wgmma_registers(dK_rmem);
    wgmma_registers(dS_rmem);
    if constexpr (DP_FIRST) begin_dq<LEFT>();
    dO_turns.release(n, lane);
    if constexpr (MORE) {
      INSIDE(inside.enter(WAIT_DATA, number());)
      if constexpr (CHANGES) {
        smem.items.keys.wait_full(keys + 1);
        hold(K_rmem, smem.K_of(keys + 1));
      }
      Q_turns.wait_full(n + 1);
      INSIDE(inside.enter(ISSUE, number());)
      wgmma_fence();
      issue_scores(n + 1, keys + CHANGES);
      INSIDE(inside.in_flight(SCORES, CHANGES ? NO_TILE : number_of(block.next(tile)));)
    }
    if constexpr (!MORE && !DP_FIRST) wgmma_fence();
    issue_dk();
    INSIDE(inside.in_flight(KEY_GRADIENTS, number());)
    if constexpr (DP_FIRST) end_dq<LEFT, MORE ? 2 : 1>();
    INSIDE(const u32 finished = number();)
    before = block.place(tile);
    keys_before = keys;
    if constexpr (CHANGES) {
      INSIDE(inside.enter(STORE);)
      store_dv(block);
      block.record = at(item + 1).record;
      tile = block.first();
    }
    if constexpr (MORE) {
      if constexpr (!CHANGES) tile = block.next(tile);
      masked = block.cuts(tile);
      INSIDE(inside.enter(WAIT_PRODUCTS, number());)
      wgmma_wait<1>();
      INSIDE(inside.landed(SCORES, number()); inside.enter(SOFTMAX, number());)
      make_weights(n + 1);
      INSIDE(inside.enter(WAIT_DATA, number());)
      dO_turns.wait_full(n + 1);
    }
    INSIDE(inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    INSIDE(inside.landed(KEY_GRADIENTS, finished); inside.enter(NOTHING);)
    wgmma_registers(dK_rmem);
    wgmma_registers(dS_rmem);
    Q_turns.release(n, lane);
    if constexpr (CHANGES) change_items();
    ++n;
  }
  // Behind the last tile of an item, while P of the next item's first one is there.
  DEVICE void change_items() {
    INSIDE(inside.enter(STORE);)
    store_dk(at(item));
    end_trace();
    ++item;
    begin_trace();
    keys = uniform(keys + 1);
    INSIDE(inside.enter(WAIT_DATA, number());)
    smem.items.values.wait_full(keys);
    hold(V_rmem, smem.V);
  }

  DEVICE void begin_dp() {
    INSIDE(inside.enter(ISSUE, number());)
    wgmma_fence();
    issue_dp();
    INSIDE(inside.in_flight(WEIGHT_GRADIENTS, number());)
  }
  // dQ of the tile before.
  template <bool LEFT>
  DEVICE void begin_dq() {
    INSIDE(inside.enter(WAIT_TURN, NO_TILE);)
    dS_turns.wait_full(n - 1 + zeros);
    if constexpr (DP_FIRST) async_proxy_fence();  // dS has been stored, and D read where the copy engine writes next
    INSIDE(inside.enter(ISSUE, NO_TILE);)
    wgmma_fence();
    issue_dq<LEFT>(n - 1 + zeros, keys_before);
    INSIDE(inside.in_flight(QUERY_GRADIENTS, NO_TILE);)
  }
  // Before an item's first tile there is none.
  template <bool LEFT, int YOUNGER>
  DEVICE void end_dq() {
    INSIDE(inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<YOUNGER>();
    INSIDE(inside.landed(QUERY_GRADIENTS, NO_TILE); inside.enter(ADD, NO_TILE);)
    if (before != NO_TILE_BEFORE) {
      add_dq<LEFT>();
    } else {
      wgmma_registers(dQ_of<LEFT>());
      dS_turns.release(n - 1 + zeros, lane);
    }
  }
  DEVICE void end_dv() {
    INSIDE(inside.enter(WAIT_PRODUCTS, number());)
    wgmma_wait<0>();
    INSIDE(inside.landed(VALUE_GRADIENTS, number());)
    wgmma_registers(dV_rmem);
    wgmma_registers(P_rmem);
  }
};

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  grid_release_next();
  prepare_strip(p);
  prepare_items(p);
  prepare_counters(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap dO_map,
                 const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
                 const __grid_constant__ TensorMap V_map) {
  DYN_SMEM(start);
  const u32 base = smem_address(start);
  const BackwardMemory smem(base);
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // uniform, and known to be
  grid_release_next();
  if (thread == 0) smem.init_barriers();
  if (LOOKED_UP ? thread / 32 == 1 : thread == 32) take_item(p, base);
  block_sync();  // nobody may wait on a barrier that is not initialised, or read an item that is not there

  if (warpgroup == 0) {
    registers_release_to<PRODUCER_REGISTERS>();
    if (RUNS_ON && (thread / 32 == 0 || thread / 32 == 3)) {
      Background{p, base}.run();
    } else if (RAGGED ? thread / 32 == 1 : thread == 32) {
      Loader<BackwardMemory, true>{p, &Q_map, &K_map, base}.run();
    } else if (RAGGED ? thread / 32 == 2 : thread == 64) {
      Loader<BackwardMemory, false>{p, &dO_map, &V_map, base}.run();
    } else if (DETERMINISTIC && (thread == 96 || (BULK_ADD && thread == 0))) {
      if constexpr (BULK_ADD) {
        DqAdder<BackwardMemory>{p, base, thread != 96}.run();
      } else {
        TurnKeeper<BackwardMemory>{p, base, 0}.run();
      }
    }
  } else {
    registers_raise_to<CONSUMER_REGISTERS>();
    if (DQ_UNEVEN && warpgroup == CONSUMERS) {
      Consumer{{p, smem, CONSUMERS - 1, thread / 32 % 4, thread % 32}}.run<DQ_UNEVEN>();
    } else {
      Consumer{{p, smem, DQ_UNEVEN ? 0 : warpgroup - 1, thread / 32 % 4, thread % 32}}.run<false>();
    }
  }
}

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_convert(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  grid_await_previous();
  convert_strip(p, RUNS_ON ? HeadGroups{p}.left() : 0);
}
