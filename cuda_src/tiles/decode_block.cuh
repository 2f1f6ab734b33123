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
    copy_queries(p, piece, smem, thread);
    cp_async_commit();
    if constexpr (HEAD_DIM % 16 != 0) {
      zero_padding<Br, HEAD_DIM * 2, Q_PITCH, NUM_THREADS>(smem, thread);
      zero_padding<RINGS * NUM_STAGES * 2 * RING_KEYS, KV_ROW_BYTES, KV_PITCH, NUM_THREADS>(smem + Q_BYTES, thread);
    }
    stream.start(p, piece, ring, thread % RING_THREADS);
    int tiles = stream.remaining(), key = stream.key;
#pragma unroll 1
    for (int stage = 0; stage < NUM_STAGES; ++stage) stream.copy_next(p, ring_smem + stage * STAGE_BYTES);
    cp_async_wait<NUM_STAGES>();
    block_sync();  // Q has landed for all threads
    tile.start(p, piece, Q_lane, first_row, lane);

    // Keys that every row sees; the tiles beyond are masked.
    const int unmasked = piece.length.keys - (CAUSAL ? p.tokens - 1 : 0);
    u32 buffer = ring_smem;
#pragma unroll 1
    for (; tiles > 0; --tiles, key += Bc) {
      cp_async_wait<NUM_STAGES - 1>();
      ring_sync(ring);  // the oldest tile has landed for all threads of the ring
      if (key + RING_KEYS <= unmasked) {
        tile.visit<false>(buffer, Q_lane, key, piece.length.keys, lane);
      } else {
        tile.visit<true>(buffer, Q_lane, key, piece.length.keys, lane);
      }
      ring_sync(ring);  // all have read it
      stream.copy_next(p, buffer);
      buffer = buffer + STAGE_BYTES == ring_smem + RING_BYTES ? ring_smem : buffer + STAGE_BYTES;
    }
    cp_async_wait<0>();
    merge_warps(p, piece, tile, smem + Q_BYTES, smem + ML_OFFSET, thread);
  }
};
