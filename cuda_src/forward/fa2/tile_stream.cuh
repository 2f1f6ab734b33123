// Copies of one key or value tile after another, spread between the products of the tile that is being computed.
#pragma once
#include "mma/copy.cuh"

// One thread's share of the copies, from the last tile of a sequence to the first, in PARTS: a burst of copies would fill the
// queue that ldmatrix waits in. To save registers a thread keeps its column and steps down the rows (with 10 units per row, 8 of
// 128 threads copy nothing).
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS, int ALIGNMENT, int PARTS>
struct TileStream {
  static constexpr int UNITS = ROW_BYTES / ALIGNMENT;
  static constexpr int STEP = NUM_THREADS / UNITS;  // rows between two passes
  static constexpr int PASSES = ALIGNMENT == 16 ? (ROWS + STEP - 1) / STEP : 1;

  const char* source;  // this thread's first unit of the next tile; with units under 16 bytes, the tile
  u32 target;
  int thread;

  DEVICE TileStream(u32 smem, const char* tile, i64 row_stride_bytes, int thread_)
      : source(tile), target(smem), thread(thread_) {
    if constexpr (ALIGNMENT == 16) {
      source += thread / UNITS * row_stride_bytes + thread % UNITS * 16;
      target += thread / UNITS * PITCH + thread % UNITS * 16;
    }
  }

  // The whole tile that is visited first, to stage 0. Rows from `valid_rows` on become zeros.
  DEVICE void copy_first(u32 smem, const char* tile, i64 row_stride_bytes, int valid_rows) const {
    copy_tile_async<ROWS, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(smem, tile, row_stride_bytes, valid_rows, thread);
  }

  // The next tile is `tiles` tiles before the one that `source` points to.
  DEVICE void skip(int tiles, i64 row_stride_bytes) { source -= tiles * (ROWS * row_stride_bytes); }

  // Part `part` of the next tile, whose rows all exist. If not `valid`, writes zeros and reads nothing. The last part moves
  // `source` one tile back.
  DEVICE void copy(int part, u32 stage_offset, i64 row_stride_bytes, bool valid) {
    if constexpr (ALIGNMENT == 16) {
#pragma unroll
      for (int i = part * PASSES / PARTS; i < (part + 1) * PASSES / PARTS; ++i) {
        const bool mine = (NUM_THREADS % UNITS == 0 || thread < STEP * UNITS) &&
                          ((i + 1) * STEP <= ROWS || thread / UNITS < ROWS - i * STEP);
        if (mine) cp_async_16(target + stage_offset + i * STEP * PITCH, source + i * (STEP * row_stride_bytes), valid);
      }
    } else if (part == 0) {
      copy_tile_async<ROWS, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(  //
          target + stage_offset, source, row_stride_bytes, valid ? ROWS : 0, thread);
    }
    if (part == PARTS - 1) source -= ROWS * row_stride_bytes;
  }
};
