// wgmma with both operands in shared memory and k across the rows of A: dQ^T = K^T dS^T reads K as it lies, keys down the rows, 64
// columns of K being the 64 rows of A. B has k along its rows. Everything else is as wgmma.cuh says.
#pragma once
#include "primitives/wgmma.cuh"
#ifndef __CUDACC__
#include "host/backward_hopper_host.h"
#else

template <int N, bool BF16>
struct WgmmaTransposedA;

#define WGMMA_TRANSPOSED_A_TYPE(N, BF16, TYPE, A, B, ACCUMULATE)                                                   \
  template <>                                                                                                      \
  struct WgmmaTransposedA<N, BF16> {                                                                               \
    template <bool ACCUMULATES>                                                                                    \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                   "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "}, " A ", " B ", p, 1, 1, 1, 0;}"                     \
                   : WGMMA_C##N : "l"(a), "l"(b), "n"(int(ACCUMULATES)));                                          \
    }                                                                                                              \
  };
#define WGMMA_TRANSPOSED_A(N, ...)                      \
  WGMMA_TRANSPOSED_A_TYPE(N, false, "f16", __VA_ARGS__) \
  WGMMA_TRANSPOSED_A_TYPE(N, true, "bf16", __VA_ARGS__)

WGMMA_TRANSPOSED_A(80, "%40", "%41", "%42")
WGMMA_TRANSPOSED_A(96, "%48", "%49", "%50")
#endif  // __CUDACC__
