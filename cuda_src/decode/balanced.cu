// decode_balanced: Flash-Decoding over ragged batches; the tiles of the whole batch are cut into shares (sm_80 and later).
// Osama et al., "Stream-K: Work-centric Parallel Decomposition", 2023; Sanovar et al., "Lean Attention", 2024.
//
//   the tiles of all sequences and heads, end to end     BalancedLine, BalancedShare: decode/schedule.cuh
//   a share's spans, one after another                   the loop below
//   partial results of a work item, merged               combine_if_last(), or decode_combine_balanced
//
// The kernel reads the lengths: each warp sums all of them, 32 at a time. The borders of a share depend only on the lengths and
// the number of shares, and partial results are merged in the order of their keys: repeated calls give the same bits.
//
// Departure: if lengths differ, there are more shares than resident blocks, in two sizes. SMs read at different speeds: an SM
// that is done early starts another share. The second half of the shares, which start last, has an eighth of the tiles (guided
// self-scheduling: Polychronopoulos, Kuck, 1987). Measurements and failed experiments: NOTES.md.
#include "decode/config.cuh"
#include "decode/block.cuh"

static_assert(!INVARIANT, "INVARIANT: the borders of a share depend on all lengths of the batch");
static_assert(!CLUSTER_MERGE, "CLUSTER_MERGE: the thread blocks of a work item are not one cluster");

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_balanced(const __grid_constant__ KernelParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE) grid_release_next();
  BalancedShare share(p, thread % 32);
  const u32 share_slot = smem_base + SharedMemory::SHARES + thread / 32 * 32;
  DecodeBlock block(p, smem_base, thread);
  Span span;
#pragma unroll 1
  while (share.next(p, span)) {  // block-uniform
    share.park(share_slot, thread % 32);
    block.attend(p, span);
    if constexpr (FOLD_COMBINE) combine_if_last(p, span, thread);
    block.release();
    share.unpark(share_slot);
    if constexpr (TRACE) {
      if (thread == 0) write_span_trace(p, span, start_ns);
      start_ns = global_timer();
    }
  }
}

// A thread merges one vector (four columns of a row) of a work item at a time.
KERNEL __launch_bounds__(NUM_THREADS) decode_combine_balanced(const __grid_constant__ KernelParams p) {
  Span span;
  balanced_item(p, blockIdx.z, blockIdx.y, threadIdx.x % 32, span);
  if constexpr (TMA_COPIES) grid_await_previous();
  if (span.num_partials > 1) {
    combine_partials(p, span, blockIdx.x * NUM_THREADS + threadIdx.x, gridDim.x * NUM_THREADS);
  }
}
