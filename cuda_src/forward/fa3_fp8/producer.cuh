// The producer of fa3_forward_fp8: one thread asks TMA for tiles in the order in which consumers need them.
#pragma once
#include "forward/fa3_fp8/memory.cuh"
#include "forward/float8_values.cuh"

// Copy a tile of ROWS rows of e4m3 in the layout of wgmma operands, in boxes of BOX_ROWS rows and 128 columns.
template <int ROWS, int BOX_ROWS, int COLUMNS>
DEVICE void load_bytes(u32 tile, u32 full_barrier, const TensorMap* map, int column, int row, int head, int batch) {
  mbarrier_arrive_expect_tx(full_barrier, tile_bytes(ROWS, COLUMNS));
  for (int a = 0; a < column_atoms(COLUMNS); ++a) {
    for (int r = 0; r < ROWS; r += BOX_ROWS) {
      tma_load_4d(tile + (a * ROWS + r) * ATOM_BYTES, map, full_barrier, column + a * ATOM_BYTES, row + r, head, batch);
    }
  }
}

struct Producer {
  const Float8Params& p;
  const TensorMap *Q_map, *K_map, *V_map;
  const SharedMemory& smem;
  RingCursor<NUM_STAGES> K_ring = smem.K_ring(), V_ring = smem.V_ring();
  u32 round = 0;
  PhaseLog inside = PhaseLog(p.trace, true);

  DEVICE void run(PersistentItems& items) {
    for (u32 index; items.next(index);) {
      const WorkItem work = items.item(p, index);
      const auto sequence = sequence_of(p, work.batch);
      if (LENGTHS_KIND == PACKED && work.q_block * Br >= sequence.stored_rows()) continue;  // past the end of its sequence
      inside.item(index);
      load_item({work, index}, head_mask(p, sequence), sequence);
    }
    for (int w = 0; w < CONSUMERS; ++w) mbarrier_wait(smem.Q_empty + 8 * w, round % 2 ^ 1);
    write_shared(smem.item(round), Item{{NO_MORE_ITEMS, 0, 0}, 0});
    for (int w = 0; w < CONSUMERS; ++w) mbarrier_arrive(smem.Q_full + 8 * w);
    inside.close();
  }

  // Scales go into the descriptor: if consumers read scales themselves, each item would begin with a wait for device memory.
  template <typename Sequence>
  DEVICE ScalesOfItem scales_of(const Item& item, const Sequence& sequence, int kv_head) const {
    const int first_row = int(sequence.first_row()), first_key = int(sequence.first_key());
    const float* q = p.q_scale + query_scale_index(p, item.batch, item.head, first_row);
    const float* const k = p.k_scale + key_scale_index(p, item.batch, kv_head, first_key);
    const float* const v = p.v_scale + value_scale_index(p, item.batch, kv_head);
    ScalesOfItem scales = {{}, ld_global<float>(v)};
    const float k_scale = K_SCALE == OF_BLOCK ? 1.0f : ld_global<float>(k);
    for (int w = 0; w < CONSUMERS; ++w) {
      const int group = group_of(item, w);
      if (group * GROUP_ROWS >= sequence.stored_rows()) break;  // rows past the end have no scale
      if constexpr (PACKED_HEADS > 1) q = p.q_scale + query_scale_index(p, item.batch, head_of(item, w), first_row);
      scales.qk[w] = ld_global<float>(q + (Q_SCALE == OF_BLOCK ? group : 0)) * k_scale;
    }
    return scales;
  }

  // Q_full publishes the descriptor too: consumers read the descriptor after that wait. K is loaded one tile ahead of V.
  template <typename Sequence>
  DEVICE void load_item(const Item& item, const HeadMask& mask, const Sequence& sequence) {
    const TileRange tiles = tiles_of_split(p, mask, item.q_block);
    const int kv_head = item.head / (p.heads / p.kv_heads), batch = sequence.batch(), first_key = int(sequence.first_key());
    const int first_value = first_position(first_key, item.batch);
    auto load_keys = [&](int j) {
      K_ring.wait_empty(inside, j);
      load_bytes<Bc, Bc, HEAD_DIM>(smem.K + K_ring.stage * K_TILE_BYTES, K_ring.full_barrier(), K_map, 0, first_key + j * Bc,
                                   kv_head, batch);
      K_ring.advance();
    };
    if (!tiles.empty()) load_keys(tiles.end - 1);
    // Rows after the last packed sequence have no scales.
    const bool has_scales = LENGTHS_KIND != PACKED || !tiles.empty();
    const ScalesOfItem scales = has_scales ? scales_of(item, sequence, kv_head) : ScalesOfItem{};
    for (int w = 0; w < CONSUMERS; ++w) mbarrier_wait(smem.Q_empty + 8 * w, round % 2 ^ 1);
    const u32 descriptor = smem.item(round++);
    write_shared(descriptor, item);
    write_shared(descriptor + MASK_AT, mask);
    write_shared(descriptor + SCALES_AT, scales);
    write_shared(descriptor + SEQUENCE_AT, SequenceOfItem{sequence.sequence_index, sequence.stored_rows(),
                                                            int(sequence.first_row()), first_key});
    for (int w = 0; w < CONSUMERS; ++w) {
      const int row = int(sequence.first_row()) + item.q_block * HEAD_ROWS + (PACKED_HEADS == 1 ? w * GROUP_ROWS : 0);
      load_bytes<GROUP_ROWS, GROUP_ROWS, HEAD_DIM>(smem.Q + w * Q_TILE_BYTES, smem.Q_full + 8 * w, Q_map, 0, row,
                                                   head_of(item, w), batch);
    }
    for (int j = tiles.end - 1; j >= tiles.first; --j) {
      if (j > tiles.first) load_keys(j - 1);
      V_ring.wait_empty(inside, j);
      load_bytes<HEAD_DIM, V_BOX_ROWS, Bc>(smem.V + V_ring.stage * V_TILE_BYTES, V_ring.full_barrier(), V_map,
                                           first_value + j * Bc, 0, kv_head, batch);
      V_ring.advance();
    }
  }
};
