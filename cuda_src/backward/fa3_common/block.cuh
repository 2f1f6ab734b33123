// The key block that a thread block of Hopper's backward kernels works on, and the query tiles that it visits.
#pragma once
#include "backward/common/passes.cuh"
#include "backward/common/schedule.cuh"
#include "backward/common/score_gradients.cuh"
#include "backward/fa3_common/shape.cuh"
#include "primitives/opaque.cuh"

// A work item, one key block of one key/value head, as it lies in shared memory: there it costs no registers.
struct ItemDescriptor {
  i32 k_block, kv_head, batch;
  i32 count;                   // query tiles to visit, over all heads of the query group
  i32 first, end;              // query tiles of each head; IRREGULAR: positions in the list
  i32 clear_first, clear_end;  // the clear tiles of each head; LISTED_TICKETS: all heads visit the list up to clear_first first
  u32 index;                   // among the items of the launch
  i32 total;                   // query tiles of a head
  u32 workspace_tile;          // index in the workspace of the sequence's first tile
  i32 first_key;               // PAIRED: the first key of this thread block
};
static_assert(sizeof(ItemDescriptor) == DESCRIPTOR_BYTES, "the copy engine brings whole 16-byte vectors");

// RAGGED: the sequence of the item, and where the sequence lies in the arrays.
struct SequenceDescriptor {
  i32 rows, keys, band_first, band_last;
  i32 stored_keys, first_row, first_key, unused;
};

// Four words of a descriptor.
template <typename Descriptor>
DEVICE vec4 vector_of(const Descriptor& descriptor, int i) {
  const u32* const words = reinterpret_cast<const u32*>(&descriptor) + 4 * i;
  return {words[0], words[1], words[2], words[3]};
}

#define ITEM_FIELD(name) int(ld_shared_u32(descriptor_smem + OFFSET_OF(ItemDescriptor, name)))
#define SEQUENCE_FIELD(name) \
  int(ld_shared_u32(descriptor_smem + (SharedMemory::SEQUENCE - SharedMemory::ITEMS) + OFFSET_OF(SequenceDescriptor, name)))

// The item whose descriptor is at `descriptor_smem`. IRREGULAR: the tiles to visit, the same for all heads of the query group,
// are listed in shared memory, and a QueryTile's q_tile is a position in that list.
struct KeyBlock {
  const KernelParams& p;
  u32 descriptor_smem;

  DEVICE int k_block() const { return ITEM_FIELD(k_block); }
  DEVICE int kv_head() const { return ITEM_FIELD(kv_head); }
  DEVICE int batch() const { return ITEM_FIELD(batch); }
  DEVICE int count() const { return ITEM_FIELD(count); }
  DEVICE u32 index() const { return u32(ITEM_FIELD(index)); }
  DEVICE u32 head() const { return u32(batch() * p.kv_heads + kv_head()); }  // over the batch
  DEVICE u32 head_batch() const { return HeadBatches{p}.of_head(head()); }
  DEVICE int query_group_size() const { return p.heads / p.kv_heads; }
  DEVICE int first_key() const { return PAIRED ? ITEM_FIELD(first_key) : k_block() * Bc; }  // of the thread block

  DEVICE HeadMask mask() const {
    if constexpr (RAGGED) {
      return {SEQUENCE_FIELD(rows), SEQUENCE_FIELD(keys), SEQUENCE_FIELD(band_first), SEQUENCE_FIELD(band_last)};
    }
    return head_mask(p);
  }
  DEVICE int rows() const { return RAGGED ? SEQUENCE_FIELD(rows) : p.seqlen_q; }
  DEVICE int keys() const { return RAGGED ? SEQUENCE_FIELD(keys) : p.seqlen_k; }
  DEVICE int stored_keys() const { return RAGGED ? SEQUENCE_FIELD(stored_keys) : p.seqlen_k; }
  DEVICE int row_in_arrays() const { return RAGGED ? SEQUENCE_FIELD(first_row) : 0; }
  DEVICE int key_in_arrays() const { return RAGGED ? SEQUENCE_FIELD(first_key) : 0; }
  DEVICE int batch_in_arrays() const { return LENGTHS_KIND == PACKED ? 0 : batch(); }
  DEVICE auto sequence() const {
    if constexpr (RAGGED) {
      return RaggedSequence{batch(), rows(), keys(), 0, stored_keys(), row_in_arrays(), key_in_arrays()};
    } else {
      return DenseSequence<BackwardParams>{p, batch()};
    }
  }

  DEVICE QueryTile first() const { return {kv_head() * query_group_size(), ITEM_FIELD(first)}; }
  DEVICE QueryTile next(QueryTile tile) const {
    if constexpr (!LISTED_TICKETS) return tile.next({0, ITEM_FIELD(first), ITEM_FIELD(end), 0, 0});
    const int diagonal_end = ITEM_FIELD(clear_first), first_head = kv_head() * query_group_size();
    const int heads_end = first_head + query_group_size();
    // Runs of rows, and no band hides keys to the right: a tile of all heads, then the next tile.
    if (num_runs(MASK_KIND) > 0 && p.band_last >= p.seqlen_k - 1) {
      return tile.head + 1 < heads_end ? QueryTile{tile.head + 1, tile.q_tile} : QueryTile{first_head, tile.q_tile + 1};
    }
    // Tiles at the diagonal may come first, for all heads (list_tiles()). All other tiles follow, head after head.
    const bool on_diagonal = tile.q_tile < diagonal_end;
    const QueryTile next = tile.next({0, on_diagonal ? 0 : diagonal_end, on_diagonal ? diagonal_end : ITEM_FIELD(end), 0, 0});
    return next.head < heads_end ? next : QueryTile{first_head, diagonal_end};
  }
  DEVICE WalkedTile listed(int position) const {
    return {int(ld_shared_u32(descriptor_smem + (SharedMemory::LIST - SharedMemory::ITEMS) + 4 * position))};
  }
  DEVICE int q_tile(QueryTile tile) const { return IRREGULAR ? listed(tile.q_tile).tile() : tile.q_tile; }
  DEVICE bool has_hidden_scores(QueryTile tile) const {
    auto extends_past_end = [&] { return keys() - first_key() < BLOCK_KEYS; };
    if constexpr (IRREGULAR) return listed(tile.q_tile).masked() || extends_past_end();
    return tile.q_tile < ITEM_FIELD(clear_first) || tile.q_tile >= ITEM_FIELD(clear_end) || extends_past_end();
  }
  // Index of a tile in the workspace.
  DEVICE u32 workspace_tile(QueryTile tile) const {
    return u32(ITEM_FIELD(workspace_tile)) + u32(tile.head) * BackwardWorkspace::tiles(p) + u32(q_tile(tile));
  }
  DEVICE TileRange tiles() const {  // for the trace
    if constexpr (IRREGULAR) {
      TileTally tally;
      for (int i = 0; i < ITEM_FIELD(end); ++i) tally.count(listed(i).tile(), listed(i).masked());
      return tally.range(ITEM_FIELD(total));
    }
    return {ITEM_FIELD(total), ITEM_FIELD(first), ITEM_FIELD(end), ITEM_FIELD(clear_first), ITEM_FIELD(clear_end)};
  }
};

// The descriptors of item `index`.
struct NewItem {
  ItemDescriptor descriptor;
  SequenceDescriptor sequence;

  DEVICE NewItem(const BackwardParams& p, u32 index) {
    const KeyItem found = key_item<Bc>(p, index, 6 * HEAD_DIM + 2 * V_DIM);
    const auto length = sequence_of(p, found.batch);
    const HeadMask mask = head_mask(p, length);
    const TileRange tiles = visited_queries<Br, Bc>(mask, found.k_block);
    const u32 count = u32(p.heads / p.kv_heads) * u32(tiles.end - tiles.first);
    const u32 first_tile = LENGTHS_KIND == PACKED ? first_packed_block<Br>(int(length.first_row()), found.batch)
                                                  : u32(found.batch) * u32(p.heads) * BackwardWorkspace::tiles(p);
    const u32 first_key = PAIRED ? u32(found.k_block * Bc) + blockIdx.x % CLUSTER * BLOCK_KEYS : 0;
    descriptor = {found.k_block, found.kv_head, found.batch, i32(count), tiles.first, tiles.end, tiles.clear_first,
                  tiles.clear_end, index, tiles.total, first_tile, i32(first_key)};
    if constexpr (RAGGED) {
      sequence = {mask.rows, mask.keys, mask.first, mask.last,
                  i32(length.stored_keys()), i32(length.first_row()), i32(length.first_key()), 0};
    }
  }

  // IRREGULAR, by a warp: lists the tiles to visit.
  DEVICE void list_tiles(const BackwardParams& p, u32 list) {
    TileWalk<false> walk(0);
    u32 count = 0;
    int behind_diagonal = 0;
    for (;; ++count) {
      const WalkedTile tile = walk.next(classified_query_tiles(p, descriptor.k_block, descriptor.batch), [&](int tile) {
        return class_of_query_tile(p, descriptor.k_block, descriptor.batch, descriptor.kv_head, tile);
      });
      if (!tile.exists()) break;
      if (lane_id() == 0) st_shared_u32(list + 4 * count, u32(tile.code));
      if (count == Bc / Br) behind_diagonal = tile.tile();
    }
    descriptor.count = i32(u32(p.heads / p.kv_heads) * count);
    descriptor.first = descriptor.clear_first = descriptor.clear_end = 0;
    // If the key block to the left does not see the first tile behind the diagonal, a document begins in this key block. The key
    // blocks to the left have the previous document, and wait for this block's additions to its last rows. These rows are in the
    // tiles at the diagonal, which come first, for all heads.
    if constexpr (LISTED_TICKETS) {
      const int left = descriptor.k_block - 1;
      const bool shared = left < 0 || count <= Bc / Br ||
                          class_of_query_tile(p, left, descriptor.batch, descriptor.kv_head, behind_diagonal).some;
      if (!shared) descriptor.clear_first = Bc / Br;
    }
    descriptor.end = i32(count);
  }
};
