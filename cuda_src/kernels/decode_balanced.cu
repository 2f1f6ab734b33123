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
  BalancedShare share(p, thread % 32);
  DecodeBlock block(smem_base, thread);
  Piece piece;
#pragma unroll 1
  while (share.next(p, piece)) {  // the same for all threads
    block.attend(p, piece);
    combine_if_last(p, piece, smem_base + FLAG_OFFSET, thread);
    block_sync();  // Q, the rings and what was merged in them are free
    if constexpr (TRACE) {
      if (thread == 0) write_piece_trace(p, piece, start_ns);
      start_ns = global_timer();
    }
  }
}
