// Counts of a block. Python gets the names as text: this is their only list.
#pragma once
#include <cstdint>

namespace cufa_host {

#define CUFA_COUNTERS(X)                                                         \
  X(global_read_bytes) /* of loads and asynchronous copies */                    \
  X(global_write_bytes)                                                          \
  X(global_read_sectors) /* distinct 32-byte sectors of each warp-wide access */ \
  X(global_write_sectors)                                                        \
  X(shared_read_bytes)                                                           \
  X(shared_write_bytes)                                                          \
  X(shared_wavefronts) /* passes of 128 bytes that shared memory needs */        \
  X(engine_wavefronts) /* of these, by wgmma and the copy engine */              \
  X(bank_conflicts)    /* wavefronts beyond those that the access width needs */ \
  X(ldmatrix)          /* warp-wide instructions */                              \
  X(stmatrix)                                                                    \
  X(mma)                                                                         \
  X(products)     /* multiply-adds of the mma instructions */                    \
  X(exponentials) /* ex2, per thread */                                          \
  X(reciprocals)  /* rcp, per thread */                                          \
  X(shuffles)                                                                    \
  X(votes)                                                                       \
  X(async_copies)   /* cp.async, per thread */                                   \
  X(wgmma)          /* per warp: four to an instruction */                       \
  X(bulk_copies)    /* TMA boxes */                                              \
  X(reductions)     /* numbers added to global memory */                         \
  X(barrier_waits)  /* per warp */                                               \
  X(mbarrier_waits) /* per thread */                                             \
  X(warp_syncs)                                                                  \
  X(grid_releases) /* griddepcontrol.launch_dependents, per thread */            \
  X(switches) /* of fibers: a property of the emulation, not of the kernel */

struct Counters {
#define CUFA_COUNTER(name) std::uint64_t name = 0;
  CUFA_COUNTERS(CUFA_COUNTER)
#undef CUFA_COUNTER

  void add_engine_wavefronts(std::uint64_t waves) {
    shared_wavefronts += waves;
    engine_wavefronts += waves;
  }
};

#define CUFA_COUNTER(name) #name ","
constexpr char kCounterNames[] = CUFA_COUNTERS(CUFA_COUNTER);
#undef CUFA_COUNTER
constexpr int kNumCounters = sizeof(Counters) / sizeof(std::uint64_t);

}  // namespace cufa_host
