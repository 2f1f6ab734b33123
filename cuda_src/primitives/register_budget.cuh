// The registers of a thread.
//
// setmaxnreg (sm_90a): warpgroups of one block trade registers. All warps of the warpgroup execute it. The sum over the block
// must stay within what the launch allocated (registers at launch x threads), not the SM's 65,536: asking for more hangs.
#pragma once
#include "primitives/types.cuh"

// Registers that the launch allocates for each thread of a block with an SM to itself.
constexpr int registers_at_launch(int threads) { return (65536 / threads < 255 ? 65536 / threads : 255) / 8 * 8; }
// Whether `consumers` warpgroups can have `each` registers per thread if one warpgroup keeps `producer`.
constexpr bool registers_suffice(int producer, int consumers, int each) {
  return producer + consumers * each <= (consumers + 1) * registers_at_launch((consumers + 1) * 128);
}

#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

template <int COUNT>
DEVICE void registers_release_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_raise_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Keeps two values in an aligned pair of registers, because a vector store needs such a pair. `never` is false, so that nothing
// is stored, but the compiler cannot know. Instructions that alternate between the two values then read both banks of the
// register file, and the operand cache holds both values.
DEVICE void pair_registers(float even, float odd, bool never) {
  if (never) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(0), "f"(even), "f"(odd) : "memory");
}
#endif  // __CUDACC__
