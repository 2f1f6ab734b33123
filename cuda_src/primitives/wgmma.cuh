// wgmma: D += A B by a warpgroup (four consecutive warps, 128 threads) on the tensor cores of sm_90a, asynchronously.
// A is 64 x 16, B is 16 x N, D is 64 x N in float32: warp w of the group holds rows 16w ... 16w + 15 laid out as in
// mma.sync (mma.cuh), N / 8 tiles side by side: d[4n ... 4n + 3] is tile n.
//
// 64-bit descriptors name operands in shared memory (wgmma/operands.cuh). wgmma reads operands and writes D while the threads
// continue: from the first wgmma to the wait for its group, the threads may not touch D or A's registers. wgmma_fence() comes
// after writes to such registers and before the next wgmma; wgmma_registers() after the wait keeps the compiler from moving
// accesses across the wait.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// wgmma.fence: the next wgmma sees the registers written before the fence.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the products issued since the last commit become one group.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: all groups but the `PENDING` youngest are complete.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: tells the compiler that a wgmma in flight has owned these registers until now.
template <int COUNT>
DEVICE void wgmma_registers(float (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int COUNT>
DEVICE void wgmma_registers(u32 (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// wgmma.mma_async.m64nNk16 for every N: `ss` takes A and B from shared memory, both with k along the rows; `rs` takes A
// from registers, B with k along the rows or, TRANSPOSED, across them. With ACCUMULATE false D is overwritten.
template <int N, bool BF16>
struct Wgmma;

// F of each register of D but the first, whose text begins with a comma.
#define WGMMA_REST8(F) F(1) F(2) F(3)
#define WGMMA_REST16(F) WGMMA_REST8(F) F(4) F(5) F(6) F(7)
#define WGMMA_REST24(F) WGMMA_REST16(F) F(8) F(9) F(10) F(11)
#define WGMMA_REST32(F) WGMMA_REST24(F) F(12) F(13) F(14) F(15)
#define WGMMA_REST40(F) WGMMA_REST32(F) F(16) F(17) F(18) F(19)
#define WGMMA_REST48(F) WGMMA_REST40(F) F(20) F(21) F(22) F(23)
#define WGMMA_REST56(F) WGMMA_REST48(F) F(24) F(25) F(26) F(27)
#define WGMMA_REST64(F) WGMMA_REST56(F) F(28) F(29) F(30) F(31)
#define WGMMA_REST72(F) WGMMA_REST64(F) F(32) F(33) F(34) F(35)
#define WGMMA_REST80(F) WGMMA_REST72(F) F(36) F(37) F(38) F(39)
#define WGMMA_REST88(F) WGMMA_REST80(F) F(40) F(41) F(42) F(43)
#define WGMMA_REST96(F) WGMMA_REST88(F) F(44) F(45) F(46) F(47)
#define WGMMA_REST104(F) WGMMA_REST96(F) F(48) F(49) F(50) F(51)
#define WGMMA_REST112(F) WGMMA_REST104(F) F(52) F(53) F(54) F(55)
#define WGMMA_REST120(F) WGMMA_REST112(F) F(56) F(57) F(58) F(59)
#define WGMMA_REST128(F) WGMMA_REST120(F) F(60) F(61) F(62) F(63)
#define WGMMA_REST136(F) WGMMA_REST128(F) F(64) F(65) F(66) F(67)
#define WGMMA_REST144(F) WGMMA_REST136(F) F(68) F(69) F(70) F(71)
#define WGMMA_REST152(F) WGMMA_REST144(F) F(72) F(73) F(74) F(75)
#define WGMMA_REST160(F) WGMMA_REST152(F) F(76) F(77) F(78) F(79)
#define WGMMA_REST168(F) WGMMA_REST160(F) F(80) F(81) F(82) F(83)
#define WGMMA_REST176(F) WGMMA_REST168(F) F(84) F(85) F(86) F(87)
#define WGMMA_REST184(F) WGMMA_REST176(F) F(88) F(89) F(90) F(91)
#define WGMMA_REST192(F) WGMMA_REST184(F) F(92) F(93) F(94) F(95)
#define WGMMA_REST200(F) WGMMA_REST192(F) F(96) F(97) F(98) F(99)
#define WGMMA_REST208(F) WGMMA_REST200(F) F(100) F(101) F(102) F(103)
#define WGMMA_REST216(F) WGMMA_REST208(F) F(104) F(105) F(106) F(107)
#define WGMMA_REST224(F) WGMMA_REST216(F) F(108) F(109) F(110) F(111)
#define WGMMA_REST232(F) WGMMA_REST224(F) F(112) F(113) F(114) F(115)
#define WGMMA_REST240(F) WGMMA_REST232(F) F(116) F(117) F(118) F(119)
#define WGMMA_REST248(F) WGMMA_REST240(F) F(120) F(121) F(122) F(123)
#define WGMMA_REST256(F) WGMMA_REST248(F) F(124) F(125) F(126) F(127)
#define WGMMA_OPERAND(I) ",%" #I
#define WGMMA_REGISTER(I) , "+f"(d[I])
#define WGMMA_D(N) "{%0" WGMMA_REST##N(WGMMA_OPERAND) "}"
#define WGMMA_C(N) "+f"(d[0]) WGMMA_REST##N(WGMMA_REGISTER)

// One specialisation; R0 ... R6 are the operand numbers that follow D's.
#define WGMMA_TYPE(N, BF16, TYPE, R0, R1, R2, R3, R4, R5, R6)                                                    \
  template <>                                                                                                    \
  struct Wgmma<N, BF16> {                                                                                        \
    template <bool ACCUMULATE>                                                                                   \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " R2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N               \
                   "k16.f32." TYPE "." TYPE " " WGMMA_D(N) ", " R0 ", " R1 ", p, 1, 1, 0, 0;}"                   \
                   : WGMMA_C(N) : "l"(a), "l"(b), "n"(int(ACCUMULATE)));                                         \
    }                                                                                                            \
    template <bool ACCUMULATE, bool TRANSPOSED>                                                                  \
    static DEVICE void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {                            \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " R5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N               \
                   "k16.f32." TYPE "." TYPE " " WGMMA_D(N) ", {" R0 "," R1 "," R2 "," R3 "}, " R4                \
                   ", p, 1, 1, " R6 ";}"                                                                         \
                   : WGMMA_C(N) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(int(ACCUMULATE)), "n"(int(TRANSPOSED))); \
    }                                                                                                            \
  };
#define WGMMA_N(N, ...)                    \
  WGMMA_TYPE(N, false, "f16", __VA_ARGS__) \
  WGMMA_TYPE(N, true, "bf16", __VA_ARGS__)

WGMMA_N(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA_N(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA_N(24, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
WGMMA_N(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA_N(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
WGMMA_N(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA_N(56, "%28", "%29", "%30", "%31", "%32", "%33", "%34")
WGMMA_N(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_N(72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
WGMMA_N(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA_N(88, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
WGMMA_N(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA_N(104, "%52", "%53", "%54", "%55", "%56", "%57", "%58")
WGMMA_N(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA_N(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
WGMMA_N(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA_N(136, "%68", "%69", "%70", "%71", "%72", "%73", "%74")
WGMMA_N(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
WGMMA_N(152, "%76", "%77", "%78", "%79", "%80", "%81", "%82")
WGMMA_N(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA_N(168, "%84", "%85", "%86", "%87", "%88", "%89", "%90")
WGMMA_N(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
WGMMA_N(184, "%92", "%93", "%94", "%95", "%96", "%97", "%98")
WGMMA_N(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA_N(200, "%100", "%101", "%102", "%103", "%104", "%105", "%106")
WGMMA_N(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
WGMMA_N(216, "%108", "%109", "%110", "%111", "%112", "%113", "%114")
WGMMA_N(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
WGMMA_N(232, "%116", "%117", "%118", "%119", "%120", "%121", "%122")
WGMMA_N(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
WGMMA_N(248, "%124", "%125", "%126", "%127", "%128", "%129", "%130")
WGMMA_N(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#endif  // __CUDACC__
