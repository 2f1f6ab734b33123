// FlashAttention-2 forward for float32 on the 16-bit tensor cores (mma.sync, ldmatrix, cp.async: sm_80 and later).
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 1.
// Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance", 2022: every float32 becomes a pair of float16, every product three (mma/half_pair.cuh). With
// TF32 on, the small halves are left out: one product of 11-bit factors, tf32's precision at float16's speed.
//
//   Alg. 1, l. 3     one thread block a query block          l. 9      m, P, l: shared/softmax.cuh
//           l. 4, 6  copy, then split into pairs             l. 10     O = alpha O + P V
//           l. 8     S = Q K^T                               l. 12-15  normalise, log-sum-exp
//
// Where it departs from Algorithm 1:
// - K and V take turns in the pipeline: V arrives while S is computed, the next K while P V is. Each warp splits the
//   rows that it copied itself, in place, so a tile costs two block barriers and no second buffer: 99 KB do for d128.
// - Tensor cores truncate sums where float32 arithmetic rounds, and always towards zero. They sum 16 or 32 columns of
//   S and one tile of P V, from zero; the rest is ordinary addition.
// - Every group of eight rows has its own unit. O is kept in the largest unit of V so far, and P takes up the ratio.
// - O is rescaled where it is added to, in one instruction. That costs nothing, so the maximum is kept exact: P <= 1
//   can then fill float16 up to its end, and rows of V may be 2^16 smaller than others before their P loses bits.
//
// Largest error against float64 on an H200, beside naive float32 matmul, softmax, matmul (N(0,1) inputs; then scores
// 30 times as wide): d64 1.3e-7, 2.1e-5 (naive 4.0e-7, 4.8e-5); d128 8.3e-8, 2.4e-5 (3.6e-7, 8.6e-5); d256 1.4e-7,
// 3.7e-5 (4.2e-7, 1.2e-4). In cufa/records it is up to 1.4e-7 without a mask, at d128 9.0e-8, and, causal, 2.4e-7, at d256
// 3.7e-7. An element far below the largest of its group loses bits (mma/half_pair.cuh).
//
// The limit there is the latency of mma with two or three warps a scheduler: a warp waits 8 cycles between two products,
// and for each sum before it can be added. About 31% of the time goes to S, 41% to P and P V, 19% to splitting, 3% to
// barriers.
//
// Tried there and left (d128, speed relative to the version of the day, unless said):
// - S summed by the tensor cores over the whole head dim: no faster, and up to 3.5 times naive's error on short sequences.
//   In two passes, small products first: 0.95, less at d256, and half as accurate.
// - 256 query rows, 8 warps: 1.0 with 32 keys, 1.04 with 64, at 169 and 203 KB. 16 query rows per warp: 0.88.
// - Splitting K and V between the products instead of after them: no gain.
// - O rescaled in a branch of its own, then added to: ptxas put the additions off past the next products, to 250 live
//   registers where 170 do, and spilled. Rescaled before P V, or always (fmaf with alpha = 1): the same, and worse.
// - Three tf32 products (mma.m16n8k8) need the same splits at half the rate: not built.
#include "forward/fa2_f32/config.cuh"
#include "shared/params.cuh"
#include "mma/copy.cuh"
#include "mma/half_pair.cuh"
#include "shared/schedule.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int WARP_ROWS = Br / NUM_WARPS;      // query rows of one warp
constexpr int M_TILES = WARP_ROWS / 16;        // 16-row mma tiles of one warp
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of S = Q K^T; the last one may be half padding
constexpr int S_TILES = Bc / 8;                // 8-column mma tiles of S, and groups of eight keys
constexpr int P_STEPS = Bc / 16;               // k16 steps of P V
constexpr int O_TILES = HEAD_DIM / 8;          // 8-column mma tiles of O
constexpr int ROW_BYTES = HEAD_DIM * 4;
constexpr int PITCH = tile_pitch(ROW_BYTES, 64);
constexpr int SUM_STEPS = M_TILES == 1 ? 2 : 1;  // k16 steps of S that the tensor cores sum: enough to keep busy
constexpr int O_GROUP = BLOCKS_PER_SM > 2 ? 3 : 4;  // 8-column tiles of O in work at a time: more take more registers
constexpr int RUNS_AT_ONCE = BLOCKS_PER_SM > 2 ? 1 : 2;  // likewise of the runs of rows that a key is hidden from

// Dynamic shared memory: the offset of each tile. Each is first float32, then pairs of float16 in the same place.
struct SharedMemory {
  static constexpr int Q = 0, K = Q + Br * PITCH, V = K + Bc * PITCH, BYTES = V + Bc * PITCH;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/fa2_f32.py must ask for the bytes that the tiles take");
static_assert(LENGTHS_KIND == DENSE, "fa2_forward_f32 takes dense arrays only");
static_assert(Br % (16 * NUM_WARPS) == 0, "a warp owns whole 16-row tiles");
static_assert(Bc % 16 == 0, "P V takes keys 16 at a time");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "head_dim");

// P <= 1, times this: below 2^15, as every other operand.
constexpr float P_SCALE = 16384.0f;

// Columns: the launch before, a warp per block of keys.
KERNEL __launch_bounds__(MASK_THREADS) mask_blocks(const __grid_constant__ AttentionParams p) {
  prepare_mask<MASK_KIND>(p, (blockIdx.x * MASK_THREADS + threadIdx.x) / 32, gridDim.x * (MASK_THREADS / 32));
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_forward_f32(const __grid_constant__ AttentionParams p) {
  DYN_SMEM(smem);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();

  // Alg. 1, l. 3: the loop over i is the grid.
  const WorkItem item = work_item<Br>(p, blockIdx.x, 2 * ROW_BYTES);
  TileRange tiles = visited_tiles<Br, Bc>(p, item.q_block);
  // Where tiles are looked up: the one after that which is visited. `tiles` ends behind the first of them.
  constexpr bool LOOKED_UP = is_looked_up(MASK_KIND);
  TileWalk<true> walk(tiles.end - 1);
  TileTally tally;
  WalkedTile next{-1};
  auto find_next = [&](int q_block, int head, int batch) {
    next = walk.next(0, [&](int tile) {
      return class_of_key_tile<MASK_KIND, SKIP_MASKED_TILES>(p, q_block, batch, head / (p.heads / p.kv_heads), tile);
    });
  };
  if constexpr (LOOKED_UP) {
    find_next(item.q_block, item.head, item.batch);
    tiles.end = next.tile() + 1;
  }
  const int warp_row = item.q_block * Br + warp * WARP_ROWS;
  const int kv_head = item.head / (p.heads / p.kv_heads);
  // This lane's first byte of this warp's rows: of Q, and of the last visited tile of K and of V.
  using Rows = RowCopy<ROW_BYTES, PITCH, ALIGNMENT>;
  const i64 kv_row = i64(tiles.end - 1) * Bc + warp * 8;
  const char* Q = Rows::source(p.q, p.q_stride, item.batch, item.head, warp_row, lane);
  const char* K = Rows::source(p.k, p.k_stride, item.batch, kv_head, kv_row, lane);
  const char* V = Rows::source(p.v, p.v_stride, item.batch, kv_head, kv_row, lane);

  const u32 Q_smem = smem_address(smem) + SharedMemory::Q + warp * WARP_ROWS * PITCH;  // this warp's rows
  const u32 K_smem = smem_address(smem) + SharedMemory::K, V_smem = smem_address(smem) + SharedMemory::V;
  // What only the end needs, or each tile once, waits in a gap of this warp's rows of Q: registers are scarce. For
  // the same reason lanes are read anew (lane_id) where addresses follow from them.
  const u32 saved_smem = gap_address<PITCH>(Q_smem, 1);
  if (lane == 0) {
    st_shared_vec4(saved_smem, vec4{u32(item.q_block), u32(item.head), u32(item.batch), u32(tiles.clear_end)});
    if constexpr (MASK_KIND == MASK_BAND) st_shared_u32(saved_smem + PITCH, u32(tiles.clear_first));
  }
  warp_sync();

  float O_rmem[O_TILES][M_TILES][4] = {};
  OnlineSoftmax<2 * M_TILES, 0> softmax;
  softmax.reset();
  float O_unit = pair_unit(0);  // of O and V: the largest unit of V so far

  // A warp copies and splits the same rows, eight of every 8 * NUM_WARPS: until they are split, no other warp takes
  // part. Tile by tile, from the last one down, which may hang over the end of the keys.
  auto load_tile = [&](u32 tile, const char*& source, i64 stride_bytes, bool is_last) {
#pragma unroll
    for (int g = 0; g < S_TILES; g += NUM_WARPS) {
      if (S_TILES % NUM_WARPS != 0 && g + warp >= S_TILES) break;
      const int valid_rows = is_last ? p.seqlen_k - (tiles.end - 1) * Bc - (g + warp) * 8 : 8;
      Rows::copy(tile + (g + warp) * 8 * PITCH, source + g * 8 * stride_bytes, stride_bytes, valid_rows, lane_id());
    }
    source -= Bc * stride_bytes;
    cp_async_commit();
  };
  auto split_tile = [&](u32 tile) {
    cp_async_wait<0>();
    warp_sync();  // the copies of the other lanes have landed too
#pragma unroll
    for (int g = 0; g < S_TILES; g += NUM_WARPS) {
      if (S_TILES % NUM_WARPS != 0 && g + warp >= S_TILES) break;
      split_rows<HEAD_DIM, PITCH>(tile + (g + warp) * 8 * PITCH, lane_id());
    }
  };

  // The tile that comes next: where tiles are looked up its address is found anew, as registers are scarce.
  auto load_next = [&](u32 tile, const void* tensor, const Strides& stride, const char*& source) {
    if constexpr (LOOKED_UP) {
      // Not the number behind these two: the lane that is first may be writing it for the next tile already.
      const int head = int(ld_shared_u32(saved_smem + 4)), batch = int(ld_shared_u32(saved_smem + 8));
      const i64 row = i64(next.tile()) * Bc + thread_id() / 32 * 8;
      source = Rows::source(tensor, stride, batch, head / (p.heads / p.kv_heads), row, lane_id());
    }
    load_tile(tile, source, stride.seq * 4, false);
  };

  // S += Q K^T over one k16 step.
  using Scores = float[S_TILES][M_TILES][4];
  auto multiply_q_k = [&](Scores& S, int k, u32 Q_lane, u32 K_lane) {
    u32 Q_hi[M_TILES][4], Q_lo[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      ldmatrix_x4(Q_hi[i], Q_lane + i * 16 * PITCH + k * 2 * OCTET_BYTES);
      if constexpr (WITH_LO) ldmatrix_x4(Q_lo[i], Q_lane + i * 16 * PITCH + k * 2 * OCTET_BYTES + LO_OFFSET);
    }
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      multiply_pairs<false>(S[n], Q_hi, Q_lo, K_lane + n * 8 * PITCH + k * 2 * OCTET_BYTES);
    }
  };

  // Alg. 1, l. 7-10 for key tile j. Row r of a lane is row r / 2 * 16 + r % 2 * 8 + lane / 4 of the warp.
  auto visit_tile = [&](int j) {
    // Alg. 1, l. 8: S = Q K^T, while V arrives. ldmatrix takes the row addresses of four 8x8 matrices from lanes 0-7,
    // 8-15, 16-23, 24-31: of Q rows 0-7 and rows 8-15, then both in the next octet of columns; of K two octets of hi,
    // then of lo.
    float S_rmem[S_TILES][M_TILES][4] = {};
    const u32 Q_lane = Q_smem + lane_id() % 16 * PITCH + lane_id() / 16 * OCTET_BYTES;
    const u32 K_lane = K_smem + lane_id() % 8 * PITCH + lane_id() / 8 % 2 * OCTET_BYTES + lane_id() / 16 * LO_OFFSET;
#pragma unroll 1
    for (int k = 0; k < K_STEPS; k += SUM_STEPS) {
      Scores sum = {};
#pragma unroll
      for (int step = 0; step < SUM_STEPS; ++step) {
        if (K_STEPS % SUM_STEPS == 0 || k + step < K_STEPS) multiply_q_k(sum, k + step, Q_lane, K_lane);
      }
      mma_fence();
#pragma unroll
      for (int e = 0; e < S_TILES * M_TILES * 4; ++e) (&S_rmem[0][0][0])[e] += (&sum[0][0][0])[e];
    }
    split_tile(V_smem);
    float Q_unit[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) Q_unit[r] = ld_shared_f32(unit_address<PITCH>(Q_smem, r));
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      const float K_unit = ld_shared_f32(unit_address<PITCH>(K_smem, n));
#pragma unroll
      for (int r = 0; r < 2 * M_TILES; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) S_rmem[n][r / 2][r % 2 * 2 + e] *= Q_unit[r] * K_unit;
      }
    }
    block_sync();  // V is split; all warps are done with K, which the next copies overwrite
    if (LOOKED_UP ? next.exists() : j > tiles.first) load_next(K_smem, p.k, p.k_stride, K);

    const auto S = fragment_view_by_columns(S_rmem);
    cap_scores<SOFTCAP, true>(S, p.softcap);
    // One body for all segments, as the registers are those of the products: both edges are tested.
    if constexpr (LOOKED_UP) {
      const vec4 saved = ld_shared_vec4(saved_smem);
      const WalkedTile walked{int(saved.w)};
      if (walked.masked()) {
        const LookedUpMask<MASK_KIND, AttentionParams> mask(p, int(saved.z), int(saved.y) / (p.heads / p.kv_heads));
        const int row = int(saved.x) * Br + warp * WARP_ROWS + S.lane_row(lane_id());
        hide_scores<RUNS_AT_ONCE>(S, mask, row, walked.tile() * Bc, S.lane_column(lane_id()));
      }
    } else if (j >= int(ld_shared_u32(saved_smem + 12)) ||
        (MASK_KIND == MASK_BAND && j < int(ld_shared_u32(saved_smem + PITCH)))) {
      const int row = int(ld_shared_u32(saved_smem)) * Br + warp * WARP_ROWS + S.lane_row(lane_id());
      hide_scores<RIGHT_MASKED>(S, head_mask(p), row, j * Bc, S.lane_column(lane_id()));
    }

    // Alg. 1, l. 9: the row maxima, and what O is multiplied by to have the new maximum and the new unit.
    float m_tile[2 * M_TILES], alpha[2 * M_TILES];
    lane_maxima<false>(m_tile, S);
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      m_tile[r] = quad_max(m_tile[r]);
      alpha[r] = 1.0f;
    }
    float P_factor[S_TILES];  // brings the rows of V to the unit of O
    const float O_unit_old = O_unit;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) {
      P_factor[n] = ld_shared_f32(unit_address<PITCH>(V_smem, n));
      O_unit = fmaxf(O_unit, P_factor[n]);
    }
    const float inverse_unit = inverse_power_of_two(O_unit);
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) P_factor[n] *= inverse_unit * P_SCALE;
    const bool raised = softmax.raise_max(m_tile, p.scale_log2, alpha);
    const bool rescale = raised || O_unit != O_unit_old;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) alpha[r] *= O_unit_old * inverse_unit;

    // Alg. 1, l. 9: P = exp(S - m), in pairs. Two neighbouring accumulators of S hold what one A operand needs.
    u32 P_hi[P_STEPS][M_TILES][4], P_lo[P_STEPS][M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
      for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {  // register h of an A operand: row h % 2, columns h / 2
          const int n = 2 * k + h / 2, r = 2 * i + h % 2;
          const float x = softmax.exp(S_rmem[n][i][h % 2 * 2], p.scale_log2, r) * P_factor[n];
          const float y = softmax.exp(S_rmem[n][i][h % 2 * 2 + 1], p.scale_log2, r) * P_factor[n];
          split_pair(x, y, P_hi[k][i][h], P_lo[k][i][h]);
        }
      }
    }

    // Alg. 1, l. 10: O = alpha O + P V, a few columns at a time, while the next K arrives. Of V ldmatrix takes keys
    // 0-7 and keys 8-15 of hi, then of lo.
    const u32 V_lane = V_smem + lane_id() % 16 * PITCH + lane_id() / 16 * LO_OFFSET;
#pragma unroll
    for (int n0 = 0; n0 < O_TILES; n0 += O_GROUP) {
      constexpr int LAST_GROUP = (O_TILES - 1) % O_GROUP + 1;
      const int group = n0 + O_GROUP <= O_TILES ? O_GROUP : LAST_GROUP;
      float sum[O_GROUP][M_TILES][4] = {};
#pragma unroll
      for (int k = 0; k < P_STEPS; ++k) {
#pragma unroll
        for (int n = 0; n < group; ++n) {
          multiply_pairs<true>(sum[n], P_hi[k], P_lo[k], V_lane + k * 16 * PITCH + (n0 + n) * OCTET_BYTES);
        }
      }
      mma_fence();
      // Both ways to add are here, behind their branch: a sum that is added later than this costs registers, and ptxas,
      // left the choice, puts off more of them than there is room for.
      if (rescale) {
#pragma unroll
        for (int n = 0; n < group; ++n) {
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              O_rmem[n0 + n][i][e] = fmaf(O_rmem[n0 + n][i][e], alpha[2 * i + e / 2], sum[n][i][e]);
            }
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < group; ++n) {
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) O_rmem[n0 + n][i][e] += sum[n][i][e];
          }
        }
      }
    }
    if (LOOKED_UP ? next.exists() : j > tiles.first) split_tile(K_smem);
    block_sync();  // K is split; all warps are done with V, which the next copies overwrite
    if (LOOKED_UP ? next.exists() : j > tiles.first) load_next(V_smem, p.v, p.v_stride, V);
  };

  if (!tiles.empty()) {
    // Alg. 1, l. 4: Q, and the first K and V.
    const i64 q_stride_bytes = p.q_stride.seq * 4;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; ++r) {
      Rows::copy(Q_smem + r * 8 * PITCH, Q + r * 8 * q_stride_bytes, q_stride_bytes, p.seqlen_q - warp_row - r * 8,
                 lane);
    }
    load_tile(K_smem, K, p.k_stride.seq * 4, true);
    split_tile(K_smem);
    load_tile(V_smem, V, p.v_stride.seq * 4, true);
#pragma unroll 1
    for (int r = 0; r < 2 * M_TILES; ++r) split_rows<HEAD_DIM, PITCH>(Q_smem + r * 8 * PITCH, lane);
    block_sync();  // K is split; the rows of Q are this warp's own
    // Alg. 1, l. 6, from the last visited tile down, so that the masked tiles come first.
    if constexpr (LOOKED_UP) {
#pragma unroll 1
      while (next.exists()) {
        const WalkedTile walked = next;
        if (lane == 0) st_shared_u32(saved_smem + 12, u32(walked.code));  // in the place of what bands have there
        warp_sync();  // the other lanes may read it
        const vec4 saved = ld_shared_vec4(saved_smem);
        if constexpr (TRACE) tally.count(walked.tile(), walked.masked());
        find_next(int(saved.x), int(saved.y), int(saved.z));
        visit_tile(walked.tile());
      }
    } else {
#pragma unroll 1
      for (int j = tiles.end - 1; j >= tiles.first; --j) visit_tile(j);
    }
  }

  // Alg. 1, l. 12-15: O = O / l, L = m + log l.
  softmax.reduce_sum();
  const vec4 saved = ld_shared_vec4(saved_smem);
  const int q_block = int(saved.x), head = int(saved.y), batch = int(saved.z);
  char* O = static_cast<char*>(p.o) + 4 * (batch * p.o_stride.batch + head * p.o_stride.head);
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int row = q_block * Br + warp * WARP_ROWS + r / 2 * 16 + r % 2 * 8 + lane / 4;
    if (row >= p.seqlen_q) continue;
    const float factor = softmax.inverse_sum(r) * (O_unit / P_SCALE);
    char* O_row = O + 4 * (row * p.o_stride.seq + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < O_TILES; ++n) {
      const u32 x = float_as_u32(O_rmem[n][r / 2][r % 2 * 2] * factor);
      const u32 y = float_as_u32(O_rmem[n][r / 2][r % 2 * 2 + 1] * factor);
      store_two<ALIGNMENT>(O_row + n * 32, x, y);
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      const float lse = exact_lse(softmax.m_scaled[r], softmax.l[r]);
      st_global(p.lse + (i64(batch) * p.heads + head) * p.seqlen_q + row, lse);
    }
  }

  if constexpr (TRACE) {
    block_sync();  // the record ends when the last warp has stored
    if constexpr (LOOKED_UP) tiles = tally.range(tiles.total);
    if (thread == 0) write_trace(p, blockIdx.x, {q_block, head, batch}, tiles, start_ns);
  }
}
