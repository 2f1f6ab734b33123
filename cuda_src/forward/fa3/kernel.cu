// FlashAttention-3 forward for float16 and bfloat16 on Hopper (sm_90a): TMA, WGMMA, warp specialisation.
// Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision", 2024.
//   Alg. 1  l. 3-10   the producer (warpgroup 0): one thread asks TMA for tiles    producer.cuh; lister.cuh if tiles are listed
//           l. 11-23  consumers: one warpgroup for each 64 query rows              Consumer::run() below, consumer_items.cuh
//           l. 19-20  O / l, L = m + log l, store                                  store_output() in consumer.cuh
//   Alg. 2  l. 8-14   next tile's S = Q K^T in flight with this tile's O += P V    issue_products(), end_step() below
//   Sec. 3.1          ping-pong: named barriers order the consumers' products      begin_slot(), end_slot()
// Tiles, shared memory and descriptors: memory.cuh. Compile-time choices: config.cuh. Measurements: NOTES.md.
//
// Departures, and why:
// - Persistent blocks. The producer computes the next work item and leaves its descriptor in shared memory, which saves
//   consumers five divisions. The order is fixed, so that runs are reproducible without a counter in memory. If tiles are
//   listed, the length of an item is unknown, and each block takes the next item when it is ready (persistent_items.cuh).
// - Between two items, the last O += P V of one runs while the next begins, and O is stored while the next S = Q K^T runs.
// - O leaves through the buffer its Q came in: each warp stages its 16 rows and asks TMA to store them. The buffer is given
//   back one softmax later, when the copy has surely read it. If that buffer is in use again (head dim > 128 with 128 rows), O
//   goes from registers to global memory.
// - Few query blocks over many keys: the keys are split over thread blocks with one item each, heads may share a tile, and a
//   second launch merges (SPLIT_KEYS: forward/splits.cuh).
// - A consumer passes over tiles that its 64 rows do not see. It keeps its ping-pong slot, as the rings are shared. In a list
//   such tiles may lie between others: their step has no scores, and probabilities of 0.
// - If the mask is irregular, or lengths are read on the device, a producer warp lists the tiles to visit. Consumers read
//   beside each K tile which tile it is, whether their rows need the mask, and whether it is the last (tile_list.cuh).
// - O is rescaled only when a row's maximum grew by more than 2^8 (shared/softmax.cuh).
// - A soft cap of scores near 0 is part of the softmax (fast_softcap.cuh).
// - Head dims are not padded to a power of 2: WGMMA takes N in steps of 8, and TMA fills the last 16 columns with zeros.
//
// What must not be changed:
// - fence.proxy.async before Q's buffer is given back: without it, TMA overwrites rows that ldmatrix still reads.
// - Wait for V, then wgmma_fence(), then issue: a wait between the fence and a lone product makes ptxas serialise (C7519).
// - V is not held back while K is passed over: the V ring would fill up and every warp would wait.
#include "forward/fa3/config.cuh"
#include "primitives/grid.cuh"
#include "primitives/register_budget.cuh"
#include "forward/fa3/consumer_items.cuh"
#include "forward/fa3/lister.cuh"

// Registers of each thread of the producer and of a consumer. A lister needs more than a producer that knows its range of tiles.
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
static_assert(registers_suffice(REGISTERS.producer, CONSUMERS, REGISTERS.consumer),
              "setmaxnreg of a consumer would wait forever");

// Alg. 1, l. 11-23 and Alg. 2: one warpgroup, 64 query rows.
struct Consumer : ConsumerItems {
  DEVICE void run() {
    if (PING_PONG && consumer == CONSUMERS - 1) bar_arrive(PING_PONG_BARRIER, 256);  // consumer 0 has the first slot
    bool more = begin_item(), fresh = true;
    while (more) {
      if (fresh) {
        tiles.skip_to_first(*this);
        issue_first_scores();
        first_softmax();
      }
      // The buffer that the last O leaves from is given back when its copy has read it: one softmax later that needs no wait.
      if (STORE_FROM_SMEM && (Q_IN_REGISTERS || O_buffer >= 0)) give_back_queries(Q_IN_REGISTERS ? consumer : O_buffer);
      tiles.visit_rest(*this);
      end_queries();
      issue_last_values();
      const u32 done = descriptor;
      if constexpr (TRACE) start_ns[0] = start_ns[1];
      tiles.keep_count();
      // The next item's first scores overlap with these last values and with the store of O. If tiles must be passed over in
      // between, wait for the values first: passing over needs the buffers of V. Under a band nearly every item has such tiles.
      // Q of the next item is read before O leaves through Q's buffer.
      constexpr bool PASSES_OVER = MASK_KIND == MASK_BAND && !LISTED;
      if constexpr (PASSES_OVER) {
        end_last_values<0>();
        pass_over(tiles.below);
      }
      more = SPLIT_KEYS ? false : begin_item();  // SPLIT_KEYS: one item for each block
      const bool apart = !more || (!PASSES_OVER && tiles.skips(*this));
      fresh = apart && !PASSES_OVER;
      if (apart) {
        if constexpr (!PASSES_OVER) end_last_values<0>();
        store(done);
      } else {
        if constexpr (PASSES_OVER) pass_over(tiles.above);
        issue_first_scores();
        if constexpr (!PASSES_OVER) end_last_values<1>();
        store(done);
        first_softmax();
      }
    }
    if constexpr (STORE_FROM_SMEM) {
      if (lane == 0) bulk_wait_read();  // shared memory ends with the block
    }
    inside.close();
  }

  // The first scores of an item, in flight.
  DEVICE void issue_first_scores() {
    K_ring.wait_full(inside, tiles.j);
    begin_slot();
    wgmma_fence();
    issue_next_scores();
    end_slot();
  }

  DEVICE void first_softmax() {
    if (tiles.masked(consumer)) load_mask();
    wgmma_wait<0>(inside, tiles.j);
    release_scores();
    softmax.reset();
    float alpha[2];
    change_scores<SegmentTag<RIGHT_MASKED>>();
    if (tiles.masked(consumer)) {
      mask(SegmentTag<RIGHT_MASKED>{});
    } else {
      mask(SegmentTag<CLEAR>{});
    }
    softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
    pack_weights();
    inside.enter(NOTHING);
  }

  // One step of the pipeline (Alg. 2, l. 8-14): issue_products() puts the scores of tile j and the values of tile j + 1 in
  // flight together; end_step() runs the softmax of j under the values.
  template <typename Tag>
  DEVICE void step(Tag segment) {
    K_ring.wait_full(inside, tiles.j);
    issue_products();
    end_step(segment);
  }
  DEVICE void issue_products() {
    begin_slot();
    wgmma_registers(O_rmem);
    wgmma_registers(P_rmem);
    wgmma_fence();
    issue_next_scores();
    V_ring.wait_full(inside, tiles.j + 1);
    inside.enter(ISSUE, tiles.j + 1);
    issue_next_values();
    end_slot();
  }
  template <typename Tag>
  DEVICE void end_step(Tag segment) {
    if constexpr (Tag::value != CLEAR) load_mask();
    // VALUES_FIRST: a soft cap, or the mask of a listed tile, needs the registers of the P in flight. It waits for the values
    // of this consumer and runs under those of other consumers. Exceptions, where registers suffice: scores near 0, head dims
    // over 128 with a causal mask in clear tiles, and bits of a mask that are loaded early.
    constexpr bool NEAR_0_FIRST = CAP_FOLDS && Tag::value == CLEAR && Bc <= 96;
    constexpr bool CAP_WAITS = SOFTCAP && !(HEAD_DIM > 128 && MASK_KIND == MASK_CAUSAL && Tag::value == CLEAR);
    constexpr bool FUNCTION_WAITS = !ScoreFunction<ForwardParams>::IS_LIGHT;
    constexpr bool MASK_WAITS = LISTED && !Tiles::BITS_EARLY && Tag::value != CLEAR;
    constexpr bool VALUES_FIRST = (CAP_WAITS && !NEAR_0_FIRST) || FUNCTION_WAITS || MASK_WAITS;
    wgmma_wait<VALUES_FIRST ? 0 : 1>(inside, tiles.j);
    release_scores();
    if constexpr (VALUES_FIRST) release_values();
    float alpha[2];
    bool grown;
    if constexpr (CAP_FOLDS && Tag::value == CLEAR) {
      tiles.count();
      grown = capped_softmax_beside<!VALUES_FIRST>(alpha);
    } else {
      change_scores<Tag>();
      mask(segment);
      grown = softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
      if constexpr (!VALUES_FIRST) end_values();
    }
    // Row sums and packed P before the branch: ptxas computes them between exponentials, which leave every second issue slot
    // free. Without wgmma_registers() it moves them behind the branch.
    pack_weights();
    wgmma_registers(P_rmem);
    wgmma_registers(softmax.l);
    if (grown) {
#pragma unroll
      for (int i = 0; i < V_DIM / 2; ++i) O_rmem[i] *= alpha[i / 2 % 2];
    }
  }
  DEVICE void end_values() {
    wgmma_wait<0>(inside, tiles.j + 1);
    release_values();
    inside.enter(SOFTMAX, tiles.j);
  }

  // The softmax of capped scores. Each warp takes the cheapest way that its scores allow. PENDING: values are in flight. All
  // warps wait for them at the same place, as wgmma.wait_group is for a whole warpgroup.
  template <bool PENDING>
  DEVICE bool capped_softmax_beside(float (&alpha)[2]) {
    const auto S = fragment_view(S_rmem);
    const float unit = unit_of(p.softcap), greatest = greatest_magnitude(S);
    const bool nearest = !warp_any(!is_near_0<3>(greatest, unit));
    if constexpr (PENDING) end_values();
    if (nearest) return capped_softmax<3>(S, softmax, unit, p.scale_log2, greatest, alpha);
    wgmma_registers(S_rmem);  // else ptxas computes the squares of scores, which both branches need, before them, and spills
    if (!warp_any(!is_near_0<4>(greatest, unit))) {
      return capped_softmax<4>(S, softmax, unit, p.scale_log2, greatest, alpha);
    }
    cap_clear_scores<false>(S, p.softcap);
    return softmax_of_tile(S_rmem, softmax, softmax_scale(p), alpha);
  }

  // LISTED: the step of a tile that this consumer's rows do not see. The next step adds its values with probabilities of 0,
  // and so has the shape of every other step.
  DEVICE void skip_step() {
    tiles.count();
    K_ring.release(lane);
    K_ring.advance();
    begin_slot();
    issue_last_values();
    end_slot();
    end_last_values<0>();
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i) P_rmem[i] = 0;
  }

  // The last values of an item, in flight.
  DEVICE void issue_last_values() {
    V_ring.wait_full(inside, tiles.j + 1);
    inside.enter(ISSUE, tiles.j + 1);
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

using KernelParams = typename Choose<RUNNING, RunningParams, ForwardParams>::type;

// A separate first launch, only for masks with runs of rows: one warp per block of keys.
KERNEL __launch_bounds__(MASK_THREADS)
    mask_blocks(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  prepare_mask<MASK_KIND>(p, (blockIdx.x * MASK_THREADS + threadIdx.x) / 32, gridDim.x * (MASK_THREADS / 32));
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_forward(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap Q_map,
                const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
                const __grid_constant__ TensorMap O_map) {
  DYN_SMEM(start);
  const SharedMemory smem{smem_address(start)};
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // shfl: ptxas knows that the result is warp-uniform

  if (thread == 0) smem.init_barriers();
  block_sync();  // all mbarriers are initialised before a thread waits for one

  if constexpr (SPLIT_KEYS) grid_release_next();  // blocks of the merge may become resident as blocks of this launch end
  PersistentItems items(p);
  if (warpgroup == 0) {
    registers_release_to<REGISTERS.producer>();
    if constexpr (LISTED) {
      if (CACHED ? thread / 32 == 0 && elect_one() : thread == 0) {
        KeyLoader{p, &Q_map, &K_map, smem}.run();
      } else if (thread / 32 == 1) {
        ValueLoader{p, &V_map, smem, thread % 32}.run();
      } else if (thread / 32 == 2) {
        Lister{p, smem}.run(items);
      } else if (TREE && thread / 32 == 3) {
        TreeLoader{p, smem}.run();
      }
    } else {
      if (thread == 0) Producer{p, &Q_map, &K_map, &V_map, smem}.run(items);
    }
  } else {
    registers_raise_to<REGISTERS.consumer>();
    if (!SPLIT_KEYS && !LISTED && some_block_is_empty(p)) {  // blocks of queries without keys skip the pipeline
      for (u32 index; items.next(index);) {
        const WorkItem work = items.item(p, index);
        if (tiles_of(p, work.q_block).empty()) store_nothing(p, {work, index}, thread - 128);
      }
    }
    Consumer{{p, &O_map, smem, warpgroup - 1, thread / 32 % 4, thread % 32}}.run();
  }
}

// The second launch: merges the parts of splits. Its blocks may start early, and then wait for the first launch to end.
KERNEL __launch_bounds__(COMBINE_THREADS)
    fa3_combine(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap,
                const __grid_constant__ TensorMap, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  if constexpr (SPLIT_KEYS) {
    grid_await_previous();
    combine_splits<Bc>(p);
  }
}
