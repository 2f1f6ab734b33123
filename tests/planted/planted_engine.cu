// One warpgroup multiplies A, in registers, with B and sends the product out by the copy engine, twice, through the same
// buffer. One bug at a time, chosen by the argument bug; NONE is a correct kernel.
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/tma.cuh"
#include "shared/element.cuh"
#include "wgmma/operands.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  NO_WGMMA_FENCE,  // wgmma-fence: no wgmma.fence since the wgmma's registers were this thread's own
  NO_SECOND_WGMMA_FENCE,  // wgmma-fence: no wgmma.fence since the wgmma's registers
  // An accumulator, or an operand, is written after the fence.
  FENCE_BEFORE_ACCUMULATOR,  // wgmma-fence: were written after the last wgmma.fence
  FENCE_BEFORE_OPERAND,  // wgmma-fence: were written after the last wgmma.fence
  // An operand is written while wgmma reads it.
  OPERAND_TOUCHED,  // accumulator-touched: operand registers of the wgmma
  NO_INIT_FENCE,  // proxy-fence: no fence.mbarrier_init by warp 0 lane 0 comes before
  INIT_FENCE_TOO_LATE,  // proxy-fence: no fence.mbarrier_init by warp 0 lane 0 comes before
  INIT_FENCE_BY_ANOTHER,  // proxy-fence: no fence.mbarrier_init by warp 0 lane 0 comes before
  NO_STORE_FENCE,  // proxy-fence: no fence.proxy.async between an ordinary access and the copy engine's
  NO_COMMIT,  // copy-in-flight: a store by the copy engine that may not have read its shared memory yet
  NO_WAIT,  // copy-in-flight: a store by the copy engine that may not have read its shared memory yet
  OVERWRITTEN,  // copy-not-awaited: touches data of an asynchronous copy that was not waited for: shared
  OVERWRITTEN_BY_ANOTHER,  // copy-not-awaited|race: shared offset
  // The sending thread has not waited for the stores of the others.
  SENT_BY_ANOTHER,  // race: no barrier orders this access after another thread's: shared offset
  // The product is read back from global memory.
  READ_BACK,  // copy-not-awaited: touches data of an asynchronous copy that was not waited for: byte
};

struct PlantedParams {
  i32 bug;
  u32* out;  // (2, 1, 64, 64) of 16 bits; also by tensor map
  u32* back; // (128)
};

constexpr int N = 64;
constexpr u32 A_BYTES = 64 * 128, B_BYTES = N * 128, OUT_BYTES = 64 * 128, BARRIER = A_BYTES + B_BYTES + OUT_BYTES;
static_assert(SMEM_BYTES == BARRIER + 8, "A, B, the product, a barrier");

KERNEL planted_engine(const __grid_constant__ PlantedParams p, const __grid_constant__ TensorMap A_map,
                      const __grid_constant__ TensorMap B_map, const __grid_constant__ TensorMap out_map) {
  DYN_SMEM(smem);
  const u32 A = smem_address(smem), B = A + A_BYTES, product = B + B_BYTES, barrier = A + BARRIER;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    if (p.bug != NO_INIT_FENCE && p.bug != INIT_FENCE_TOO_LATE && p.bug != INIT_FENCE_BY_ANOTHER) mbarrier_init_fence();
  }
  if (p.bug == INIT_FENCE_BY_ANOTHER && thread == 32) mbarrier_init_fence();
  block_sync();
  if (thread == 32) {
    mbarrier_arrive_expect_tx(barrier, A_BYTES + B_BYTES);
    tma_load_4d(A, &A_map, barrier, 0, 0, 0, 0);
    tma_load_4d(B, &B_map, barrier, 0, 0, 0, 0);
  }
  if (p.bug == INIT_FENCE_TOO_LATE && thread == 0) mbarrier_init_fence();
  mbarrier_wait(barrier, 0);

  u32 A_rmem[16];
  float D[N / 2] = {};
  for (int round = 0; round < 2; ++round) {
    if (p.bug == FENCE_BEFORE_OPERAND && round == 1) wgmma_fence();
    load_swizzled_rows<64, 4>(A_rmem, A, warp * 16 + lane % 16, lane / 16);
    A_rmem[5] += round;
    wgmma_registers(D);
    wgmma_registers(A_rmem);
    const bool fence = p.bug != NO_WGMMA_FENCE && !(p.bug == NO_SECOND_WGMMA_FENCE && round == 1) &&
                       !(p.bug == FENCE_BEFORE_OPERAND && round == 1);
    if (fence) wgmma_fence();
    if (p.bug == FENCE_BEFORE_ACCUMULATOR && round == 1) D[7] = 0.5f;
    wgmma_tiles_rs<N, 4, Float16>(D, A_rmem, k_major_descriptor(B));
    wgmma_commit();
    if (p.bug == OPERAND_TOUCHED) A_rmem[3] ^= 1;
    wgmma_wait<0>();
    wgmma_registers(D);
    wgmma_registers(A_rmem);

    if (round == 1) {
      if (lane == 0 && p.bug != NO_WAIT && p.bug != OVERWRITTEN && !(p.bug == OVERWRITTEN_BY_ANOTHER)) bulk_wait_read();
      warp_sync();
    }
    // The warp's rows, or those of the next warp.
    const int rows = p.bug == OVERWRITTEN_BY_ANOTHER && round == 1 ? (warp + 1) % 4 : warp;
    for (int i = 0; i < N / 4; ++i) {
      const u32 row = rows * 16 + lane / 4 + i % 2 * 8, unit = i / 2 ^ row % 8;
      st_shared_u32(product + row * 128 + unit * 16 + lane % 4 * 4, cvt_f16x2(D[2 * i], D[2 * i + 1]));
    }
    if (p.bug != NO_STORE_FENCE) async_proxy_fence();
    warp_sync();
    const int sender = p.bug == SENT_BY_ANOTHER ? warp ^ 1 : warp;
    if (lane == 0) {
      tma_store_4d(&out_map, product + sender * 2048, 0, sender * 16, 0, round);
      if (p.bug != NO_COMMIT) bulk_commit();
    }
  }
  if (lane == 0 && p.bug != NO_WAIT) bulk_wait_read();
  if (p.bug == OVERWRITTEN_BY_ANOTHER) block_sync();
  if (p.bug == READ_BACK) {
    block_sync();
    st_global(p.back + thread, ld_global<u32>(p.out + thread));
  }
}
