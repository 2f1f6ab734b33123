// Which registers a thread has.
//
// setmaxnreg (sm_90a): warpgroups of one block trade registers. All warps of the warpgroup execute it. The sum over the block
// must stay within what the launch allocated (registers at launch x threads), not the SM's 65,536: asking for more hangs.
#pragma once
#include "primitives/types.cuh"

// Of each thread of a block that has an SM to itself: what its launch allocates.
constexpr int registers_at_launch(int threads) { return (65536 / threads < 255 ? 65536 / threads : 255) / 8 * 8; }
// Whether a warpgroup that keeps `producer` registers per thread leaves enough for `consumers` others to have `each`.
constexpr bool registers_suffice(int producer, int consumers, int each) {
  return producer + consumers * each <= (consumers + 1) * registers_at_launch((consumers + 1) * 128);
}

#ifndef __CUDACC__
#include "host/hopper_host.h"
#else

template <int COUNT>
DEVICE void registers_release_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_raise_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Keeps two values in neighbouring registers, an even one and the next, wherever they live: only such a pair can be stored
// at once. The store itself happens when `never` is true, which it is not, but the compiler does not know. What reads now
// the one, now the other value then reads from both banks of the register file, and the operand cache holds both.
DEVICE void pair_registers(float even, float odd, bool never) {
  if (never) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(0), "f"(even), "f"(odd) : "memory");
}
#endif  // __CUDACC__
