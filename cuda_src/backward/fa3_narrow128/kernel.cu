// FlashAttention-3 backward for float16 and bfloat16 on Hopper (sm_90a), head dims 72 to 128: TMA, WGMMA, warp specialisation.
// Read backward/fa3_narrow64/kernel.cu first: its header has the papers, the algorithm's lines and the departures that both
// kernels share. What differs here, and why (figures: NOTES.md):
// - dQ of the previous tile comes first in a tile; dP is issued with it and with dV, where registers suffice (DP_WITH_DQ).
// - Items of persistent blocks overlap up to 96 columns only. With more, dQ is staged, which is faster there.
// - A warpgroup computes the columns of dQ of one atom of K. If fewer remain for the second warpgroup, it issues only these
//   (DQ_IS_UNEVEN).
// - Parts of V and K stay in registers, as operands of dP and S, as far as there is room (held_steps() of fa3_config.py).
// - Each warp fences the dS that it stores: dQ comes too early in a tile for the fence to be left to the warps that issue dQ.
#include "backward/fa3_narrow128/config.cuh"
#include "backward/fa3_common/shape.cuh"

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

#include "backward/fa3_common/narrow_entries.cuh"
