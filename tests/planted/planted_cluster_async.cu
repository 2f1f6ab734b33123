// Blocks of a cluster that send each other words by st.async, counted by an mbarrier of who receives them; one bug at a time,
// chosen by the argument bug; NONE is a correct kernel. A block that has received everything may end: it is sent
// nothing more.
#include "primitives/cluster.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/primitives.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  NO_INIT,  // barrier: where no mbarrier was initialised at the address given
  NO_INIT_FENCE,  // race: may not have been initialised for block
  NO_START_BARRIER,  // barrier|block-not-running: may not have begun|no mbarrier was initialised
  OWN_BARRIER,  // barrier: where no mbarrier was initialised at the address given
  TOO_MANY_BYTES,  // deadlock: wait for mbarrier
  TOO_FEW_BYTES,  // copy-not-awaited|deadlock|never-written|race: block
  NO_WAIT,  // copy-not-awaited|never-written|race: planted_cluster_async.cu:
  NO_WAIT_NOR_READ,  // block-not-running: does not wait, before it ends, for the store
  WAIT_FOR_OWN_BLOCK,  // race: no barrier orders this access after another thread's
};

struct PlantedParams {
  i32 bug;
  u32* out;      // (grid, THREADS)
  u32* scratch;  // not used
};

constexpr u32 RECEIVED = CLUSTER * THREADS * 24;  // bytes: of every thread of the cluster four words, and two
static_assert(SMEM_BYTES == RECEIVED + 8, "and the mbarrier");

KERNEL planted_cluster_async(const __grid_constant__ PlantedParams p) {
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), thread = threadIdx.x, rank = cluster_rank(), barrier = base + RECEIVED;
  const u32 twos = base + CLUSTER * THREADS * 16;
  if (thread == 0) {
    if (p.bug != NO_INIT) mbarrier_init(barrier, 1);
    if (p.bug != NO_INIT_FENCE) mbarrier_init_fence();
  }
  cluster_arrive_relaxed();
  if (p.bug != NO_START_BARRIER) cluster_wait();
  for (u32 to = 0; to < CLUSTER; ++to) {
    const u32 slot = rank * THREADS + thread, v = rank * 10007 + to * 101 + thread;
    const u32 counts = cluster_address(barrier, p.bug == OWN_BARRIER ? rank : to);
    st_async_vec4(cluster_address(base + slot * 16, to), {v, v + 1, v + 2, v + 3}, counts);
    st_async_vec2(cluster_address(twos + slot * 8, to), {v, ~v}, counts);
  }
  block_sync();  // the mbarrier is initialised for all threads
  if (thread == 0) {
    mbarrier_arrive_expect_tx(barrier, RECEIVED + (p.bug == TOO_MANY_BYTES ? 16 : 0) - (p.bug == TOO_FEW_BYTES ? 24 : 0));
  }
  if (p.bug == WAIT_FOR_OWN_BLOCK) {
    mbarrier_wait(barrier, 0);
  } else if (p.bug != NO_WAIT && p.bug != NO_WAIT_NOR_READ) {
    mbarrier_wait_cluster(barrier, 0);
  }
  u32 sum = 0;
  for (u32 from = 0; from < CLUSTER && p.bug != NO_WAIT_NOR_READ; ++from) {
    const u32 slot = from * THREADS + (THREADS - 1 - thread);
    const vec4 four = ld_shared_vec4(base + slot * 16);
    const vec2 two = ld_shared_vec2(twos + slot * 8);
    sum += four.x + four.y + four.z + four.w + two.x + two.y;
  }
  st_global<u32>(p.out + blockIdx.x * THREADS + thread, sum);
}
