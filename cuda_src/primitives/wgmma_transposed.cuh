// wgmma with both operands in shared memory and k across the rows of one, as K lies with keys down the rows. WgmmaTransposedB: of B,
// for dQ = dS K. WgmmaTransposedA: of A, for dQ^T = K^T dS^T, 64 columns of K being the 64 rows of A. The other operand has k along
// its rows, and everything else is as wgmma.cuh says.
#pragma once
#include "primitives/wgmma.cuh"
#ifndef __CUDACC__
#include "host/backward_hopper_host.h"
#else

template <int N, bool BF16>
struct WgmmaTransposedA;
template <int N, bool BF16>
struct WgmmaTransposedB;

// One specialisation; FLAGS say of A and of B whether k is across the rows.
#define WGMMA_TRANSPOSED_TYPE(OPERAND, FLAGS, N, BF16, TYPE, A, B, ACCUMULATE)                                     \
  template <>                                                                                                      \
  struct WgmmaTransposed##OPERAND<N, BF16> {                                                                       \
    template <bool ACCUMULATES>                                                                                    \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                   "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "}, " A ", " B ", p, 1, 1, " FLAGS ";}"                \
                   : WGMMA_C##N : "l"(a), "l"(b), "n"(int(ACCUMULATES)));                                          \
    }                                                                                                              \
  };
#define WGMMA_TRANSPOSED_A(N, ...)                               \
  WGMMA_TRANSPOSED_TYPE(A, "1, 0", N, false, "f16", __VA_ARGS__) \
  WGMMA_TRANSPOSED_TYPE(A, "1, 0", N, true, "bf16", __VA_ARGS__)
#define WGMMA_TRANSPOSED_B(N, ...)                               \
  WGMMA_TRANSPOSED_TYPE(B, "0, 1", N, false, "f16", __VA_ARGS__) \
  WGMMA_TRANSPOSED_TYPE(B, "0, 1", N, true, "bf16", __VA_ARGS__)

WGMMA_TRANSPOSED_A(80, "%40", "%41", "%42")

WGMMA_TRANSPOSED_B(8, "%4", "%5", "%6")
WGMMA_TRANSPOSED_B(16, "%8", "%9", "%10")
WGMMA_TRANSPOSED_B(24, "%12", "%13", "%14")
WGMMA_TRANSPOSED_B(32, "%16", "%17", "%18")
WGMMA_TRANSPOSED_B(40, "%20", "%21", "%22")
WGMMA_TRANSPOSED_B(48, "%24", "%25", "%26")
WGMMA_TRANSPOSED_B(56, "%28", "%29", "%30")
WGMMA_TRANSPOSED_B(64, "%32", "%33", "%34")
WGMMA_TRANSPOSED_B(96, "%48", "%49", "%50")
WGMMA_TRANSPOSED_B(128, "%64", "%65", "%66")
#endif  // __CUDACC__
