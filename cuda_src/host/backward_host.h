// Host twins of the primitives that backward kernels add: reduction.cuh, semaphore.cuh, stmatrix.cuh.
#pragma once
#include "host/primitives_host.h"

namespace cufa_host {

// reductions.cpp
void add_to_global(float* global, const float* values, u32 count, Site site);
// The sums themselves, unchecked.
void add_atomically(float* global, const float* values, u32 count);
void release_count(u32* counter, u32 value, Site site);
u32 acquire_count(const u32* counter, Site site);
u32 relaxed_count(const u32* counter, Site site);

// collectives.cpp
void store_matrices(bool transposed, const u32* registers, u32 smem, Site site);

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

// ---- reduction.cuh
DEVICE void red_add_f32(float* p, float v, SITE) { cufa_host::add_to_global(p, &v, 1, site); }
DEVICE void red_add_f32x2(float* p, float v0, float v1, SITE) {
  const float v[] = {v0, v1};
  cufa_host::add_to_global(p, v, 2, site);
}
DEVICE void red_add_f32x4(float* p, float v0, float v1, float v2, float v3, SITE) {
  const float v[] = {v0, v1, v2, v3};
  cufa_host::add_to_global(p, v, 4, site);
}

// ---- semaphore.cuh
DEVICE void red_release_gpu_add(u32* counter, u32 v, SITE) { cufa_host::release_count(counter, v, site); }
DEVICE u32 ld_acquire_gpu(const u32* counter, SITE) { return cufa_host::acquire_count(counter, site); }
DEVICE u32 ld_relaxed_gpu(const u32* counter, SITE) { return cufa_host::relaxed_count(counter, site); }

// ---- stmatrix.cuh
DEVICE void stmatrix_x4(u32 smem, const u32 (&r)[4], SITE) { cufa_host::store_matrices(false, r, smem, site); }
DEVICE void stmatrix_x4_trans(u32 smem, const u32 (&r)[4], SITE) { cufa_host::store_matrices(true, r, smem, site); }

#undef SITE
