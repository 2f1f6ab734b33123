// TileStream over keys in a cache: a thread finds the page of each row that it copies in the block table.
#pragma once
#include "forward/fa2/shape.cuh"

static_assert(!CACHED || HEAD_DIM == V_DIM, "keys and values in a cache have one head dim");

struct PageStream {
  static constexpr int UNITS = ROW_BYTES / 16, STEP = NUM_THREADS / UNITS, PASSES = (Bc + STEP - 1) / STEP;

  const CacheParams& p;
  const char* cache;  // the head's first key or value in page 0
  const Strides& stride;
  u32 target;
  int thread, sequence;
  int tile_key;   // the first key of the next tile
  int first, end;  // keys that are read: earlier keys are masked for all rows, and their pages may be freed

  DEVICE PageStream(const AttentionParams& params, const void* cache_, const Strides& stride_, int kv_head, u32 smem,
                    int sequence_, int tile, int first_, int end_, int thread_)
      : p(cache_of(params)), cache(static_cast<const char*>(cache_) + 2 * kv_head * stride_.head), stride(stride_),
        target(smem + thread_ / UNITS * PITCH + thread_ % UNITS * 16), thread(thread_), sequence(sequence_),
        tile_key(tile * Bc), first(first_), end(end_) {}

  // Part `part` of `parts` of the next tile; rows without a key that is read become zeros. The last part moves one tile back.
  DEVICE void copy_part(int part, int parts, u32 stage_offset, bool valid) {
#pragma unroll
    for (int i = part * PASSES / parts; i < (part + 1) * PASSES / parts; ++i) {
      const int row = thread / UNITS + i * STEP, key = tile_key + row;
      if (row >= Bc || thread >= STEP * UNITS) continue;
      const bool read = valid && first <= key && key < end;
      const char* source = cache;
      if (read) {
        const PlaceInCache place = place_in_cache(p, sequence, key);
        source += 2 * (page_to_read(p, place.page) * stride.batch + place.slot * stride.seq) + thread % UNITS * 16;
      }
      cp_async_16(target + stage_offset + i * STEP * PITCH, source, read);
    }
    if (part == parts - 1) tile_key -= Bc;
  }
  DEVICE void copy(int part, u32 stage_offset, i64, bool valid) { copy_part(part, K_STEPS, stage_offset, valid); }
  DEVICE void copy_first(u32, const char*, i64, int) { copy_part(0, 1, 0, true); }
  DEVICE void skip(int tiles, i64) { tile_key -= tiles * Bc; }
};
