// Probes of sm_90a's primitives, like primitive_probes.cu: mbarrier, TMA, wgmma. Tiles come by TMA, as in the attention
// kernel, so that no fence between proxies is needed.
#include "shared/element.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"
#include "primitives/tma.cuh"
#include "wgmma/operands.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

// All threads; the barrier is initialised for one arrival, and known to be.
DEVICE void init_barrier(u32 barrier, u32 arrivals) {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, arrivals);
    mbarrier_init_fence();
  }
  block_sync();
}

// Two warps hand 32 words back and forth through two phases of two barriers.
KERNEL probe_mbarrier(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap,
                      const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), full = base + 1024, empty = full + 8, lane = threadIdx.x % 32;
  init_barrier(full, 32);
  init_barrier(empty, 32);
  u32 sum = 0;
  for (u32 round = 0; round < 4; ++round) {
    if (threadIdx.x < 32) {
      mbarrier_wait(empty, round % 2 ^ 1);  // the first round finds it empty
      st_shared_u32(base + lane * 4, ld_global<u32>(p.in + round * 32 + lane));
      mbarrier_arrive(full);
    } else {
      mbarrier_wait(full, round % 2);
      sum = sum * 3 + ld_shared_u32(base + (lane ^ 5) * 4);
      mbarrier_arrive(empty);
    }
  }
  st_global<u32>(p.out + threadIdx.x, sum);
}

// Each lane: how many lanes are elected (shared by all lanes), and whether it is the same lane twice.
KERNEL probe_elect(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                   const __grid_constant__ TensorMap) {
  const bool elected = elect_one(), again = elect_one();
  u32 count = elected;
  for (int mask = 1; mask < 32; mask *= 2) count += shfl_xor(count, mask);
  st_global<u32>(p.out + threadIdx.x, count + 2 * (elected != again));
}

// Boxes of 16 rows and 64 columns: one inside the tensor, one that hangs over its end in both directions.
KERNEL probe_tma(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap map,
                 const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  constexpr u32 BOX_BYTES = 16 * 128;
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), barrier = base + 2 * BOX_BYTES;
  init_barrier(barrier, 1);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, 2 * BOX_BYTES);
    tma_load_4d(base, &map, barrier, 0, 2, 1, 0);
    tma_load_4d(base + BOX_BYTES, &map, barrier, 64, 12, 0, 1);
  }
  mbarrier_wait(barrier, 0);
  for (u32 i = threadIdx.x; i < 2 * BOX_BYTES / 4; i += blockDim.x) st_global(p.out + i, ld_shared_u32(base + i * 4));
}

// One warpgroup: A (64 x 64) B^T with A in shared memory and in registers, B (32 x 64); and A V, V (64 x 64).
template <bool BF16>
DEVICE void probe_products(const ProbeParams& p, u32 A, const TensorMap& A_map, const TensorMap& B_map,
                           const TensorMap& V_map) {
  constexpr u32 A_BYTES = 64 * 128, B_BYTES = 32 * 128, V_BYTES = 64 * 128;
  const u32 B = A + A_BYTES, V = B + B_BYTES, barrier = V + V_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  init_barrier(barrier, 1);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, A_BYTES + B_BYTES + V_BYTES);
    tma_load_4d(A, &A_map, barrier, 0, 0, 0, 0);
    tma_load_4d(B, &B_map, barrier, 0, 0, 0, 0);
    tma_load_4d(V, &V_map, barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(barrier, 0);
  u32 A_rmem[16];
  load_swizzled_rows<64, 4>(A_rmem, A, warp * 16 + lane % 16, lane / 16);
  float D_shared[16], D_registers[16], D_values[32] = {};
  wgmma_registers(D_shared);
  wgmma_registers(D_registers);
  wgmma_registers(D_values);
  wgmma_registers(A_rmem);
  wgmma_fence();
  wgmma_tiles_ss<32, 4, SixteenBit<BF16>>(D_shared, k_major_descriptor(A), k_major_descriptor(B));
  wgmma_commit();
  wgmma_tiles_rs<32, 4, SixteenBit<BF16>>(D_registers, A_rmem, k_major_descriptor(B));
  wgmma_accumulate_values<64, 4, SixteenBit<BF16>>(D_values, A_rmem, mn_major_descriptor<64>(V));
  wgmma_commit();
  wgmma_wait<1>();
  wgmma_registers(D_shared);
  wgmma_wait<0>();
  wgmma_registers(D_registers);
  wgmma_registers(D_values);
  u32* out = p.out + threadIdx.x * 64;
  for (int i = 0; i < 16; ++i) st_global(out + i, float_as_u32(D_shared[i]));
  for (int i = 0; i < 16; ++i) st_global(out + 16 + i, float_as_u32(D_registers[i]));
  for (int i = 0; i < 32; ++i) st_global(out + 32 + i, float_as_u32(D_values[i]));
}
KERNEL probe_wgmma_f16(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap A,
                       const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap V) {
  DYN_SMEM(smem);
  probe_products<false>(p, smem_address(smem), A, B, V);
}
KERNEL probe_wgmma_bf16(const __grid_constant__ ProbeParams p, const __grid_constant__ TensorMap A,
                        const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap V) {
  DYN_SMEM(smem);
  probe_products<true>(p, smem_address(smem), A, B, V);
}
