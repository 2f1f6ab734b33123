// FlashAttention-3 backward for float16 and bfloat16 on Hopper (sm_90a), head dims 72 to 128: TMA, WGMMA, warp specialisation.
// Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision", 2024, section 3 and appendix B; Dao, "FlashAttention-2", 2023, Algorithm 2, whose lines are:
//
//   l. 3-4    dQ = 0, D = rowsum(dO o O)           fa3_backward_prepare; persistent blocks: also Background::prepare()
//   l. 5-7    key blocks j; K_j, V_j, dK, dV = 0   for_each_item(): a persistent block takes several, any other block one
//   l. 8-9    query blocks i; Q_i, dO_i, L_i, D_i  Loader, by the copy engine, in rings; all heads of a query group
//   l. 10-11  S = Q_i K_j^T, P = exp(S - L_i)      issue_scores(), make_weights(), as S^T = K_j Q_i^T: 64 keys a warpgroup,
//                                                  so that P^T and dS^T are operands of dV and dK as they lie in registers
//   l. 12     dV += P^T dO_i                       issue_dv()
//   l. 13-14  dP = dO_i V_j^T, dS = P o (dP - D)   issue_dp(), make_gradients(), transposed as well
//   l. 15     dQ_i += dS K_j                       begin_dq(), end_dq(): of the previous tile
//   l. 16     dK += dS^T Q_i                       issue_dk()
//   l. 18     dK, dV                               store_dk(), store_dv(); dQ: fa3_backward_convert, Background::convert()
//
// Departures from FlashAttention-3's kernel, and why (figures: NOTES.md):
// - dQ needs the dS of both warpgroups. It is computed one tile later, so that neither waits for the other: one warpgroup's
//   exponentials overlap with the other's products, without ping-pong barriers.
// - P is kept only as the operand of dV, rounded to 16 bits, and dS is computed from that. The registers that this leaves let dV
//   overlap with dS, and dK with the exponentials of the next tile.
// - Persistent blocks take one key block after another. Two warps of their producer prepare and convert most of dQ concurrently
//   (backward/fa3_common/background.cuh).
// - Up to 96 columns, persistent blocks overlap items: while S of the next item's first tile is in flight, dV of the current item
//   is stored; dK is stored after P of that tile is made. The second buffer of K takes the shared memory that staging dQ would
//   need (BULK_ADD = false).
// - A warpgroup computes the columns of dQ of one atom of K. If fewer remain for the second warpgroup, it issues only these
//   (DQ_IS_UNEVEN).
// - dP is issued with dQ of the previous tile and with dV, where registers suffice (DP_WITH_DQ).
// - Parts of V and K stay in registers, as operands of dP and S, as far as there is room (held_steps() of fa3_config.py).
// - dQ is stored in the layout of accumulators, 16 rows of a warp at a time, by the copy engine or by red; the convert pass
//   puts dQ in order (backward/common/passes.cuh, shared with fa2_backward).
// - A thread block keeps dK and dV of a query group over all of its query heads.
// - The item descriptor is read from shared memory while products run. In registers it would make head dim 128 spill.
// - DETERMINISTIC: threads of the producer wait for tickets, so that no consumer does. With BULK_ADD they also start the
//   additions of staged dQ; without it they signal consumers to add (backward/fa3_common/sums.cuh).
//
// Do not change without looking at the machine code: ptxas serialises products that cross a join or a condition, and products
// whose registers other instructions touch in flight; it does not always say so (`cufa compile` counts fences).
// Warp roles, mbarriers, shared memory and a tile's timeline: backward/fa3_common/README.md.
#include "backward/fa3_narrow128/config.cuh"
#include "backward/fa3_common/background.cuh"
#include "backward/fa3_common/loader.cuh"

static_assert((HEAD_DIM > 64 || V_DIM > 64) && HEAD_DIM <= 128 && V_DIM <= 128,
              "backward/fa3_narrow64 and backward/fa3_pair compute other heads");
constexpr bool DQ_FIRST = true;
constexpr bool IN_HALVES = false;
// dP is issued with dQ and runs while dQ is added. With a soft cap or a score function, and in persistent blocks beyond 96
// columns, the registers do not suffice for both: ptxas then waits for each product before it issues the next one.
constexpr bool CHANGED = SOFTCAP || SCORE || DROPOUT;  // needs these registers
constexpr bool DP_WITH_DQ = !CHANGED && (HEAD_DIM <= 96 || !IS_PERSISTENT);
constexpr int K_HELD = CHANGED ? 0 : K_STEPS_HELD, V_HELD = CHANGED ? 0 : V_STEPS_HELD;
#include "backward/fa3_common/narrow_consumer.cuh"

struct Consumer : NarrowConsumer {
  using NarrowConsumer::NarrowConsumer;

  // LAST: the consumer that has the last columns of dQ, where these are fewer (DQ_IS_UNEVEN).
  template <bool LAST>
  DEVICE void run() {
    for_each_item([&] {
      begin_first_tile();
      do {
        while (n + 1 < end) visit<LAST, NEXT_TILE>();
      } while (goes_on_to_next_item([&] { visit<LAST, NEXT_ITEM>(); }));
      visit<LAST, NOTHING_MORE>();
      end_last_tile<LAST>();
    });
  }

  // One tile, whose P is made. Products: dQ of the previous tile, dP, dV, S of the next tile, dK. P of the next tile is computed
  // while dK is in flight.
  template <bool LAST, Following NEXT>
  DEVICE void visit() {
    wgmma_registers(dV_rmem);
    wgmma_registers(P_rmem);
    begin_dq<LAST>();
    if constexpr (DP_WITH_DQ) issue_dp();
    issue_dv();
    end_dq<LAST, DP_WITH_DQ ? 2 : 1>();  // dV stays pending, and dP if it is issued
    if constexpr (DP_WITH_DQ) {
      await<1>(WEIGHT_GRADIENTS);
    } else {
      issue_dp();
      await_dv();  // dP has landed, too
      log.enter(WEIGHT_GRADIENTS | LANDED);
    }
    enter(SOFTMAX);
    wgmma_registers(dP_rmem);
    if constexpr (NEXT != NEXT_TILE) smem.rings.V.release(kv, lane);
    make_gradients();
    if constexpr (DP_WITH_DQ) await_dv();  // dV overlapped with dS
    wgmma_registers(dK_rmem);
    wgmma_registers(dS_rmem);
    smem.dO_ring.release(n, lane);
    if constexpr (NEXT != NOTHING_MORE) {
      issue_next_scores<NEXT>();
    } else {
      begin_products();
    }
    issue_dk();
    finish_tile<NEXT>();
  }
};

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_prepare(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap) {
  grid_release_next();
  if (found_tickets<PASS_THREADS>(p)) return;
  prepare_strip(p);
  zero_score_gradients<PASS_THREADS>(p);
  prepare_items(p);
  prepare_counters(p);
  prepare_mask<MASK_KIND>(p, (blockIdx.x * PASS_THREADS + threadIdx.x) / 32, gridDim.x * PASS_STRIPS);
}

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_backward(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap dO_map,
                 const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
                 const __grid_constant__ TensorMap V_map) {
  DYN_SMEM(start);
  const u32 base = smem_address(start);
  const NarrowMemory smem(base);
  const int thread = threadIdx.x;
  const int warpgroup = shfl(u32(thread / 128), 0);  // warp-uniform, as ptxas can prove
  grid_release_next();
  if (thread == 0) smem.init_barriers(base);
  if (IRREGULAR ? thread / 32 == 1 : thread == 32) take_item(p, base);
  block_sync();  // mbarriers are initialised and the item is there before any thread uses them

  if (warpgroup == 0) {
    registers_release_to<REGISTERS.producer>();
    if (IS_PERSISTENT && (thread / 32 == 0 || thread / 32 == 3)) {
      Background{p, base}.run();
    } else if (RAGGED ? thread / 32 == 1 : thread == 32) {
      Loader<NarrowMemory, true>{p, &Q_map, &K_map, base}.run();
    } else if (RAGGED ? thread / 32 == 2 : thread == 64) {
      Loader<NarrowMemory, false>{p, &dO_map, &V_map, base}.run();
    } else if (DETERMINISTIC && (thread == 96 || (BULK_ADD && thread == 0))) {
      if constexpr (BULK_ADD) {
        DqAdder<NarrowMemory>{p, base, thread != 96}.run();
      } else {
        TicketKeeper{p, base, 0}.run();
      }
    }
  } else {
    registers_raise_to<REGISTERS.consumer>();
    if (DQ_IS_UNEVEN && warpgroup == CONSUMERS) {
      Consumer(p, smem, CONSUMERS - 1, thread).run<DQ_IS_UNEVEN>();
    } else {
      Consumer(p, smem, DQ_IS_UNEVEN ? 0 : warpgroup - 1, thread).run<false>();
    }
  }
}

KERNEL __launch_bounds__(PASS_THREADS)
    fa3_backward_convert(const __grid_constant__ KernelParams p, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                         const __grid_constant__ TensorMap) {
  grid_await_previous();
  convert_strip(p, IS_PERSISTENT ? HeadBatches{p}.left() : 0);
}
