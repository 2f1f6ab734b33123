// The key block that a thread block of a backward kernel takes, and the query tiles that it visits.
#pragma once
#include "backward/common/workspace.cuh"
#include "backward/common/mask_by_keys.cuh"
#include "shared/block_order.cuh"

// One key block of one key/value head.
struct KeyItem {
  int k_block, kv_head, batch;
};

// DETERMINISTIC: a block waits for the blocks to its right (tickets.cuh), so these are launched first. The blocks of a head
// follow one another through its query tiles, a tile or two apart. Launched in direct succession, most would wait: blocks of the
// other heads of a head batch are launched in between. A head batch has as many heads as the L2 cache holds.
DEVICE u32 heads_of_head_batch(u32 all_heads, i64 head_bytes) {
  constexpr i64 L2_SHARE = 24 << 20;  // bytes, as in ordered_block()
  const u32 fitting = u32(max(i64(1), min(i64(all_heads), L2_SHARE / head_bytes)));
  const u32 num_batches = (all_heads - 1) / fitting + 1;
  return (all_heads - 1) / num_batches + 1;
}
DEVICE HeadBlock batched_block(u32 index, u32 num_blocks, u32 all_heads, u32 batch_heads) {
  const u32 head_batch = index / (batch_heads * num_blocks), rest = index - head_batch * batch_heads * num_blocks;
  const u32 members = min(batch_heads, all_heads - head_batch * batch_heads);
  return {num_blocks - 1 - rest / members, head_batch * batch_heads + rest % members};
}

// Under a causal mask more rows see early key blocks: key blocks have the reverse of the forward's order of query blocks. The
// query heads of a query group are visited one after another, so that the L2 cache holds one at a time.
template <int BC>
DEVICE KeyItem key_item(const BackwardParams& p, u32 index, int head_bytes_per_row) {
  const u32 Tc = LENGTHS_KIND == PACKED ? num_packed_blocks<BC>(p.total_k, p.batch) : u32(p.seqlen_k - 1) / BC + 1;
  const u32 all_heads = LENGTHS_KIND == PACKED ? u32(p.kv_heads) : u32(p.batch) * u32(p.kv_heads);
  const i64 head_bytes = i64(p.seqlen_q) * head_bytes_per_row;
  HeadBlock found;
  // Packed sequences have no planned head batches.
  if constexpr (BY_HEAD_BATCHES || (LISTED_TICKETS && LENGTHS_KIND != PACKED)) {
    const HeadBatches batches{p};
    const u32 head_batch = min(index / (u32(p.heads_per_head_batch) * Tc), batches.whole()), first = batches.first(head_batch);
    const u32 rest = index - first * Tc, members = batches.end(head_batch) - first;
    if constexpr (LISTED_TICKETS) {
      found = {Tc - 1 - rest / members, first + rest % members};
    } else if constexpr (LATER_ROWS_SEE_MORE) {
      found = {rest / members, first + rest % members};
    } else {
      found = {rest % Tc, first + rest / Tc};
    }
  } else if constexpr (DETERMINISTIC) {
    found = batched_block(index, Tc, all_heads, heads_of_head_batch(all_heads, head_bytes));
  } else {
    found = ordered_block(index, Tc, all_heads, head_bytes);
    if constexpr (LATER_ROWS_SEE_MORE) found.block = Tc - 1 - found.block;
  }
  if constexpr (LENGTHS_KIND == PACKED) {
    const PackedBlock block = packed_block<BC>(p.cu_seqlens_k, p.batch, p.total_k, found.block);
    return {block.block, int(found.head), block.sequence};
  }
  return {int(found.block), int(found.head % u32(p.kv_heads)), int(found.head / u32(p.kv_heads))};
}

// The query tiles that a key block visits. A key block past the last key visits none.
template <int BR, int BC>
DEVICE TileRange visited_queries(const HeadMask& mask, int k_block) {
  if (LENGTHS_KIND != DENSE && (mask.rows == 0 || k_block * BC >= mask.keys)) return {};
  return query_tiles<BR, BC>(mask, k_block);
}

// A query tile of one query head. A key block visits the tiles of a head from first to last (causal: from the diagonal on), then
// the tiles of the next head of the query group. LISTED_TICKETS on Hopper: see KeyBlock::next() of fa3_common/block.cuh.
struct QueryTile {
  int head, q_tile;

  DEVICE QueryTile next(const TileRange& tiles) const {
    return q_tile + 1 < tiles.end ? QueryTile{head, q_tile + 1} : QueryTile{head + 1, tiles.first};
  }
  DEVICE QueryTile previous(const TileRange& tiles) const {
    return q_tile > tiles.first ? QueryTile{head, q_tile - 1} : QueryTile{head - 1, tiles.end - 1};
  }
};

// The ticket of a key block at a query tile: the number of key blocks to its right that the tile sees, which add first.
template <int BR, int BC>
DEVICE u32 key_blocks_before(const HeadMask& mask, int q_tile, int k_block) {
  return u32(mask.template tiles<BR, BC, true>(q_tile).end - 1 - k_block);
}
