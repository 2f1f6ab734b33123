// wgmma with both operands in shared memory and B's k across its rows: for dQ = dS K, where K has one key per row. A has k along
// its rows; the rest is as in wgmma.cuh.
#pragma once
#include "primitives/wgmma.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

template <int N, bool BF16>
struct WgmmaTransposedB;

#define WGMMA_TRANSPOSED_TYPE(N, BF16, TYPE, A, B, ACCUMULATE)                                                     \
  template <>                                                                                                      \
  struct WgmmaTransposedB<N, BF16> {                                                                               \
    template <bool ACCUMULATES>                                                                                    \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                   "k16.f32." TYPE "." TYPE " " WGMMA_D(N) ", " A ", " B ", p, 1, 1, 0, 1;}"                       \
                   : WGMMA_C(N) : "l"(a), "l"(b), "n"(int(ACCUMULATES)));                                          \
    }                                                                                                              \
  };
#define WGMMA_TRANSPOSED_B(N, ...)                     \
  WGMMA_TRANSPOSED_TYPE(N, false, "f16", __VA_ARGS__) \
  WGMMA_TRANSPOSED_TYPE(N, true, "bf16", __VA_ARGS__)

WGMMA_TRANSPOSED_B(8, "%4", "%5", "%6")
WGMMA_TRANSPOSED_B(16, "%8", "%9", "%10")
WGMMA_TRANSPOSED_B(24, "%12", "%13", "%14")
WGMMA_TRANSPOSED_B(32, "%16", "%17", "%18")
WGMMA_TRANSPOSED_B(40, "%20", "%21", "%22")
WGMMA_TRANSPOSED_B(48, "%24", "%25", "%26")
WGMMA_TRANSPOSED_B(56, "%28", "%29", "%30")
WGMMA_TRANSPOSED_B(64, "%32", "%33", "%34")
#endif  // __CUDACC__
