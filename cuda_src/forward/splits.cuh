// Split keys (Flash-Decoding), for forwards with fewer query blocks than the GPU holds thread blocks, such as chunked prefill
// over a long cache: gridDim.y thread blocks share the key tiles of a query block. Each writes a part (shared/parts.cuh) to the
// workspace, and a second launch merges the parts. cufa/plan/splits.py decides when splitting pays.
//
// Query heads of one key/value head may share a tile (PACKED_HEADS): rows HEAD_ROWS * h ... belong to head h, and a warp's rows
// belong to one head. Packing exists only with split keys: queries that fill a tile gain nothing from it.
#pragma once
#include "forward/query_block.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/dropout.cuh"
#include "shared/fragment_view.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/parts.cuh"

constexpr int HEAD_ROWS = BLOCK_Q / PACKED_HEADS;  // queries of one head in a tile
constexpr int COMBINE_THREADS = 256;
static_assert(HEAD_ROWS * PACKED_HEADS == BLOCK_Q && HEAD_ROWS % 16 == 0, "heads have whole 16-row tiles");
static_assert(PACKED_HEADS == 1 || SPLIT_KEYS, "only the merge of SPLIT_KEYS unpacks packed heads");
static_assert(PACKED_HEADS == 1 || (LENGTHS_KIND == DENSE && !is_irregular(MASK_KIND)), "heads share tiles of whole arrays");

// The query in a row of the tile, counted from the first query of the query block.
DEVICE int query_of_row(int row) { return PACKED_HEADS == 1 ? row : row % HEAD_ROWS; }
// The head in a row of the tile, counted from the work item's head.
DEVICE int head_of_row(int row) { return PACKED_HEADS == 1 ? 0 : row / HEAD_ROWS; }

// Each split takes the same number of tiles, in the order of keys; the last splits may have none.
DEVICE int tiles_per_split(const AttentionParams& p, const TileRange& tiles) {
  return (tiles.end - tiles.first + p.num_splits - 1) / p.num_splits;
}

// The tiles of one split of the query block.
DEVICE TileRange split_tiles(const AttentionParams& p, const TileRange& tiles, int split) {
  const int each = tiles_per_split(p, tiles);
  TileRange part = tiles;
  part.first = min(tiles.first + split * each, tiles.end);
  part.end = min(part.first + each, tiles.end);
  part.clear_first = max(tiles.clear_first, part.first);
  part.clear_end = min(tiles.clear_end, part.end);
  if (part.clear_first >= part.clear_end) part.clear_first = part.clear_end = part.first;
  return part;
}

// The key tiles that a query block visits. Irregular masks: all tiles; a split visits those of its share with a visible score.
template <int BC>
DEVICE TileRange tiles_of_block(const AttentionParams& p, const HeadMask& mask, int q_block) {
  return LENGTHS_KIND == DENSE ? visited_tiles<HEAD_ROWS, BC>(p, q_block) : visited_tiles<HEAD_ROWS, BC>(mask, q_block);
}

// The key tiles that this thread block visits.
template <int BC>
DEVICE TileRange block_tiles(const AttentionParams& p, const HeadMask& mask, int q_block) {
  const TileRange tiles = tiles_of_block<BC>(p, mask, q_block);
  if constexpr (SPLIT_KEYS) return split_tiles(p, tiles, int(blockIdx.y));
  return tiles;
}

template <int BC>
DEVICE TileRange block_tiles(const AttentionParams& p, int q_block) {
  return block_tiles<BC>(p, head_mask(p), q_block);
}

// The first part. Kernels that keep other data in the workspace have an overload for their own parameters.
DEVICE float* first_part(const AttentionParams& p) { return static_cast<float*>(p.workspace); }

// Row `row` of a split's part in the workspace.
template <typename Params>
DEVICE float* part_row(const Params& p, const WorkItem& item, int split, int row) {
  if constexpr (LENGTHS_KIND == PACKED) {
    const u32 first = first_packed_block<HEAD_ROWS>(int(sequence_of(p, item.batch).first_row()), item.batch);
    const i64 tile = i64(item.head) * num_packed_blocks<HEAD_ROWS>(p.total_q, p.batch) + first + item.q_block;
    return first_part(p) + ((tile * p.num_splits + split) * BLOCK_Q + row) * SLOT_ROW;
  }
  const int Tr = (p.seqlen_q - 1) / HEAD_ROWS + 1;
  const i64 tile = (i64(item.batch) * (p.heads / PACKED_HEADS) + item.head / PACKED_HEADS) * Tr + item.q_block;
  return first_part(p) + ((tile * p.num_splits + split) * BLOCK_Q + row) * SLOT_ROW;
}

// Writes a warp's accumulator of O, at row `first_row` and column `first_column` of the tile, and m and l of its rows (sums over
// all lanes) to the part. Rows past the end of the queries are not written.
template <typename Params, typename View, typename Softmax>
DEVICE void leave_part(const Params& p, const WorkItem& item, int first_row, int first_column, View O,
                       const Softmax& softmax, int lane) {
#pragma unroll
  for (int r = 0; r < View::ROWS; ++r) {
    const int row = first_row + r * 8 + View::lane_row(lane);
    if (item.q_block * HEAD_ROWS + query_of_row(row) >= p.seqlen_q) continue;
    float* part = part_row(p, item, int(blockIdx.y), row);
#pragma unroll
    for (int n = 0; n < View::TILES; ++n) {
      const int column = first_column + n * 8;
      if (column >= V_DIM) continue;
      st_global<vec2>(part + column + View::lane_column(lane), {float_as_u32(O.at(r, n, 0)), float_as_u32(O.at(r, n, 1))});
    }
    if (first_column == 0 && lane % 4 == 0) {
      st_global<vec2>(part + V_DIM, {float_as_u32(softmax.m_scaled[r]), float_as_u32(softmax.l[r])});
    }
  }
}

// The second launch: one thread per four columns of an output row. A row has no parts if its query block sees no key, or if it is
// padding. A sink joins as one more part, without values; the factor of kept weights (DROPOUT) is that of whole rows.
template <int BC, typename Params>
DEVICE void combine_splits(const Params& p) {
  const u32 index = blockIdx.x * COMBINE_THREADS + threadIdx.x;
  const u32 row = index / VECTORS;
  u32 rows = u32(p.batch) * u32(p.heads) * u32(p.seqlen_q);
  if constexpr (LENGTHS_KIND == PACKED) rows = u32(p.heads) * u32(p.total_q);
  if (row >= rows) return;
  const int vector = int(index % VECTORS);
  int query = int(row % u32(p.seqlen_q)), q_block = query / HEAD_ROWS;
  const u32 head_of_batch = row / u32(p.seqlen_q);
  WorkItem item = {q_block, int(head_of_batch % u32(p.heads)), int(head_of_batch / u32(p.heads))};
  if constexpr (LENGTHS_KIND == PACKED) {
    const int place = int(row % u32(p.total_q)), batch = sequence_of_row(p.cu_seqlens_q, p.batch, place);
    query = place - int(sequence_of(p, batch).first_row());
    if (query < 0) return;  // only where lengths fall, which nothing has checked
    q_block = query / HEAD_ROWS;
    item = {q_block, int(row / u32(p.total_q)), batch};
  }
  const auto sequence = sequence_of(p, item.batch);
  const bool exists = LENGTHS_KIND == DENSE || query < sequence.rows();
  const TileRange tiles = exists ? tiles_of_block<BC>(p, head_mask(p, sequence), q_block) : TileRange{};
  const int count = tiles.end - tiles.first, each = tiles_per_split(p, tiles);
  const int tile_row = item.head % PACKED_HEADS * HEAD_ROWS + query % HEAD_ROWS;
  float o[4] = {}, m = NO_SCORE, l = 0.0f;
  merge_parts(o, m, l, tiles.empty() ? 0 : (count + each - 1) / each, vector,
              [&](int split) { return part_row(p, item, split, tile_row); });
  if (SINK && exists) add_part(o, m, l, {}, {float_as_u32(load_sink(p.sink + item.head) * LOG2_E), float_as_u32(1.0f)});
  if constexpr (LENGTHS_KIND == PACKED) {  // results have no batch axis
    query += int(sequence.first_row());
    item.batch = 0;
    if (vector == 0 && p.lse != nullptr) st_global(p.lse + i64(item.head) * p.total_q + query, natural_lse(m, l));
  } else {
    if (vector == 0 && p.lse != nullptr) st_global(lse_row(p, item, query), natural_lse(m, l));
  }
  store_vector(output_row(p, item, query) + vector * 8, o, of_kept(p, l == 0.0f ? 0.0f : rcp(l)));
}
