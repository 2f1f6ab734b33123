// Irregular masks, and the tiles that a block visits under them: the device side of cufa/problem/mask.py (sets of tokens that
// the band does not bind) and cufa/problem/columns.py (runs of rows that each key is hidden from; FlashMask, arXiv 2410.01359).
//
// Both edges of the band are tested; an absent edge lies beyond every score. Rows and keys sum to less than 2^31, so a row plus a
// key fits in 32 bits.
//
// Whether runs hide a tile follows from the least and the greatest ends of its keys' runs. prepare_mask() computes them for each
// block of keys, in a small launch before the kernel or in the first pass of a backward. Every call does so: the runs are on the
// GPU and may change between calls. It also stores each run as {lo, hi - lo}, clamped to existing rows: one load, 32-bit tests.
// With LENGTHS, runs that count positions among the keys begin elsewhere in each sequence (run_offset).
#pragma once
#include "shared/params.cuh"
#include "primitives/opaque.cuh"
#include "shared/fragment_view.cuh"
#include "shared/bit_mask.cuh"
#include "shared/lengths.cuh"
#include "shared/mask.cuh"

constexpr int num_runs(MaskKind kind) { return kind == MASK_COLUMNS2 ? 2 : kind == MASK_COLUMNS ? 1 : 0; }

// Extremes of the ends of a key block's runs, without empty runs.
struct RunExtremes {
  int greatest_lo, least_hi, least_lo, greatest_hi;
};

// The workspace that prepare_mask() fills. For each sequence and head of the mask, run after run: {lo, hi - lo} of every key
// of whole blocks. After all of them: RunExtremes of each block.
template <typename Params, int RUNS>
struct MaskWorkspace {
  static constexpr int RUN_BYTES = 8, EXTREMES_BYTES = 16;
  char *runs, *extremes;
  int blocks;  // key blocks of a sequence

  // The part of one head.
  DEVICE MaskWorkspace(const Params& p, char* runs_, char* extremes_)
      : runs(runs_), extremes(extremes_), blocks((p.seqlen_k - 1) / BLOCK_KV + 1) {}
  DEVICE explicit MaskWorkspace(const Params& p) : blocks((p.seqlen_k - 1) / BLOCK_KV + 1) {
    runs = static_cast<char*>(p.workspace) + p.mask.workspace;
    extremes = runs + i64(p.mask.sequences) * p.mask.heads * RUNS * blocks * (BLOCK_KV * RUN_BYTES);
  }
  // Index of a head's first run; a mask with one sequence or head broadcasts.
  DEVICE static i64 of_head(const MaskParams& mask, int batch, int kv_head) {
    return (i64(mask.sequences > 1 ? batch : 0) * mask.heads + (mask.heads > 1 ? kv_head : 0)) * RUNS;
  }
  DEVICE char* run(i64 run_index, int key) const { return runs + (run_index * (i64(blocks) * BLOCK_KV) + key) * RUN_BYTES; }
  DEVICE char* extremes_of(i64 run_index, int block) const { return extremes + (run_index * blocks + block) * EXTREMES_BYTES; }
};

DEVICE int cut(i64 row, int rows) { return row < 0 ? 0 : row > rows ? rows : int(row); }
DEVICE u32 warp_min(u32 x) { return ~redux_max(~x); }

constexpr int MASK_THREADS = 128;  // threads of a block of mask_blocks()

// Stored runs count rows from this row of the caller's, so that every row of a sequence has a number of at least 0.
template <typename Params>
DEVICE i64 first_run_row(const Params& p) {
  if constexpr (LENGTHS_KIND == DENSE) return p.mask.run_shift;
  return p.mask.run_shift - i64(p.mask.run_shift_by_length) * p.seqlen_q;  // the least: of a sequence of all rows and no keys
}

// Called by all lanes of warp `warp`; `num_warps` warps share the blocks of keys.
template <MaskKind KIND, typename Params>
DEVICE void prepare_mask(const Params& p, int warp, int num_warps) {
  constexpr int RUNS = num_runs(KIND);
  if constexpr (KIND == MASK_BITS) prepare_bits(p, warp, num_warps);
  if constexpr (RUNS > 0) {
    const MaskWorkspace<Params, RUNS> workspace(p);
    const int lane = lane_id(), rows = p.seqlen_q + (LENGTHS_KIND == DENSE ? 0 : p.seqlen_k);
    const i64 of_mask = i64(p.mask.sequences) * p.mask.heads;
    for (i64 index = warp; index < of_mask * RUNS * workspace.blocks; index += num_warps) {
      const i64 run_index = index / workspace.blocks;
      const int block = int(index % workspace.blocks);
      const i32* lo_of = p.mask.runs + (run_index % RUNS * 2 * of_mask + run_index / RUNS) * p.mask.keys;
      const i32* hi_of = lo_of + of_mask * p.mask.keys;
      RunExtremes found{0, rows, rows, 0};
      for (int i = lane; i < BLOCK_KV; i += 32) {
        const int key = block * BLOCK_KV + i;
        int lo = rows, hi = 0;  // an empty run: it neither covers nor touches a tile
        if (key < p.seqlen_k) {
          const i32 given_lo = ld_global<i32>(lo_of + key), given_hi = ld_global<i32>(hi_of + key);
          if (given_lo < given_hi) {
            lo = cut(i64(given_lo) - first_run_row(p), rows);
            hi = cut(i64(given_hi) - first_run_row(p), rows);
          }
          found = {max(found.greatest_lo, lo), min(found.least_hi, hi), min(found.least_lo, lo), max(found.greatest_hi, hi)};
        }
        st_global(workspace.run(run_index, key), vec2{u32(lo), u32(max(hi - lo, 0))});
      }
      const vec4 extremes = {redux_max(u32(found.greatest_lo)), warp_min(u32(found.least_hi)), warp_min(u32(found.least_lo)),
                             redux_max(u32(found.greatest_hi))};
      if (lane == 0) st_global(workspace.extremes_of(run_index, block), extremes);
    }
  }
}

struct TileClass {
  bool some, every;  // some score may be visible; all scores are visible
};

// SETS: row i also sees keys before `prefix`, and keys before min(keep, i + last + 1). Rows before `exempt` see all keys.
struct TokenSets {
  int prefix, keep, exempt;
};

// The mask of one head.
template <MaskKind KIND, typename Params>
struct IrregularMask : TokenSets {
  static constexpr int RUNS = num_runs(KIND);
  static constexpr bool SETS = KIND == MASK_SETS, BITS = KIND == MASK_BITS;

  int rows, keys;
  int first, last;  // row i sees keys i + first ... i + last
  MaskWorkspace<Params, RUNS> workspace;  // BITS: `runs` are the words of the head, `extremes` its tile classes
  i64 first_run;  // of the head, among the runs of the workspace; BITS: the head, among those of all sequences of the mask
  int run_offset;  // LENGTHS: row 0 among the rows that stored runs count
  int line_places;  // BITS: of a line of the whole mask

  // `band` is that of sequence `batch`. `member`: which head of the query group. Bits may differ between them.
  DEVICE IrregularMask(const Params& p, const Band<KIND>& band, int batch, int kv_head, int member)
      : TokenSets{}, rows(band.rows), keys(band.keys), first(band.first), last(band.last), workspace(p),
        first_run(workspace.of_head(p.mask, RUNS > 0 ? mask_index(p, batch) : batch, kv_head)),
        run_offset(offset_of_runs(p, band)), line_places(places_of_line(p)) {
    if constexpr (SETS) {
      const int sequence = mask_index(p, batch);
      auto of_sequence = [&](const i32* values, i32 all) {
        return values == nullptr ? all : ld_global<i32>(values + sequence * all);
      };
      prefix = cut(of_sequence(p.mask.prefix_of, p.mask.prefix), keys);
      keep = cut(of_sequence(p.mask.keep_of, p.mask.keep), keys);
      const i32 tokens = of_sequence(p.mask.global_of, p.mask.global_tokens);
      if (tokens > 0) exempt = cut(i64(tokens) - diagonal_of(p, sequence_of(p, batch)), rows);
    }
    if constexpr (BITS) {
      const BitMask<Params> bits(p);
      const int of_mask = p.mask.heads > p.kv_heads ? kv_head * (p.heads / p.kv_heads) + member : kv_head;
      const i64 head = MaskWorkspace<Params, 1>::of_head(p.mask, batch, of_mask);
      workspace.runs = bits.words + head * bits.bytes_of_head();
      workspace.extremes = bits.classes + 8 * head * bits.classes_of_head();
      if constexpr (LENGTHS_KIND != DENSE) first_run = head;
    }
  }
  // From the values of one sequence and head: `run` is its first_run.
  DEVICE IrregularMask(const Params& p, const Band<KIND>& band, i64 run, const TokenSets& sets)
      : IrregularMask(p, band, MaskWorkspace<Params, RUNS>(p), sets) {
    first_run = run;
    if constexpr (BITS) find_bits(BitMask<Params>(p), run);
  }
  DEVICE IrregularMask(const Params& p, const Band<KIND>& band, const MaskWorkspace<Params, RUNS>& of_head, const TokenSets& sets)
      : TokenSets(sets), rows(band.rows), keys(band.keys), first(band.first), last(band.last), workspace(of_head), first_run(0),
        run_offset(offset_of_runs(p, band)), line_places(places_of_line(p)) {}

  // The sequence whose numbers are read. Padding after the last packed sequence has no rows, and reads the last one's numbers.
  DEVICE static int mask_index(const Params& p, int batch) { return LENGTHS_KIND == PACKED ? min(batch, p.batch - 1) : batch; }
  // Row 0 among the rows of stored runs.
  DEVICE static int offset_of_runs(const Params& p, const Band<KIND>& band) {
    return LENGTHS_KIND == DENSE || RUNS == 0 ? 0 : p.mask.run_shift_by_length * (band.keys - band.rows + p.seqlen_q);
  }
  DEVICE static int places_of_line(const Params& p) { return LINES_ARE_KEYS<Params> ? p.seqlen_q : p.seqlen_k; }
  DEVICE int words_of_line() const {
    const int of_sequence = LINES_ARE_KEYS<Params> ? rows : keys;
    return ((LENGTHS_KIND == DENSE ? of_sequence : line_places) + 31) / 32;
  }
  DEVICE void find_bits(const BitMask<Params>& bits, i64 head) {
    first_run = head;
    workspace.runs = bits.words + head * bits.bytes_of_head();
    workspace.extremes = bits.classes + 8 * head * bits.classes_of_head();
  }

  DEVICE RunExtremes extremes(int run, int block) const {
    const vec4 x = ld_global<vec4>(workspace.extremes_of(first_run + run, block));
    const int offset = LENGTHS_KIND == DENSE ? 0 : run_offset;
    return {int(x.x) - offset, int(x.y) - offset, int(x.z) - offset, int(x.w) - offset};
  }

  // BITS: the class of the tile of rows top ... end-1 and key block `block` in bit 0. If lines are rows, bit n is the class of
  // the n-th of the next key blocks, as far as they are in one word. AT_ONCE: groups of rows whose classes are loaded together.
  template <int MOST_ROWS, int AT_ONCE = 1>
  DEVICE TileClasses classes_from(int top, int end, int block) const {
    constexpr bool BY_KEY = LINES_ARE_KEYS<Params>;
    const int along = BitMask<Params>::words_along(line_places);
    TileClasses found{0, ~0u};
#pragma unroll AT_ONCE
    for (int n = 0; n < (MOST_ROWS - 1) / CLASS_ROWS + 1; ++n) {
      const int group = top / CLASS_ROWS + n, across = BY_KEY ? block : group;
      const u32 place = BY_KEY ? group : block;
      if (group * CLASS_ROWS >= end) continue;
      const vec2 x = ld_global<vec2>(workspace.extremes + 8 * (across * along + int(place / 32)));
      found = {found.some | x.x >> place % 32, found.every & x.y >> place % 32};
    }
    return found;
  }

  // Class of the tile of rows top ... end-1, at most MOST_ROWS, and keys left ... right-1, which all exist. `block` is its key
  // block.
  template <int MOST_ROWS = BLOCK_Q>
  DEVICE TileClass classify(int top, int end, int left, int right, int block) const {
    if constexpr (BITS) {
      const TileClasses is = classes_from<MOST_ROWS>(top, end, block);
      return {(is.some & 1) != 0, (is.every & 1) != 0};
    }
    bool some = left <= end - 1 + last, every = right - 1 <= max(top, exempt) + last;
    some = some && (right - 1 >= top + first || left < keep);
    every = every && (max(max(left, prefix), keep) >= end - 1 + first || right <= keep);
    if constexpr (SETS) {
      some = some || left < prefix || top < exempt;
      every = every || right <= prefix || end <= exempt;
    }
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      if (!some) break;  // nothing is read of tiles outside the band
      const RunExtremes x = extremes(run, block);
      some = some && !(top >= x.greatest_lo && end <= x.least_hi);
      every = every && !(top < x.greatest_hi && end > x.least_lo);
    }
    return {some, every};
  }
};

// A tile of a walk in one register: negative after the last.
struct WalkedTile {
  int code;

  DEVICE bool exists() const { return code >= 0; }
  DEVICE int tile() const { return code >> 1; }  // -1 after the last
  DEVICE bool masked() const { return code & 1; }
};

// The tiles that a block visits, one after another, by all lanes of a warp: 32 tiles at a time, one for each lane to classify.
template <bool DOWNWARDS>
struct TileWalk {
  int from;  // the next tile to classify
  u32 mine;  // the lane's tile if it is still to be visited: its place, and whether it needs the mask; else 0

  DEVICE explicit TileWalk(int from_) : from(from_), mine(0) {}

  // The next tile before `end` or, DOWNWARDS, from `end` on; classify(tile) -> TileClass.
  template <typename Classify>
  DEVICE WalkedTile next(int end, const Classify& classify) {
    u32 found = redux_max(mine);
    while (found == 0) {
      if (DOWNWARDS ? from < end : from >= end) return {-1};
      const int tile = DOWNWARDS ? from - lane_id() : from + lane_id();
      TileClass is{false, false};
      if (DOWNWARDS ? tile >= end : tile < end) is = classify(tile);
      mine = is.some ? u32(32 - lane_id()) << 1 | u32(!is.every) : 0;  // the largest comes first
      from += DOWNWARDS ? -32 : 32;
      found = redux_max(mine);
    }
    if (mine == found) mine = 0;
    const int before = int(found >> 1);  // tiles between this one and `from`
    return {(DOWNWARDS ? from + before : from - before) << 1 | int(found & 1)};
  }
};
