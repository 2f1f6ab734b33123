// Host twins of primitives/stamp.cuh: arithmetic.cpp.
//
// The clock counts what this worker has executed: products, exponentials, copies, shuffles, barriers and readings of the clock.
// It orders events and does not measure time.
#pragma once
#include "host/primitives_host.h"

u64 sm_clock();
u32 sm_clock_low();
DEVICE void st_global_if(bool is_on, void* p, vec2 v, SITE) {
  if (is_on) cufa_host::store_global(p, &v, sizeof(v), site);
}
