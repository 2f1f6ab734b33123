// Blocks of a cluster that send each other words, with one bug at a time, chosen by the argument bug; NONE is a correct
// kernel. In each of two rounds every thread stores to every block of its cluster, its own included, and then adds up
// what its block has received.
#include "primitives/cluster.cuh"
#include "primitives/primitives.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  NO_START_BARRIER,  // block-not-running: which may not have begun, no barrier of the cluster tells
  RELAXED_START,  // race: of block \(\d,0,0\), block \(\d,0,0\) warp
  NO_BARRIER_BEFORE_READING,  // race: no barrier orders this access after another thread's
  RELAXED_ARRIVE,  // race: no barrier orders this access after another thread's
  NO_BARRIER_AFTER_READING,  // race: no barrier orders this access after another thread's
  EARLY_EXIT,  // block-not-running: block \([15],0,0\)(, which has ended| does not wait)
  STORE_AT_THE_END,  // block-not-running: store to (its )?shared memory
  SAME_SLOT,  // race: no barrier orders this access after another thread's
  WAIT_WITHOUT_ARRIVE,  // barrier: waits at the cluster's barrier without having arrived: block
  ARRIVE_TWICE,  // barrier: arrives at the cluster's barrier twice without a wait: block
  WARP_SKIPS_BARRIER,  // deadlock: at the cluster's barrier is missing block \([26],0,0\) warp 1$
  DIVERGENT_ARRIVE,  // divergence: barrier.cluster.wait
  PAST_THE_END,  // out-of-range: st.shared::cluster of 8 bytes at shared offset
  MISALIGNED,  // misaligned: st.shared::cluster of 16 bytes at shared offset
  NO_SUCH_BLOCK,  // out-of-range: block 4 of a cluster of 4
  ADDRESS_OF_ANOTHER,  // out-of-range: ld.shared of 16 bytes
};

struct PlantedParams {
  i32 bug;
  u32* out;      // (grid, THREADS)
  u32* scratch;  // (grid, THREADS)
};

constexpr u32 SLOT = 24;  // of a thread: four words, then two
static_assert(SMEM_BYTES == CLUSTER * THREADS * SLOT, "a slot for every thread of the cluster");

DEVICE u32 word(int round, u32 from, u32 to, u32 thread) { return round * 1000003 + from * 10007 + to * 101 + thread; }

DEVICE void send(const PlantedParams& p, u32 base, int round, u32 from, u32 to, u32 thread) {
  const u32 slot = (p.bug == SAME_SLOT ? 0 : from * THREADS) + thread, v = word(round, from, to, thread);
  const u32 there = p.bug == NO_SUCH_BLOCK ? to + 1 : to;
  const u32 four = cluster_address(base + slot * 16, there);
  const u32 two = cluster_address(base + CLUSTER * THREADS * 16, there) + slot * 8;
  st_cluster_vec4(four + (p.bug == MISALIGNED ? 8 : 0), {v, v + 1, v + 2, v + 3});
  st_cluster_vec2(two + (p.bug == PAST_THE_END ? THREADS * 8 : 0), {v, ~v});
}

DEVICE u32 received(const PlantedParams& p, u32 base, u32 from, u32 thread) {
  const u32 slot = from * THREADS + thread;
  const vec4 four = ld_shared_vec4(p.bug == ADDRESS_OF_ANOTHER ? cluster_address(base + slot * 16, from) : base + slot * 16);
  const vec2 two = ld_shared_vec2(base + CLUSTER * THREADS * 16 + slot * 8);
  return four.x + four.y + four.z + four.w + two.x + two.y;
}

KERNEL planted_cluster(const __grid_constant__ PlantedParams p) {
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), thread = threadIdx.x, rank = cluster_rank();
  // The slots serve another purpose first.
  st_shared_vec4(base + thread * 16, {thread, 0, 0, 0});
  u32 sum = ld_shared_vec4(base + thread * 16).y;
  if (p.bug != NO_START_BARRIER) {
    if (p.bug == RELAXED_START) cluster_arrive_relaxed(); else cluster_arrive();
    cluster_wait();
  }
  for (int round = 0; round < 2; ++round) {
    for (u32 to = 0; to < CLUSTER; ++to) send(p, base, round, rank, to, thread);
    st_global<u32>(p.scratch + blockIdx.x * THREADS + thread, word(round, rank, 0, thread));
    if (p.bug == EARLY_EXIT && rank == 1) return;
    if (!(p.bug == WARP_SKIPS_BARRIER && rank == 2 && thread / 32 == 1) && p.bug != NO_BARRIER_BEFORE_READING) {
      if (p.bug == RELAXED_ARRIVE) {
        cluster_arrive_relaxed();
      } else if (p.bug != WAIT_WITHOUT_ARRIVE && !(p.bug == DIVERGENT_ARRIVE && thread < 5)) {
        cluster_arrive();
      }
      if (p.bug == ARRIVE_TWICE) cluster_arrive();
      cluster_wait();
    }
    block_sync();
    for (u32 from = 0; from < CLUSTER; ++from) sum += received(p, base, from, THREADS - 1 - thread);
    sum += ld_global<u32>(p.scratch + (blockIdx.x ^ 1) * THREADS + thread);
    if (p.bug != NO_BARRIER_AFTER_READING && round == 0) {
      cluster_arrive();
      cluster_wait();
    }
  }
  if (p.bug == STORE_AT_THE_END) st_cluster_vec2(cluster_address(base + thread * 8, (rank + 1) % CLUSTER), {sum, sum});
  st_global<u32>(p.out + blockIdx.x * THREADS + thread, sum);
}
