// A producer and a consumer warpgroup over a ring of two stages: TMA loads tiles, wgmma sums A B^T over them. One bug at a
// time, chosen by the argument bug; NONE is a correct kernel.
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/register_budget.cuh"
#include "primitives/tma.cuh"
#include "wgmma/operands.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  WRONG_PHASE,  // barrier|copy-not-awaited|deadlock|never-written|race: planted_hopper\.cu:
  NO_WAIT_FOR_FULL,  // barrier|copy-not-awaited|deadlock|never-written|race: planted_hopper\.cu:
  NO_WAIT_FOR_EMPTY,  // barrier|copy-not-awaited|deadlock|never-written|race: planted_hopper\.cu:
  EARLY_RELEASE,  // copy-not-awaited|race: planted_hopper\.cu:
  NO_RELEASE,  // deadlock: warp 0 lane 0 wait for mbarrier \(parity 0\)
  TWO_RELEASES,  // barrier|copy-not-awaited|deadlock|never-written|race: planted_hopper\.cu:
  NO_EXPECTED_BYTES,  // barrier|copy-not-awaited|deadlock|never-written|race: planted_hopper\.cu:
  NO_INIT,  // barrier: no mbarrier was initialised at shared offset
  NO_BARRIER_AFTER_INIT,  // barrier|race: planted_hopper\.cu:
  ACCUMULATOR_TOUCHED,  // accumulator-touched: were written before it was waited for
  NOT_AWAITED,  // copy-in-flight: kernel ends with wgmma still in flight
  UNALIGNED_BOX,  // misaligned: 128-byte swizzle
  BOX_PAST_THE_END,  // out-of-range: outside the block's 16424 bytes
  TOO_MANY_REGISTERS,  // deadlock: warp 7 asks for 256 registers per thread and has 248; of the 8 x 248 that the launch has 0 are free
};

struct PlantedParams {
  i32 bug;
  float* out;  // (128, 16): the accumulators of every consumer thread
  i32 tiles;
};

constexpr int N = 32;
constexpr u32 A_BYTES = 64 * 128, B_BYTES = N * 128, BARRIERS = A_BYTES + 2 * B_BYTES;
static_assert(SMEM_BYTES == BARRIERS + 5 * 8, "A, two stages of B, barriers of A, full and empty");

KERNEL planted_hopper(const __grid_constant__ PlantedParams p, const __grid_constant__ TensorMap A_map,
                      const __grid_constant__ TensorMap B_map) {
  DYN_SMEM(smem);
  const u32 A = smem_address(smem), B = A + A_BYTES, A_full = A + BARRIERS, full = A_full + 8, empty = full + 16;
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0 && p.bug != NO_INIT) {
    mbarrier_init(A_full, 1);
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 4);  // the consumer's warps
    }
    mbarrier_init_fence();
  }
  if (p.bug != NO_BARRIER_AFTER_INIT) block_sync();

  if (thread < 128) {
    if (p.bug == TOO_MANY_REGISTERS) registers_release_to<248>();
    else registers_release_to<240>();
    if (thread == 0) {
      mbarrier_arrive_expect_tx(A_full, A_BYTES);
      tma_load_4d(A, &A_map, A_full, 0, 0, 0, 0);
      for (int t = 0; t < p.tiles; ++t) {
        const int stage = t % 2, round = t / 2;
        if (p.bug != NO_WAIT_FOR_EMPTY) mbarrier_wait(empty + 8 * stage, u32(round % 2) ^ 1);
        if (p.bug == NO_EXPECTED_BYTES) {
          mbarrier_arrive(full + 8 * stage);
        } else {
          mbarrier_arrive_expect_tx(full + 8 * stage, B_BYTES);
        }
        const u32 target = B + stage * B_BYTES + (p.bug == UNALIGNED_BOX ? 16 : p.bug == BOX_PAST_THE_END ? 2 * B_BYTES : 0);
        tma_load_4d(target, &B_map, full + 8 * stage, 0, t * N, 0, 0);
      }
    }
  } else {
    registers_raise_to<256>();  // before the other warpgroup has released any, in one order of warps: it waits for them
    float D[N / 2] = {};
    mbarrier_wait(A_full, 0);
    for (int t = 0; t < p.tiles; ++t) {
      const int stage = t % 2;
      const u32 parity = u32(t / 2 % 2) ^ (p.bug == WRONG_PHASE ? 1 : 0);
      if (p.bug != NO_WAIT_FOR_FULL) mbarrier_wait(full + 8 * stage, parity);
      wgmma_registers(D);
      wgmma_fence();
      const u64 a = k_major_descriptor(A), b = k_major_descriptor(B + stage * B_BYTES);
      for (int k = 0; k < 4; ++k) Wgmma<N, false>::ss<true>(D, a + k_major_step<64>(k), b + k_major_step<N>(k));
      wgmma_commit();
      if (p.bug == ACCUMULATOR_TOUCHED) D[3] += 1.0f;
      if (p.bug == EARLY_RELEASE && lane == 0) mbarrier_arrive(empty + 8 * stage);
      if (p.bug != NOT_AWAITED) wgmma_wait<0>();
      wgmma_registers(D);
      if (p.bug != EARLY_RELEASE && p.bug != NO_RELEASE && lane == 0) mbarrier_arrive(empty + 8 * stage);
      if (p.bug == TWO_RELEASES && lane == 1) mbarrier_arrive(empty + 8 * stage);
    }
    for (int i = 0; i < N / 2; ++i) st_global<float>(p.out + (thread - 128) * (N / 2) + i, D[i]);
  }
}
