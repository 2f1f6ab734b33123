// Which tiles a query block visits if its mask is irregular or lengths are read on the device, and the descriptor of each
// tile. A tile is skipped if no row of the block sees a key of it. The descriptor of a visited tile says for each consumer
// whether its 64 rows see some score of the tile, and whether they see all scores: then no mask is needed. lister.cuh writes
// the list.
#pragma once
#include "forward/fa3/memory.cuh"
#include "forward/query_block.cuh"
#include "forward/tree_scores.cuh"

static_assert(CONSUMERS <= 4, "ALL_CLEAR: the marks of all consumers are one byte");

// Marks of a tile: two bits for each consumer (some score is visible; all are), and bits of the tile itself.
constexpr u32 SEEN = 1, CLEAR_TILE = 2, ALL_CLEAR = 0xff;
constexpr u32 FIRST_TILE = 1u << 29, LAST_TILE = 1u << 30, NO_TILE_AT_ALL = 1u << 31;

// The descriptor of the tile in a buffer of K.
struct alignas(8) ListedTile {
  int tile;
  u32 marks;

  DEVICE bool exists() const { return tile >= 0; }
  DEVICE bool seen(int consumer) const { return (marks >> 2 * consumer & SEEN) != 0; }
  DEVICE bool masked(int consumer) const { return (marks >> 2 * consumer & CLEAR_TILE) == 0; }
  DEVICE bool block_masked() const { return (marks & ALL_CLEAR) != ALL_CLEAR; }
  DEVICE bool first() const { return (marks & FIRST_TILE) != 0; }
  DEVICE bool last() const { return (marks & LAST_TILE) != 0; }
  // An item without visible tiles visits one tile of zeros, all masked: every item has the same pipeline.
  DEVICE bool stands_for_none() const { return (marks & NO_TILE_AT_ALL) != 0; }
};

// Class of a tile for rows top ... end - 1 of a band mask. Keys past the end are masked for every row.
DEVICE TileClass class_in_band(const HeadMask& mask, int top, int end, int left) {
  const int begin = mask.keys_begin(top), behind = mask.keys_end(end - 1), right = left + Bc;
  // New tokens that are a tree need the mask. (Builds without a cache compute the end in the second expression below: the same
  // value, but with clear_end their machine code would change.)
  const int clear_end = !CACHED ? 0 : TREE ? mask.keys - mask.rows : mask.keys_end(top);
  return {left < behind && right > begin && begin < behind,
          left >= mask.keys_begin(end - 1) && right <= (CACHED ? clear_end : mask.keys_end(top))};
}

// The mask and the sequence of an item, in its descriptor.
using ItemMask = IrregularMask<MASK_KIND, AttentionParams>;
DEVICE HeadMask read_mask(u32 item) { return read_shared<HeadMask>(item + MASK_AT); }
template <typename Sequence>
DEVICE void publish_irregular_mask(u32 item, const AttentionParams& p, const WorkItem& work, const Sequence& sequence) {
  const int group = p.heads / p.kv_heads;
  const ItemMask mask(p, head_mask(p, sequence), work.batch, work.head / group, work.head % group);
  if constexpr (LENGTHS_KIND != DENSE) {
    write_shared(item + MASK_AT, head_mask(p, sequence));
    write_shared(item + SEQUENCE_AT, MaskOfItem{ItemMask::SETS ? mask.prefix : int(mask.first_run), mask.keep, mask.exempt,
                                                int(sequence.first_key())});
  } else if constexpr (ItemMask::SETS) {
    write_shared(item + MASK_AT, SetsOfItem{mask.prefix, mask.keep, mask.exempt, 0});
  } else {
    write_shared(item + RUNS_AT, mask.workspace.run(mask.first_run, 0));
    write_shared(item + EXTREMES_AT, mask.workspace.extremes_of(mask.first_run, 0));
  }
}
DEVICE ItemMask read_irregular_mask(const AttentionParams& p, u32 item) {
  using Workspace = MaskWorkspace<AttentionParams, ItemMask::RUNS>;
  if constexpr (LENGTHS_KIND != DENSE) {
    const auto x = read_shared<MaskOfItem>(item + SEQUENCE_AT);
    return {p, read_mask(item), i64(x.prefix_or_run), {x.prefix_or_run, x.keep, x.exempt}};
  } else if constexpr (ItemMask::SETS) {
    const auto x = read_shared<SetsOfItem>(item + MASK_AT);
    return {p, head_mask(p), Workspace(p, nullptr, nullptr), {x.prefix, x.keep, x.exempt}};
  } else {
    const Workspace of_head(p, read_shared<char*>(item + RUNS_AT), read_shared<char*>(item + EXTREMES_AT));
    return {p, head_mask(p), of_head, TokenSets{}};
  }
}
template <typename Sequence>
DEVICE void publish_sequence(u32 item, const HeadMask& mask, const Sequence& x) {
  write_shared(item + MASK_AT, mask);
  write_shared(item + SEQUENCE_AT, SequenceOfItem{x.sequence_index, x.stored_rows(), int(x.first_row()), int(x.first_key())});
}
DEVICE RaggedSequence read_sequence(u32 item) {
  const auto x = read_shared<SequenceOfItem>(item + SEQUENCE_AT);
  const HeadMask mask = read_mask(item);
  return {x.sequence_index, mask.rows, mask.keys, x.stored_rows, 0, x.first_row, x.first_key};
}
DEVICE auto sequence_of_item(const AttentionParams& p, const WorkItem& item, [[maybe_unused]] u32 descriptor) {
  if constexpr (LENGTHS_KIND == DENSE || is_irregular(MASK_KIND)) {
    return sequence_of(p, item.batch);
  } else {
    return read_sequence(descriptor);
  }
}
DEVICE int first_key_of(u32 item) {
  using OfItem = typename Choose<is_irregular(MASK_KIND), MaskOfItem, SequenceOfItem>::type;
  return int(ld_shared_u32(item + SEQUENCE_AT + OFFSET_OF(OfItem, first_key)));
}

// The tiles that a block of rows visits under bits by row, from the last to the first, by all lanes of a warp: 1,024 tiles at
// a time, a word of classes for each lane.
struct BitWalk {
  int from;  // the next word to read
  TileClasses mine{};  // of the lane's tiles that are still to be visited

  DEVICE explicit BitWalk(int last_tile) : from(last_tile / 32) {}

  // The next tile. classes(word) -> TileClasses of the tiles that may be visited.
  template <typename Classes>
  DEVICE WalkedTile next(int, const Classes& classes) {
    for (;;) {
      const int top = 31 - __clz(int(mine.some));
      const int word = from + 32 - lane_id();
      const u32 code = mine.some == 0 ? 0 : u32(32 * word + top + 1) << 1 | (~mine.every >> top & 1);
      const u32 found = redux_max(code);
      if (found != 0) {
        if (code == found) mine.some ^= 1u << top;
        return {int(found - 2)};
      }
      if (from < 0) return {-1};
      mine = word < 32 ? TileClasses{} : classes(word - 32);
      from -= 32;
    }
  }
};

// The tiles of one query block, from the last to the first, by all lanes of a warp. The block is read from the item's
// descriptor for each tile: a producer has few registers.
struct TileList {
  const AttentionParams& p;
  u32 descriptor;
  typename Choose<ItemMask::BITS, BitWalk, TileWalk<true>>::type walk{last_tile()};

  // `tile` is -1 after the last.
  DEVICE ListedTile next() {
    const WalkedTile walked = walk.next(SPLIT_KEYS ? split().first : 0, [&](int tile) {
      if constexpr (ItemMask::BITS) {
        return classes_of_block(tile);
      } else {
        const int first = top();
        return class_of<Br>(first, min(first + Br, rows()), tile);
      }
    });
    if (!walked.exists()) return {-1, 0};
    u32 marks = ALL_CLEAR;
    if (walked.masked()) {  // one lane for each consumer
      const int first = top() + lane_id() * GROUP_ROWS, end = min(first + GROUP_ROWS, rows());
      marks = 0;
      if (lane_id() < CONSUMERS && first < end) {
        const TileClass is = class_of<GROUP_ROWS>(first, end, walked.tile());
        if (is.some) marks = (is.every ? SEEN | CLEAR_TILE : SEEN) << 2 * lane_id();
      }
      marks |= shfl_xor(marks, 1);
      marks |= shfl_xor(marks, 2);
    }
    return {walked.tile(), marks};
  }
  // SPLIT_KEYS: a tile that the mask hides from all rows, if no tile is visited. (Of another split's tiles some may be visible.
  // The merge ignores splits that have no tile.)
  DEVICE int hidden_tile() const { return split().empty() ? 0 : split().first; }

 private:
  // BITS: the classes of 32 tiles for all rows of the block.
  DEVICE TileClasses classes_of_block(int word) const {
    const int first = top();
    const ItemMask mask = read_irregular_mask(p, descriptor);
    TileClasses classes = mask.classes_from<Br, CONSUMERS>(first, min(first + Br, rows()), 32 * word);
    if constexpr (SPLIT_KEYS || LENGTHS_KIND != DENSE) classes.some &= bits_between(word, split().first, split().end);
    if constexpr (LENGTHS_KIND != DENSE) classes.every &= bits_between(word, 0, mask.keys / Bc);
    return classes;
  }
  DEVICE int top() const { return read_shared<Item>(descriptor).q_block * Br; }
  DEVICE int rows() const {
    if constexpr (LENGTHS_KIND == DENSE) return p.seqlen_q;
    return read_mask(descriptor).rows;
  }
  // SPLIT_KEYS: the tiles that may be visited.
  DEVICE TileRange split() const {
    HeadMask mask = head_mask(p);
    if constexpr (LENGTHS_KIND != DENSE) mask = read_mask(descriptor);
    return block_tiles<Bc>(p, mask, read_shared<Item>(descriptor).q_block);
  }
  // The last tile that may be visited; -1: none.
  DEVICE int last_tile() const {
    if constexpr (SPLIT_KEYS) return split().end - 1;
    if constexpr (is_irregular(MASK_KIND) && LENGTHS_KIND == DENSE) return (p.seqlen_k - 1) / Bc;
    return visited_tiles<Br, Bc>(read_mask(descriptor), read_shared<Item>(descriptor).q_block).end - 1;
  }
  template <int MOST_ROWS>
  DEVICE TileClass class_of(int top, int end, int tile) const {
    if constexpr (is_irregular(MASK_KIND)) {
      const int left = tile * Bc, right = left + Bc;
      const ItemMask mask = read_irregular_mask(p, descriptor);
      const TileClass is = mask.classify<MOST_ROWS>(top, end, left, min(right, mask.keys), tile);
      return {is.some, is.some && is.every && right <= mask.keys};
    } else {
      return class_in_band(read_mask(descriptor), top, end, tile * Bc);
    }
  }
};
