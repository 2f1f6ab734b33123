// A probe of what inside traces are stamped with (stamp.cuh), like primitive_probes.cu.
#include "primitives/primitives.cuh"
#include "primitives/stamp.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

// Two words of every thread whose input is odd; whether both clocks run forwards, and agree in their low half.
KERNEL probe_stamps(const __grid_constant__ ProbeParams p) {
  const u64 start = sm_clock();
  const u32 word = ld_global<u32>(p.in + threadIdx.x), low = sm_clock_low();
  st_global_if(word % 2 == 1, p.out + 2 * threadIdx.x, {word, ~word});
  const u32 between = low - u32(start);
  st_global<u32>(p.out + 64 + threadIdx.x, (sm_clock() > start) + 2 * (between > 0 && between < 1u << 24));
}
