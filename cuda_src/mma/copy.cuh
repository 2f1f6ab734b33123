// Tiles between global and shared memory.
//
// A tile is ROWS rows of ROW_BYTES, each starting at a multiple of PITCH bytes. tile_pitch() makes PITCH an odd
// number of 16-byte units, so that the eight rows an ldmatrix phase reads lie in eight different groups of banks
// for every head dim. XOR swizzling needs no padding, but then every address needs its own register or its own
// ALU operation; with a pitch, one base register and immediate offsets serve a whole tile.
#pragma once
#include "primitives/primitives.cuh"

// Bytes from row to row. PAD_TO is the multiple of bytes that products read: the gap is filled by zero_padding.
constexpr int tile_pitch(int row_bytes, int pad_to) {
  const int units = (row_bytes + pad_to - 1) / pad_to * pad_to / 16;
  return (units | 1) * 16;
}

// One unit of a row, BYTES = the alignment of the tensors. cp.async has no 2-byte form: that one goes by a register.
template <int BYTES>
DEVICE void copy_unit_async(u32 smem, const char* global, bool valid) {
  if constexpr (BYTES == 16) {
    cp_async_16(smem, global, valid);
  } else if constexpr (BYTES >= 4) {
    cp_async_small<BYTES>(smem, global, valid);
  } else {
    u16 value = 0;
    if (valid) value = ld_global<u16>(global);
    st_shared_u16(smem, value);
  }
}

// Global -> shared, asynchronous, by NUM_THREADS threads. With CHECK_ROWS, rows from `valid_rows` on are filled with
// zeros and never read: memory past the end of a tensor may hold NaN, and 0 * NaN would reach the result.
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS, int ALIGNMENT, bool CHECK_ROWS>
DEVICE void copy_tile_async(u32 smem, const char* global, i64 row_stride_bytes, int valid_rows, int thread) {
  constexpr int UNITS = ROW_BYTES / ALIGNMENT;  // a row
  static_assert(ROW_BYTES % ALIGNMENT == 0, "a row is a whole number of copies");
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

// One thread's share of copying tile after tile, from the last of a sequence to the first, in PARTS that can be spread
// between other instructions: a burst of copies fills the queue that ldmatrix waits in. Registers are what counts here:
// a thread keeps its column for good and steps down the rows (with 10 units per row, 8 of 128 threads copy nothing).
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS, int ALIGNMENT, int PARTS>
struct TileStream {
  static constexpr int UNITS = ROW_BYTES / ALIGNMENT;
  static constexpr int STEP = NUM_THREADS / UNITS;  // rows from pass to pass
  static constexpr int PASSES = ALIGNMENT == 16 ? (ROWS + STEP - 1) / STEP : 1;

  const char* source;  // this thread's first unit of the next tile; with narrow units, the tile
  u32 target;
  int thread;

  DEVICE TileStream(u32 smem, const char* tile, i64 row_stride_bytes, int thread_)
      : source(tile), target(smem), thread(thread_) {
    if constexpr (ALIGNMENT == 16) {
      source += thread / UNITS * row_stride_bytes + thread % UNITS * 16;
      target += thread / UNITS * PITCH + thread % UNITS * 16;
    }
  }

  // The next tile lies so many tiles further back.
  DEVICE void skip(int tiles, i64 row_stride_bytes) { source -= tiles * (ROWS * row_stride_bytes); }

  // Part `part` of the next tile, whose rows all exist; not `valid`: zeros, and nothing is read. The last part steps
  // back to the tile before.
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

// Part `part` of PARTS of copy_tile_async with CHECK_ROWS: the passes that one part takes lie between other instructions.
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS, int ALIGNMENT, int PARTS>
DEVICE void copy_tile_part(int part, u32 smem, const char* global, i64 row_stride_bytes, int valid_rows, int thread) {
  constexpr int UNITS = ROW_BYTES / ALIGNMENT, STEP = NUM_THREADS / UNITS;  // rows from pass to pass
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

// Zeros in the 16 bytes after each row, where the last k16 step of a product reads past a head dim that is an odd
// multiple of 8. Copies never write there: once a buffer is enough.
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS>
DEVICE void zero_padding(u32 smem, int thread) {
  for (int row = thread; row < ROWS; row += NUM_THREADS) {
    st_shared_vec4(smem + row * PITCH + ROW_BYTES, vec4{0, 0, 0, 0});
  }
}

// Shared -> global by one warp, rows from `valid_rows` on left out: the widest stores that ALIGNMENT allows.
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
