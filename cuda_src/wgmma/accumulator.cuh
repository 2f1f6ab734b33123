// An accumulator of wgmma or of a row of mma.sync tiles, straight from registers to global memory.
#pragma once
#include "wgmma/operands.cuh"

// Row r (0: lane / 4, 1: 8 below) of TILES 8-column tiles, multiplied by `factor` and rounded to 16 bits. A lane holds two
// columns of every tile; four lanes of a quad swap theirs, so that each writes the 16 bytes of one tile in four. All lanes
// take part; rows that are not `valid` are not written.
template <int TILES, typename Element>
DEVICE void store_accumulator_row(char* global, const float (&d)[4 * TILES], int r, float factor, bool valid, int lane) {
  const int t = lane % 4;
  auto packed = [&](int n) { return Element::pack(d[4 * n + 2 * r] * factor, d[4 * n + 2 * r + 1] * factor); };
#pragma unroll
  for (int n = 0; n + 4 <= TILES; n += 4) {
    u32 v[4] = {packed(n), packed(n + 1), packed(n + 2), packed(n + 3)};
    // A 4 x 4 transpose over the quad: swap within pairs of tiles, then pairs of pairs.
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = (t & distance) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((i & distance) != 0) continue;
        const u32 got = shfl_xor(upper ? v[i] : v[i + distance], distance);
        if (upper) {
          v[i] = got;
        } else {
          v[i + distance] = got;
        }
      }
    }
    if (valid) st_global(global + (n + t) * 16, vec4{v[0], v[1], v[2], v[3]});
  }
#pragma unroll
  for (int n = TILES / 4 * 4; n < TILES; ++n) {
    const u32 v = packed(n);
    if (valid) st_global(global + n * 16 + t * 4, v);
  }
}

// Stages the same row in a tile of ROWS rows as TMA takes it (wgmma/operands.cuh), 16 rows per warp. Eight rows of a quad's 16
// bytes fill all banks.
template <int ROWS, int TILES, typename Element>
DEVICE void stage_accumulator_row(u32 tile, const float (&d)[4 * TILES], int r, float factor, int warp, int lane) {
  const int row = warp * 16 + 8 * r + lane / 4;
  const u32 start = tile + row * ATOM_ROW_BYTES + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const u32 unit = u32(n % 8) ^ u32(lane / 4);
    st_shared_u32(start + n / 8 * ROWS * ATOM_ROW_BYTES + unit * 16,
                  Element::pack(d[4 * n + 2 * r] * factor, d[4 * n + 2 * r + 1] * factor));
  }
}
