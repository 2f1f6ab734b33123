// Which key block a thread block of a backward kernel takes, which query tiles it visits, and in which order key blocks add to
// a tile of dQ where that order is fixed.
#pragma once
#include "primitives/semaphore.cuh"
#include "backward/common/workspace.cuh"
#include "backward/common/mask_by_keys.cuh"
#include "shared/schedule.cuh"

// One key block of one key/value head.
struct KeyItem {
  int k_block, kv_head, batch;
};

// DETERMINISTIC: a block waits for those at its right (DqTurns), so they come before it. A head's blocks follow one another
// through its query tiles, each a tile or two behind the one before; between two of them come those of the other heads of
// a group, as many as the L2 cache holds, so that a block is not launched only to wait. (With 4 heads on 132 SMs at a time
// and blocks of one head launched together, each waits for a quarter of the head's blocks: a quarter of its time at 4k.)
DEVICE u32 heads_in_turn(u32 all_heads, i64 head_bytes) {
  constexpr i64 L2_SHARE = 24 << 20;  // bytes, as of ordered_block()
  const u32 fitting = u32(max(i64(1), min(i64(all_heads), L2_SHARE / head_bytes)));
  const u32 num_groups = (all_heads - 1) / fitting + 1;
  return (all_heads - 1) / num_groups + 1;
}
DEVICE HeadBlock block_in_turn(u32 index, u32 num_blocks, u32 all_heads, u32 group_heads) {
  const u32 group = index / (group_heads * num_blocks), rest = index - group * group_heads * num_blocks;
  const u32 members = min(group_heads, all_heads - group * group_heads);
  return {num_blocks - 1 - rest / members, group * group_heads + rest % members};
}

// Early key blocks are seen by more rows (MASK_CAUSAL), so the order is that of the forward's query blocks turned around.
// Query heads of a group are visited one after another, so that the L2 cache has to hold one of them at a time. (Groups by
// the bytes of all of them left SMs idle at the end: 2 x 32/8 x 4k x d128 causal took 1.04, with one sequence 1.39.)
template <int BC>
DEVICE KeyItem key_item(const BackwardParams& p, u32 index, int head_bytes_per_row) {
  const u32 Tc = LENGTHS_KIND == PACKED ? num_packed_blocks<BC>(p.total_k, p.batch) : u32(p.seqlen_k - 1) / BC + 1;
  const u32 all_heads = LENGTHS_KIND == PACKED ? u32(p.kv_heads) : u32(p.batch) * u32(p.kv_heads);
  const i64 head_bytes = i64(p.seqlen_q) * head_bytes_per_row;
  HeadBlock found;
  if constexpr (GROUPED) {
    const HeadGroups groups{p};
    const u32 group = min(index / (u32(p.heads_per_group) * Tc), groups.whole()), first = groups.first(group);
    const u32 rest = index - first * Tc, members = groups.end(group) - first;
    if constexpr (LATER_ROWS_SEE_MORE) {
      found = {rest / members, first + rest % members};
    } else {
      found = {rest % Tc, first + rest / Tc};
    }
  } else if constexpr (DETERMINISTIC) {
    found = block_in_turn(index, Tc, all_heads, heads_in_turn(all_heads, head_bytes));
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

// The query tiles that a key block visits: none behind the last key.
template <int BR, int BC>
DEVICE TileRange visited_queries(const HeadMask& mask, int k_block) {
  if (LENGTHS_KIND != DENSE && (mask.rows == 0 || k_block * BC >= mask.keys)) return {};
  return query_tiles<BR, BC>(mask, k_block);
}

// A query tile of one query head, and its successor among those that a key block visits: tiles of a head from first to last
// (where later rows see more, from the diagonal on), then those of the next head of the group.
struct QueryTile {
  int head, q_tile;

  DEVICE QueryTile next(const TileRange& tiles) const {
    return q_tile + 1 < tiles.end ? QueryTile{head, q_tile + 1} : QueryTile{head + 1, tiles.first};
  }
  DEVICE QueryTile previous(const TileRange& tiles) const {
    return q_tile > tiles.first ? QueryTile{head, q_tile - 1} : QueryTile{head - 1, tiles.end - 1};
  }
};

// Where tiles are looked up: those that a key block visits, for each head of the group the same.
struct QueryWalk {
  TileWalk<false> walk{0};
  int head = 0;  // of the group

  DEVICE WalkedTile next(const BackwardParams& p, int k_block, int batch, int kv_head) {
    const int total = (p.seqlen_q - 1) / BLOCK_Q + 1;
    auto classify = [&](int tile) { return class_of_query_tile<MASK_KIND>(p, k_block, batch, kv_head, tile); };
    WalkedTile found = walk.next(total, classify);
    if (!found.exists() && ++head < p.heads / p.kv_heads) {
      walk = TileWalk<false>(0);
      found = walk.next(total, classify);
    }
    return found;
  }
};

// How many key blocks add to a query tile before one does: those to its right that see something of it.
template <int BR, int BC>
DEVICE u32 key_blocks_before(const HeadMask& mask, int q_tile, int k_block) {
  return u32(mask.template tiles<BR, BC, true>(q_tile).end - 1 - k_block);
}
template <int BR, int BC>
DEVICE u32 key_blocks_before(const BackwardParams& p, int q_tile, int k_block) {
  return key_blocks_before<BR, BC>(head_mask(p), q_tile, k_block);
}

// DETERMINISTIC: key blocks add to a tile of dQ from right to left. Blocks are launched in that order, and a causal block
// begins at its diagonal, where it is the first: then nobody waits long.
//
// In the words of PTX's memory model: a block's additions happen before its pass_on() by the barrier between them; that is a
// release, which the acquire of count() synchronises with once it finds it (through the read-modify-writes of all turns
// before); and a barrier leads from there to the additions of the block whose turn it is. So additions to one float come in
// the order of turns.
template <int BR, int BC>
struct DqTurns {
  const BackwardParams& p;
  const BackwardWorkspace& workspace;
  int k_block;
  i64 first_head;  // of the batch
  const HeadMask* mask = nullptr;  // with LENGTHS: of the sequence; and its first tile
  u32 first_tile = 0;

  // How many key blocks have added to a tile.
  DEVICE u32 count(QueryTile tile) const { return ld_acquire_gpu(counter(tile)); }

  // By one thread, before a barrier of the block that comes before the additions; `found` is what count() said before.
  DEVICE void await(QueryTile tile, u32 found) const {
    const u32 turn = LENGTHS_KIND == DENSE ? key_blocks_before<BR, BC>(p, tile.q_tile, k_block)
                                           : key_blocks_before<BR, BC>(*mask, tile.q_tile, k_block);
    while (found != turn) found = count(tile);
  }

  // By one thread, after a barrier of the block that comes after the additions.
  DEVICE void pass_on(QueryTile tile) const { red_release_gpu_add(counter(tile), 1); }

 private:
  DEVICE u32* counter(QueryTile tile) const {
    if constexpr (LENGTHS_KIND == PACKED) {
      return workspace.turns + i64(tile.head) * workspace.tiles(p) + first_tile + tile.q_tile;
    }
    return workspace.turns + (first_head + tile.head) * ((p.seqlen_q - 1) / BR + 1) + tile.q_tile;
  }
};
