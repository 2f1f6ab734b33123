// Which tiles a thread block reads: fixed splits and balanced shares. cufa/schedule/decode.py is the host's side.
#pragma once
#include "decode/sequence.cuh"

// The tiles of one work item that one thread block reads. A work item is one block of query rows of one key/value head of one
// sequence.
struct Span {
  int batch, kv_head, row_block;
  int item;                       // index of the work item
  Lengths length;                 // lengths of the sequence
  int first_tile, last_tile;      // first tile of the span, and one past its last tile
  Tiles tiles;                    // all tiles of the work item
  int partial, num_partials;      // index of the span's partial result in the order of keys; how many the work item has
  int first_slot;                 // workspace slot of partial result 0; partial result 1 has the next slot
  int slot_step;                  // distance in slots between partial results i and i + 1, from i = 1 on
  int record;                     // index of the span's TraceRecord

  DEVICE int slot(int i) const { return i == 0 ? first_slot : first_slot + 1 + (i - 1) * slot_step; }

  DEVICE void set_head(const DecodeParams& p, int head_and_rows) {
    kv_head = head_and_rows;
    row_block = 0;
    if (p.row_blocks > 1) {  // skip slow divisions: the first load waits for the result
      kv_head = head_and_rows / p.row_blocks;
      row_block = head_and_rows % p.row_blocks;
    }
  }
};

// INVARIANT: a split is a chunk of keys at positions that do not depend on lengths or batch. Chunks have 256 keys up to key
// 2,048, 512 up to 32,768, 1,024 up to 131,072, then 4,096 (as in cufa/schedule/decode.py). Narrow chunks let short sequences
// fill a GPU; wide chunks leave long sequences few partial results to merge. Blocks of the last chunks start first.
DEVICE int chunk_of(int key) {  // the index of the chunk that holds a key
  if (key < 2048) return key / 256;
  if (key < 32768) return 4 + key / 512;
  return key < 131072 ? 36 + key / 1024 : 132 + key / 4096;
}
DEVICE int chunk_start(int chunk) {  // the first key of a chunk
  if (chunk < 8) return chunk * 256;
  if (chunk < 68) return (chunk - 4) * 512;
  return chunk < 164 ? (chunk - 36) * 1024 : (chunk - 132) * 4096;
}

// Flash-Decoding: split `split` of the work item (batch, head_and_rows). All splits have the same number of whole tiles, but the
// last splits of a short sequence are shorter or empty. Returns false if this split is empty.
DEVICE bool fixed_split(const DecodeParams& p, int batch, int head_and_rows, int split, Span& span) {
  span.batch = batch;
  span.set_head(p, head_and_rows);
  span.item = batch * p.kv_heads * p.row_blocks + head_and_rows;
  span.length = sequence_lengths(p, batch);
  span.tiles = tiles_to_read(p, batch, span.length.keys);
  int each = p.split_tiles;
  span.num_partials = p.used_splits;
  if constexpr (UNEVEN) {
    each = int(u32(span.tiles.count + p.num_splits - 1) / u32(p.num_splits));
    span.num_partials = int(u32(span.tiles.count + each - 1) / u32(each));
  }
  const int end = span.tiles.first + span.tiles.count;
  if constexpr (INVARIANT) {
    const int first = chunk_of(span.tiles.first * Bc);
    span.num_partials = chunk_of(end * Bc - 1) - first + 1;
    span.first_tile = min(max(chunk_start(first + split) / Bc, span.tiles.first), end);
    span.last_tile = min(chunk_start(first + split + 1) / Bc, end);
  } else {
    span.first_tile = min(span.tiles.first + split * each, end);
    span.last_tile = min(span.first_tile + each, end);
  }
  span.partial = split;
  span.first_slot = span.item * p.num_splits;
  span.slot_step = 1;
  span.record = span.item * p.num_splits + split;
  return span.first_tile < span.last_tile;
}

// Stream-K: the tiles of all work items end to end (sequences, within them heads, within them blocks of rows), cut into shares,
// one per thread block. If lengths differ, shares have two sizes: the first half of the shares has 7/8 of the tiles, so that the
// shares that start last are short. A share may begin and end inside work items that other shares also read. It has two workspace
// slots: slot 2 * share for the work item that an earlier share began, 2 * share + 1 for the work item that this share begins.
constexpr int LAST_PART = 8, TILES_A_SHARE = 32;  // as in cufa/schedule/decode.py

struct BalancedLine {
  int total;   // tiles; 32 bits suffice for the memory of any GPU
  int shares;  // shares that are not empty

  // Every warp computes its own copy. Returns the first tile of sequence `batch`.
  DEVICE int measure(const DecodeParams& p, int batch, int lane) {
    const int items_per_batch = p.kv_heads * p.row_blocks;
    u32 all, before;
    if constexpr (UNEVEN) {
      all = before = 0;
      for (int b = lane; b < p.batch; b += 32) {
        const u32 tiles = tiles_to_read(p, b, sequence_lengths(p, b).keys).count;
        all += tiles;
        if (b < batch) before += tiles;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        all += shfl_xor(all, step);
        before += shfl_xor(before, step);
      }
    } else {
      const u32 tiles = tiles_to_read(p, 0, sequence_lengths(p, 0).keys).count;
      all = tiles * p.batch;
      before = tiles * batch;
    }
    total = int(all) * items_per_batch;
    shares = min(p.num_splits, total);
    if constexpr (UNEVEN) shares = min(shares, max(total / TILES_A_SHARE, p.min_shares));
    return int(before) * items_per_batch;
  }

  DEVICE bool two_sizes() const { return UNEVEN && shares > 1 && i64(shares) * TILES_A_SHARE <= total; }
  DEVICE int middle() const { return total - total / LAST_PART; }  // first tile of the short shares

  // First tile of a share; `total` if `share` is the number of shares.
  DEVICE int start(int share) const {
    if (!two_sizes()) return int(i64(total) * share / shares);
    const int large = shares / 2;
    if (share < large) return int(i64(middle()) * share / large);
    return middle() + int(i64(total - middle()) * (share - large) / (shares - large));
  }

  // The share that holds tile `t`: the last share that does not start after `t`.
  DEVICE int share_of(int t) const {
    if (!two_sizes()) return int((i64(t + 1) * shares - 1) / total);
    const int large = shares / 2;
    if (t < middle()) return int((i64(t + 1) * large - 1) / middle());
    return large + int((i64(t - middle() + 1) * (shares - large) - 1) / (total - middle()));
  }

  // Sets the number of the work item's partial results and their slots. Returns the first share that reads the work item.
  DEVICE int find_partials(int item_start, Span& span) const {
    const int first = share_of(item_start), last = share_of(item_start + span.tiles.count - 1);
    span.num_partials = last - first + 1;
    span.first_slot = 2 * first + 1;  // partial result 0 begins the work item, all others continue it
    span.slot_step = 2;
    return first;
  }
};

// Describes the partial results of the work item (batch, head_and_rows) to the block that merges them.
DEVICE void balanced_item(const DecodeParams& p, int batch, int head_and_rows, int lane, Span& span) {
  BalancedLine line;
  const int batch_start = line.measure(p, batch, lane);
  span.batch = batch;
  span.set_head(p, head_and_rows);
  span.length = sequence_lengths(p, batch);
  span.tiles = tiles_to_read(p, batch, span.length.keys);
  line.find_partials(batch_start + head_and_rows * span.tiles.count, span);
}

struct BalancedShare {
  BalancedLine line;
  int tile, end;    // this share's next tile, and one past its last
  int batch_start;  // first tile of the sequence `batch`
  int batch;

  DEVICE BalancedShare(const DecodeParams& p, int lane) {
    const int share = blockIdx.x;
    line.measure(p, 0, lane);
    const int items_per_batch = p.kv_heads * p.row_blocks;
    tile = share < line.shares ? line.start(share) : line.total;
    end = share < line.shares ? line.start(share + 1) : line.total;
    batch = 0;
    batch_start = 0;
    if constexpr (UNEVEN) {
      // Skip whole sequences, 32 at a time, by a prefix sum over lanes.
      for (; batch < p.batch && tile < line.total; batch += 32) {
        const u32 own = batch + lane < p.batch ? tiles_to_read(p, batch + lane, sequence_lengths(p, batch + lane).keys).count : 0;
        u32 upto = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const u32 before = shfl(upto, max(lane - step, 0));
          if (lane >= step) upto += before;
        }
        const int chunk = int(shfl(upto, 31)) * items_per_batch;
        if (tile < batch_start + chunk) {
          // The first lane whose sequence ends past `tile`.
          const u32 reached = tile - batch_start < int(upto) * items_per_batch ? 32 - lane : 0;
          const int found = 32 - int(redux_max(reached));
          batch_start += int(shfl(upto - own, found)) * items_per_batch;
          batch += found;
          break;
        }
        batch_start += chunk;
      }
    } else {
      const int each = tiles_to_read(p, 0, sequence_lengths(p, 0).keys).count * items_per_batch;
      if (tile < line.total) batch = tile / each;
      batch_start = batch * each;
    }
  }

  // Registers are scarce while a span is computed: each warp moves its share to 32 bytes of shared memory meanwhile.
  DEVICE void park(u32 slot, int lane) const {
    warp_sync();  // all lanes have read the previous content
    if (lane == 0) {
      st_shared_vec4(slot, {u32(line.total), u32(line.shares), u32(tile), u32(end)});
      st_shared_vec2(slot + 16, {u32(batch_start), u32(batch)});
    }
  }

  // A barrier must come between park() and unpark().
  DEVICE void unpark(u32 slot) {
    const vec4 a = ld_shared_vec4(slot);
    const vec2 b = ld_shared_vec2(slot + 16);
    line.total = int(a.x);
    line.shares = int(a.y);
    tile = int(a.z);
    end = int(a.w);
    batch_start = int(b.x);
    batch = int(b.y);
  }

  DEVICE bool next(const DecodeParams& p, Span& span) {
    if (tile >= end) return false;
    const int items_per_batch = p.kv_heads * p.row_blocks;
    span.length = sequence_lengths(p, batch);
    span.tiles = tiles_to_read(p, batch, span.length.keys);
    while (tile >= batch_start + span.tiles.count * items_per_batch) {
      batch_start += span.tiles.count * items_per_batch;
      span.length = sequence_lengths(p, ++batch);
      span.tiles = tiles_to_read(p, batch, span.length.keys);
    }
    const int item_of_batch = (tile - batch_start) / span.tiles.count;
    const int item_start = batch_start + item_of_batch * span.tiles.count;
    span.batch = batch;
    span.set_head(p, item_of_batch);
    span.item = batch * items_per_batch + item_of_batch;
    span.first_tile = span.tiles.first + tile - item_start;
    span.last_tile = span.tiles.first + min(span.tiles.count, end - item_start);
    const int share = blockIdx.x;
    span.partial = share - line.find_partials(item_start, span);
    span.record = share + span.item;  // unique: the next span has a later share or a later work item
    tile = item_start + span.last_tile - span.tiles.first;
    return true;
  }
};

// TRACE: one thread writes the TraceRecord of a span.
DEVICE void write_span_trace(const DecodeParams& p, const Span& span, u64 start_ns) {
  TraceRecord record;
  record.start_ns = start_ns;
  record.end_ns = global_timer();
  record.sm = sm_id();
  record.q_block = u32(span.partial);
  record.head = u32(span.kv_head * p.row_blocks + span.row_block);
  record.batch = u32(span.batch);
  record.first_tile = record.first_clear = u32(span.first_tile);  // every tile is masked
  record.tiles_clear = 0;
  record.tiles_visited = u32(span.last_tile - span.first_tile);
  record.tiles_skipped = u32(span.tiles.first + span.tiles.count - span.last_tile + span.first_tile);
  record.thread_block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  p.trace[span.record] = record;
}
