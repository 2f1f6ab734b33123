// Tiles between global and shared memory.
#pragma once
#include "mma/copy_unit.cuh"

// Global -> shared, asynchronous, by NUM_THREADS threads. With CHECK_ROWS, rows from `valid_rows` on are not read and become
// zeros: memory past the end of a tensor may hold NaN, and 0 * NaN is NaN.
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS, int ALIGNMENT, bool CHECK_ROWS>
DEVICE void copy_tile_async(u32 smem, const char* global, i64 row_stride_bytes, int valid_rows, int thread) {
  constexpr int UNITS = ROW_BYTES / ALIGNMENT;  // units of a row
  static_assert(ROW_BYTES % ALIGNMENT == 0, "a row is a whole number of units");
  if constexpr (ALIGNMENT == 16 && NUM_THREADS % UNITS == 0 && ROWS % (NUM_THREADS / UNITS) == 0) {
    // Every thread keeps its column and steps down the rows: the addresses are one addition each.
    constexpr int STEP = NUM_THREADS / UNITS;
    const int row = thread / UNITS, offset = thread % UNITS * ALIGNMENT;
    const char* source = global + row * row_stride_bytes + offset;
    const u32 target = smem + row * PITCH + offset;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i, source += STEP * row_stride_bytes) {
      copy_unit_async<ALIGNMENT>(target + i * STEP * PITCH, source, !CHECK_ROWS || row + i * STEP < valid_rows);
    }
  } else {
#pragma unroll(ALIGNMENT == 16 ? 8 : 1)
    for (int i = thread; i < ROWS * UNITS; i += NUM_THREADS) {
      const int row = i / UNITS, offset = i % UNITS * ALIGNMENT;
      copy_unit_async<ALIGNMENT>(smem + row * PITCH + offset, global + row * row_stride_bytes + offset,
                                 !CHECK_ROWS || row < valid_rows);
    }
  }
}

// Shared -> global by one warp, without the rows from `valid_rows` on, by the widest stores that ALIGNMENT allows.
template <int ROWS, int ROW_BYTES, int PITCH, int ALIGNMENT>
DEVICE void store_tile(char* global, i64 row_stride_bytes, u32 smem, int valid_rows, int lane) {
  constexpr int UNITS = ROW_BYTES / ALIGNMENT;
#pragma unroll(ALIGNMENT == 16 ? 8 : 1)
  for (int i = lane; i < ROWS * UNITS; i += 32) {
    const int row = i / UNITS, offset = i % UNITS * ALIGNMENT;
    if (row < valid_rows) {
      const u32 source = smem + row * PITCH + offset;
      char* target = global + row * row_stride_bytes + offset;
      if constexpr (ALIGNMENT == 16) {
        st_global(target, ld_shared_vec4(source));
      } else if constexpr (ALIGNMENT == 8) {
        st_global(target, ld_shared_vec2(source));
      } else if constexpr (ALIGNMENT == 4) {
        st_global(target, ld_shared_u32(source));
      } else {
        st_global(target, ld_shared_u16(source));
      }
    }
  }
}
