// Flash-Decoding: a few query tokens against a long key/value cache (sm_80 and later).
// Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023:
//
//   step 1   split the keys and values             the grid: a thread block a (split, item); fixed_split()
//   step 2   FlashAttention for each split         decode_split: DecodeBlock::attend()
//   step 3   rescale by log-sum-exp and reduce     decode_combine; or, FOLD_COMBINE, the last block of an item
#include "tiles/decode_block.cuh"

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_split(const __grid_constant__ DecodeParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE) grid_release_next();
  Piece piece;
  if (fixed_split(p, blockIdx.z, blockIdx.y, blockIdx.x, piece)) {  // the same for all threads
    DecodeBlock block(smem_base, thread);
    block.attend(p, piece);
    if constexpr (FOLD_COMBINE) combine_if_last(p, piece, smem_base + FLAG_OFFSET, smem_base + RINGS_OFFSET, thread);
    if constexpr (TRACE) {
      block_sync();  // the record ends when the last warp has stored
      if (thread == 0) write_piece_trace(p, piece, start_ns);
    }
  }
}

// A block takes NUM_THREADS vectors of four columns of one item's rows.
KERNEL __launch_bounds__(NUM_THREADS) decode_combine(const __grid_constant__ DecodeParams p) {
  Piece piece;
  fixed_split(p, blockIdx.z, blockIdx.y, 0, piece);
  if constexpr (TMA_COPIES) grid_await_previous();
  if (piece.num_parts > 1) {
    combine_parts(p, piece, blockIdx.x * NUM_THREADS + threadIdx.x, gridDim.x * NUM_THREADS);
  }
}
