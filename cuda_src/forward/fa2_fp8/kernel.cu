// FlashAttention-2 forward for e4m3 on mma.sync (sm_89 and later): q, k and v are scales times 8-bit floats, results are 16-bit.
// Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, Algorithm 1:
//
//   l. 1-3    query blocks i                       the grid: one thread block per (query block, head); work_item()
//   l. 4-5    load Q_i; O = 0, l = 0, m = -inf     before the loop
//   l. 6      key blocks j                         walk_tiles(), last tile first
//   l. 7      load K_j, V_j                        V_j comes during S, K_{j-1} during P V
//   l. 8      S = Q_i K_j^T                        compute_scores()
//   l. 9-10   m, P = exp(S - m), l, O              make_weights(), add_values()
//   l. 12-15  O / l, L = m + log l, store          store()
//
// The arithmetic is that of fa3_forward_fp8 (forward/fa3_fp8/consumer.cuh), tile by tile: the same keys in a tile,
// P = 448 exp(s - m) rounded to e4m3 with the true maximum m, l of unrounded P, scales of q and k as a factor of a tile's scores,
// the scale of v at the end.
//
// Departures, and why:
//   - Tiles run from last to first: a causal mask touches only the last tiles; first keys (sinks) come when m is almost final.
//   - The 8-bit B operand has k along its rows, so V comes transposed. Each 32 keys of V are permuted so that the accumulators
//     of S, packed to e4m3, are the operand P without shuffles (cufa/problem/float8.py).
//   - P is rounded relative to m after its tile: a warp must hold the scores of 16 rows and a whole tile before it packs P. With
//     224 keys these are 112 registers. To save registers, Q is read from shared memory again for each tile.
//   - One buffer for K and one for V: the 99 KiB of sm_89 and sm_120 do not hold two tiles at head dim 128.
//   - P V of a tile is summed from 0 for a few columns at a time; then O = alpha O + P V is one FFMA. Tensor cores add 8-bit
//     products in fewer bits than float32 (NOTES.md): over long rows that error would grow.
// sm_89 and sm_120 multiply 8-bit operands (QMMA); for sm_90 and sm_100 ptxas unpacks them to float16 (HMMA).
// Measurements: NOTES.md.
#include "forward/fa2_fp8/config.cuh"
constexpr bool SPLIT_KEYS = false;  // a thread block visits all keys of its rows (forward/splits.cuh)
constexpr int PACKED_HEADS = 1;     // a query tile has rows of one head
#include "forward/float8_scores.cuh"
#include "forward/float8_values.cuh"
#include "forward/block_item.cuh"
#include "forward/query_block.cuh"
#include "mma/copy.cuh"
#include "mma/fragments.cuh"
#include "mma/traced_waits.cuh"
#include "primitives/opaque.cuh"
#include "shared/block_order.cuh"
#include "shared/softcap.cuh"
#include "wgmma/accumulator.cuh"

constexpr int Br = BLOCK_Q, Bc = BLOCK_KV;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int K_STEPS = (HEAD_DIM + 31) / 32;  // k32 steps of S = Q K^T; the last may be half padding
constexpr int V_STEPS = Bc / 32;               // k32 steps of P V
constexpr int S_TILES = Bc / 8, O_TILES = HEAD_DIM / 8;  // 8-column tiles of mma.sync
constexpr int PITCH = tile_pitch(HEAD_DIM, 32), V_PITCH = tile_pitch(Bc, 32);
static_assert(Br == 16 * NUM_WARPS, "BLOCK_Q: 16 query rows for each warp");
static_assert(Bc % 32 == 0, "BLOCK_KV: P V takes 32 keys per mma.sync");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && ALIGNMENT == 16, "rows are whole units of 16 bytes, at most 16");
static_assert(!is_irregular(MASK_KIND), "fa2_forward_fp8 takes band masks");
static_assert(!ALIBI && !SINK, "fa2_forward_fp8 takes no ALiBi and no sinks");

// Dynamic shared memory: the offset of each buffer. One loop fills the padding of Q and K, so these are neighbours. The work
// item, needed again in store() only, is parked in the last 16 bytes of Q's first row: padding that no product reads.
struct SharedMemory {
  static constexpr int Q = 0;                       // Br rows
  static constexpr int K = Q + Br * PITCH;          // Bc rows
  static constexpr int V = K + Bc * PITCH;          // V^T: HEAD_DIM rows of Bc keys
  static constexpr int PARKED = Q + PITCH - 16;
  static constexpr int BYTES = V + HEAD_DIM * V_PITCH;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/fa2_fp8.py: shared_memory() must list these buffers");

// A separate first launch, only if V is not transposed yet: V^T to the workspace.
KERNEL __launch_bounds__(TRANSPOSE_WARPS * 32) transpose_values(const __grid_constant__ Float8Params p) {
  DYN_SMEM(smem);
  transpose_block_of_values(p, smem_address(smem));
}

DEVICE int kv_head_of(const Float8Params& p, const WorkItem& item) { return item.head / (p.heads / p.kv_heads); }

// One warp: 16 query rows.
struct Rows {
  const Float8Params& p;
  const HeadMask& mask;
  const u32 smem;
  const int first_row;
  const int warp = thread_id() / 32, lane = lane_id(), row = first_row + lane / 4;

  float S[S_TILES][4];
  u32 P[V_STEPS][4];
  float O[HEAD_DIM / 2];  // accumulators of 16 x 8 tiles, one after another
  OnlineSoftmax<2, 0> softmax;
  float alpha[2];         // exp(m before this tile - m after it): the factor of O and l
  float qk_scale;         // the scale of q, times the scale of k unless K_SCALE is OF_BLOCK
  const float* k_scales;  // K_SCALE == OF_BLOCK: the scales of the sequence's key tiles

  template <typename Sequence>
  DEVICE void read_scales(const WorkItem& item, int kv_head, const Sequence& sequence) {
    const int block = Q_SCALE == OF_BLOCK ? min(first_row, mask.rows - 1) / QUERY_BLOCK : 0;
    qk_scale = ld_global<float>(p.q_scale + query_scale_index(p, item.batch, item.head, int(sequence.first_row())) + block);
    k_scales = p.k_scale + key_scale_index(p, item.batch, kv_head, int(sequence.first_key()));
    if constexpr (K_SCALE != OF_BLOCK) qk_scale *= ld_global<float>(k_scales);
  }

  // Alg. 1, l. 8. ldmatrix takes longer than a product, so the keys of the next product are loaded before this product.
  // The loop over k is not unrolled: ptxas would load further ahead, and spill.
  DEVICE void compute_scores() {
    const u32 Q_lane = smem + SharedMemory::Q + warp * 16 * PITCH + lane_offset_rows_first<PITCH>(lane);
    const u32 K_lane = smem + SharedMemory::K + lane_offset_columns_first<PITCH>(lane);
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0.0f;
#pragma unroll 1
    for (int k = 0; k < K_STEPS; ++k) {
      u32 A[4], B[2][4];
      ldmatrix_x4(A, Q_lane + k * 32);
      ldmatrix_x4(B[0], K_lane + k * 32);
#pragma unroll
      for (int n = 0; n < S_TILES; n += 2) {
        if (n + 2 < S_TILES) ldmatrix_x4(B[(n / 2 + 1) % 2], K_lane + k * 32 + (n + 2) * 8 * PITCH);
        mma_m16n8k32_e4m3(S[n], A, B[n / 2 % 2][0], B[n / 2 % 2][1]);
        mma_m16n8k32_e4m3(S[n + 1], A, B[n / 2 % 2][2], B[n / 2 % 2][3]);
      }
    }
  }

  // Alg. 1, l. 9-10: S becomes P = 448 exp(S - m); m, l and alpha.
  template <typename Tag>
  DEVICE void make_weights(int j, Tag) {
    const auto scores = fragment_view(S);
    float scale = qk_scale;
    if constexpr (K_SCALE == OF_BLOCK) scale *= ld_global<float>(k_scales + j);
    cap_scores<SOFTCAP>(scores, p.softcap * scale);
    const float scale_log2 = SOFTCAP ? p.scale_log2 : fmaxf(p.scale_log2 * scale, 0x1p-126f);
    hide_scores<Tag::value>(scores, mask, row, j * Bc, lane % 4 * 2);
    float top[2];
    lane_maxima<true>(top, scores);
    if (!softmax.raise_max_by_lanes(top, scale_log2, alpha)) alpha[0] = alpha[1] = 1.0f;
    scores_to_weights(scores, softmax, scale_log2);
#pragma unroll
    for (int i = 0; i < S_TILES; ++i) P[i / 4][i % 4] = opaque(pack_e4m3(scores, i));
  }

  // Alg. 1, l. 10: O = alpha O + P V, a slice of O's columns at a time. Each slice sits in a branch that is always taken: without
  // that branch ptxas overlaps two slices, and spills.
  DEVICE void add_values() {
    constexpr int SLICE = O_TILES % 4 == 0 ? 4 : 2;
    const u32 V_lane = smem + SharedMemory::V + lane_offset_columns_first<V_PITCH>(lane);
    u32 B[2][4];
    ldmatrix_x4(B[0], V_lane);
#pragma unroll
    for (int first = 0; first < O_TILES; first += SLICE) {
      if (lane_id() >= 32) continue;
      float PV[SLICE][4] = {};
#pragma unroll
      for (int s = 0; s < V_STEPS; ++s) {
#pragma unroll
        for (int x = 0; x < SLICE; x += 2) {
          const int now = first / 2 * V_STEPS + s * SLICE / 2 + x / 2;
          const bool same_step = x + 2 < SLICE, same_slice = same_step || s + 1 < V_STEPS;
          const int next_s = same_step ? s : same_slice ? s + 1 : 0;
          const int next_n = same_step ? first + x + 2 : same_slice ? first : first + SLICE;
          if (next_n < O_TILES) ldmatrix_x4(B[(now + 1) % 2], V_lane + next_n * 8 * V_PITCH + next_s * 32);
          mma_m16n8k32_e4m3(PV[x], P[s], B[now % 2][0], B[now % 2][1]);
          mma_m16n8k32_e4m3(PV[x + 1], P[s], B[now % 2][2], B[now % 2][3]);
        }
      }
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4 * SLICE; ++i) {
        float& o = O[4 * first + i];
        o = fmaf(o, alpha[i / 2 % 2], PV[i / 4][i % 4]);
      }
    }
  }

  // Alg. 1, l. 12-15: O v_scale / l, L = m + log l. Rows in padding get 0 and -inf.
  DEVICE void store(bool sees_keys) {
    const WorkItem item = parked_item(smem + SharedMemory::PARKED);
    const auto sequence = sequence_of(p, item.batch);
    const float v_scale = sees_keys ? ld_global<float>(p.v_scale + value_scale_index(p, item.batch, kv_head_of(p, item))) : 0.0f;
    float* const lse =
        p.lse == nullptr ? nullptr : p.lse + row_stats_index(p, sequence, i64(sequence.batch()) * p.heads + item.head);
    softmax.reduce_sum();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + 8 * r;
      const bool exists = i < sequence.rows(), stored = i < sequence.stored_rows();
      if (lse != nullptr && lane % 4 == 0 && stored) st_global(lse + i, exists ? softmax.lse(r) - LN_448 : NEG_INF);
      if (LENGTHS_KIND != DENSE && !exists) {  // padding may hold NaN, and 0 * NaN is NaN
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) O[4 * n + 2 * r] = O[4 * n + 2 * r + 1] = 0.0f;
      }
      store_accumulator_row<O_TILES, Element>(
          output_row(p, {item.q_block, item.head, sequence.batch()}, int(sequence.first_row()) + i), O, r,
          exists ? softmax.inverse_sum(r) * v_scale : 0.0f, stored, lane);
    }
  }
};

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) fa2_forward_fp8(const __grid_constant__ Float8Params p) {
  DYN_SMEM(start);
  const u32 smem = smem_address(start);
  const int thread = threadIdx.x;
  u64 start_ns = 0;
  if constexpr (TRACE) start_ns = global_timer();
  PhaseLog inside(p.trace, thread % 32 == 0, blockIdx.x, COPY);

  // Alg. 1, l. 3
  const WorkItem item = work_item<Br>(p, blockIdx.x, 2 * HEAD_DIM);
  const auto sequence = sequence_of(p, item.batch);
  if (LENGTHS_KIND == PACKED && item.q_block * Br >= sequence.stored_rows()) return inside.close();  // past its sequence
  const HeadMask mask = head_mask(p, sequence);
  const TileRange tiles = visited_tiles<Br, Bc>(mask, item.q_block);
  Rows rows{p, mask, smem, item.q_block * Br + thread / 32 * 16};

  if (thread == 0) park_item(smem + SharedMemory::PARKED, item, 0);

  // Alg. 1, l. 5
  rows.softmax.reset();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) rows.O[i] = 0.0f;

  if (!tiles.empty()) {
    const int kv_head = kv_head_of(p, item), batch = sequence.batch(), first_row = item.q_block * Br;
    const char* const Q = static_cast<const char*>(p.q) + batch * p.q_stride.batch + item.head * p.q_stride.head +
                          (sequence.first_row() + first_row) * p.q_stride.seq;
    const char* const K = static_cast<const char*>(p.k) + batch * p.k_stride.batch + kv_head * p.k_stride.head +
                          sequence.first_key() * p.k_stride.seq;
    const i64 positions = value_positions(p), first_value = first_position(int(sequence.first_key()), item.batch);
    const Strides in_workspace = {p.kv_heads * HEAD_DIM * positions, HEAD_DIM * positions, positions};
    const Strides V_strides = VALUES_IN_ROWS ? in_workspace : p.v_stride;
    const char* const V = static_cast<const char*>(VALUES_IN_ROWS ? p.workspace : p.v) + batch * V_strides.batch +
                          kv_head * V_strides.head + first_value;
    const int left = int(min(positions - first_value, i64(0x7fffffff)));  // positions of V^T from the sequence's first key on
    // opaque: addresses are computed again for each tile, which saves registers.
    auto copy_keys = [&](int j) {
      copy_tile_async<Bc, HEAD_DIM, PITCH, NUM_THREADS, 16, true>(  //
          smem + SharedMemory::K, K + j * (Bc * p.k_stride.seq), p.k_stride.seq, mask.keys - j * Bc, int(opaque(u32(thread))));
      cp_async_commit();
    };
    // The last tile may go past the end of V^T.
    auto copy_values = [&](int j) {
      constexpr int UNITS = Bc / 16;
#pragma unroll 4
      for (int i = int(opaque(u32(thread))); i < HEAD_DIM * UNITS; i += NUM_THREADS) {
        const int column = i / UNITS, position = j * Bc + i % UNITS * 16;
        cp_async_16(smem + SharedMemory::V + column * V_PITCH + i % UNITS * 16, V + column * V_strides.seq + position,
                    position < left);
      }
      cp_async_commit();
    };

    // Alg. 1, l. 4 and 7
    if constexpr (HEAD_DIM % 32 != 0) zero_padding<Br + Bc, HEAD_DIM, PITCH, NUM_THREADS>(smem + SharedMemory::Q, thread);
    copy_tile_async<Br, HEAD_DIM, PITCH, NUM_THREADS, 16, true>(  //
        smem + SharedMemory::Q, Q, p.q_stride.seq, sequence.rows() - first_row, thread);
    int j = tiles.end - 1;
    copy_keys(j);
    rows.read_scales(item, kv_head, sequence);
    walk_tiles<MASK_KIND>(j, tiles, [&](int j, auto segment) {  // Alg. 1, l. 6
      await_copies<0>(inside, j, SCORES);  // K_j has landed for all threads, and all warps are done with V_{j+1}
      copy_values(j);
      rows.compute_scores();
      mma_fence({inside, SOFTMAX, u32(j)});
      rows.make_weights(j, segment);
      await_copies<0>(inside, j, VALUES);  // V_j has landed for all threads, and all warps are done with K_j
      if (j > tiles.first) copy_keys(j - 1);
      rows.add_values();
    });
  } else {
    block_sync();  // the parked values are visible
  }

  inside.enter(STORE);
  rows.store(!tiles.empty());
  inside.close();
  if constexpr (TRACE) {
    block_sync();  // the trace record ends when the last warp has stored
    const bool exists = LENGTHS_KIND == DENSE || item.q_block * Br < mask.rows;
    if (thread == 0 && exists) write_trace(p, blockIdx.x, item, tiles, start_ns);
  }
}
