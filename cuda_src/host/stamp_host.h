// Host twins of primitives/stamp.cuh.
//
// The clock counts what this worker has executed: products, exponentials, copies, shuffles and barriers, as its blocks' counters
// have them, and the readings of the clock themselves. It tells what came before what, and says nothing about time.
#pragma once
#include "host/primitives_host.h"

namespace cufa_host {

// arithmetic.cpp
u64 executed_primitives();

}  // namespace cufa_host

DEVICE u64 sm_clock() { return cufa_host::executed_primitives(); }
DEVICE u32 sm_clock_low() { return static_cast<u32>(cufa_host::executed_primitives()); }
DEVICE void st_global_if(bool is_on, void* p, vec2 v, cufa_host::Site site = cufa_host::Site::here()) {
  if (is_on) cufa_host::store_global(p, &v, sizeof(v), site);
}
