// Waits and products of kernels that multiply with mma.sync, with their stamps for an inside trace (shared/phases.cuh).
#pragma once
#include "primitives/cp_async.cuh"
#include "primitives/mma.cuh"
#include "primitives/primitives.cuh"
#include "shared/phases.cuh"

// The phase that begins, and its tile.
struct Stamp {
  PhaseLog& log;
  u32 phase, number;

  DEVICE void enter() const { log.enter(phase, number); }
};

// Waits until all but the PENDING youngest groups of copies have landed for all threads of the block; then phase `then` begins.
template <int PENDING>
DEVICE void await_copies(PhaseLog& log, u32 number, u32 then) {
  log.enter(WAIT_DATA, number);
  cp_async_wait<PENDING>();
  block_sync();
  log.enter(then, number);
}

// Earlier products are complete; then phase `then` begins.
DEVICE void mma_fence(Stamp then) {
  mma_fence();
  then.enter();
}
