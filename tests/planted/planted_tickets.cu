// Blocks of two warps change the same words one after another, by tickets: a counter in global memory says whose ticket has
// come. Plain loads and stores, and additions in the order of tickets.
// One bug at a time, chosen by the argument bug; NONE is a correct kernel.
#include "primitives/primitives.cuh"
#include "primitives/reduction.cuh"
#include "primitives/semaphore.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  NO_BARRIER_BEFORE_RELEASE,  // race: blocks . and . of one launch both touch byte .* of words
  NO_BARRIER_AFTER_WAIT,  // race: blocks . and . of one launch both touch byte .* of words
  NO_WAIT,  // race: blocks . and . of one launch both touch byte .* of words
  NO_RELEASE,  // deadlock: the counter at byte 0 of counters stays at 0
  EARLY_RELEASE,  // race: blocks . and . of one launch both touch byte .* of words
  PLAIN_WAIT,  // race: blocks . and . of one launch both touch byte 0 of counters
  OTHER_COUNTER,  // race: blocks . and . of one launch both touch byte .* of words
  ADDITION_BEFORE_TICKET,  // unordered-sum: of one launch add in any order to byte .* of sums
  ADDITION_IN_BLOCK,  // unordered-sum: two threads add in any order: byte .* of sums
};

struct PlantedParams {
  i32 bug;
  u32* words;     // (64)
  float* sums;    // (64)
  u32* counters;  // (2)
};

KERNEL planted_tickets(const __grid_constant__ PlantedParams p) {
  const u32 thread = threadIdx.x, block = blockIdx.x;
  u32* const counter = p.counters + (p.bug == OTHER_COUNTER && block == 2 ? 1 : 0);
  if (p.bug == ADDITION_BEFORE_TICKET) red_add_f32(p.sums + thread, 1.0f);
  if (thread == 0 && p.bug != NO_WAIT) {
    if (p.bug == PLAIN_WAIT) {
      while (ld_global<u32>(counter) != block) {
        if (ld_acquire_gpu(counter) == block) break;  // or this executor would wait for ever
      }
    } else if (p.bug != OTHER_COUNTER || block < 2) {
      while (ld_acquire_gpu(counter) != block) {
      }
    }
  }
  if (p.bug != NO_BARRIER_AFTER_WAIT) block_sync();
  const u32 mine = ld_global<u32>(p.words + (thread ^ 40));
  block_sync();
  st_global<u32>(p.words + thread, mine * 5 + block);
  red_add_f32(p.sums + thread, 2.0f);
  if (p.bug == ADDITION_IN_BLOCK) red_add_f32(p.sums + (thread ^ 32), 2.0f);
  if (p.bug == EARLY_RELEASE && thread == 0) red_release_gpu_add(counter, 1);
  if (p.bug != NO_BARRIER_BEFORE_RELEASE) block_sync();
  if (p.bug == EARLY_RELEASE) st_global<u32>(p.words + thread, mine);
  if (thread == 0 && p.bug != NO_RELEASE && p.bug != EARLY_RELEASE) red_release_gpu_add(counter, 1);
}
