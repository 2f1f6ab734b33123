// FlashAttention-3 forward for e4m3 on Hopper (sm_90a): q, k and v are scales times 8-bit floats, results are 16-bit.
// Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision", 2024, section 3.3, with the pipeline of Algorithms 1 and 2: forward/fa3/kernel.cu explains it.
//   Alg. 1  l. 3-10   the producer: one thread asks TMA for tiles                  producer.cuh
//           l. 11-23  consumers: one warpgroup for each 64 query rows              consumer.cuh
//   Alg. 2  l. 8-14   next tile's S = Q K^T in flight with this tile's O += P V    step()
// Tiles, shared memory and descriptors: memory.cuh. Compile-time choices: config.cuh. Measurements: NOTES.md.
//
// What differs from the 16-bit kernel, and why:
// - Both operands of an 8-bit wgmma have k along their rows, so V comes transposed. Each 32 keys of V are permuted so that
//   the accumulators of S, packed to e4m3, are the operand P without shuffles or byte permutations (cufa/problem/float8.py).
// - The scales of q and k are one factor of the scores of a tile; the scale of v is a factor of O at the end.
// - P is 448 exp(s - m): it uses all of e4m3's range. m is always the true maximum: a lazy rescale would overflow. l sums P
//   before it is rounded.
// - Tiles run from last to first: the first keys, often attention sinks, come when m is final or nearly so.
// - ADDED_TILES: the tensor core adds with about 14 bits, too few for long rows. 1: P V of each tile is summed from 0 and
//   added to O in float32. n > 1: every n tiles, O is added to a float32 sum in the workspace.
// - Item descriptors carry mask and sequence: one path for dense, padded and packed arrays.
// - Few queries over many keys: the keys are split over thread blocks at borders of tiles, heads may share a tile, and a last
//   launch merges (SPLIT_KEYS: forward/splits.cuh).
#include "forward/fa3_fp8/config.cuh"
#include "primitives/register_budget.cuh"
#include "forward/fa3_fp8/consumer.cuh"
#include "forward/fa3_fp8/producer.cuh"

// A separate first launch, only if V is not transposed yet: V^T to the workspace.
KERNEL __launch_bounds__(TRANSPOSE_WARPS * 32)
    transpose_values(const __grid_constant__ Float8Params p, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                     const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  DYN_SMEM(start);
  transpose_block_of_values(p, smem_address(start));
}

constexpr int PRODUCER_REGISTERS = CONSUMERS <= 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS <= 2 ? 240 : CONSUMERS == 3 ? 160 : 112;
static_assert(registers_suffice(PRODUCER_REGISTERS, CONSUMERS, CONSUMER_REGISTERS),
              "setmaxnreg of a consumer would wait forever");

KERNEL __launch_bounds__(NUM_THREADS, 1)
    fa3_forward_fp8(const __grid_constant__ Float8Params p, const __grid_constant__ TensorMap Q_map,
                    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
                    const __grid_constant__ TensorMap) {
  DYN_SMEM(start);
  const SharedMemory smem{smem_address(start)};
  const int warpgroup = shfl(u32(threadIdx.x / 128), 0);  // shfl: ptxas knows that the result is warp-uniform

  if (threadIdx.x == 0) smem.init_barriers();
  block_sync();  // all mbarriers are initialised before a thread waits for one

  if constexpr (SPLIT_KEYS) grid_release_next();  // blocks of the merge may become resident as blocks of this launch end
  if (warpgroup == 0) {
    registers_release_to<PRODUCER_REGISTERS>();
    PersistentItems items(p);
    if (threadIdx.x == 0) Producer{p, &Q_map, &K_map, &V_map, smem}.run(items);
  } else {
    registers_raise_to<CONSUMER_REGISTERS>();
    Consumer{p, smem, warpgroup - 1, int(threadIdx.x) / 32 % 4, int(threadIdx.x) % 32}.run();
  }
}

// The last launch: merges the parts of splits. Its blocks may start early, and then wait for the launch before to end.
KERNEL __launch_bounds__(COMBINE_THREADS)
    fa3_fp8_combine(const __grid_constant__ Float8Params p, const __grid_constant__ TensorMap, const __grid_constant__ TensorMap,
                    const __grid_constant__ TensorMap, const __grid_constant__ TensorMap) {
  if constexpr (SPLIT_KEYS) {
    grid_await_previous();
    combine_splits<Bc>(p);
  }
}
