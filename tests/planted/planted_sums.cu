// Two warps per block, several blocks: threads of all blocks add to the same sums, and the block that counts in last reads
// them. One bug at a time, chosen by the argument bug; NONE is a correct kernel.
#include "primitives/grid.cuh"
#include "primitives/primitives.cuh"
#include "primitives/reduction.cuh"
#include "primitives/stmatrix.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  // A sum of the block's own is loaded without a barrier after the additions.
  LOAD_IN_BLOCK,  // race: no barrier orders this access after another thread's: byte
  // A sum of the block's own is stored to without a barrier before the additions.
  STORE_IN_BLOCK,  // race: no barrier orders this access after another thread's: byte
  // Every block loads the common sums, without a count.
  LOAD_BY_ANOTHER,  // race: of one launch both touch byte
  STORE_BY_ANOTHER,  // race: of one launch both touch byte
  // A load, an addition, a store.
  PLAIN_ADDITION,  // race: of one launch both touch byte
  // One block's last addition is a plain store.
  PLAIN_LAST,  // race: of one launch both touch byte
  PAST_THE_END,  // out-of-range: red.add of 16 bytes at
  MISALIGNED,  // misaligned: red.add of 16 bytes at global address
  READ_ONLY,  // out-of-range: red.add of 16 bytes at byte 0 of in
  DIVERGENT_STMATRIX,  // divergence: stmatrix.x4.trans
  STMATRIX_RACE,  // race: no barrier orders this access after another thread's: shared offset
};

struct PlantedParams {
  i32 bug;
  const float* in;  // (64, 4)
  float* common;    // (64, 4): what all blocks add to
  float* own;       // (grid, 64): a sum of each block
  float* out;       // (64, 4): what the last block has found
  u32* counter;
};

DEVICE void add(const PlantedParams& p, float* sum, const float (&v)[4]) {
  if (p.bug == PLAIN_ADDITION) {
    for (int i = 0; i < 4; ++i) st_global(sum + i, ld_global<float>(sum + i) + v[i]);
  } else {
    red_add_f32x4(sum, v[0], v[1], v[2], v[3]);
    for (int i = 0; i < 4; ++i) {
      if (i != 2) red_add_f32(sum + i, v[i]);
    }
  }
}

KERNEL planted_sums(const __grid_constant__ PlantedParams p) {
  DYN_SMEM(smem);
  const u32 thread = threadIdx.x, lane = thread % 32, base = smem_address(smem);
  float v[4];
  for (int i = 0; i < 4; ++i) v[i] = ld_global<float>(p.in + thread * 4 + i);
  float* own = p.own + blockIdx.x * 64;
  st_global(own + thread, 0.0f);
  if (p.bug != STORE_IN_BLOCK) block_sync();
  for (int i = 0; i < 4; ++i) red_add_f32(own + (thread + 32) % 64, v[i]);
  if (p.bug != LOAD_IN_BLOCK) block_sync();
  v[2] += ld_global<float>(own + thread);

  float* sum = p.common + (thread * 5 + blockIdx.x) % 64 * 4;
  float* const there = p.bug == PAST_THE_END ? sum + 256 : p.bug == READ_ONLY ? const_cast<float*>(p.in) : sum;
  add(p, p.bug == MISALIGNED ? sum + 2 : there, v);
  if (p.bug == LOAD_BY_ANOTHER) v[0] = ld_global<float>(p.common + thread * 4);
  if (p.bug == STORE_BY_ANOTHER && blockIdx.x == 1) st_global(p.common + thread * 4 + 1, v[0]);
  if (p.bug == PLAIN_LAST && blockIdx.x == 1 && thread == 0) st_global(sum, v[0]);
  block_sync();
  if (thread == 0) st_shared_u32(base, atomic_inc_wrap(p.counter, gridDim.x - 1));
  block_sync();
  if (ld_shared_u32(base) == gridDim.x - 1) {
    for (int i = 0; i < 4; ++i) st_global(p.out + thread * 4 + i, ld_global<float>(p.common + thread * 4 + i));
  }
  block_sync();

  const u32 words[4] = {thread, thread + 1, thread + 2, thread + 3};
  const u32 tile = base + thread / 32 * 512;
  if (!(p.bug == DIVERGENT_STMATRIX && lane == 3)) stmatrix_x4_trans(tile + lane * 16, words);
  if (p.bug != STMATRIX_RACE) warp_sync();
  if (ld_shared_u32(tile + (lane ^ 1) * 16) == 0xffffffffu) st_global(p.out, 0.0f);
}
