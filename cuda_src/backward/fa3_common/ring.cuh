// Rings of buffers in shared memory whose position is computed from the number of a tile.
#pragma once
#include "primitives/mbarrier.cuh"

// A ring of buffers, each with a full and an empty mbarrier. Tile n takes stage n % STAGES in mbarrier phase n / STAGES: a
// position computed from n takes no registers between tiles. (wgmma/pipeline.cuh has a ring whose position is kept.)
template <int STAGES>
struct Ring {
  u32 full, empty;  // the first mbarrier of each kind

  // By one thread. A phase completes with the arrivals of `writers` threads that fill a buffer, or `readers` warps that read it.
  DEVICE void init(u32 writers, u32 readers) const {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, writers);
      mbarrier_init(empty + 8 * i, readers);
    }
  }
  DEVICE static u32 stage(u32 n) { return n % STAGES; }
  DEVICE u32 full_barrier(u32 n) const { return full + stage(n) * 8; }
  DEVICE void wait_full(u32 n) const { mbarrier_wait(full_barrier(n), n / STAGES & 1); }
  // Buffers begin empty: the first STAGES fills wait for no release.
  DEVICE void wait_empty(u32 n) const { mbarrier_wait(empty + stage(n) * 8, (n / STAGES & 1) ^ 1); }
  DEVICE void release(u32 n, int lane) const {  // by every warp, once all its lanes have read the buffer
    if (lane == 0) mbarrier_arrive(empty + stage(n) * 8);
  }
};
