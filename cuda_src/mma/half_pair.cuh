// float32 values as pairs of float16, x = unit * (hi + lo), so that the 16-bit tensor cores multiply them. Ootomo and Yokota,
// "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022: hi is x
// rounded to 11 bits, lo is the remainder. The product lo lo' in (hi + lo)(hi' + lo') is dropped: about 2^-22, as much as
// rounding lo loses.
//
// float16 has few exponents, so each group of eight rows has its own power of two, `unit`, which brings the group's largest
// element to [2^14, 2^15). Elements down to 2^-17 of the largest keep all 22 bits; smaller ones are off by up to 2^-40 of it.
//
// Infinities: hi saturates at 65504, lo becomes infinite, and every product has the right sign.
//
// The pair replaces its float32 in place: eight floats, 32 bytes, become eight hi and eight lo, 16 bytes each, which are rows of
// ldmatrix's 8x8 matrices. The unit is stored in the gap that tile_pitch leaves after the group's first row.
#pragma once
#include "primitives/ldmatrix.cuh"
#include "primitives/mma.cuh"
#include "shared/params.cuh"
#include "mma/copy.cuh"

constexpr int OCTET_BYTES = 32;  // eight columns: hi, then lo
constexpr int LO_OFFSET = 16;
constexpr float P_SCALE = 16384.0f;  // P <= 1, so scaled P is below 2^15, as every other operand is
constexpr bool WITH_LO = !TF32;  // else only hi is kept: 11 leading bits, the precision of tf32

// 1 / x for a power of two.
DEVICE float inverse_power_of_two(float x) { return u32_as_float((254u << 23) - float_as_u32(x)); }

// The unit of a group whose largest element has this biased exponent, within the range of float32 and of inverses.
DEVICE float pair_unit(u32 exponent) { return u32_as_float((max(exponent, 41u) - 14) << 23); }

// A key that orders finite float32 values by magnitude, from their bits: doubling drops the sign, and adding 1 to the exponent
// wraps the exponent of an infinity or NaN to zero.
constexpr u32 NO_MAGNITUDE = 1u << 24;
DEVICE u32 magnitude(u32 bits) { return bits * 2 + NO_MAGNITUDE; }
DEVICE float unit_of_largest(u32 largest) { return pair_unit((largest - NO_MAGNITUDE) / NO_MAGNITUDE); }

// The 16 bytes that tile_pitch leaves after a row.
template <int PITCH>
DEVICE u32 gap_address(u32 tile, int row) {
  return tile + row * PITCH + PITCH - 16;
}

template <int PITCH>
DEVICE u32 unit_address(u32 tile, int group) {
  return gap_address<PITCH>(tile, group * 8);
}

// Two values, already divided by their units, as hi and lo.
DEVICE void split_pair(float x, float y, u32& hi, u32& lo) {
  if constexpr (WITH_LO) {
    hi = cvt_f16x2_satfinite(x, y);
    lo = cvt_f16x2(x - cvt_f32_f16(u16(hi)), y - cvt_f32_f16(u16(hi >> 16)));
  } else {
    hi = cvt_f16x2(x, y);
  }
}

// Eight rows of float32 from global to shared memory, asynchronously, by the warp that splits them next.
template <int ROW_BYTES, int PITCH, int ALIGNMENT>
struct RowCopy {
  static constexpr int UNITS = ROW_BYTES / ALIGNMENT;                                    // units of a row
  static constexpr int LANES = UNITS <= 4 ? 4 : UNITS <= 8 ? 8 : UNITS <= 16 ? 16 : 32;  // lanes that copy one row

  // Address of a lane's first unit, from row `first_row` on.
  static DEVICE const char* source(const void* tensor, const Strides& stride, int batch, int head, i64 first_row,
                                   int lane) {
    return static_cast<const char*>(tensor) + lane % LANES * ALIGNMENT +
           4 * (batch * stride.batch + head * stride.head + (first_row + lane / LANES) * stride.seq);
  }

  // Rows from `valid_rows` on are not read and become zeros.
  static DEVICE void copy(u32 rows, const char* lane_source, i64 stride_bytes, int valid_rows, int lane) {
    const u32 target = rows + lane / LANES * PITCH + lane % LANES * ALIGNMENT;
#pragma unroll
    for (int row = 0; row < 8; row += 32 / LANES) {
#pragma unroll
      for (int unit = 0; unit < UNITS; unit += LANES) {
        if (unit + LANES <= UNITS || unit + lane % LANES < UNITS) {
          copy_unit_async<ALIGNMENT>(target + row * PITCH + unit * ALIGNMENT,
                                     lane_source + row * stride_bytes + unit * ALIGNMENT,
                                     row + lane / LANES < valid_rows);
        }
      }
    }
  }
};

// Splits eight rows in place, by one warp: four lanes per row. Columns from DIM up to a multiple of 16 become zeros.
template <int DIM, int PITCH>
DEVICE void split_rows(u32 rows, int lane) {
  constexpr int OCTETS = DIM / 8, PADDED_OCTETS = (DIM + 15) / 16 * 2;  // units of a row
  constexpr int STEPS = (PADDED_OCTETS + 3) / 4;
  const u32 address = rows + lane / 4 * PITCH + lane % 4 * OCTET_BYTES;

  u32 largest = NO_MAGNITUDE;
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i) {
    if (OCTETS % 4 == 0 || i / 2 * 4 + lane % 4 < OCTETS) {
      const vec4 x = ld_shared_vec4(address + i / 2 * 4 * OCTET_BYTES + i % 2 * 16);
      largest = max(max(largest, max(magnitude(x.x), magnitude(x.y))), max(magnitude(x.z), magnitude(x.w)));
    }
  }
  const float unit = unit_of_largest(redux_max(largest)), scale = inverse_power_of_two(unit);
  if (lane == 0) st_shared_f32(unit_address<PITCH>(rows, 0), unit);

  // Loaded again rather than kept: registers are scarcer than shared-memory bandwidth.
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    vec4 x{0, 0, 0, 0}, y{0, 0, 0, 0}, hi, lo;
    if (OCTETS % 4 == 0 || i * 4 + lane % 4 < OCTETS) {
      x = ld_shared_vec4(address + i * 4 * OCTET_BYTES);
      y = ld_shared_vec4(address + i * 4 * OCTET_BYTES + 16);
    }
    split_pair(u32_as_float(x.x) * scale, u32_as_float(x.y) * scale, hi.x, lo.x);
    split_pair(u32_as_float(x.z) * scale, u32_as_float(x.w) * scale, hi.y, lo.y);
    split_pair(u32_as_float(y.x) * scale, u32_as_float(y.y) * scale, hi.z, lo.z);
    split_pair(u32_as_float(y.z) * scale, u32_as_float(y.w) * scale, hi.w, lo.w);
    if (PADDED_OCTETS % 4 == 0 || i * 4 + lane % 4 < PADDED_OCTETS) {
      st_shared_vec4(address + i * 4 * OCTET_BYTES, hi);
      if constexpr (WITH_LO) st_shared_vec4(address + i * 4 * OCTET_BYTES + LO_OFFSET, lo);
    }
  }
}

// A B operand of eight columns: two registers of hi, then of lo.
template <bool TRANSPOSED>
DEVICE void load_pair_b(u32 (&b)[4], u32 smem) {
  if constexpr (WITH_LO) {
    TRANSPOSED ? ldmatrix_x4_trans(b, smem) : ldmatrix_x4(b, smem);
  } else {
    u32 hi[2];
    TRANSPOSED ? ldmatrix_x2_trans(hi, smem) : ldmatrix_x2(hi, smem);
    b[0] = hi[0];
    b[1] = hi[1];
  }
}

// D += (A_hi + A_lo) (B_hi + B_lo) without A_lo B_lo, over one k16 step, the small products first. B_smem is this lane's row
// address of four 8x8 matrices: k 0-7 and k 8-15 of hi, then of lo.
template <bool TRANSPOSED, int M_TILES>
DEVICE void multiply_pairs(float (&D)[M_TILES][4], const u32 (&A_hi)[M_TILES][4], const u32 (&A_lo)[M_TILES][4],
                           u32 B_smem) {
  u32 B[4];
  load_pair_b<TRANSPOSED>(B, B_smem);
  if constexpr (WITH_LO) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(D[i], A_lo[i], B[0], B[1]);
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(D[i], A_hi[i], B[2], B[3]);
  }
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(D[i], A_hi[i], B[0], B[1]);
}

// multiply_pairs() for the first COUNT of N tiles of eight columns, N_BYTES apart. Each of the three products is issued for all
// tiles before the next product: a sum depends on the previous sum of its tile.
template <bool TRANSPOSED, int N_BYTES, int COUNT, int N, int M_TILES>
DEVICE void multiply_pair_tiles(float (&D)[N][M_TILES][4], const u32 (&A_hi)[M_TILES][4], const u32 (&A_lo)[M_TILES][4],
                                u32 B_smem) {
  u32 B[COUNT][4];
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    load_pair_b<TRANSPOSED>(B[n], B_smem + n * N_BYTES);
  }
#pragma unroll
  for (int product = WITH_LO ? 0 : 2; product < 3; ++product) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if (product == 0) mma_m16n8k16_f16(D[n][i], A_lo[i], B[n][0], B[n][1]);
        if (product == 1) mma_m16n8k16_f16(D[n][i], A_hi[i], B[n][2], B[n][3]);
        if (product == 2) mma_m16n8k16_f16(D[n][i], A_hi[i], B[n][0], B[n][1]);
      }
    }
  }
}

// A operands of a k16 step from M_TILES * 16 rows or, TRANSPOSED, from 16 rows whose columns are A's rows. `smem` is this lane's
// row address (pair_lane_a) in the first tile; tiles are M_BYTES apart.
template <bool TRANSPOSED, int M_BYTES, int M_TILES>
DEVICE void load_pair_operand(u32 (&hi)[M_TILES][4], u32 (&lo)[M_TILES][4], u32 smem) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) {
    TRANSPOSED ? ldmatrix_x4_trans(hi[i], smem + i * M_BYTES) : ldmatrix_x4(hi[i], smem + i * M_BYTES);
    if constexpr (WITH_LO) {
      TRANSPOSED ? ldmatrix_x4_trans(lo[i], smem + i * M_BYTES + LO_OFFSET) : ldmatrix_x4(lo[i], smem + i * M_BYTES + LO_OFFSET);
    }
  }
}

// f(first, Size<count>) for TOTAL tiles, GROUP at a time. Each call stands in a branch that is always taken: without it ptxas
// begins a call before the previous one has ended, and needs more registers than there are.
template <int TOTAL, int GROUP, typename F>
DEVICE void for_groups(F f) {
#pragma unroll
  for (int n = 0; n + GROUP <= TOTAL; n += GROUP) {
    if (lane_id() < 32) f(n, Size<GROUP>{});
  }
  if constexpr (TOTAL % GROUP != 0) {
    if (lane_id() < 32) f(TOTAL / GROUP * GROUP, Size<TOTAL % GROUP>{});
  }
}

// Row addresses for ldmatrix (mma/fragments.cuh). An A operand: rows 0-7 and rows 8-15 of an octet of columns, then of the
// next octet.
template <int PITCH>
DEVICE u32 pair_lane_a(int lane) {
  return lane % 16 * PITCH + lane / 16 * OCTET_BYTES;
}
// An A operand stored transposed: rows 0-7 in two octets of columns, then rows 8-15.
template <int PITCH>
DEVICE u32 pair_lane_a_trans(int lane) {
  return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * OCTET_BYTES;
}
// A B operand whose column n is row n in shared memory: two octets of k of hi, then of lo.
template <int PITCH>
DEVICE u32 pair_lane_b(int lane) {
  return lane % 8 * PITCH + lane / 8 % 2 * OCTET_BYTES + lane / 16 * LO_OFFSET;
}
// A B operand stored with k along the rows: rows 0-7 and rows 8-15 of hi, then of lo.
template <int PITCH>
DEVICE u32 pair_lane_b_trans(int lane) {
  return lane % 16 * PITCH + lane / 16 * LO_OFFSET;
}
