// The attention of one thread block over a Span: the code that decode_split and decode_balanced share.
#pragma once
#include "decode/maximum.cuh"
#include "decode/merge.cuh"
#include "shared/phases.cuh"

struct DecodeBlock {
  Choose<TMA_COPIES, TmaKeyStream, AsyncKeyStream>::type stream;
  u32 smem, ring_smem, Q_lane;
  int thread, lane, ring, first_row;
  int stage = 0;  // index of the stage that holds the ring's oldest tile
  PhaseLog inside;

  DEVICE DecodeBlock(const DecodeParams& p, u32 smem_, int thread_)
      : smem(smem_), thread(thread_), inside(p.trace, thread_ % 32 == 0) {
    const int warp = int(shfl(u32(thread) / 32, 0));  // the shuffle tells the compiler that the value is warp-uniform
    lane = int(u32(thread) % 32);  // unsigned: a cheaper remainder
    ring = warp / ROW_WARPS;
    first_row = warp % ROW_WARPS * WARP_ROWS;
    ring_smem = smem + SharedMemory::KV + ring * RING_BYTES;
    Q_lane = smem + SharedMemory::Q + first_row * Q_PITCH + TileAttention::q_lane_offset(lane);
    if constexpr (KEY_SCALES) stream.scales = smem + SharedMemory::SCALES + ring * NUM_STAGES * SCALES_BYTES;
    stream.init(smem + SharedMemory::BARRIERS + ring * NUM_STAGES * 8, thread % RING_THREADS);
  }

  DEVICE ~DecodeBlock() { inside.close(); }

  DEVICE void attend(const DecodeParams& p, const Span& span) {
    TileAttention tile;
    inside.begin(span.record, COPY);
    if constexpr (HEAD_DIM % 16 != 0) {
      zero_padding<Br, HEAD_DIM * 2, Q_PITCH, NUM_THREADS>(smem + SharedMemory::Q, thread);
      if constexpr (!TMA_COPIES && HEAD_DIM == V_DIM) {
        zero_padding<RINGS * NUM_STAGES * 2 * RING_KEYS, KV_ROW_BYTES, KV_PITCH, NUM_THREADS>(smem + SharedMemory::KV, thread);
      } else if constexpr (!TMA_COPIES) {
        for (int i = 0; i < RINGS * NUM_STAGES; ++i) {
          zero_padding<RING_KEYS, K_ROW_BYTES, KV_PITCH, NUM_THREADS>(smem + SharedMemory::KV + i * STAGE_BYTES, thread);
        }
      }
    }
    const NewTokens new_tokens(p.tree, span.batch, p.tokens, lane);  // the loads of the tree overlap with the copies
    stream.start(p, span, ring);
    const int tiles = stream.remaining();
    int key = stream.key;
#pragma unroll 1
    for (int i = 0; i < NUM_STAGES; ++i) {
      stream.copy_next(p, buffer(), stage);
      advance();
      // TMA: request all tiles before Q. cp.async: groups complete in order; Q is committed after the first tile, and the wait
      // below covers both.
      if (i == (TMA_COPIES ? NUM_STAGES - 1 : 0)) {
        copy_queries(p, span, smem + SharedMemory::Q, thread);
        cp_async_commit();
      }
    }
    inside.enter(WAIT_DATA, NO_TILE);
    cp_async_wait<TMA_COPIES ? 0 : NUM_STAGES - 1>();
    block_sync();  // Q has landed for all threads, and the mbarriers are initialised
    tile.start(p, span, new_tokens, Q_lane, first_row, lane);
    if constexpr (SOFTMAX_MAX != ONLINE) tile.fix_maxima(p, span, Q_lane, first_row, lane);
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (int round = 0; round < tiles; ++round) {
        const int place = stream.places.of(key);
        inside.enter(WAIT_DATA, key / Bc);
        stream.await(p, buffer(), stage, place, ring);
        inside.enter(TILE, key / Bc);
        if constexpr (KEY_SCALES) tile.scales = stream.scales + stage * SCALES_BYTES;
        tile.visit(p, buffer(), Q_lane, place, span.length.keys, lane);
        key += Bc;
        stream.release();
        meet<false>(COPY);  // all warps of the ring have read the stage
        stream.copy_next(p, buffer(), stage);
        advance();
      }
      if constexpr (SOFTMAX_MAX == ONLINE) break;
      if (!ring_any(tile.out_of_range(first_row, valid_rows(p, span), lane))) break;
      tile.start(p, span, new_tokens, Q_lane, first_row, lane);  // resets `online` to true
      if (tiles == 0) break;
      key -= tiles * Bc;
      stream.restart(p, key);
#pragma unroll 1
      for (int i = 0; i < NUM_STAGES; ++i) {
        stream.copy_next(p, buffer(), stage);
        advance();
      }
    }
    inside.enter(MERGE);
    cp_async_wait<0>();
    merge_warps(p, span, tile, smem, thread);
    // The barriers of merge_warps() have passed: all warps have read the old norm.
    if (RAISES_NORMS && thread == 0 && span.partial == 0 && span.row_block == 0) {
      red_max_u32(reinterpret_cast<u32*>(key_norm_of(p, span)), float_as_u32(tile.key_norm));
    }
  }

  // Address of the ring's oldest tile.
  DEVICE u32 buffer() const { return ring_smem + stage * STAGE_BYTES; }
  DEVICE void advance() { stage = stage + 1 == NUM_STAGES ? 0 : stage + 1; }

  // Between spans: returns when all threads have read Q, the rings and the merged O, so that the next span may overwrite them.
  DEVICE void release() {
    stream.release();
    meet<true>(NOTHING);
  }

 private:
  // The OR of `mine` over the warps of the ring.
  DEVICE bool ring_any(bool mine) const {
    if constexpr (ROW_WARPS == 1) return mine;
    const u32 flags = smem + SharedMemory::ML + ring * Br * 8;  // merge_warps() writes there later
    if (lane == 0) st_shared_u32(flags + thread / 32 % ROW_WARPS * 4, mine);
    ring_sync(ring);  // all warps' flags are written
    bool any = false;
#pragma unroll
    for (int i = 0; i < ROW_WARPS; ++i) any |= ld_shared_u32(flags + i * 4) != 0;
    ring_sync(ring);  // all flags are read: merge_warps() may write there
    return any;
  }

  // A barrier: ALL_RINGS: of the block, else of the ring. Then phase `then` of an inside trace begins.
  template <bool ALL_RINGS>
  DEVICE void meet(Phase then) {
    inside.enter(WAIT_TURN, NO_TILE);
    if constexpr (ALL_RINGS) {
      block_sync();
    } else {
      ring_sync(ring);
    }
    inside.enter(then, NO_TILE);
  }
};
