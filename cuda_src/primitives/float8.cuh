// e4m3, the 8-bit float with four bits of exponent and three of mantissa (sm_89).
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

// cvt.rn.f16x2.e4m3x2: exact. The lower byte goes to the lower half.
DEVICE u32 cvt_f16x2_e4m3x2(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
}

// cvt.rn.satfinite.e4m3x2.f32: `lo` goes to the lower byte of 16 bits. Beyond 448, infinity included, becomes 448 with its sign.
DEVICE u32 cvt_e4m3x2(float lo, float hi) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

// mma.sync with e4m3: D += A B. Fragments as bytes of k: with g = lane/4 and t = lane%4
//   D, C (16x8 f32): as in mma.cuh
//   A (16x32): a[0] = row g, k 4t..4t+3; a[1] = row g+8, the same k; a[2], a[3] = the same rows, k 16+4t..
//   B (32x8):  b0 = k 4t..4t+3, column g; b1 = k 16+4t.., column g
DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif  // __CUDACC__
