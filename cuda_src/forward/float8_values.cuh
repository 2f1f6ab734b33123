// V^T in memory, and the launch that writes V^T to the workspace if the caller's V is not transposed. cufa.quantize(role="v")
// returns V^T.
#pragma once
#include "forward/float8_params.cuh"
#include "shared/packed_blocks.cuh"
#include "shared/value_tile.cuh"

// V^T is contiguous: (batch, kv_heads, HEAD_DIM, positions), one batch entry if packed.
DEVICE i64 value_positions(const Float8Params& p) {
  if constexpr (LENGTHS_KIND == PACKED) return i64(VALUE_KEYS) * (p.total_k / VALUE_KEYS + p.batch);
  return i64(VALUE_KEYS) * ((p.seqlen_k + VALUE_KEYS - 1) / VALUE_KEYS);
}
// First position of a sequence in V^T. A packed sequence begins at a multiple of VALUE_KEYS positions.
DEVICE int first_position(int first_key, int sequence) {
  return LENGTHS_KIND == PACKED ? VALUE_KEYS * int(first_packed_block<VALUE_KEYS>(first_key, sequence)) : 0;
}

constexpr int TRANSPOSE_WARPS = 8;

// Transpose four rows of four bytes: word c of `columns` has byte c of each row.
DEVICE void transpose_bytes(const u32 (&rows)[4], u32* columns) {
  const u32 low_01 = byte_permute(rows[0], rows[1], 0x5140), low_23 = byte_permute(rows[2], rows[3], 0x5140);
  const u32 high_01 = byte_permute(rows[0], rows[1], 0x7362), high_23 = byte_permute(rows[2], rows[3], 0x7362);
  columns[0] = byte_permute(low_01, low_23, 0x5410);
  columns[1] = byte_permute(low_01, low_23, 0x7632);
  columns[2] = byte_permute(high_01, high_23, 0x5410);
  columns[3] = byte_permute(high_01, high_23, 0x7632);
}

// One thread block of TRANSPOSE_WARPS warps transposes VALUE_KEYS positions of a head. Positions past the end of their sequence
// become 0. Grid: (blocks, kv_heads).
DEVICE void transpose_block_of_values(const Float8Params& p, u32 smem) {
  using Tile = ValueTile<HEAD_DIM, VALUE_WORDS, TRANSPOSE_WARPS * 32>;
  const Tile tile{smem};
  const int block = blockIdx.x, head = blockIdx.y;
  PackedBlock at;
  if constexpr (LENGTHS_KIND == PACKED) {
    at = packed_block<VALUE_KEYS>(p.cu_seqlens_k, p.batch, p.total_k, block);
  } else {
    const int blocks = (p.seqlen_k + VALUE_KEYS - 1) / VALUE_KEYS;
    at = {block / blocks, block % blocks};
  }
  const auto sequence = sequence_of(p, at.sequence);
  const int column = threadIdx.x % Tile::LANES * 8;
  const char* v = static_cast<const char*>(p.v) + sequence.batch() * p.v_stride.batch + head * p.v_stride.head + column;
  for (int word = threadIdx.x / Tile::LANES; word < VALUE_WORDS; word += TRANSPOSE_WARPS * 32 / Tile::LANES) {
    if (column >= HEAD_DIM) continue;
    u32 left[4] = {}, right[4] = {}, columns[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = at.block * VALUE_KEYS + first_key_of_word(word) + key_of_word(i);
      if (key >= sequence.keys()) continue;
      const vec2 bytes = ld_global<vec2>(v + (sequence.first_key() + key) * p.v_stride.seq);
      left[i] = bytes.x;
      right[i] = bytes.y;
    }
    transpose_bytes(left, columns);
    transpose_bytes(right, columns + 4);
    tile.write(column, word, columns);
  }
  block_sync();  // the tile is complete
  const i64 blocks = LENGTHS_KIND == PACKED ? gridDim.x : (p.seqlen_k + VALUE_KEYS - 1) / VALUE_KEYS, row = blocks * VALUE_KEYS;
  const i64 first = LENGTHS_KIND == PACKED ? i64(block) : at.block, batch = LENGTHS_KIND == PACKED ? 0 : at.sequence;
  tile.store(static_cast<char*>(p.workspace) + (batch * p.kv_heads + head) * HEAD_DIM * row + first * VALUE_KEYS, row);
}
