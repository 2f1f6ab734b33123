// decode_split: Flash-Decoding, a few query tokens against a long key/value cache (sm_80 and later).
// Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023:
//
//   step 1   split the keys and values             the grid: one thread block per (split, work item); fixed_split()
//   step 2   FlashAttention for each split         DecodeBlock::attend(): decode/block.cuh
//   step 3   rescale by log-sum-exp and reduce     decode/merge.cuh, one of:
//     CLUSTER_MERGE   the splits of a work item are one cluster, whose blocks send each other their partial results
//     FOLD_COMBINE    the last warp that stores its rows to global memory merges them
//     neither         a second launch, decode_combine; with TMA_COPIES a programmatic dependent launch, which starts early
//
// A work item is one key/value head of one sequence (and one block of its rows). The query heads of its query group times the
// query tokens are the rows of one product: each byte of the cache is read once. Speed depends on the bytes in flight:
//
//   - Each warp takes 16 keys of a tile and has its own ring of stages. The loop has no barrier of the whole block.
//   - Only if there are more than 16 rows, warps split the rows: ROW_WARPS warps share a ring and its keys.
//   - The block that reads new tokens appends them. The block table is read up to 64 tiles ahead (decode/tma.cuh).
//   - Boxes of the copy engine have no L2 promotion: promotion slows long caches down.
//
// Departures:
//   - O is rescaled only if a maximum has grown by more than 2^8 (shared/softmax.cuh): exact, and rare.
//   - All tiles are masked: an unmasked copy of the loop would cost instruction cache misses.
//   - The kernel computes the splits, in whole tiles, from lengths in device memory: sequences may grow between the replays of a
//     CUDA graph.
//   - Under a window (MASK_BAND), only tiles that some query token sees are split. Keys before the window are never read:
//     a server may reuse their pages.
//
// cufa/plan/decode_splits.py chooses the number of splits and the merge. A batch of more work items than resident blocks
// usually goes to decode_balanced. Measurements and failed experiments: NOTES.md.
#include "decode/config.cuh"
#include "decode/block.cuh"

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_split(const __grid_constant__ KernelParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE && !CLUSTER_MERGE) grid_release_next();
  Span span;
  if (fixed_split(p, blockIdx.z, INVARIANT ? blockIdx.x : blockIdx.y, INVARIANT ? gridDim.y - 1 - blockIdx.y : blockIdx.x,
                  span)) {  // block-uniform
    DecodeBlock block(p, smem_base, thread);
    if constexpr (CLUSTER_MERGE) ClusterMerge::begin(smem_base, thread);
    block.attend(p, span);
    if constexpr (FOLD_COMBINE) combine_if_last(p, span, thread);
    if constexpr (CLUSTER_MERGE) merge_cluster(p, span, smem_base, thread);
    if constexpr (TRACE) {
      block_sync();  // the TraceRecord ends when the last warp has stored its rows
      if (thread == 0) write_span_trace(p, span, start_ns);
    }
  }
}

// A thread merges one vector (four columns of a row) of a work item at a time.
KERNEL __launch_bounds__(NUM_THREADS) decode_combine(const __grid_constant__ KernelParams p) {
  Span span;
  fixed_split(p, blockIdx.z, blockIdx.y, 0, span);
  if constexpr (TMA_COPIES) grid_await_previous();
  if (span.num_partials > 1) {
    combine_partials(p, span, blockIdx.x * NUM_THREADS + threadIdx.x, gridDim.x * NUM_THREADS);
  }
}
