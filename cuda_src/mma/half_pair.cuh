// float32 values as pairs of float16, x = unit * (hi + lo), so that the 16-bit tensor cores multiply them.
// Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance", 2022: hi is x rounded to 11 bits, lo is what that lost, and of (hi + lo)(hi' + lo') the product
// lo lo' is dropped (about 2^-22, as is what rounding lo loses).
//
// float16 has few exponents, so every group of eight rows gets its own power of two, `unit`, which brings its largest
// element to [2^14, 2^15). Elements down to 2^-17 of that keep all 22 bits; smaller ones are off by up to 2^-40 of it.
//
// Infinities: hi saturates at 65504, lo becomes infinite, and every product has the sign it should have.
//
// The pair takes the place of the float32 it came from: eight floats, 32 bytes, become eight hi and eight lo, 16 bytes
// each, which are rows of ldmatrix's 8x8 matrices. The unit lies in the gap that tile_pitch leaves after the group's
// first row.
#pragma once
#include "shared/params.cuh"
#include "mma/copy.cuh"

constexpr int OCTET_BYTES = 32;  // eight columns: hi, then lo
constexpr int LO_OFFSET = 16;

// 1 / x for a power of two.
DEVICE float inverse_power_of_two(float x) { return u32_as_float((254u << 23) - float_as_u32(x)); }

// The unit for a group whose largest element has this biased exponent, kept within what float32 and an inverse hold.
DEVICE float pair_unit(u32 exponent) { return u32_as_float((max(exponent, 41u) - 14) << 23); }

// What orders finite float32 values by size, from their bits: doubling drops the sign, and adding 1 to the exponent wraps
// that of an infinity or NaN to zero.
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

// Two values in units. Without WITH_LO only their 11 leading bits are kept: tf32's precision.
template <bool WITH_LO>
DEVICE void split_pair(float x, float y, u32& hi, u32& lo) {
  if constexpr (WITH_LO) {
    hi = cvt_f16x2_satfinite(x, y);
    lo = cvt_f16x2(x - cvt_f32_f16(u16(hi)), y - cvt_f32_f16(u16(hi >> 16)));
  } else {
    hi = cvt_f16x2(x, y);
  }
}

// Eight rows of float32 from global to shared memory, asynchronously, by one warp: the one that splits them next.
template <int ROW_BYTES, int PITCH, int ALIGNMENT>
struct RowCopy {
  static constexpr int UNITS = ROW_BYTES / ALIGNMENT;                                    // a row
  static constexpr int LANES = UNITS <= 4 ? 4 : UNITS <= 8 ? 8 : UNITS <= 16 ? 16 : 32;  // that copy one row

  // Where a lane begins: its row and its unit, counted from row `first_row`.
  static DEVICE const char* source(const void* tensor, const Strides& stride, int batch, int head, i64 first_row,
                                   int lane) {
    return static_cast<const char*>(tensor) + lane % LANES * ALIGNMENT +
           4 * (batch * stride.batch + head * stride.head + (first_row + lane / LANES) * stride.seq);
  }

  // Rows from `valid_rows` on are filled with zeros and never read.
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
template <int DIM, int PITCH, bool WITH_LO>
DEVICE void split_rows(u32 rows, int lane) {
  constexpr int OCTETS = DIM / 8, PADDED_OCTETS = (DIM + 15) / 16 * 2;  // a row
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

  // Read again, not kept: registers are scarcer than shared-memory bandwidth.
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    vec4 x{0, 0, 0, 0}, y{0, 0, 0, 0}, hi, lo;
    if (OCTETS % 4 == 0 || i * 4 + lane % 4 < OCTETS) {
      x = ld_shared_vec4(address + i * 4 * OCTET_BYTES);
      y = ld_shared_vec4(address + i * 4 * OCTET_BYTES + 16);
    }
    split_pair<WITH_LO>(u32_as_float(x.x) * scale, u32_as_float(x.y) * scale, hi.x, lo.x);
    split_pair<WITH_LO>(u32_as_float(x.z) * scale, u32_as_float(x.w) * scale, hi.y, lo.y);
    split_pair<WITH_LO>(u32_as_float(y.x) * scale, u32_as_float(y.y) * scale, hi.z, lo.z);
    split_pair<WITH_LO>(u32_as_float(y.z) * scale, u32_as_float(y.w) * scale, hi.w, lo.w);
    if (PADDED_OCTETS % 4 == 0 || i * 4 + lane % 4 < PADDED_OCTETS) {
      st_shared_vec4(address + i * 4 * OCTET_BYTES, hi);
      if constexpr (WITH_LO) st_shared_vec4(address + i * 4 * OCTET_BYTES + LO_OFFSET, lo);
    }
  }
}

// D += (A_hi + A_lo) (B_hi + B_lo) over one k16 step, lo lo left out, the small products first. B_smem is this lane's
// row address of four 8x8 matrices: k 0-7 and k 8-15 of hi, then of lo.
template <bool WITH_LO, bool TRANSPOSED, int M_TILES>
DEVICE void multiply_pairs(float (&D)[M_TILES][4], const u32 (&A_hi)[M_TILES][4], const u32 (&A_lo)[M_TILES][4],
                           u32 B_smem) {
  u32 B[WITH_LO ? 4 : 2];
  if constexpr (WITH_LO && TRANSPOSED) ldmatrix_x4_trans(B, B_smem);
  if constexpr (WITH_LO && !TRANSPOSED) ldmatrix_x4(B, B_smem);
  if constexpr (!WITH_LO && TRANSPOSED) ldmatrix_x2_trans(B, B_smem);
  if constexpr (!WITH_LO && !TRANSPOSED) ldmatrix_x2(B, B_smem);
  if constexpr (WITH_LO) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(D[i], A_lo[i], B[0], B[1]);
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(D[i], A_hi[i], B[2], B[3]);
  }
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) mma_m16n8k16_f16(D[i], A_hi[i], B[0], B[1]);
}

// The same for the first COUNT of N tiles of eight columns, N_BYTES apart. Of the three products each is issued for all
// tiles before the next: a sum waits for the one before it.
template <bool WITH_LO, bool TRANSPOSED, int N_BYTES, int COUNT, int N, int M_TILES>
DEVICE void multiply_pair_tiles(float (&D)[N][M_TILES][4], const u32 (&A_hi)[M_TILES][4], const u32 (&A_lo)[M_TILES][4],
                                u32 B_smem) {
  u32 B[COUNT][4];
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    if constexpr (WITH_LO) {
      TRANSPOSED ? ldmatrix_x4_trans(B[n], B_smem + n * N_BYTES) : ldmatrix_x4(B[n], B_smem + n * N_BYTES);
    } else {
      u32 hi[2];
      TRANSPOSED ? ldmatrix_x2_trans(hi, B_smem + n * N_BYTES) : ldmatrix_x2(hi, B_smem + n * N_BYTES);
      B[n][0] = hi[0];
      B[n][1] = hi[1];
    }
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

// A operands of a k16 step out of M_TILES * 16 rows, and, TRANSPOSED, out of 16 rows whose columns are A's rows. `smem` is
// this lane's row address (pair_lane_offset) in the first tile, M_BYTES from tile to tile.
template <bool WITH_LO, bool TRANSPOSED, int M_BYTES, int M_TILES>
DEVICE void load_pair_operand(u32 (&hi)[M_TILES][4], u32 (&lo)[M_TILES][4], u32 smem) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) {
    TRANSPOSED ? ldmatrix_x4_trans(hi[i], smem + i * M_BYTES) : ldmatrix_x4(hi[i], smem + i * M_BYTES);
    if constexpr (WITH_LO) {
      TRANSPOSED ? ldmatrix_x4_trans(lo[i], smem + i * M_BYTES + LO_OFFSET) : ldmatrix_x4(lo[i], smem + i * M_BYTES + LO_OFFSET);
    }
  }
}

// f(first, Size<count>) for TOTAL tiles, GROUP at a time. Each group stands behind a branch, which is always taken: ptxas would
// otherwise begin groups before others have ended, and have more sums in work than there are registers.
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

// ldmatrix takes the row addresses of four 8x8 matrices from lanes 0-7, 8-15, 16-23, 24-31. Of an A operand: rows 0-7 and
// rows 8-15, then both in the next octet of columns.
template <int PITCH>
DEVICE u32 pair_lane_a(int lane) {
  return lane % 16 * PITCH + lane / 16 * OCTET_BYTES;
}
// Of one stored transposed: rows 0-7 in two octets of columns, then rows 8-15.
template <int PITCH>
DEVICE u32 pair_lane_a_trans(int lane) {
  return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * OCTET_BYTES;
}
// Of a B operand whose columns are rows: two octets of hi, then of lo.
template <int PITCH>
DEVICE u32 pair_lane_b(int lane) {
  return lane % 8 * PITCH + lane / 8 % 2 * OCTET_BYTES + lane / 16 * LO_OFFSET;
}
// Of one stored with k along the rows: rows 0-7 and rows 8-15 of hi, then of lo.
template <int PITCH>
DEVICE u32 pair_lane_b_trans(int lane) {
  return lane % 16 * PITCH + lane / 16 * LO_OFFSET;
}
