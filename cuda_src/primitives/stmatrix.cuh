// stmatrix (sm_90): ldmatrix the other way. A warp stores four 8x8 matrices of 16-bit elements, held as mma fragments, to
// shared memory. Lane i gives the address of row i%8 of matrix i/8; every row is 16 aligned bytes.
#pragma once
#include "primitives/types.cuh"
#ifndef __CUDACC__
#include "host/primitives_host.h"
#else

DEVICE void stmatrix_x4(u32 smem, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

// The transposed form: lane i holds elements of a column, which is how P^T and dS^T are stored from accumulators of P and dS.
DEVICE void stmatrix_x4_trans(u32 smem, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif  // __CUDACC__
