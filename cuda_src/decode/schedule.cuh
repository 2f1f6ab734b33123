// Who reads which keys: the device side of cufa/schedule/decode.py. Lengths are read here, on the device, so that they
// may change between replays of a CUDA graph.
#pragma once
#include "decode/memory.cuh"
#include "decode/params.cuh"
#include "shared/mask.cuh"

constexpr MaskKind MASK_KIND = MaskKind(MASK);
constexpr bool SEVERAL_TOKENS = MASK != MASK_FULL;  // else a sequence has one query token, which sees all of its keys

// Keys of one sequence: those in the cache before the call, and those after the new tokens were appended. Never more
// than the cache can hold, whatever the device was told.
struct Lengths {
  int old_keys, keys;
};

DEVICE Lengths sequence_lengths(const DecodeParams& p, int batch) {
  const int told = RAGGED ? int(ld_global<u32>(p.cache_seqlens + batch)) : p.capacity;
  const int old_keys = min(max(told, 0), p.capacity);
  return {old_keys, APPEND ? min(old_keys + p.new_tokens, p.capacity) : old_keys};
}

constexpr bool WINDOWED = MASK == MASK_BAND || MASK == MASK_SETS;

// The first key of a sequence of `keys` that any of its tokens sees: in a window, the one at its first token's left edge.
DEVICE int first_seen(const DecodeParams& p, int keys) { return WINDOWED ? max(keys - p.tokens - p.left, 0) : 0; }

// Whether some of `count` keys from a place on are seen by no token, as they lie left of the window.
DEVICE bool some_unseen(const DecodeParams& p, int place, int count, int keys) {
  return WINDOWED && place < first_seen(p, keys) && (MASK == MASK_BAND || place + count > p.keep);
}

// The first that is read: more new tokens may have come than anybody sees, and all of them must be stored.
DEVICE int first_read(const DecodeParams& p, int keys) {
  if constexpr (!WINDOWED) return 0;
  return max(keys - max(p.tokens + p.left, APPEND ? p.new_tokens : 0), 0);
}

// Tiles of a sequence that hold keys to be read; they are numbered from the sequence's first key on. A sequence without
// keys still has a tile: somebody must write its zeros. Where first keys are kept beside a window (MASK_SETS), tiles
// between the two are left out of the numbers.
struct Tiles {
  int first, count;
};

// Those kept before the window's first tile.
DEVICE int kept_tiles(const DecodeParams& p, int keys) {
  return MASK == MASK_SETS ? min((p.keep + Bc - 1) / Bc, first_read(p, keys) / Bc) : 0;
}

DEVICE Tiles tiles_to_read(const DecodeParams& p, int keys) {
  const int all = max(1, (keys + Bc - 1) / Bc), first = first_read(p, keys) / Bc;
  if constexpr (MASK == MASK_SETS) return {0, all - (first - kept_tiles(p, keys))};
  return {first, all - first};
}

// Where the keys of numbered tiles are in their sequence.
struct KeyPlaces {
  int gap_start, gap;  // used when MASK_SETS

  DEVICE void set(const DecodeParams& p, int keys) {
    if constexpr (MASK == MASK_SETS) {
      gap_start = kept_tiles(p, keys) * Bc;
      gap = first_read(p, keys) / Bc * Bc - gap_start;
    }
  }
  DEVICE int of(int key) const {
    if constexpr (MASK == MASK_SETS) return key < gap_start ? key : key + gap;
    return key;
  }
  // A piece's end in these numbers: one past the last tile, or key.
  DEVICE int end(int last_tile, int keys) const {
    if constexpr (MASK == MASK_SETS) keys -= gap;
    return min(last_tile * Bc, keys);
  }
};

// An entry of the block table may be wild: what is read through it plays no part, but must lie in the cache; nothing is
// stored through it (a sequence that has no pages in a padded batch).
DEVICE int page_to_read(const DecodeParams& p, int entry) { return min(max(entry, 0), p.num_pages - 1); }
DEVICE bool page_is_wild(const DecodeParams& p, int entry) { return u32(entry) >= u32(p.num_pages); }

// What a thread block does of one item, an item being the query rows of one key/value head of one sequence.
struct Piece {
  int batch, kv_head, row_block;
  int item;                   // number of the item
  Lengths length;             // of the sequence
  int first_tile, last_tile;  // of the sequence; one past the last
  Tiles tiles;                // of the item
  int part, num_parts;        // this piece is the `part`th of the item, in the order of keys
  int first_slot;             // of the workspace, where part 0 leaves its result; part 1 in the next one, ...
  int slot_step;              // ... the others so many slots apart
  int record;  // of the trace

  DEVICE int slot(int i) const { return i == 0 ? first_slot : first_slot + 1 + (i - 1) * slot_step; }

  DEVICE void set_head(const DecodeParams& p, int head_and_rows) {
    kv_head = head_and_rows;
    row_block = 0;
    if (p.row_blocks > 1) {  // divisions are slow, and the first load waits for this
      kv_head = head_and_rows / p.row_blocks;
      row_block = head_and_rows % p.row_blocks;
    }
  }
};

// Flash-Decoding: split `split` of the item (batch, kv_head, row_block). Whole tiles, equally many in each; a short
// sequence leaves the later splits empty. False when this one is.
DEVICE bool fixed_split(const DecodeParams& p, int batch, int head_and_rows, int split, Piece& piece) {
  piece.batch = batch;
  piece.set_head(p, head_and_rows);
  piece.item = batch * p.kv_heads * p.row_blocks + head_and_rows;
  piece.length = sequence_lengths(p, batch);
  piece.tiles = tiles_to_read(p, piece.length.keys);
  int each = p.split_tiles;
  piece.num_parts = p.used_splits;
  if constexpr (RAGGED) {
    each = int(u32(piece.tiles.count + p.num_splits - 1) / u32(p.num_splits));
    piece.num_parts = int(u32(piece.tiles.count + each - 1) / u32(each));
  }
  const int end = piece.tiles.first + piece.tiles.count;
  piece.first_tile = min(piece.tiles.first + split * each, end);
  piece.last_tile = min(piece.first_tile + each, end);
  piece.part = split;
  piece.first_slot = piece.item * p.num_splits;
  piece.slot_step = 1;
  piece.record = piece.item * p.num_splits + split;
  return piece.first_tile < piece.last_tile;
}

// Stream-K: the tiles of all items laid end to end (sequences, in them heads, in them blocks of rows), cut into shares, one
// per thread block; where lengths differ of two sizes: half of them have 7 of 8 tiles, and what is handed out last is small.
// A share's first piece may continue an item that earlier shares began, its last one may be continued by later shares: two
// slots per share, 2 share for the former, 2 share + 1 for the latter.
constexpr int LAST_PART = 8, TILES_A_SHARE = 32;  // cufa/schedule/decode.py says what they are

struct BalancedLine {
  int total;   // tiles: 32 bits count those of any GPU's memory
  int shares;  // that are not empty

  // Every warp sums the lengths for itself: of all sequences, and of those before `batch`.
  DEVICE int measure(const DecodeParams& p, int batch, int lane) {
    const int items_a_batch = p.kv_heads * p.row_blocks;
    u32 all, before;
    if constexpr (RAGGED) {
      all = before = 0;
      for (int b = lane; b < p.batch; b += 32) {
        const u32 tiles = tiles_to_read(p, sequence_lengths(p, b).keys).count;
        all += tiles;
        if (b < batch) before += tiles;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        all += shfl_xor(all, step);
        before += shfl_xor(before, step);
      }
    } else {
      const u32 tiles = tiles_to_read(p, sequence_lengths(p, 0).keys).count;
      all = tiles * p.batch;
      before = tiles * batch;
    }
    total = int(all) * items_a_batch;
    shares = min(p.num_splits, total);
    if constexpr (RAGGED) shares = min(shares, max(total / TILES_A_SHARE, p.min_shares));
    return int(before) * items_a_batch;
  }

  DEVICE bool two_sizes() const { return RAGGED && shares > 1 && i64(shares) * TILES_A_SHARE <= total; }
  DEVICE int middle() const { return total - total / LAST_PART; }  // the first tile of small shares

  // First tile of a share; of the one past the last, the number of tiles.
  DEVICE int start(int share) const {
    if (!two_sizes()) return int(i64(total) * share / shares);
    const int large = shares / 2;
    if (share < large) return int(i64(middle()) * share / large);
    return middle() + int(i64(total - middle()) * (share - large) / (shares - large));
  }

  // The share that holds a tile: the last one that does not start after it.
  DEVICE int share_of(int t) const {
    if (!two_sizes()) return int((i64(t + 1) * shares - 1) / total);
    const int large = shares / 2;
    if (t < middle()) return int((i64(t + 1) * large - 1) / middle());
    return large + int((i64(t - middle() + 1) * (shares - large) - 1) / (total - middle()));
  }

  // Who has parts of an item, and where. Returns the first share.
  DEVICE int find_parts(int item_start, Piece& piece) const {
    const int first = share_of(item_start), last = share_of(item_start + piece.tiles.count - 1);
    piece.num_parts = last - first + 1;
    piece.first_slot = 2 * first + 1;  // the first part does not continue anything, all others do
    piece.slot_step = 2;
    return first;
  }
};

// All parts of the item (batch, head_and_rows), for who merges them.
DEVICE void balanced_item(const DecodeParams& p, int batch, int head_and_rows, int lane, Piece& piece) {
  BalancedLine line;
  const int batch_start = line.measure(p, batch, lane);
  piece.batch = batch;
  piece.set_head(p, head_and_rows);
  piece.length = sequence_lengths(p, batch);
  piece.tiles = tiles_to_read(p, piece.length.keys);
  line.find_parts(batch_start + head_and_rows * piece.tiles.count, piece);
}

struct BalancedShare {
  BalancedLine line;
  int tile, end;    // of this share: the next one, one past the last
  int batch_start;  // first tile of the sequence `batch`
  int batch;

  DEVICE BalancedShare(const DecodeParams& p, int lane) {
    const int share = blockIdx.x;
    line.measure(p, 0, lane);
    const int items_a_batch = p.kv_heads * p.row_blocks;
    tile = share < line.shares ? line.start(share) : line.total;
    end = share < line.shares ? line.start(share + 1) : line.total;
    batch = 0;
    batch_start = 0;
    if constexpr (RAGGED) {
      // Skip whole sequences, 32 at a time: each lane sums what comes before its own.
      for (; batch < p.batch && tile < line.total; batch += 32) {
        const u32 own = batch + lane < p.batch ? tiles_to_read(p, sequence_lengths(p, batch + lane).keys).count : 0;
        u32 upto = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const u32 before = shfl(upto, max(lane - step, 0));
          if (lane >= step) upto += before;
        }
        const int chunk = int(shfl(upto, 31)) * items_a_batch;
        if (tile < batch_start + chunk) {
          // The first lane whose sequence reaches past the target holds it.
          const u32 reached = tile - batch_start < int(upto) * items_a_batch ? 32 - lane : 0;
          const int found = 32 - int(redux_max(reached));
          batch_start += int(shfl(upto - own, found)) * items_a_batch;
          batch += found;
          break;
        }
        batch_start += chunk;
      }
    } else {
      const int each = tiles_to_read(p, sequence_lengths(p, 0).keys).count * items_a_batch;
      if (tile < line.total) batch = tile / each;
      batch_start = batch * each;
    }
  }

  // Registers are scarce while a piece is worked on: the warp's slot of 32 bytes in shared memory holds the share.
  DEVICE void put_aside(u32 slot, int lane) const {
    warp_sync();  // all have taken back what is there
    if (lane == 0) {
      st_shared_vec4(slot, {u32(line.total), u32(line.shares), u32(tile), u32(end)});
      st_shared_vec2(slot + 16, {u32(batch_start), u32(batch)});
    }
  }

  // After a barrier.
  DEVICE void take_back(u32 slot) {
    const vec4 a = ld_shared_vec4(slot);
    const vec2 b = ld_shared_vec2(slot + 16);
    line.total = int(a.x);
    line.shares = int(a.y);
    tile = int(a.z);
    end = int(a.w);
    batch_start = int(b.x);
    batch = int(b.y);
  }

  DEVICE bool next(const DecodeParams& p, Piece& piece) {
    if (tile >= end) return false;
    const int items_a_batch = p.kv_heads * p.row_blocks;
    piece.length = sequence_lengths(p, batch);
    piece.tiles = tiles_to_read(p, piece.length.keys);
    while (tile >= batch_start + piece.tiles.count * items_a_batch) {
      batch_start += piece.tiles.count * items_a_batch;
      piece.length = sequence_lengths(p, ++batch);
      piece.tiles = tiles_to_read(p, piece.length.keys);
    }
    const int item_of_batch = (tile - batch_start) / piece.tiles.count;
    const int item_start = batch_start + item_of_batch * piece.tiles.count;
    piece.batch = batch;
    piece.set_head(p, item_of_batch);
    piece.item = batch * items_a_batch + item_of_batch;
    piece.first_tile = piece.tiles.first + tile - item_start;
    piece.last_tile = piece.tiles.first + min(piece.tiles.count, end - item_start);
    const int share = blockIdx.x;
    piece.part = share - line.find_parts(item_start, piece);
    piece.record = share + piece.item;  // no two pieces share it: the next one has a later share or a later item
    tile = item_start + piece.last_tile - piece.tiles.first;
    return true;
  }
};

// One record a piece, written by one thread. Compiled only when TRACE is on.
DEVICE void write_piece_trace(const DecodeParams& p, const Piece& piece, u64 start_ns) {
  TraceRecord record;
  record.start_ns = start_ns;
  record.end_ns = global_timer();
  record.sm = sm_id();
  record.q_block = u32(piece.part);
  record.head = u32(piece.kv_head * p.row_blocks + piece.row_block);
  record.batch = u32(piece.batch);
  record.first_tile = record.first_clear = u32(piece.first_tile);  // none is clear: every tile is masked
  record.tiles_clear = 0;
  record.tiles_visited = u32(piece.last_tile - piece.first_tile);
  record.tiles_skipped = u32(piece.tiles.first + piece.tiles.count - piece.last_tile + piece.first_tile);
  record.thread_block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  p.trace[piece.record] = record;
}
