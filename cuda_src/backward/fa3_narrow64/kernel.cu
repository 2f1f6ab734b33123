// FlashAttention-3 backward for float16 and bfloat16 on Hopper (sm_90a), head dims to 64: TMA, WGMMA, warp specialisation.
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
// - P is kept only as the operand of dV, rounded to 16 bits, and dS is computed from this operand. The registers that this saves
//   let dV overlap with dS, and dK with the exponentials of the next tile.
// - Persistent blocks take one key block after another. Two warps of their producer prepare and convert most of dQ concurrently
//   (backward/fa3_common/background.cuh).
// - Items overlap: while S of the next item's first tile is in flight, dV of the current item is stored; dK is stored after P of
//   that tile is begun. The current item's last dQ is computed concurrently with the next item's first products. The second
//   buffer of K takes the shared memory that staging dQ would need (BULK_ADD = false).
// - dP comes first in a tile. In persistent blocks it is issued between the two halves of a tile's exponentials and overlaps with
//   the second half: by then half of S has become P, and no other product is in flight.
// - The warps that issue dQ, a tile later, fence dS between the proxies. They have waited for the full mbarrier of dS, so the
//   stores happen before their fence. A fence by the storing warps would wait for the stores.
// - dQ leaves in the layout of accumulators, 16 rows of a warp at a time, by the copy engine or by red; the convert pass puts dQ
//   in order (backward/common/passes.cuh, shared with fa2_backward).
// - A thread block keeps dK and dV of a query group over all of its query heads.
// - The item descriptor is read from shared memory while products run. In registers it would make head dim 128 spill
//   (backward/fa3_narrow128, with the same code).
// - DETERMINISTIC: threads of the producer wait for tickets, so that no consumer does. With BULK_ADD they also start the
//   additions of staged dQ; without it they signal consumers to add (backward/fa3_common/sums.cuh).
//
// Do not change without looking at the machine code: ptxas serialises products that cross a join or a condition, and products
// whose registers other instructions touch in flight; it does not always say so (`cufa compile` counts fences).
// Warp roles, mbarriers, shared memory and a tile's timeline: backward/fa3_common/README.md.
#include "backward/fa3_narrow64/config.cuh"
#include "backward/fa3_common/shape.cuh"

static_assert(HEAD_DIM <= 64 && V_DIM <= 64, "backward/fa3_narrow128 computes wider heads");
constexpr bool DQ_FIRST = false;
// Persistent blocks issue dP between the two halves of a tile's exponentials: it overlaps with the second half.
constexpr bool IN_HALVES = IS_PERSISTENT;
constexpr int K_HELD = 0, V_HELD = 0;  // 128 query rows leave no registers for K and V
#include "backward/fa3_common/narrow_consumer.cuh"

struct Consumer : NarrowConsumer {
  using NarrowConsumer::NarrowConsumer;

  template <bool LAST>  // false: all consumers have equal parts of dQ
  DEVICE void run() {
    for_each_item([&] {
      begin_first_tile();
      do {
        while (n + 1 < end) visit<NEXT_TILE>();
      } while (goes_on_to_next_item([&] { visit<NEXT_ITEM>(); }));
      visit<NOTHING_MORE>();
      end_last_tile<LAST>();
    });
  }

  // One tile, whose P is made (IN_HALVES: its first half). Products: dP, dV, dQ of the previous tile, S of the next tile, dK. dS
  // is computed while dV is in flight, and P of the next tile while dK is.
  template <Following NEXT>
  DEVICE void visit() {
    wgmma_registers(dV_rmem);
    if constexpr (!IN_HALVES) wgmma_registers(P_rmem);
    issue_dp();
    if constexpr (IN_HALVES) {
      enter(SOFTMAX);
      end_weights(n);
      wgmma_registers(P_rmem);
    }
    begin_products();
    issue_dv();
    await<1>(WEIGHT_GRADIENTS);
    enter(SOFTMAX);
    wgmma_registers(dP_rmem);
    if constexpr (NEXT != NEXT_TILE) smem.rings.V.release(kv, lane);
    make_gradients();  // while dV is in flight
    await_dv();
    wgmma_registers(dK_rmem);
    wgmma_registers(dS_rmem);
    // In begin_dq() each lane fences its reads of -D. wgmma.fence.sync follows and converges the warp: lane 0 releases for all.
    begin_dq<false>();
    smem.dO_ring.release(n, lane);
    if constexpr (NEXT != NOTHING_MORE) issue_next_scores<NEXT>();
    issue_dk();
    end_dq<false, NEXT == NOTHING_MORE ? 1 : 2>();  // dK stays pending, and S of the next tile if there is one
    finish_tile<NEXT>();
  }
};

#include "backward/fa3_common/narrow_entries.cuh"
