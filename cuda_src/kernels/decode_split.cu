// Flash-Decoding: a few query tokens against a long key/value cache (sm_80 and later).
// Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023:
//
//   step 1   split the keys and values             the grid: a thread block a (split, item); fixed_split()
//   step 2   FlashAttention for each split         DecodeBlock::attend(): tiles/decode_block.cuh
//   step 3   rescale by log-sum-exp and reduce     decode_combine, whose blocks are resident before decode_split ends;
//                                                  or, FOLD_COMBINE, the last block of an item: tiles/decode_merge.cuh
//
// An item is one key/value head of one sequence: its query heads times the query tokens are the rows of one product, so
// that every byte of the cache is read once. What matters is how many of them are on their way at any time:
//
//   - Every warp takes 16 keys of a tile and has a ring of buffers of its own. No barrier of the block in the loop.
//   - Rows are split over warps only when there are more than 16 (ROW_WARPS share a ring, and keys).
//   - New tokens are appended by the block that reads them; the block table is read one tile ahead.
//
// Departures: O is rescaled only when a maximum has grown by 2^8 (tiles/softmax.cuh); all tiles are masked; splits are
// whole tiles of the length that stands on the device, so that a graph may be replayed while sequences grow.
//
// Figures, one H200, bf16, d128, cold L2 (batch x query/kv heads x cached; microseconds, and of a streaming read):
//   1 x 32/8 x 1k     9.9   67%   cuDNN 11.5     PyTorch's FlashAttention 14.5     64 x 32/8 x 8k   478.0 99%   482.2   773.8
//   1 x 32/8 x 8k     19.8  79%         22.6                              29.6     1 x 32/32 x 32k  133.0 97%   135.8   147.6
//   1 x 32/8 x 128k   134.0 96%         137.1                             153.3    16 x 64/1 x 16k   51.5 82%    67.6    56.3
//   8 x 32/8 x 32k    248.3 98%         251.0                             254.7    1 x 64/8 x 512k  478.9 99%   480.8   514.6
// By Hopper's copy engine, boxes of 16 keys (decode_tma.cuh). Its L2 promotion decides: none as above, 256 bytes 523 us at
// 512k, cp.async 504. Pages of 128 cost 2%, of 16 7%: a box a page. Eight query heads a group cost 0.5% over one. e4m3: 137 us
// for bytes that read in 128. What limits small caches: launch, lengths, the first load, the merge; a read alone takes 6.6.
//
// Tried, and slower (1 x 64/8 x 512k unless said otherwise, against the best of the same run):
//   - Two blocks an SM of four warps: +1%; three: +3%; four of two warps: +7%. 32 keys a warp: +1%.
//   - cp.async with L2::256B: +2%, without a hint or with evict_first: +3%.
//   - All warps in step, by a barrier a tile: no gain. Tiles interleaved among splits instead of runs: none either.
//   - Boxes of half rows (no bank conflicts) or of whole rows (two by two): alike. With 256 bytes of L2 promotion: +9%,
//     over none. One bulk copy a row: +2%, for a warp issues them one by one.
//   - The merge as a second launch, 1 x 32/8 x 1k: 10.7 us against 9.7; without programmatic launch 14.3.
#include "tiles/decode_block.cuh"

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_split(const __grid_constant__ DecodeParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE && !CLUSTER_MERGE) grid_release_next();
  Piece piece;
  if (fixed_split(p, blockIdx.z, blockIdx.y, blockIdx.x, piece)) {  // the same for all threads
    DecodeBlock block(smem_base, thread);
    if constexpr (CLUSTER_MERGE) ClusterMerge::begin(smem_base + RECEIVED_OFFSET, thread);
    block.attend(p, piece);
    if constexpr (FOLD_COMBINE) combine_if_last(p, piece, thread);
    if constexpr (CLUSTER_MERGE) merge_cluster(p, piece, smem_base + RECEIVED_OFFSET, thread);
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
