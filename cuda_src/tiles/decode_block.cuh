// A thread block at work on pieces, one after another: what both schedules share.
#pragma once
#include "tiles/decode_merge.cuh"

// Shared memory: Q; the rings, in whose place warps merge; m and l of every ring and row; a flag.
constexpr int RING_BYTES = NUM_STAGES * STAGE_BYTES;
constexpr int RINGS_BYTES = RINGS * RING_BYTES, MERGE_BYTES = RINGS * Br * MERGE_PITCH;
constexpr int ML_OFFSET = Q_BYTES + (RINGS_BYTES > MERGE_BYTES ? RINGS_BYTES : MERGE_BYTES);
constexpr int FLAG_OFFSET = ML_OFFSET + RINGS * Br * 8;
static_assert(FLAG_OFFSET + 16 == SMEM_BYTES, "the registry computes the same layout");

struct DecodeBlock {
  u32 smem, ring_smem, Q_lane;
  int thread, lane, ring, first_row;

  DEVICE DecodeBlock(u32 smem_, int thread_) : smem(smem_), thread(thread_) {
    const int warp = thread / 32;
    lane = thread % 32;
    ring = warp / ROW_WARPS;
    first_row = warp % ROW_WARPS * WARP_ROWS;
    ring_smem = smem + Q_BYTES + ring * RING_BYTES;
    Q_lane = smem + first_row * Q_PITCH + TileAttention::q_lane_offset(lane);
  }

  DEVICE void attend(const DecodeParams& p, const Piece& piece) {
    TileAttention tile;
    KeyStream stream;
    if constexpr (HEAD_DIM % 16 != 0) {
      zero_padding<Br, HEAD_DIM * 2, Q_PITCH, NUM_THREADS>(smem, thread);
      zero_padding<RINGS * NUM_STAGES * 2 * RING_KEYS, KV_ROW_BYTES, KV_PITCH, NUM_THREADS>(smem + Q_BYTES, thread);
    }
    stream.start(p, piece, ring, thread % RING_THREADS);
    copy_queries(p, piece, smem, thread);  // lands with the first tile
    const int tiles = stream.remaining();
    int key = stream.key;
    u32 buffer = ring_smem;
    // The first NUM_STAGES rounds only fill the ring. One loop, because code is fetched from memory, cold, like data.
#pragma unroll 1
    for (int round = -NUM_STAGES; round < tiles; ++round) {
      if (round >= 0) {
        cp_async_wait<NUM_STAGES - 1>();
        if (round == 0) {
          block_sync();  // the queries have landed for all threads
          tile.start(p, piece, Q_lane, first_row, lane);
        } else {
          ring_sync(ring);  // the oldest tile has landed for all threads of the ring
        }
        tile.visit(buffer, Q_lane, key, piece.length.keys, lane);
        key += Bc;
        ring_sync(ring);  // all have read it
      }
      stream.copy_next(p, buffer);
      buffer = buffer + STAGE_BYTES == ring_smem + RING_BYTES ? ring_smem : buffer + STAGE_BYTES;
    }
    cp_async_wait<0>();
    if (tiles == 0) {
      block_sync();  // the one above, of the other rings
      tile.start(p, piece, Q_lane, first_row, lane);
    }
    merge_warps(p, piece, tile, smem + Q_BYTES, smem + ML_OFFSET, thread);
  }
};
