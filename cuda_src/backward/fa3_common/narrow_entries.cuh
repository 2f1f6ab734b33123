// The launches of the backward kernels of head dims to 128: prepare pass, key blocks, convert pass. A kernel defines before:
// struct Consumer, a NarrowConsumer whose run<LAST>() does all its work. LAST: it has the last columns of dQ (DQ_IS_UNEVEN).
#pragma once
#include "backward/fa3_common/background.cuh"
#include "backward/fa3_common/loader.cuh"

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
  round_score_gradients<PASS_THREADS>(p);
}
