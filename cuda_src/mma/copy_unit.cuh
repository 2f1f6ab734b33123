// Tiles in shared memory, and copies of one unit of a row.
//
// A tile is ROWS rows of ROW_BYTES, each starting at a multiple of PITCH bytes. tile_pitch() makes PITCH an odd number of 16-byte
// units: the eight rows that one phase of ldmatrix reads then lie in eight different groups of banks, for every head dim. XOR
// swizzling needs no padding, but each address then needs its own register or ALU operation; with a pitch, one base register and
// immediate offsets serve a whole tile.
#pragma once
#include "primitives/cp_async.cuh"
#include "primitives/primitives.cuh"

// Bytes between rows. Products read a multiple of PAD_TO bytes of a row; zero_padding() fills the gap.
constexpr int tile_pitch(int row_bytes, int pad_to) {
  const int units = (row_bytes + pad_to - 1) / pad_to * pad_to / 16;
  return (units | 1) * 16;
}

// One unit of a row; BYTES is the alignment of the tensors. cp.async has no 2-byte form: those units pass through a register.
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

// Zeros in the 16 bytes after each row: if the head dim is an odd multiple of 8, the last k16 step of a product reads them.
// Copies never write there, so that once per buffer is enough.
template <int ROWS, int ROW_BYTES, int PITCH, int NUM_THREADS>
DEVICE void zero_padding(u32 smem, int thread) {
  for (int row = thread; row < ROWS; row += NUM_THREADS) {
    st_shared_vec4(smem + row * PITCH + ROW_BYTES, vec4{0, 0, 0, 0});
  }
}
