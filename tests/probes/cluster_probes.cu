// Probes of thread block clusters, like primitive_probes.cu. sm_90. The cluster's size stands in the kernel, so that an
// ordinary launch makes clusters.
#include "primitives/cluster_copy.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

constexpr u32 BLOCKS = 4, THREADS = 64, SENT = 12, OUT = 1 + SENT;  // words of a thread

// A thread stores 2 and 4 words to the next block of its cluster, at the place of the mirrored thread, and sends 2 and 4
// words to the one after the next by st.async. Out: the block's rank, then what was received.
KERNEL __cluster_dims__(4, 1, 1) __launch_bounds__(THREADS)
    probe_cluster(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), thread = threadIdx.x, mirrored = THREADS - 1 - thread, rank = cluster_rank();
  const u32 fours = base, twos = fours + THREADS * 16, async_fours = twos + THREADS * 8;
  const u32 async_twos = async_fours + THREADS * 16, barrier = async_twos + THREADS * 8;
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  cluster_arrive_relaxed();
  cluster_wait();  // all blocks have begun, and their mbarriers are initialised

  const u32* in = p.in + (blockIdx.x * THREADS + thread) * SENT;
  u32 word[SENT];
  for (u32 i = 0; i < SENT; ++i) word[i] = ld_global<u32>(in + i);
  const u32 next = (rank + 1) % BLOCKS, after = (rank + 2) % BLOCKS;
  st_cluster_vec4(cluster_address(fours + mirrored * 16, next), {word[0], word[1], word[2], word[3]});
  st_cluster_vec2(cluster_address(twos, next) + mirrored * 8, {word[4], word[5]});
  const u32 counts = cluster_address(barrier, after);
  st_async_vec4(cluster_address(async_fours + mirrored * 16, after), {word[6], word[7], word[8], word[9]}, counts);
  st_async_vec2(cluster_address(async_twos + mirrored * 8, after), {word[10], word[11]}, counts);
  cluster_arrive();
  cluster_wait();  // what was stored is here
  if (thread == 0) mbarrier_arrive_expect_tx(barrier, THREADS * 24);
  mbarrier_wait_cluster(barrier, 0);  // and what was sent

  u32* out = p.out + (blockIdx.x * THREADS + thread) * OUT;
  const vec4 four = ld_shared_vec4(fours + thread * 16), async_four = ld_shared_vec4(async_fours + thread * 16);
  const vec2 two = ld_shared_vec2(twos + thread * 8), async_two = ld_shared_vec2(async_twos + thread * 8);
  const u32 received[OUT] = {rank,         four.x,       four.y,       four.z,       four.w,      two.x,      two.y,
                             async_four.x, async_four.y, async_four.z, async_four.w, async_two.x, async_two.y};
  for (u32 i = 0; i < OUT; ++i) st_global<u32>(out + i, received[i]);
}

constexpr u32 ROUNDS = 2, COPIED = THREADS * 16;  // bytes

// A block sends four words of each thread to the other block of its pair, twice, each time once the other has read what it
// was sent before. Out: what was received, of the mirrored thread.
KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS)
    probe_cluster_copy(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 own = smem_address(smem), received = own + COPIED, full = received + COPIED, empty = full + 8;
  const u32 thread = threadIdx.x, lane = thread % 32, other = cluster_rank() ^ 1;
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, THREADS / 32);
    mbarrier_init_fence();
  }
  cluster_arrive();
  cluster_wait();
  for (u32 round = 0; round < ROUNDS; ++round) {
    if (round > 0) mbarrier_wait(empty, round - 1);
    const u32 at = (blockIdx.x * ROUNDS + round) * THREADS;
    st_shared_vec4(own + thread * 16, ld_global<vec4>(p.in + (at + thread) * 4));
    async_proxy_fence();
    block_sync();
    if (thread == 0) {
      cluster_copy(cluster_address(received, other), own, COPIED, cluster_address(full, other));
      mbarrier_arrive_expect_tx(full, COPIED);
    }
    mbarrier_wait(full, round);
    st_global(reinterpret_cast<vec4*>(p.out + (at + thread) * 4), ld_shared_vec4(received + (THREADS - 1 - thread) * 16));
    async_proxy_fence();  // it has been read, where the copy engine writes next
    warp_sync();
    if (lane == 0) mbarrier_arrive_cluster_relaxed(cluster_address(empty, other));
  }
  mbarrier_wait(empty, ROUNDS - 1);  // the other block says nothing more to this one, which may end
}
