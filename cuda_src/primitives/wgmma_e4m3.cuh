// wgmma of two e4m3 operands: D (64 x N, float32) += A (64 x 32) B (32 x N), both with k along their rows.
//
// The accumulators of the tensor core keep about 14 bits of a sum's largest term.
#pragma once
#include "primitives/types.cuh"
#include "primitives/wgmma.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// wgmma.mma_async.m64nNk32. `ss`: A and B in shared memory; `rs`: A in four registers: bytes k = 4t ... 4t + 3 of rows g and
// g + 8, then bytes 16 + 4t ... of both, of lane 4g + t. With ACCUMULATE false D is overwritten.
template <int N>
struct WgmmaE4m3;

#define WGMMA_E4M3(N, R0, R1, R2, R3, R4, R5, UNUSED)                                                             \
  template <>                                                                                                    \
  struct WgmmaE4m3<N> {                                                                                          \
    template <bool ACCUMULATE>                                                                                   \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " R2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N               \
                   "k32.f32.e4m3.e4m3 " WGMMA_D(N) ", " R0 ", " R1 ", p, 1, 1;}"                                 \
                   : WGMMA_C(N) : "l"(a), "l"(b), "n"(int(ACCUMULATE)));                                         \
    }                                                                                                            \
    template <bool ACCUMULATE>                                                                                   \
    static DEVICE void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {                            \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " R5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N               \
                   "k32.f32.e4m3.e4m3 " WGMMA_D(N) ", {" R0 "," R1 "," R2 "," R3 "}, " R4 ", p, 1, 1;}"          \
                   : WGMMA_C(N) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(int(ACCUMULATE)));             \
    }                                                                                                            \
  };

WGMMA_E4M3(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA_E4M3(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA_E4M3(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA_E4M3(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_E4M3(72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
WGMMA_E4M3(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA_E4M3(88, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
WGMMA_E4M3(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA_E4M3(104, "%52", "%53", "%54", "%55", "%56", "%57", "%58")
WGMMA_E4M3(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA_E4M3(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
WGMMA_E4M3(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA_E4M3(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
WGMMA_E4M3(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA_E4M3(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
WGMMA_E4M3(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA_E4M3(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
WGMMA_E4M3(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
WGMMA_E4M3(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
WGMMA_E4M3(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#endif  // __CUDACC__
