// Host twins of the primitives that backward kernels add: reduction.cuh, maximum.cuh, semaphore.cuh, stmatrix.cuh.
#pragma once
#include "host/primitives_host.h"

// ---- reduction.cuh, maximum.cuh: reductions.cpp
void red_add_f32(float* p, float v, SITE);
void red_add_f32x4(float* p, float v0, float v1, float v2, float v3, SITE);
void red_max_u32(u32* p, u32 v, SITE);

// ---- semaphore.cuh: reductions.cpp
void red_release_gpu_add(u32* counter, u32 v, SITE);
u32 ld_acquire_gpu(const u32* counter, SITE);

// ---- stmatrix.cuh: collectives.cpp
void stmatrix_x4(u32 smem, const u32 (&r)[4], SITE);
void stmatrix_x4_trans(u32 smem, const u32 (&r)[4], SITE);
