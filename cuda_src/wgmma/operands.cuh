// Tiles as wgmma operands: as TMA writes them with 128-byte swizzle, and the descriptors that name them.
//
// A tile of ROWS rows and COLUMNS 16-bit columns is cut into atoms of 64 columns (128 bytes, the swizzle's span); atom
// after atom, each ROWS x 128 bytes. Within an atom 16-byte unit u of row r lies at unit u ^ (r % 8): eight rows of one
// unit fill all banks. Tiles are 1024-byte aligned, so that the hardware can tell r % 8 from the address.
#pragma once
#include "primitives/ldmatrix.cuh"
#include "primitives/primitives.cuh"
#include "primitives/wgmma.cuh"

constexpr int ATOM_COLUMNS = 64;
constexpr int ATOM_ROW_BYTES = 128;

constexpr int atoms(int columns) { return (columns + ATOM_COLUMNS - 1) / ATOM_COLUMNS; }
constexpr int wgmma_tile_bytes(int rows, int columns) { return atoms(columns) * rows * ATOM_ROW_BYTES; }

// Address, leading and stride offsets in 16-byte units; 1 at bit 62 is the 128-byte swizzle.
DEVICE u64 wgmma_descriptor(u32 smem, u32 leading_bytes, u32 stride_bytes) {
  return u64((smem & 0x3FFFF) >> 4) | u64(leading_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 | u64(1) << 62;
}

// Descriptors are plain numbers: moving the operand by bytes adds to the address field.
constexpr u64 descriptor_step(int bytes) { return u64(bytes >> 4); }

// A tile whose columns are the product's k (Q, K): eight-row groups are 1024 bytes apart.
DEVICE u64 k_major_descriptor(u32 smem) { return wgmma_descriptor(smem, 16, 8 * ATOM_ROW_BYTES); }

// Offset of the 16 columns of k-step `k`: 32 bytes inside an atom, then the next atom.
template <int ROWS>
constexpr u64 k_major_step(int k) {
  return descriptor_step(k / 4 * ROWS * ATOM_ROW_BYTES + k % 4 * 32);
}

// A tile whose rows are the product's k (V): the next 64 columns are a whole atom away.
template <int ROWS>
DEVICE u64 mn_major_descriptor(u32 smem) {
  return wgmma_descriptor(smem, ROWS * ATOM_ROW_BYTES, 8 * ATOM_ROW_BYTES);
}

// Offset of the 16 rows of k-step `k`.
constexpr u64 mn_major_step(int k) { return descriptor_step(k * 16 * ATOM_ROW_BYTES); }

// S (64 x N) = A (64 x 16 K_STEPS) B^T, with A and B in shared memory; B has N rows. ADDS: S += A B^T. Issues, does not wait.
template <int N, int K_STEPS, typename Element, bool ADDS = false>
DEVICE void wgmma_tiles_ss(float (&d)[N / 2], u64 a, u64 b) {
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    const u64 a_k = a + k_major_step<64>(k), b_k = b + k_major_step<N>(k);
    if (k == 0 && !ADDS) {
      Wgmma<N, Element::IS_BFLOAT16>::template ss<false>(d, a_k, b_k);
    } else {
      Wgmma<N, Element::IS_BFLOAT16>::template ss<true>(d, a_k, b_k);
    }
  }
}

// wgmma_tiles_ss() with A in registers, four to a k-step.
template <int N, int K_STEPS, typename Element, bool ADDS = false>
DEVICE void wgmma_tiles_rs(float (&d)[N / 2], const u32 (&a)[4 * K_STEPS], u64 b) {
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    const u64 b_k = b + k_major_step<N>(k);
    if (k == 0 && !ADDS) {
      Wgmma<N, Element::IS_BFLOAT16>::template rs<false, false>(d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], b_k);
    } else {
      Wgmma<N, Element::IS_BFLOAT16>::template rs<true, false>(d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], b_k);
    }
  }
}

// O (64 x N) += P V, P (64 x 16 K_STEPS) in registers, V's rows along k.
template <int N, int K_STEPS, typename Element>
DEVICE void wgmma_accumulate_values(float (&d)[N / 2], const u32 (&p)[4 * K_STEPS], u64 v) {
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    Wgmma<N, Element::IS_BFLOAT16>::template rs<true, true>(d, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                                            v + mn_major_step(k));
  }
}

// Loads an A operand into registers: row `row` (this lane's) of a tile of ROWS rows, 8-column half `half` of each k-step.
template <int ROWS, int K_STEPS>
DEVICE void load_swizzled_rows(u32 (&a)[4 * K_STEPS], u32 tile, int row, int half) {
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    const int unit = (k % 4 * 2 + half) ^ (row % 8);
    u32 fragment[4];
    ldmatrix_x4(fragment, tile + k / 4 * ROWS * ATOM_ROW_BYTES + row * ATOM_ROW_BYTES + unit * 16);
#pragma unroll
    for (int e = 0; e < 4; ++e) a[4 * k + e] = fragment[e];
  }
}
