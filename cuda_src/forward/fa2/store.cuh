// The epilogue of fa2_forward: O (through shared memory) and the log-sum-exp from registers to global memory.
#pragma once
#include "forward/fa2/shape.cuh"
#include "shared/named_barriers.cuh"
#include "forward/params.cuh"
#include "shared/alibi_sink.cuh"
#include "shared/dropout.cuh"

// Called by all lanes of a warp. `parked_smem` holds query block, head, batch, and the address of Q.
template <typename Softmax>
DEVICE void store_output(const ForwardParams& p, u32 parked_smem, int row_group, int part,
                         const float (&O_rmem)[M_TILES][O_TILES][4], Softmax& softmax, int lane) {
  // O overwrites this warp's rows of Q: no other warp, or pair of warps, reads them.
  warp_sync();
  const vec4 parked = ld_shared_vec4(parked_smem);
  const int group_row = int(parked.x) * Br + row_group * WARP_ROWS, head = int(parked.y), batch = int(parked.z);
  const u32 O_smem = parked.w + row_group * WARP_ROWS * Q_PITCH;
  const auto ended = sequence_of(p, batch);
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = r * 8 + lane / 4;
    const bool exists = LENGTHS_KIND == DENSE || group_row + row < ended.rows();  // padding: zeros, and an LSE of -inf
    const float inverse = of_kept(p, row_factor(p, softmax, r, head));
#pragma unroll
    for (int n = 0; n < O_TILES; ++n) {
      const float* o = O_rmem[r / 2][n] + r % 2 * 2;
      st_shared_u32(O_smem + row * Q_PITCH + (part * O_TILES + n) * 16 + lane % 4 * 4,
                    exists ? Element::pack(o[0] * inverse, o[1] * inverse) : 0);
    }
    if (p.lse != nullptr && part == 0 && lane % 4 == 0 && group_row + row < ended.stored_rows()) {
      const i64 stats = row_stats_index(p, ended, i64(ended.batch()) * p.heads + head);
      st_global(p.lse + stats + group_row + row, exists ? softmax.lse(r) : NEG_INF);
    }
  }
  if constexpr (PAIRED) {
    bar_sync(ROW_PAIR_BARRIER + row_group, 64);  // both halves of the columns are written: each warp stores half of the rows
  } else {
    warp_sync();
  }
  constexpr int STORE_ROWS = WARP_ROWS / COLUMN_WARPS;
  char* O = static_cast<char*>(p.o) + 2 * (ended.batch() * p.o_stride.batch + head * p.o_stride.head +
                                           (ended.first_row() + (group_row + part * STORE_ROWS)) * p.o_stride.seq);
  store_tile<STORE_ROWS, V_ROW_BYTES, Q_PITCH, ALIGNMENT>(O, p.o_stride.seq * 2, O_smem + part * STORE_ROWS * Q_PITCH,
                                                      ended.stored_rows() - group_row - part * STORE_ROWS, lane);
}
