// Copies of a query tile in parts, spread between the products of the previous tile.
#pragma once
#include "mma/copy.cuh"

// Part `part` of PARTS of copy_tile_async() with CHECK_ROWS.
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS, int ALIGNMENT, int PARTS>
DEVICE void copy_tile_part(int part, u32 smem, const char* global, i64 row_stride_bytes, int valid_rows, int thread) {
  constexpr int UNITS = ROW_BYTES / ALIGNMENT, STEP = NUM_THREADS / UNITS;  // rows between two passes
  if constexpr (ALIGNMENT == 16) {
    constexpr int PASSES = (ROWS + STEP - 1) / STEP;
    const int row = thread / UNITS, offset = thread % UNITS * 16;
#pragma unroll
    for (int i = part * PASSES / PARTS; i < (part + 1) * PASSES / PARTS; ++i) {
      const bool mine = (NUM_THREADS % UNITS == 0 || thread < STEP * UNITS) && ((i + 1) * STEP <= ROWS || row < ROWS - i * STEP);
      if (mine) {
        cp_async_16(smem + (row + i * STEP) * PITCH + offset, global + (row + i * STEP) * row_stride_bytes + offset,
                    row + i * STEP < valid_rows);
      }
    }
  } else if (part == 0) {
    copy_tile_async<ROWS, ROW_BYTES, PITCH, NUM_THREADS, ALIGNMENT, true>(smem, global, row_stride_bytes, valid_rows, thread);
  }
}
