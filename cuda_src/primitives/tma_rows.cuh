// TMA of five axes: a row longer than the swizzle's 128 bytes is an axis of pieces, and a box has whole rows.
#pragma once
#include "primitives/tma.cuh"
#ifndef __CUDACC__
#include "host/decode_host.h"
#else

// cp.async.bulk.tensor.5d, global -> shared: the box at element coordinates c0 ... c4 (innermost first). Elements outside of the
// tensor arrive as zeros. Its bytes (the whole box's) count towards `barrier`.
DEVICE void tma_load_5d(u32 smem, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
          smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
#endif  // __CUDACC__
