// Where a consumer warpgroup's key tiles come from: a range of tiles side by side, or a list (tile_list.cuh). Both types have
// the same members; `Consumer` is the struct Consumer of kernel.cu.
//
//   begin()             starts an item; returns the lane's first query row
//   j                   the key tile whose scores are computed next
//   skip_to_first()     passes over the tiles that the block visits before the first one that this consumer's rows see
//   skips()             whether the item begins with a tile to pass over
//   masked()            whether tile j needs the mask
//   visit_rest()        a pipeline step for each further tile of the item
//   load_mask()         before the wait for the scores of tile j: loads what hide() needs, if registers suffice
//   hide()              masks the scores of tile j
//   count(), keep_count(), visited()   for the trace: the tiles that the block visits
#pragma once
#include "forward/fa3/consumer.cuh"
#include "forward/fa3/tile_list.cuh"
#include "forward/irregular_scores.cuh"

// The rows of one consumer may see fewer tiles than the block visits. If a consumer's rows see no tile, or lie past the end, it
// computes one tile with all scores masked: every item has the same pipeline.
struct RangeOfTiles {
  static constexpr bool BITS_EARLY = false;

  int j;
  TileRange tiles;   // the tiles that this consumer's rows see
  int above, below;  // tiles that the block visits after and before `tiles`

  DEVICE int begin(const AttentionParams& p, const Item& item, int consumer, int warp, int lane) {
    if constexpr (SPLIT_KEYS) {  // one item per block, and few masked tiles: all rows visit the same tiles
      const int row = item.q_block * HEAD_ROWS + query_of_row(consumer * GROUP_ROWS + warp * 16) + lane / 4;
      tiles = tiles_of(p, item.q_block);
      j = tiles.end - 1;
      above = below = 0;
      return row;
    }
    const int group = item.q_block * CONSUMERS + consumer;
    const bool exists = group * GROUP_ROWS < p.seqlen_q;
    const int row = group * GROUP_ROWS + warp * 16 + lane / 4;
    tiles = visited_tiles<GROUP_ROWS, Bc>(p, group);
    const TileRange block = tiles_of(p, item.q_block);
    if constexpr (MASK_KIND == MASK_BAND) {
      if (!exists || tiles.empty()) tiles = {block.total, block.first, block.first + 1, block.first, block.first};
      j = tiles.end - 1;
      below = tiles.first - block.first;
    } else {
      j = exists ? max(tiles.end, 1) - 1 : 0;
    }
    above = block.end - 1 - j;
    return row;
  }

  template <typename Consumer>
  DEVICE void skip_to_first(Consumer& consumer) {
    consumer.pass_over(above);
  }
  template <typename Consumer>
  DEVICE bool skips(Consumer&) const {
    return above > 0;
  }
  DEVICE bool masked(int) const { return j >= tiles.clear_end; }

  template <typename Consumer>
  DEVICE void visit_rest(Consumer& consumer) {
    --j;
    walk_tiles<MASK_KIND>(j, tiles, [&consumer](int, auto segment) { consumer.step(segment); });
  }

  DEVICE void load_mask(const AttentionParams&, u32, int, int, u32) {}
  template <Segment SEGMENT, typename View>
  DEVICE void hide(View S, const AttentionParams& p, u32, int row, int lane) {
    hide_scores<SEGMENT>(S, head_mask(p), row, j * Bc, lane % 4 * 2);
  }
  DEVICE void count() {}
  DEVICE void keep_count() {}
  DEVICE TileRange visited(const AttentionParams& p, const Item& item, u32) const { return tiles_of(p, item.q_block); }
};

// Each tile of the list comes with its descriptor. A tile that this consumer's rows do not see may lie between two visible ones.
// The last tile of the list is always computed.
struct ListOfTiles {
  // Bits of a masked tile are loaded while its scores are in flight, where registers suffice.
  static constexpr bool BITS_EARLY = MASK_KIND == MASK_BITS && HEAD_DIM <= 128 && V_DIM <= 128 && !DROPOUT && !SCORE && !ALIBI;

  int j;
  static constexpr int above = 0, below = 0;
  ListedTile listed{};
  TileTally tally[2];  // TRACE: of the item being stored, and of the current item
  ScoreBits<FragmentView<float, 2, S_TILES, 0, 4>> bits;  // MASK_BITS, TREE: of tile j

  DEVICE int begin(const AttentionParams&, const Item& item, int consumer, int warp, int lane) {
    const int row = item.q_block * Br + consumer * GROUP_ROWS + warp * 16 + lane / 4;
    if constexpr (TRACE) tally[1] = {};
    return row;
  }

  // Waits for the next tile of K and reads its descriptor. False: this consumer's rows do not see the tile.
  template <typename Consumer>
  DEVICE bool await(Consumer& consumer) {
    if constexpr (MASK_KIND == MASK_BITS) computed_here(consumer.K_tile_desc());
    consumer.K_ring.wait_full(consumer.inside, NO_TILE);
    listed = read_shared<ListedTile>(consumer.smem.tile(consumer.K_ring.stage));
    warp_sync();  // all lanes have read the tile's descriptor before one of them gives the buffer back
    j = listed.tile;
    return listed.seen(consumer.consumer) || listed.last();
  }
  template <typename Consumer>
  DEVICE void skip_to_first(Consumer& consumer) {
    while (!await(consumer)) {
      count();
      consumer.pass_over(1);
    }
  }
  template <typename Consumer>
  DEVICE bool skips(Consumer& consumer) {
    return !await(consumer);
  }
  DEVICE bool masked(int consumer) const { return listed.masked(consumer); }

  template <typename Consumer>
  DEVICE void visit_rest(Consumer& consumer) {
    while (!listed.last()) {
      const bool seen = await(consumer);
      if (!seen) {
        consumer.skip_step();
        continue;
      }
      consumer.issue_products();  // the descriptor has been read by then
      if (listed.masked(consumer.consumer)) {
        consumer.end_step(SegmentTag<RIGHT_MASKED>{});
      } else {
        consumer.end_step(SegmentTag<CLEAR>{});
      }
    }
  }

  // opaque(): values derived from row and lane are computed here, and take no registers between tiles.
  DEVICE void load_bits(const AttentionParams& p, u32 descriptor, int row, int lane) {
    const ItemMask mask = read_irregular_mask(p, descriptor);
    const int first_row = int(opaque(u32(row))), column = int(opaque(u32(lane))) % 4 * 2;
    bits.load(mask.workspace.runs, mask.words_of_line(), first_row, mask.rows, j * Bc + column, mask.keys);
  }
  // `tree`: what new tokens see of each other, beside the tile's K.
  DEVICE void load_mask(const AttentionParams& p, u32 descriptor, int row, int lane, [[maybe_unused]] u32 tree) {
    if constexpr (BITS_EARLY) load_bits(p, descriptor, row, lane);
    if constexpr (TREE) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // rows past the end are not stored
        const vec2 seen = ld_shared_vec2(tree + 8 * min(row + 8 * r, cache_of(p).tree_tokens - 1));
        bits.bits[r][0] = seen.x, bits.bits[r][1] = seen.y;  // until hide()
      }
      warp_sync();  // all lanes have read before one of them gives the buffer of K back
    }
  }
  template <Segment SEGMENT, typename View>
  DEVICE void hide(View S, const AttentionParams& p, u32 descriptor, int own_row, int own_lane) {
    count();
    if constexpr (SEGMENT != CLEAR && MASK_KIND == MASK_BITS) {
      if constexpr (!BITS_EARLY) load_bits(p, descriptor, own_row, own_lane);
      bits.hide(S);
    } else if constexpr (SEGMENT != CLEAR) {
      const int row = int(opaque(u32(own_row))), column = int(opaque(u32(own_lane))) % 4 * 2;
      if constexpr (is_irregular(MASK_KIND)) {
        constexpr bool ASK_FIRST = !(Q_IN_REGISTERS && HEAD_DIM > 64);  // where the test spills no register
        hide_scores<1, ASK_FIRST>(S, read_irregular_mask(p, descriptor), row, j * Bc, column);
      } else if constexpr (TREE) {
        const HeadMask mask = read_mask(descriptor);
        const u64 seen[2] = {u64(bits.bits[0][1]) << 32 | bits.bits[0][0], u64(bits.bits[1][1]) << 32 | bits.bits[1][0]};
        hide_unseen(S, seen, mask.rows, j * Bc + column - (mask.keys - mask.rows));
      } else {
        hide_scores<RIGHT_MASKED>(S, read_mask(descriptor), row, j * Bc, column);
      }
    }
  }
  DEVICE void count() {
    if (TRACE && !listed.stands_for_none()) tally[1].count(j, listed.block_masked());
  }
  DEVICE void keep_count() {
    if constexpr (TRACE) tally[0] = tally[1];
  }
  // total = -1 for a block past the end of its sequence: no trace record is written.
  DEVICE TileRange visited(const AttentionParams& p, const Item& item, [[maybe_unused]] u32 descriptor) const {
    HeadMask mask = head_mask(p);
    if constexpr (LENGTHS_KIND != DENSE) mask = read_mask(descriptor);
    if (item.q_block * Br >= mask.rows) return {-1, 0, 0, 0, 0};
    return tally[0].range((mask.keys + Bc - 1) / Bc);
  }
};

using Tiles = typename Choose<LISTED, ListOfTiles, RangeOfTiles>::type;
