// mma.sync: D += A B by one warp on the tensor cores (sm_80). With g = lane/4 and t = lane%4, the fragments are
//   D, C (16x8 f32):  d[0],d[1] = row g,   columns 2t, 2t+1;  d[2],d[3] = row g+8
//   A (16x16 16-bit): a[0] = row g, k 2t..; a[1] = row g+8, k 2t..; a[2] = row g, k 2t+8..; a[3] = row g+8, k 2t+8..
//   B (16x8 16-bit):  b0 = k 2t.., column g; b1 = k 2t+8.., column g
// so that two neighbouring D tiles, rounded to 16 bits, are an A operand: P needs no shuffle.
//
// A host executes queued products at the next warp-wide operation: call mma_fence() before D is read.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rna.tf32.f32: nearest tf32, ties away from zero, as a float32 bit pattern with 13 low zero bits.
DEVICE u32 cvt_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// tf32: A (16x8) a[0] = row g, k t; a[1] = row g+8, k t; a[2] = row g, k t+4; a[3] = row g+8, k t+4.
// B (8x8) b0 = k t, column g; b1 = k t+4, column g. The low 13 bits of every operand are ignored.
DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Nothing on a GPU; on a host, executes the warp's queued products.
DEVICE void mma_fence() {}
#endif  // __CUDACC__
