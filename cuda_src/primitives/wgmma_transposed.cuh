// wgmma with both operands in shared memory and k across the rows of B: dQ = dS K reads K as it lies, keys down the rows.
// Everything else is as wgmma.cuh says.
#pragma once
#include "primitives/wgmma.cuh"
#ifndef __CUDACC__
#include "host/backward_hopper_host.h"
#else

template <int N, bool BF16>
struct WgmmaTransposed;

#define WGMMA_TRANSPOSED_TYPE(N, BF16, TYPE, A, B, ACCUMULATE)                                                     \
  template <>                                                                                                      \
  struct WgmmaTransposed<N, BF16> {                                                                                \
    template <bool ACCUMULATES>                                                                                    \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                   "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "}, " A ", " B ", p, 1, 1, 0, 1;}"                     \
                   : WGMMA_C##N : "l"(a), "l"(b), "n"(int(ACCUMULATES)));                                          \
    }                                                                                                              \
  };
#define WGMMA_TRANSPOSED(N, ...)                    \
  WGMMA_TRANSPOSED_TYPE(N, false, "f16", __VA_ARGS__) \
  WGMMA_TRANSPOSED_TYPE(N, true, "bf16", __VA_ARGS__)

WGMMA_TRANSPOSED(8, "%4", "%5", "%6")
WGMMA_TRANSPOSED(16, "%8", "%9", "%10")
WGMMA_TRANSPOSED(24, "%12", "%13", "%14")
WGMMA_TRANSPOSED(32, "%16", "%17", "%18")
WGMMA_TRANSPOSED(40, "%20", "%21", "%22")
WGMMA_TRANSPOSED(48, "%24", "%25", "%26")
WGMMA_TRANSPOSED(56, "%28", "%29", "%30")
WGMMA_TRANSPOSED(64, "%32", "%33", "%34")
WGMMA_TRANSPOSED(96, "%48", "%49", "%50")
WGMMA_TRANSPOSED(128, "%64", "%65", "%66")
#endif  // __CUDACC__
