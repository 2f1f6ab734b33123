// Flash-Decoding over ragged batches: the same work, cut into equal shares (sm_80 and later).
// Osama et al., "Stream-K", 2023; Sanovar et al., "Lean Attention", 2024.
//
//   the tiles of all sequences and heads, end to end    BalancedShare
//   a share's pieces, one after another                 the loop below
//   partial tiles of an item, merged                    combine_if_last(): the last block to finish an item
#include "tiles/decode_block.cuh"

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_balanced(const __grid_constant__ DecodeParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE) grid_release_next();
  BalancedShare share(p, blockIdx.x, thread % 32);
  DecodeBlock block(smem_base, thread);
  Piece piece;
#pragma unroll 1
  while (share.next(p, piece)) {  // the same for all threads
    block.attend(p, piece);
    if constexpr (FOLD_COMBINE) combine_if_last(p, piece, smem_base + FLAG_OFFSET, smem_base + RINGS_OFFSET, thread);
    block.release();
    if constexpr (TRACE) {
      if (thread == 0) write_piece_trace(p, piece, start_ns);
      start_ns = global_timer();
    }
  }
}

// A block takes NUM_THREADS vectors of four columns of one item's rows.
KERNEL __launch_bounds__(NUM_THREADS) decode_combine_balanced(const __grid_constant__ DecodeParams p) {
  Piece piece;
  balanced_item(p, blockIdx.z, blockIdx.y, threadIdx.x % 32, piece);
  if constexpr (TMA_COPIES) grid_await_previous();
  if (piece.num_parts > 1) {
    combine_parts(p, piece, blockIdx.x * NUM_THREADS + threadIdx.x, gridDim.x * NUM_THREADS);
  }
}
