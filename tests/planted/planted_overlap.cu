// Two launches, the second of which may begin before the first is over. One bug at a time, chosen by the argument bug; NONE
// is a correct pair.
#include "primitives/grid.cuh"
#include "primitives/primitives.cuh"
#include "primitives/reduction.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  NO_RELEASE,  // never-released: planted_second may begin before planted_first ends, but no block of planted_first calls
  NO_AWAIT,  // race: the launch before may still be writing byte .* of between, no griddepcontrol.wait
  // The wait comes after the first load.
  LATE_AWAIT,  // race: the launch before may still be writing byte .* of between, no griddepcontrol.wait
  // The other threads do not wait for that one.
  ONE_THREAD_AWAITS,  // race: the launch before may still be writing byte .* of between
  // The second launch stores to memory that the first one reads.
  STORES_EARLY,  // race: the launch before may still be reading byte .* of read
  ADDS_EARLY,  // race: the launch before may still be writing byte .* of sums
};

struct PlantedParams {
  i32 bug;
  u32* between;  // (grid, 64): written by the first launch, read by the second
  u32* read;     // (grid, 64): read by the first
  float* sums;   // (64): the first launch adds to it
  u32* out;      // (grid, 64)
};

KERNEL planted_first(const __grid_constant__ PlantedParams p) {
  const u32 i = blockIdx.x * 64 + threadIdx.x;
  if (p.bug != NO_RELEASE) grid_release_next();
  st_global<u32>(p.between + i, ld_global<u32>(p.read + i) * 3 + 1);
  red_add_f32(p.sums + threadIdx.x, 1.0f);
}

KERNEL planted_second(const __grid_constant__ PlantedParams p) {
  const u32 i = blockIdx.x * 64 + threadIdx.x, other = blockIdx.x * 64 + (threadIdx.x ^ 33);
  st_global<u32>(p.out + i, i);  // of this thread alone
  u32 early = 0;
  if (p.bug == LATE_AWAIT) early = ld_global<u32>(p.between + other);
  if (p.bug == STORES_EARLY) st_global<u32>(p.read + i, 0);
  if (p.bug == ADDS_EARLY) red_add_f32(p.sums + threadIdx.x, 1.0f);
  if (p.bug == ONE_THREAD_AWAITS) {
    if (threadIdx.x == 0) grid_await_previous();
  } else if (p.bug == NO_AWAIT) {
    block_sync();
  } else if (blockIdx.x == 1) {  // one thread for all
    if (threadIdx.x == 63) grid_await_previous();
    block_sync();
  } else {
    grid_await_previous();
  }
  st_global<u32>(p.out + i, ld_global<u32>(p.between + other) + early);
  st_global<u32>(p.read + i, 0);
  red_add_f32(p.sums + threadIdx.x, 1.0f);
}
