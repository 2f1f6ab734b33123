// Flash-Decoding: a few query tokens against a long key/value cache (sm_80 and later).
// Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023:
//
//   step 1   split the keys and values             the grid: a thread block per (split, item); fixed_split()
//   step 2   FlashAttention for each split         DecodeBlock::attend(): decode/block.cuh
//   step 3   rescale by log-sum-exp and reduce     decode/merge.cuh: one of
//     CLUSTER_MERGE   blocks of a cluster, which the splits of an item then are, send each other their parts
//     FOLD_COMBINE    the last warp to leave its rows in global memory merges them
//     else            decode_combine, whose blocks are resident before decode_split ends
//
// An item is one key/value head of one sequence: its query heads times the query tokens are the rows of one product, so
// that every byte of the cache is read once. What matters is how many of them are on their way at any time:
//
//   - Every warp takes 16 keys of a tile and has a ring of buffers of its own. No barrier of the block in the loop.
//   - Rows are split over warps only when there are more than 16 (ROW_WARPS share a ring, and keys).
//   - New tokens are appended by the block that reads them; the block table is read a warp's worth of tiles ahead.
//
// Departures: O is rescaled only when a maximum has grown by 2^8 (shared/softmax.cuh); all tiles are masked; splits are
// whole tiles of the length that stands on the device, so that a graph may be replayed while sequences grow. How many
// splits, and which merge: cufa/plan/decode_splits.py.
//
// Where tokens see a window (MASK_BAND), the tiles that are split are those of the sequence's end that some token sees: a
// window over a long cache reads what a short cache holds. Keys before it play no part even where a tile has some of both,
// so that a server may give their pages away.
//
// Keys and values come by Hopper's copy engine, boxes of 16 keys (decode_tma.cuh). Its L2 promotion decides: none; with 256
// bytes a long cache takes 9% longer, by cp.async 5%. Pages cost 2%: a box per page. Eight query heads per group cost
// nothing over one. A batch of more items than the GPU runs at once goes to decode_balanced, one share per block.
//
// Where the time goes, by leaving parts out. A short cache of one sequence: half of it is the launch, most of the rest
// the loads, half as much again as a plain read of those bytes; products, the merge of warps and that of 8 blocks in a
// cluster (through global memory three times as much) are small, and code that is not in a cache yet is a tenth of it all. A
// long cache: loads are all but 3%, and of that the merge of 16 blocks is half: stores, count and loads wait for each
// other. A cluster would halve it, but 16 blocks find no room, and 8 leave SMs idle.
//
// Tried, and slower (1 x 64/8 x 512k unless said otherwise, against the best of the same run):
//   - Two blocks per SM of four warps: +1%; three: +3%; four of two warps: +7%. 32 keys per warp: +1%.
//     9, 12, 13 warps: alike.
//   - cp.async with L2::256B: +2%, without a hint or with evict_first: +3%. Boxes with evict_first: +3%.
//   - All warps in step, by a barrier per tile: no gain. Tiles interleaved among splits instead of runs: none either.
//   - Boxes of half rows (no bank conflicts) or of whole rows (two by two): alike. With 256 bytes of L2 promotion: +9%,
//     over none. One bulk copy a row: +2%, for a warp issues them one by one.
//   - The merge as a second launch, 1 x 32/8 x 1k: +10% over the last block's; without programmatic launch +47%.
//   - prefetch.tensormap at the start, 1k: +4%. Two chains of products for the scores: no gain.
//   - Clusters of 3 to 8 where they take more than half of the SMs: 10% and more, since GPCs differ in size and wait.
#include "decode/config.cuh"
#include "decode/block.cuh"

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) decode_split(const __grid_constant__ DecodeParams p) {
  DYN_SMEM(smem);
  const u32 smem_base = smem_address(smem);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  if constexpr (TMA_COPIES && !FOLD_COMBINE && !CLUSTER_MERGE) grid_release_next();
  Piece piece;
  if (fixed_split(p, blockIdx.z, blockIdx.y, blockIdx.x, piece)) {  // the same for all threads
    DecodeBlock block(p, smem_base, thread);
    if constexpr (CLUSTER_MERGE) ClusterMerge::begin(smem_base, thread);
    block.attend(p, piece);
    if constexpr (FOLD_COMBINE) combine_if_last(p, piece, thread);
    if constexpr (CLUSTER_MERGE) merge_cluster(p, piece, smem_base, thread);
    block.inside.close();
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
