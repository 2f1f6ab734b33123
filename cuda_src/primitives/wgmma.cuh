// wgmma: D += A B by a warpgroup (four consecutive warps, 128 threads) on the tensor cores of sm_90a, asynchronously.
// A is 64 x 16, B is 16 x N, D is 64 x N in float32: warp w of the group holds rows 16w ... 16w + 15 laid out as in
// mma.sync (mma.cuh), N / 8 tiles side by side: d[4n ... 4n + 3] is tile n.
//
// Operands in shared memory are named by 64-bit descriptors (wgmma/operands.cuh). They are read and D is written
// while the threads run on: between the first wgmma and the wait that covers it nothing may touch D or A's registers.
// wgmma_fence() goes before the first wgmma after such registers were written; wgmma_registers() after the wait,
// to keep the compiler from moving accesses across it.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/hopper_host.h"
#else

// wgmma.fence: registers written before it are seen by the wgmma after it.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the products issued since the last commit become one group.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: all groups but the `PENDING` youngest are complete.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: tells the compiler that a wgmma in flight owned these registers up to here.
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

// D's registers for each N, as operands and as constraints.
#define WGMMA_D8 "%0,%1,%2,%3"
#define WGMMA_C8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_D16 WGMMA_D8 ",%4,%5,%6,%7"
#define WGMMA_C16 WGMMA_C8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_D24 WGMMA_D16 ",%8,%9,%10,%11"
#define WGMMA_C24 WGMMA_C16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_D32 WGMMA_D24 ",%12,%13,%14,%15"
#define WGMMA_C32 WGMMA_C24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_D40 WGMMA_D32 ",%16,%17,%18,%19"
#define WGMMA_C40 WGMMA_C32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_D48 WGMMA_D40 ",%20,%21,%22,%23"
#define WGMMA_C48 WGMMA_C40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_D56 WGMMA_D48 ",%24,%25,%26,%27"
#define WGMMA_C56 WGMMA_C48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_D64 WGMMA_D56 ",%28,%29,%30,%31"
#define WGMMA_C64 WGMMA_C56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_D72 WGMMA_D64 ",%32,%33,%34,%35"
#define WGMMA_C72 WGMMA_C64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_D80 WGMMA_D72 ",%36,%37,%38,%39"
#define WGMMA_C80 WGMMA_C72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_D88 WGMMA_D80 ",%40,%41,%42,%43"
#define WGMMA_C88 WGMMA_C80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_D96 WGMMA_D88 ",%44,%45,%46,%47"
#define WGMMA_C96 WGMMA_C88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_D104 WGMMA_D96 ",%48,%49,%50,%51"
#define WGMMA_C104 WGMMA_C96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_D112 WGMMA_D104 ",%52,%53,%54,%55"
#define WGMMA_C112 WGMMA_C104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_D120 WGMMA_D112 ",%56,%57,%58,%59"
#define WGMMA_C120 WGMMA_C112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_D128 WGMMA_D120 ",%60,%61,%62,%63"
#define WGMMA_C128 WGMMA_C120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_D136 WGMMA_D128 ",%64,%65,%66,%67"
#define WGMMA_C136 WGMMA_C128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_D144 WGMMA_D136 ",%68,%69,%70,%71"
#define WGMMA_C144 WGMMA_C136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_D152 WGMMA_D144 ",%72,%73,%74,%75"
#define WGMMA_C152 WGMMA_C144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_D160 WGMMA_D152 ",%76,%77,%78,%79"
#define WGMMA_C160 WGMMA_C152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_D168 WGMMA_D160 ",%80,%81,%82,%83"
#define WGMMA_C168 WGMMA_C160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_D176 WGMMA_D168 ",%84,%85,%86,%87"
#define WGMMA_C176 WGMMA_C168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_D184 WGMMA_D176 ",%88,%89,%90,%91"
#define WGMMA_C184 WGMMA_C176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_D192 WGMMA_D184 ",%92,%93,%94,%95"
#define WGMMA_C192 WGMMA_C184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_D200 WGMMA_D192 ",%96,%97,%98,%99"
#define WGMMA_C200 WGMMA_C192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_D208 WGMMA_D200 ",%100,%101,%102,%103"
#define WGMMA_C208 WGMMA_C200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_D216 WGMMA_D208 ",%104,%105,%106,%107"
#define WGMMA_C216 WGMMA_C208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_D224 WGMMA_D216 ",%108,%109,%110,%111"
#define WGMMA_C224 WGMMA_C216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_D232 WGMMA_D224 ",%112,%113,%114,%115"
#define WGMMA_C232 WGMMA_C224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_D240 WGMMA_D232 ",%116,%117,%118,%119"
#define WGMMA_C240 WGMMA_C232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_D248 WGMMA_D240 ",%120,%121,%122,%123"
#define WGMMA_C248 WGMMA_C240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_D256 WGMMA_D248 ",%124,%125,%126,%127"
#define WGMMA_C256 WGMMA_C248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// One specialisation; R0 ... R6 are the operand numbers that follow D's.
#define WGMMA_TYPE(N, BF16, TYPE, R0, R1, R2, R3, R4, R5, R6)                                                    \
  template <>                                                                                                    \
  struct Wgmma<N, BF16> {                                                                                        \
    template <bool ACCUMULATE>                                                                                   \
    static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b) {                                                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " R2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N               \
                   "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "}, " R0 ", " R1 ", p, 1, 1, 0, 0;}"                 \
                   : WGMMA_C##N : "l"(a), "l"(b), "n"(int(ACCUMULATE)));                                         \
    }                                                                                                            \
    template <bool ACCUMULATE, bool TRANSPOSED>                                                                  \
    static DEVICE void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {                            \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " R5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N               \
                   "k16.f32." TYPE "." TYPE " {" WGMMA_D##N "}, {" R0 "," R1 "," R2 "," R3 "}, " R4              \
                   ", p, 1, 1, " R6 ";}"                                                                         \
                   : WGMMA_C##N : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(int(ACCUMULATE)), "n"(int(TRANSPOSED))); \
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
