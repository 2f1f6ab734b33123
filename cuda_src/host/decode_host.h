// Host twins of the primitives that only decode kernels use: grid.cuh, float8.cuh.
#pragma once
#include "host/hopper_host.h"

// ---- grid.cuh: memory.cpp. Launches run one after another here; checked mode finds what a launch touches too early.
u32 atomic_inc_wrap(u32* counter, u32 last, SITE);
void grid_release_next();
void grid_await_previous();

// ---- float8.cuh: arithmetic.cpp, tensor_core.cpp
u32 cvt_f16x2_e4m3x2(u16 x);
u32 cvt_e4m3x2(float lo, float hi);
void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, SITE);
u32 byte_permute(u32 lo, u32 hi, u32 selector);
