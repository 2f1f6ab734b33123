// The end of fa2_backward: dK and dV from the accumulators of warps to global memory, through shared memory.
#pragma once
#include "tiles/backward_mma_shape.cuh"
#include "tiles/backward_schedule.cuh"
#include "tiles/named_barriers.cuh"

// What a warp has of them, and where.
struct KeyShare {
  u32 K_smem, V_smem;  // which they take the places of
  u32 warp_keys;       // the first of its keys
  int key_group, part;
  int first_tile;      // of its columns
};

// By all threads, when no warp reads K and V any more. Of `stored_keys` keys those from `valid_keys` on are zeros.
template <typename Sequence>
DEVICE void store_key_gradients(const BackwardParams& p, const Sequence& sequence, const KeyItem& item, const KeyShare& share,
                                const float (&dK_rmem)[KEY_TILES][O_TILES][4], const float (&dV_rmem)[KEY_TILES][O_TILES][4],
                                int valid_keys, int stored_keys, int lane) {
  auto store = [&](u32 tile, const float(&D)[KEY_TILES][O_TILES][4], float factor) {
    const u32 rows = tile + share.warp_keys * PITCH;
#pragma unroll
    for (int r = 0; r < 2 * KEY_TILES; ++r) {
#pragma unroll
      for (int n = 0; n < O_TILES; ++n) {
        if (D_TILES % PARTS != 0 && share.first_tile + n < share.part * O_TILES) continue;  // another warp's
        const float* d = D[r / 2][n] + r % 2 * 2;
        const bool exists = LENGTHS_KIND == DENSE || int(share.warp_keys) + r * 8 + lane / 4 < valid_keys;  // else zeros
        st_shared_u32(rows + (r * 8 + lane / 4) * PITCH + (share.first_tile + n) * 16 + lane % 4 * 4,
                      exists ? pack_16bit<BFLOAT16>(d[0] * factor, d[1] * factor) : 0);
      }
    }
  };
  store(share.K_smem, dK_rmem, p.scale);
  store(share.V_smem, dV_rmem, 1.0f);
  if constexpr (SHARED_KEYS) {
    bar_sync(KEY_PARTS_BARRIER + share.key_group, PARTS * 32);  // all columns are there; each warp stores some of the rows
  } else {
    warp_sync();
  }
  constexpr int STORE_ROWS = WARP_KEYS / PARTS;
  const int row = share.warp_keys + share.part * STORE_ROWS;
  char* dK = static_cast<char*>(p.dk) + 2 * (sequence.batch() * p.dk_stride.batch + item.kv_head * p.dk_stride.head +
                                             (sequence.first_key() + i64(item.k_block * Bc + row)) * p.dk_stride.seq);
  char* dV = static_cast<char*>(p.dv) + 2 * (sequence.batch() * p.dv_stride.batch + item.kv_head * p.dv_stride.head +
                                             (sequence.first_key() + i64(item.k_block * Bc + row)) * p.dv_stride.seq);
  store_tile<STORE_ROWS, ROW_BYTES, PITCH, ALIGNMENT>(dK, p.dk_stride.seq * 2, share.K_smem + row * PITCH, stored_keys - row, lane);
  store_tile<STORE_ROWS, ROW_BYTES, PITCH, ALIGNMENT>(dV, p.dv_stride.seq * 2, share.V_smem + row * PITCH, stored_keys - row, lane);
}
