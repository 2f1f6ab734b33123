// The consumers of fa3_forward_fp8: one warpgroup for each 64 query rows.
#pragma once
#include "primitives/grid.cuh"
#include "primitives/wgmma_e4m3.cuh"
#include "forward/fa3/integer_maxima.cuh"
#include "forward/fa3_fp8/memory.cuh"
#include "shared/named_barriers.cuh"
#include "shared/softcap.cuh"
#include "wgmma/accumulator.cuh"

constexpr int K_STEPS = (HEAD_DIM + 31) / 32;  // k32 steps of S = Q K^T; TMA fills the last one up with zeros
constexpr int V_STEPS = Bc / 32;               // k32 steps of P V
constexpr int O_TILES = HEAD_DIM / 8;
// Scores, softmax and P V of a tile one after another. A soft cap needs the registers that products in flight would hold.
constexpr bool SEQUENTIAL = ADDED_TILES == 1 || SOFTCAP;
constexpr bool SUMS_IN_WORKSPACE = ADDED_TILES > 1;
static_assert(!SUMS_IN_WORKSPACE || (HEAD_DIM <= 128 && !SOFTCAP),
              "ADDED_TILES > 1 needs more registers than there are above head dim 128 or with a soft cap: use 1");
constexpr int SLICE = HEAD_DIM <= 128 ? HEAD_DIM : HEAD_DIM / 2;  // SEQUENTIAL: columns of P V in registers at once

using Scores = float[Bc / 2];
using Output = float[HEAD_DIM / 2];
using Probabilities = u32[Bc / 8];

// Descriptor offset of k32 step `k` (32 bytes of each row) in a tile of ROWS rows.
template <int ROWS>
constexpr u64 byte_step(int k) {
  return descriptor_step(k / 4 * ROWS * ATOM_BYTES + k % 4 * 32);
}

// SUMS_IN_WORKSPACE: a float32 sum that O is added to every ADDED_TILES tiles. Each thread keeps its part at the workspace's end.
struct WorkspaceSum {
  static constexpr int VECTORS = HEAD_DIM / 8;
  const Float8Params& p;
  const int consumer;
  float factor[2] = {};  // product of the alphas since the sum was stored, for each row; NaN: nothing is stored yet

  static constexpr int STRIDE = 128 * 16;  // bytes from one vector of the thread to its next
  DEVICE char* first_vector() const {
    u32 thread[1] = {threadIdx.x % 128};
    wgmma_registers(thread);  // without this, ptxas keeps the address in registers during the loop, and spills
    return static_cast<char*>(p.workspace) + p.mask.workspace -
           (i64(blockIdx.x) * CONSUMERS + consumer + 1) * VECTORS * STRIDE + thread[0] * 16;
  }
  DEVICE void reset() { factor[0] = u32_as_float(0x7fffffff); }
  DEVICE void rescale(const float (&alpha)[2]) {
    if constexpr (SUMS_IN_WORKSPACE) {
      factor[0] *= alpha[0];
      factor[1] *= alpha[1];
    }
  }
  // After tile j, if j is a multiple of ADDED_TILES: add O to the stored sum, and set O to 0.
  DEVICE void take(Output& O, int j) {
    if constexpr (SUMS_IN_WORKSPACE) {
      if (j % ADDED_TILES != 0) return;
      add_to(O);
      char* const at = first_vector();
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        vec4 bits;
        memcpy(&bits, &O[4 * i], 16);
        st_global(at + i * STRIDE, bits);
      }
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) O[i] = 0.0f;
      factor[0] = factor[1] = 1.0f;
    }
  }
  // O += factor * the stored sum.
  DEVICE void add_to(Output& O) const {
    if constexpr (SUMS_IN_WORKSPACE) {
      if (factor[0] != factor[0]) return;
      const char* const at = first_vector();
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const vec4 bits = ld_global<vec4>(at + i * STRIDE);
        float x[4];
        memcpy(x, &bits, 16);
#pragma unroll
        for (int c = 0; c < 4; ++c) O[4 * i + c] = fmaf(x[c], factor[c / 2], O[4 * i + c]);
      }
    }
  }
};

// Alg. 1, l. 11-23 and Alg. 2: one warpgroup, 64 query rows.
struct Consumer {
  const Float8Params& p;
  const SharedMemory& smem;
  const int consumer, warp, lane;
  RingCursor<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  const u64 Q_desc = k_major_descriptor(smem.Q + consumer * Q_TILE_BYTES);
  const u64 K_desc = k_major_descriptor(smem.K), V_desc = k_major_descriptor(smem.V);

  Scores S;
  Output O;
  Probabilities P;
  OnlineSoftmax<2, 0> softmax;
  WorkspaceSum workspace_sum{p, consumer};

  Item item;
  HeadMask mask;
  TileRange tiles;        // the tiles that this consumer's rows see
  int row;                // this lane's first query row; its second is row + 8
  float qk_scale;         // ScalesOfItem::qk of this consumer
  const float* k_scales;  // K_SCALE == OF_BLOCK: the scales of the sequence's key tiles
  mutable PhaseLog inside = PhaseLog(p.trace, warp == 0 && lane == 0);

  DEVICE void run() {
    if (CONSUMERS > 1 && consumer == CONSUMERS - 1) bar_arrive(PING_PONG_BARRIER, 256);  // consumer 0 has the first slot
    for (u32 round = 0;; ++round) {
      inside.enter(WAIT_ITEM);
      mbarrier_wait(smem.Q_full + 8 * consumer, round % 2);
      const u32 descriptor = smem.item(round);
      item = read_shared<Item>(descriptor);
      if (item.q_block == NO_MORE_ITEMS) break;
      const u64 start_ns = TRACE ? global_timer() : 0;
      inside.item(item.index);
      mask = read_shared<HeadMask>(descriptor + MASK_AT);
      compute(descriptor);
      if (TRACE && threadIdx.x == 128) write_trace(p, item.index, item, tiles_of_split(p, mask, item.q_block), start_ns);
      store(descriptor);
    }
    inside.close();
  }

  // O, m and l of the item. Rings and ping-pong are shared: a consumer waits for and releases every tile that the thread block
  // visits, also tiles that its own rows do not see.
  DEVICE void compute(u32 descriptor) {
    const int group = group_of(item, consumer);
    row = group * GROUP_ROWS + warp * 16 + lane / 4;
    tiles = tiles_of<GROUP_ROWS>(mask, group);
    const TileRange block = tiles_of_split(p, mask, item.q_block);
    if constexpr (SPLIT_KEYS) tiles = within(tiles, block);
    softmax.reset();
    workspace_sum.reset();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O[i] = 0.0f;
    if (tiles.empty()) {
      release_Q();
      return skip_tiles(block.end - block.first);
    }
    qk_scale = ld_shared_f32(descriptor + SCALES_AT + 4 * consumer);
    if constexpr (K_SCALE == OF_BLOCK) {
      const int first_key = read_shared<SequenceOfItem>(descriptor + SEQUENCE_AT).first_key;
      k_scales = p.k_scale + key_scale_index(p, item.batch, item.head / (p.heads / p.kv_heads), first_key);
    }
    skip_tiles(block.end - tiles.end);
    int j = tiles.end - 1;
    if constexpr (SEQUENTIAL) {
      walk_tiles<MASK_KIND>(j, tiles, [this](int j, auto segment) { step_sequential(j, segment); });
      release_Q();
    } else {
      if (j >= tiles.clear_end) {
        first(j, SegmentTag<RIGHT_MASKED>{});
      } else {
        first(j, SegmentTag<CLEAR>{});
      }
      --j;
      walk_tiles<MASK_KIND>(j, tiles, [this](int j, auto segment) { step(j, segment); });
      release_Q();
      V_ring.wait_full(inside, tiles.first);
      fence_values();
      issue_values(tiles.first);
      end_values(tiles.first);
      workspace_sum.add_to(O);
    }
    skip_tiles(tiles.first - block.first);
  }

  // The producer may load the next item's Q. This item's descriptor is overwritten ITEM_DESCRIPTORS items later, when all
  // consumers have released the Q of the items between.
  DEVICE void release_Q() const {
    warp_sync();  // all lanes have read the descriptor
    if (lane == 0) mbarrier_arrive(smem.Q_empty + 8 * consumer);
  }

  // The scores of tile j, with no other product in flight.
  DEVICE void scores_of(int j) {
    K_ring.wait_full(inside, j);
    begin_slot();
    wgmma_fence();
    issue_scores(j);
    end_scores<0>(j);
  }
  template <typename Tag>
  DEVICE void first(int j, Tag segment) {
    float alpha[2];
    scores_of(j);
    softmax_of_tile(j, segment, alpha);
    pack();
  }

  // Alg. 2, l. 8-14: S of tile j and P V of tile j + 1 are in flight together; the softmax of tile j runs during P V.
  template <typename Tag>
  DEVICE void step(int j, Tag segment) {
    K_ring.wait_full(inside, j);
    begin_slot();
    fence_values();
    issue_scores(j);
    V_ring.wait_full(inside, j + 1);
    issue_values(j + 1);
    end_scores<1>(j);
    float alpha[2];
    const bool grown = softmax_of_tile(j, segment, alpha);
    end_values(j + 1);
    pack();
    if (grown) rescale(alpha);
    workspace_sum.take(O, j + 1);
  }

  DEVICE void fence_values() {
    wgmma_registers(O);
    wgmma_registers(P);
    wgmma_fence();
  }
  DEVICE void issue_scores(int j) {
    const u64 k = K_desc + descriptor_step(K_TILE_BYTES) * K_ring.stage;
#pragma unroll
    for (int s = 0; s < K_STEPS; ++s) {
      const u64 q_s = Q_desc + byte_step<GROUP_ROWS>(s), k_s = k + byte_step<Bc>(s);
      if (s == 0) {
        WgmmaE4m3<Bc>::template ss<false>(S, q_s, k_s);
      } else {
        WgmmaE4m3<Bc>::template ss<true>(S, q_s, k_s);
      }
    }
    wgmma_commit(inside, SCORES, j);
  }
  template <int PENDING>
  DEVICE void end_scores(int j) {
    wgmma_wait<PENDING>(inside, j);
    wgmma_registers(S);
    inside.landed(SCORES, j);
    inside.enter(SOFTMAX, j);
    K_ring.release(lane);
    K_ring.advance();
  }
  DEVICE void issue_values(int j) {
    const u64 v = V_desc + descriptor_step(V_TILE_BYTES) * V_ring.stage;
#pragma unroll
    for (int s = 0; s < V_STEPS; ++s) {
      WgmmaE4m3<HEAD_DIM>::template rs<true>(O, P[4 * s], P[4 * s + 1], P[4 * s + 2], P[4 * s + 3], v + byte_step<HEAD_DIM>(s));
    }
    wgmma_commit(inside, VALUES, j);
  }
  DEVICE void end_values(int j) {
    wgmma_wait<0>(inside, j);
    wgmma_registers(O);
    wgmma_registers(P);
    inside.landed(VALUES, j);
    V_ring.release(lane);
    V_ring.advance();
  }
  DEVICE void rescale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O[i] *= alpha[i / 2 % 2];
    workspace_sum.rescale(alpha);
  }

  // SEQUENTIAL: S, softmax and P V of a tile one after another; products of other consumers run meanwhile. P V reuses the
  // registers of S, one slice of V's columns at a time.
  template <typename Tag>
  DEVICE void step_sequential(int j, Tag segment) {
    float alpha[2];
    scores_of(j);
    if (softmax_of_tile(j, segment, alpha)) rescale(alpha);
    pack();
    V_ring.wait_full(inside, j);
    const u64 v = V_desc + descriptor_step(V_TILE_BYTES) * V_ring.stage;
#pragma unroll
    for (int first = 0; first < HEAD_DIM; first += SLICE) {
      float tile_O[SLICE / 2];
      wgmma_registers(P);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < V_STEPS; ++s) {
        const u64 v_s = v + byte_step<HEAD_DIM>(s) + descriptor_step(first * ATOM_BYTES);
        if (s == 0) {
          WgmmaE4m3<SLICE>::template rs<false>(tile_O, P[0], P[1], P[2], P[3], v_s);
        } else {
          WgmmaE4m3<SLICE>::template rs<true>(tile_O, P[4 * s], P[4 * s + 1], P[4 * s + 2], P[4 * s + 3], v_s);
        }
      }
      wgmma_commit(inside, VALUES, j);
      wgmma_wait<0>(inside, j);
      wgmma_registers(tile_O);
      wgmma_registers(P);
#pragma unroll
      for (int i = 0; i < SLICE / 2; ++i) O[first / 2 + i] += tile_O[i];
    }
    inside.landed(VALUES, j);
    V_ring.release(lane);
    V_ring.advance();
  }

  // S becomes 448 exp(s - m); the ping-pong slot ends once m is known. True if O must be multiplied by alpha.
  template <typename Tag>
  DEVICE bool softmax_of_tile(int j, Tag, float (&alpha)[2]) {
    const auto scores = fragment_view(S);
    float scale = qk_scale;
    if constexpr (K_SCALE == OF_BLOCK) scale *= ld_global<float>(k_scales + j);
    if constexpr (SOFTCAP) cap_scores<true>(scores, p.softcap * scale);
    const float scale_log2 = SOFTCAP ? p.scale_log2 : fmaxf(p.scale_log2 * scale, 0x1p-126f);
    hide_scores<Tag::value>(scores, mask, row, j * Bc, lane % 4 * 2);
    float top[2];
    row_maxima(scores, scale_log2, top);
    const bool grown = softmax.raise_max_by_lanes(top, scale_log2, alpha);
    end_slot();
    scores_to_weights(scores, softmax, scale_log2);
    return grown;
  }
  // Maximum of each row over this lane's columns, or any lower number if that maximum is at most the row's m. Integer
  // comparisons take three operands, but order only positive floats (integer_maxima.cuh).
  template <typename View>
  DEVICE void row_maxima(View scores, float scale_log2, float (&top)[2]) const {
    int bits[2];
    lane_tops(bits, scores);
    const bool exact = (bits[0] > 0 || softmax.m_scaled[0] >= 0.0f) && (bits[1] > 0 || softmax.m_scaled[1] >= 0.0f);
    if (warp_any(!exact)) return lane_maxima<true>(top, scores);
    top[0] = bits[0] > 0 ? u32_as_float(u32(bits[0])) : NEG_INF;
    top[1] = bits[1] > 0 ? u32_as_float(u32(bits[1])) : NEG_INF;
  }
  DEVICE void pack() {
    wgmma_registers(S);  // without this, NVRTC 13.0 spends one more instruction (PRMT) for each four weights
#pragma unroll
    for (int i = 0; i < Bc / 8; ++i) P[i] = pack_e4m3(fragment_view(S), i);
    wgmma_registers(P);
    wgmma_registers(softmax.l);
  }

  // Wait for and release `count` tiles of K and V that this consumer's rows do not see.
  DEVICE void skip_tiles(int count) {
    for (int i = 0; i < count; ++i) {
      K_ring.wait_full(inside, NO_TILE);
      K_ring.release(lane);
      K_ring.advance();
      begin_slot();
      end_slot();
      V_ring.wait_full(inside, NO_TILE);
      V_ring.release(lane);
      V_ring.advance();
    }
  }

  // Ping-pong: a consumer's slot lasts from the issue of its products until m is known. Then its exponentials overlap with the
  // products of other consumers. If the slot ended with the issue, consumers would run in step (NOTES.md).
  DEVICE void begin_slot() const {
    inside.enter(WAIT_TURN, NO_TILE);
    if constexpr (CONSUMERS > 1) bar_sync(PING_PONG_BARRIER + consumer, 256);
    inside.enter(ISSUE, NO_TILE);
  }
  DEVICE void end_slot() const {
    if constexpr (CONSUMERS > 1) bar_arrive(PING_PONG_BARRIER + (consumer + 1) % CONSUMERS, 256);
  }

  // Alg. 1, l. 19-20: O v_scale / l, L = m + log l. Rows in padding get 0 and -inf.
  DEVICE void store(u32 descriptor) {
    inside.enter(STORE, item.index);
    const auto s = read_shared<SequenceOfItem>(descriptor + SEQUENCE_AT);
    const float v_scale = read_shared<ScalesOfItem>(descriptor + SCALES_AT).v;
    if constexpr (SPLIT_KEYS) {  // parts have weights exp(s - m), so that the merge is that of 16-bit values
      softmax.reduce_sum();
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) O[i] *= v_scale / 448.0f;
      for (float& l : softmax.l) l /= 448.0f;
      leave_part(p, item, consumer * GROUP_ROWS + warp * 16, 0, fragment_view(O), softmax, lane);
      inside.enter(NOTHING);
      return;
    }
    const int batch = LENGTHS_KIND == PACKED ? 0 : item.batch;
    const RaggedSequence sequence{s.sequence_index, mask.rows, mask.keys, s.stored_rows, 0, s.first_row, s.first_key};
    float* const lse = p.lse == nullptr ? nullptr : p.lse + row_stats_index(p, sequence, i64(batch) * p.heads + item.head);
    softmax.reduce_sum();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + 8 * r;
      const bool exists = i < mask.rows, stored = i < s.stored_rows;
      if (lse != nullptr && lane % 4 == 0 && stored) st_global(lse + i, exists ? softmax.lse(r) - LN_448 : NEG_INF);
      if (LENGTHS_KIND != DENSE && !exists) {  // padding may hold NaN, and 0 * NaN is NaN
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) O[4 * n + 2 * r] = O[4 * n + 2 * r + 1] = 0.0f;
      }
      store_accumulator_row<O_TILES, Element>(output_row(p, {item.q_block, item.head, batch}, s.first_row + i), O, r,
                                                 exists ? softmax.inverse_sum(r) * v_scale : 0.0f, stored, lane);
    }
    inside.enter(NOTHING);
  }
};
