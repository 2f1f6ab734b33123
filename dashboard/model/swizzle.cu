// The exercise of the swizzle: a warp writes a tile of 32 rows of 128 bytes row by row, then ldmatrix reads it column by column.
// BITS address bits from BASE + SHIFT up are XORed into the bits from BASE up, as in CuTe's Swizzle<BITS, BASE, SHIFT>.
#include "primitives/ldmatrix.cuh"
#include "primitives/primitives.cuh"

struct ExerciseParams {
  const u32* tile;  // (32, 32)
  u32* out;         // (32,)
};

DEVICE u32 swizzled(u32 offset) { return offset ^ ((offset >> SHIFT) & (((1u << BITS) - 1) << BASE)); }

KERNEL swizzle(const __grid_constant__ ExerciseParams p) {
  DYN_SMEM(smem);
  const u32 tile = smem_address(smem), lane = threadIdx.x;
  for (u32 i = lane; i < 32 * 8; i += 32) {
    const u32* unit = p.tile + 4 * i;
    const vec4 value{ld_global<u32>(unit), ld_global<u32>(unit + 1), ld_global<u32>(unit + 2), ld_global<u32>(unit + 3)};
    st_shared_vec4(tile + swizzled(16 * i), value);
  }
  warp_sync();
  u32 sum = 0;
  for (u32 unit = 0; unit < 8; ++unit) {
    u32 matrices[4];  // 8 rows each
    ldmatrix_x4(matrices, tile + swizzled(lane * 128 + unit * 16));
    sum += matrices[0] + matrices[1] + matrices[2] + matrices[3];
  }
  st_global<u32>(p.out + lane, sum);
}
