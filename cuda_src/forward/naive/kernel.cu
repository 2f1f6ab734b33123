// The baseline: attention as three array expressions, each a kernel, with the whole score matrix in device memory.
//
//   naive_scores   S = scale * Q K^T, hidden scores -inf      float32, (batch, heads, seqlen_q, seqlen_k)
//   naive_softmax  P = softmax(S) row by row, and the LSE     the inputs' type, the same shape
//   naive_values   O = P V
//
// The savings of the other kernels are measured against this one: 4 + itemsize bytes of memory per score, written once and read
// three times. Both products are tiled, on the tensor cores (float32 without TF32: on the FMA units), and short rather than fast:
// every element is copied to shared memory by itself, so that strides, alignment and the ends of rows need no special cases.
// Scores are in units of log2: exp(s) = exp2(s * log2(e)).
#include "forward/naive/config.cuh"
#include "shared/params.cuh"
#include "mma/copy.cuh"
#include "mma/fragments.cuh"
#include "shared/schedule.cuh"
#include "forward/irregular_scores.cuh"
#include "forward/params.cuh"
#include "shared/dropout.cuh"
#include "shared/score.cuh"
#include "shared/softcap.cuh"

using Bits = typename Choose<FLOAT32, u32, u16>::type;  // one value of Q, K, V, P or O

constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int TILE_COLUMNS = BLOCK_KV;  // columns of a block's output: keys (scores) or head dims (values)
constexpr int STEP = 128 / Element::BYTES;  // columns of the inner dimension in shared memory at a time
static_assert(BLOCK_Q == NUM_WARPS * 16, "a warp computes 16 rows");
static_assert(TILE_COLUMNS == 64, "shared memory is laid out for tiles of 64 columns");

constexpr int STEP_PITCH = tile_pitch(STEP * Element::BYTES, 16);
constexpr int V_PITCH = tile_pitch(TILE_COLUMNS * Element::BYTES, 16);

// Dynamic shared memory: the offset of each tile. A is (BLOCK_Q, STEP); B is (TILE_COLUMNS, STEP) of K, (STEP, TILE_COLUMNS) of
// V.
struct SharedMemory {
  static constexpr int A = 0, B = A + BLOCK_Q * STEP_PITCH, BYTES = B + TILE_COLUMNS * STEP_PITCH;
};
static_assert(SharedMemory::BYTES == SMEM_BYTES, "cufa/kernels/forward/naive.py must ask for the bytes that the tiles take");
static_assert(STEP * V_PITCH <= TILE_COLUMNS * STEP_PITCH, "a tile of V fits where a tile of K does");
static_assert(LENGTHS_KIND == DENSE, "naive takes dense arrays only");

using Accumulator = float[TILE_COLUMNS / 8][4];  // the warp's 16 rows, in the layout of mma.sync

template <typename Element>
DEVICE Bits rounded(float x) {
  if constexpr (FLOAT32) {
    return float_as_u32(x);
  } else {
    return Bits(Element::pack(x, 0.0f));
  }
}

// Global -> shared; zeros outside the first valid_rows rows and valid_columns columns.
template <int ROWS, int COLUMNS, int PITCH>
DEVICE void copy_tile(u32 smem, const Bits* global, i64 row_stride, int valid_rows, int valid_columns) {
  static_assert(NUM_THREADS % COLUMNS == 0, "a thread keeps its column");
  constexpr int ROW_STEP = NUM_THREADS / COLUMNS;
  const int column = threadIdx.x % COLUMNS;
  if (column >= valid_columns) valid_rows = 0;
  int row = threadIdx.x / COLUMNS;
  const Bits* source = global + row * row_stride + column;
  u32 target = smem + row * PITCH + column * Element::BYTES;
#pragma unroll 16
  for (int i = 0; i < ROWS / ROW_STEP; ++i) {
    const Bits x = row < valid_rows ? ld_global<Bits>(source) : Bits(0);
    if constexpr (FLOAT32) {
      st_shared_u32(target, x);
    } else {
      st_shared_u16(target, x);
    }
    row += ROW_STEP;
    source += ROW_STEP * row_stride;
    target += ROW_STEP * PITCH;
  }
}

// C += A B over one step. B_KEYS_IN_ROWS: B is a tile of K, (columns of C, inner); else of V, (inner, columns of C).
template <typename Element, bool B_KEYS_IN_ROWS>
DEVICE void multiply(Accumulator& C_rmem, u32 A_smem, u32 B_smem, int lane) {
  constexpr int B_PITCH = B_KEYS_IN_ROWS ? STEP_PITCH : V_PITCH;
  if constexpr (!FLOAT32) {
    const u32 A_lane = A_smem + lane_offset_rows_first<STEP_PITCH>(lane);
    const u32 B_lane =
        B_smem + (B_KEYS_IN_ROWS ? lane_offset_columns_first<B_PITCH>(lane) : lane_offset_rows_first<B_PITCH>(lane));
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 A_rmem[4], B_rmem[4];
      ldmatrix_x4(A_rmem, A_lane + k * 2);
#pragma unroll
      for (int n = 0; n < TILE_COLUMNS; n += 16) {
        if constexpr (B_KEYS_IN_ROWS) {
          ldmatrix_x4(B_rmem, B_lane + n * B_PITCH + k * 2);
        } else {
          ldmatrix_x4_trans(B_rmem, B_lane + k * B_PITCH + n * 2);
        }
        mma_m16n8k16<Element>(C_rmem[n / 8], A_rmem, B_rmem[0], B_rmem[1]);
        mma_m16n8k16<Element>(C_rmem[n / 8 + 1], A_rmem, B_rmem[2], B_rmem[3]);
      }
    }
  } else {
    // Element (k, n) of B lies at k * B_K + n * B_N.
    constexpr int B_K = B_KEYS_IN_ROWS ? 4 : B_PITCH, B_N = B_KEYS_IN_ROWS ? B_PITCH : 4;
    const u32 A_lane = A_smem + lane / 4 * STEP_PITCH;
    if constexpr (TF32) {
#pragma unroll 2
      for (int k = lane % 4; k < STEP; k += 8) {
        u32 A_rmem[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          A_rmem[x] = cvt_tf32(ld_shared_f32(A_lane + x % 2 * 8 * STEP_PITCH + (k + x / 2 * 4) * 4));
        }
#pragma unroll
        for (int n = 0; n < TILE_COLUMNS / 8; ++n) {
          const u32 B_lane = B_smem + (n * 8 + lane / 4) * B_N + k * B_K;
          mma_m16n8k8_tf32(C_rmem[n], A_rmem, cvt_tf32(ld_shared_f32(B_lane)),
                           cvt_tf32(ld_shared_f32(B_lane + 4 * B_K)));
        }
      }
    } else {
#pragma unroll 2
      for (int k = 0; k < STEP; ++k) {
        const float top = ld_shared_f32(A_lane + k * 4), bottom = ld_shared_f32(A_lane + 8 * STEP_PITCH + k * 4);
#pragma unroll
        for (int n = 0; n < TILE_COLUMNS / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float b = ld_shared_f32(B_smem + (n * 8 + lane % 4 * 2 + e) * B_N + k * B_K);
            C_rmem[n][e] = fmaf(top, b, C_rmem[n][e]);
            C_rmem[n][2 + e] = fmaf(bottom, b, C_rmem[n][2 + e]);
          }
        }
      }
    }
  }
  mma_fence();
}

// The (seqlen_q, seqlen_k) matrices of one head in the workspace: all S, then all P.
DEVICE float* scores_of(const AttentionParams& p, i64 head) {
  return static_cast<float*>(p.workspace) + head * p.seqlen_q * p.seqlen_k;
}
DEVICE Bits* probabilities_of(const AttentionParams& p, i64 head) {
  return reinterpret_cast<Bits*>(scores_of(p, i64(p.batch) * p.heads)) + head * p.seqlen_q * p.seqlen_k;
}

// A separate first launch, only for masks with runs of rows: one warp per block of keys.
KERNEL __launch_bounds__(MASK_THREADS) mask_blocks(const __grid_constant__ ForwardParams p) {
  prepare_mask<MASK_KIND>(p, (blockIdx.x * MASK_THREADS + threadIdx.x) / 32, gridDim.x * (MASK_THREADS / 32));
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) naive_scores(const __grid_constant__ ForwardParams p) {
  DYN_SMEM(shared);
  const u32 A_smem = smem_address(shared) + SharedMemory::A, B_smem = smem_address(shared) + SharedMemory::B;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 Tr = u32(p.seqlen_q - 1) / BLOCK_Q + 1, Tc = u32(p.seqlen_k - 1) / BLOCK_KV + 1;
  const i64 first_key = i64(blockIdx.x % Tc) * BLOCK_KV, first_row = i64(blockIdx.x / Tc % Tr) * BLOCK_Q;
  const u32 index = blockIdx.x / Tc / Tr;
  const int head = int(index % u32(p.heads)), batch = int(index / u32(p.heads));
  const int kv_head = head / (p.heads / p.kv_heads);
  const Bits* Q = static_cast<const Bits*>(p.q) + batch * p.q_stride.batch + head * p.q_stride.head +
                     first_row * p.q_stride.seq;
  const Bits* K = static_cast<const Bits*>(p.k) + batch * p.k_stride.batch + kv_head * p.k_stride.head +
                     first_key * p.k_stride.seq;
  const int valid_rows = int(min(i64(BLOCK_Q), p.seqlen_q - first_row));
  const int valid_keys = int(min(i64(BLOCK_KV), p.seqlen_k - first_key));

  Accumulator S_rmem = {};
  for (int d = 0; d < HEAD_DIM; d += STEP) {
    block_sync();  // the previous step's tiles are read
    copy_tile<BLOCK_Q, STEP, STEP_PITCH>(A_smem, Q + d, p.q_stride.seq, valid_rows, HEAD_DIM - d);
    copy_tile<BLOCK_KV, STEP, STEP_PITCH>(B_smem, K + d, p.k_stride.seq, valid_keys, HEAD_DIM - d);
    block_sync();  // both tiles are written
    multiply<Element, true>(S_rmem, A_smem + warp * 16 * STEP_PITCH, B_smem, lane);
  }

  if constexpr (SCORE) {
    const auto S = fragment_view(S_rmem);
    const ScoreFunction<ForwardParams> function(p, batch, head, p.shift);
    const int row = int(first_row) + warp * 16 + S.lane_row(lane);
    apply_function(S, function, row, int(first_key) + S.lane_column(lane));
  }
  cap_scores<SOFTCAP, true>(fragment_view(S_rmem), p.softcap);
  constexpr bool IRREGULAR = is_irregular(MASK_KIND);
  if constexpr (IRREGULAR) {
    const auto S = fragment_view(S_rmem);
    const auto mask = irregular_mask<AttentionParams>(p, batch, kv_head, head % (p.heads / p.kv_heads));
    hide_scores(S, mask, int(first_row) + warp * 16 + S.lane_row(lane), int(first_key), S.lane_column(lane));
  }
  float* const S = scores_of(p, index);
  for (int half = 0; half < 2; ++half) {
    const i64 row = first_row + warp * 16 + half * 8 + lane / 4;
    if (row >= p.seqlen_q) continue;
    const int first_visible = head_mask(p).keys_begin(int(row)), end_visible = head_mask(p).keys_end(int(row));
#pragma unroll
    for (int n = 0; n < TILE_COLUMNS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i64 key = first_key + n * 8 + lane % 4 * 2 + e;
        const bool visible = IRREGULAR || (first_visible <= key && key < end_visible);
        const float s = visible ? S_rmem[n][2 * half + e] * p.scale_log2 : NEG_INF;
        if (key < p.seqlen_k) st_global(S + row * p.seqlen_k + key, s);
      }
    }
  }
}

// Whether one weight is kept. `head` counts over all sequences.
template <typename Params>
DEVICE bool is_kept(const Params& p, u32 head, int query, int key) {
  const PhiloxSeed seed(p);
  u32 x[2][4];
#pragma unroll
  for (u32 call = 0; call < 2; ++call) {
    x[call][0] = head, x[call][1] = keys_of_group(key), x[call][2] = seed.number, x[call][3] = queries_of_group(query) + call;
    philox<0>(x[call], seed);
  }
  return Threshold(p).kept(x) >> (key % 4 / 2 * 16 + query % 2 * 8 + key % 2 * 4 + key / 8 % 2 * 2 + query / 8 % 2) & 1;
}

// One warp per row: its maximum, the sum of its exponentials, its probabilities.
KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) naive_softmax(const __grid_constant__ ForwardParams p) {
  const int lane = threadIdx.x % 32;
  const i64 row = i64(blockIdx.x) * NUM_WARPS + threadIdx.x / 32;  // row of all heads
  const bool valid = row < i64(p.batch) * p.heads * p.seqlen_q;
  const int keys = valid ? p.seqlen_k : 0;
  const float* S = scores_of(p, 0) + row * p.seqlen_k;
  Bits* P = probabilities_of(p, 0) + row * p.seqlen_k;

  float m = NEG_INF, l = 0.0f;
  for (int j = lane; j < keys; j += 32) m = fmaxf(m, ld_global<float>(S + j));
  for (int other = 16; other > 0; other /= 2) m = fmaxf(m, shfl_xor(m, other));
  if (m == NEG_INF) m = 0.0f;  // the row sees no key: exp2(-inf - 0) = 0
  for (int j = lane; j < keys; j += 32) l += ex2(ld_global<float>(S + j) - m);
  for (int other = 16; other > 0; other /= 2) l += shfl_xor(l, other);
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  auto weight = [&](int j) {
    const float kept = ex2(ld_global<float>(S + j) - m) * inverse;
    if constexpr (DROPOUT) return is_kept(p, u32(row / p.seqlen_q), int(row % p.seqlen_q), j) ? of_kept(p, kept) : 0.0f;
    return kept;
  };
  for (int j = lane; j < keys; j += 32) st_global(P + j, rounded<Element>(weight(j)));
  if (valid && lane == 0 && p.lse != nullptr) st_global(p.lse + row, natural_lse(m, l));
}

KERNEL __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) naive_values(const __grid_constant__ ForwardParams p) {
  DYN_SMEM(shared);
  const u32 A_smem = smem_address(shared) + SharedMemory::A, B_smem = smem_address(shared) + SharedMemory::B;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 Tr = u32(p.seqlen_q - 1) / BLOCK_Q + 1, Td = u32(V_DIM - 1) / TILE_COLUMNS + 1;
  const int first_dim = int(blockIdx.x % Td) * TILE_COLUMNS;
  const i64 first_row = i64(blockIdx.x / Td % Tr) * BLOCK_Q;
  const u32 index = blockIdx.x / Td / Tr;
  const int head = int(index % u32(p.heads)), batch = int(index / u32(p.heads));
  const int kv_head = head / (p.heads / p.kv_heads);
  const Bits* P = probabilities_of(p, index) + first_row * p.seqlen_k;
  const Bits* V =
      static_cast<const Bits*>(p.v) + batch * p.v_stride.batch + kv_head * p.v_stride.head + first_dim;
  const int valid_rows = int(min(i64(BLOCK_Q), p.seqlen_q - first_row)), valid_dims = V_DIM - first_dim;

  Accumulator O_rmem = {};
  for (i64 j = 0; j < p.seqlen_k; j += STEP) {
    const int valid_keys = int(min(i64(STEP), p.seqlen_k - j));
    block_sync();  // the previous step's tiles are read
    copy_tile<BLOCK_Q, STEP, STEP_PITCH>(A_smem, P + j, p.seqlen_k, valid_rows, valid_keys);
    copy_tile<STEP, TILE_COLUMNS, V_PITCH>(B_smem, V + j * p.v_stride.seq, p.v_stride.seq, valid_keys, valid_dims);
    block_sync();  // both tiles are written
    multiply<Element, false>(O_rmem, A_smem + warp * 16 * STEP_PITCH, B_smem, lane);
  }

  Bits* const O = static_cast<Bits*>(p.o) + batch * p.o_stride.batch + head * p.o_stride.head + first_dim;
  for (int half = 0; half < 2; ++half) {
    const i64 row = first_row + warp * 16 + half * 8 + lane / 4;
    if (row >= p.seqlen_q) continue;
#pragma unroll
    for (int n = 0; n < TILE_COLUMNS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int dim = n * 8 + lane % 4 * 2 + e;
        if (dim < valid_dims) st_global(O + row * p.o_stride.seq + dim, rounded<Element>(O_rmem[n][2 * half + e]));
      }
    }
  }
}
