// Flash-Decoding over ragged batches: the same work as decode_split, cut into shares of all of it (sm_80 and later).
// Osama et al., "Stream-K: Work-centric Parallel Decomposition", 2023; Sanovar et al., "Lean Attention", 2024.
//
//   the tiles of all sequences and heads, end to end     BalancedLine, BalancedShare: decode/schedule.cuh
//   a share's pieces, one after another                  the loop below
//   partial tiles of an item, merged                     combine_if_last(), or decode_combine_balanced
//
// Lengths are read on the device: every warp sums them for itself, 32 at a time. Where a share begins and ends depends on
// nothing but the lengths and the number of shares, and parts are merged in the order of their keys: repeats give the
// same bits.
//
// Departure: shares are not equal, and more than the GPU runs at once, where lengths differ. SMs do not read at one speed: of
// equal shares, one each, a fifth were done after three quarters of the time, and of four each SMs still idled 8% of the time
// at the end. So who is done takes another share, and the last ones are small: half of them have an eighth of the tiles
// (guided self-scheduling: Polychronopoulos, Kuck, 1987). Shares that shrink steadily were no better than two sizes.
//
// 64 sequences of 128 to 64k keys, log-uniform: 96% of a streaming read. Equal shares, 1 / 2 / 4 / 8 per block that runs at
// once: 5 / 3 / 3 / 3% more. Fixed splits as planned for the longest: 42% more; eight of each, which only a host that knows
// the lengths would choose, are as fast.
#include "decode/config.cuh"
#include "decode/block.cuh"

static_assert(!CLUSTER_MERGE, "an item's parts lie in any blocks, not in those of one cluster");

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_balanced(const __grid_constant__ DecodeParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE) grid_release_next();
  BalancedShare share(p, thread % 32);
  const u32 share_slot = smem_base + SharedMemory::SHARES + thread / 32 * 32;
  DecodeBlock block(p, smem_base, thread);
  Piece piece;
#pragma unroll 1
  while (share.next(p, piece)) {  // the same for all threads
    share.put_aside(share_slot, thread % 32);
    block.attend(p, piece);
    if constexpr (FOLD_COMBINE) combine_if_last(p, piece, thread);
    block.release();
    share.take_back(share_slot);
    if constexpr (TRACE) {
      if (thread == 0) write_piece_trace(p, piece, start_ns);
      start_ns = global_timer();
    }
  }
  block.inside.close();
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
