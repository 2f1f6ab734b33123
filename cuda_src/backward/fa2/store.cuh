// The end of fa2_backward: dK and dV from registers to global memory, 16 bits through shared memory.
#pragma once
#include "backward/fa2/shape.cuh"
#include "backward/common/passes.cuh"
#include "backward/common/schedule.cuh"
#include "backward/common/score_gradients.cuh"
#include "shared/named_barriers.cuh"

// Alg. 2, l. 18, by all lanes of a warp, after all warps have read K and V. `own` is the work item, `ended` its sequence. From
// key `own_key` on, `own_keys` keys exist and `stored_keys` rows are written.
template <typename Sequence>
DEVICE void store_gradients(const KernelParams& p, const KeyItem& own, const Sequence& ended, int own_key, int own_keys,
                            int stored_keys, u32 K_smem, u32 V_smem, u32 warp_keys, int key_group, int part, int first_tile,
                            const float (&dK_rmem)[KEY_TILES][K_TILES][4], const float (&dV_rmem)[KEY_TILES][V_TILES][4],
                            int lane) {
  auto store = [&](auto operands, void* tensor, const Strides& stride, u32 tile, const auto& D, float factor) {
    constexpr int PITCH = decltype(operands)::PITCH, TILES = decltype(operands)::TILES, ALL = decltype(operands)::ALL_TILES;
    const int first = operands.first_tile(first_tile, part);
    const u32 rows = tile + warp_keys * PITCH;
#pragma unroll
    for (int r = 0; r < 2 * KEY_TILES; ++r) {
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        if (ALL % PARTS != 0 && first + n < part * TILES) continue;  // written by another warp
        const float* d = D[r / 2][n] + r % 2 * 2;
        const int key = int(warp_keys) + r * 8 + lane / 4;
        const bool exists = LENGTHS_KIND == DENSE || key < own_keys;  // padding: zeros
        if constexpr (FLOAT32_DKV) {
          char* row = head_address<DkvElement>(tensor, stride, int(ended.batch()), own.kv_head) +
                      (ended.first_key() + i64(own_key + key)) * (stride.seq * 4);
          store_two<DkvElement, ALIGNMENT>(row + (first + n) * 32 + lane % 4 * 8, exists ? d[0] * factor : 0.0f,
                                           exists ? d[1] * factor : 0.0f, key < stored_keys);
          continue;
        }
        st_shared_u32(rows + (r * 8 + lane / 4) * PITCH + (first + n) * 16 + lane % 4 * 4,
                      exists ? Element::pack(d[0] * factor, d[1] * factor) : 0);
      }
    }
  };
  store(OfKeys{}, p.dk, p.dk_stride, K_smem, dK_rmem, p.scale);
  store(OfValues{}, p.dv, p.dv_stride, V_smem, dV_rmem, of_kept(p, 1.0f));
  if constexpr (FLOAT32_DKV) return;
  if constexpr (SHARED_KEYS) {
    bar_sync(KEY_PARTS_BARRIER + key_group, PARTS * 32);  // all columns are written: each warp stores some of the rows
  } else {
    warp_sync();
  }
  constexpr int STORE_ROWS = WARP_KEYS / PARTS;
  const int row = warp_keys + part * STORE_ROWS;
  char* dK = static_cast<char*>(p.dk) + 2 * (ended.batch() * p.dk_stride.batch + own.kv_head * p.dk_stride.head +
                                             (ended.first_key() + i64(own_key + row)) * p.dk_stride.seq);
  char* dV = static_cast<char*>(p.dv) + 2 * (ended.batch() * p.dv_stride.batch + own.kv_head * p.dv_stride.head +
                                             (ended.first_key() + i64(own_key + row)) * p.dv_stride.seq);
  store_tile<STORE_ROWS, ROW_BYTES, PITCH, ALIGNMENT>(dK, p.dk_stride.seq * 2, K_smem + row * PITCH, stored_keys - row, lane);
  store_tile<STORE_ROWS, V_ROW_BYTES, V_PITCH, ALIGNMENT>(dV, p.dv_stride.seq * 2, V_smem + row * V_PITCH, stored_keys - row,
                                                          lane);
}
