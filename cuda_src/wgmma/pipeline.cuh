// What a producer and its consumers share: rings of buffers in shared memory, and which item comes next.
#pragma once
#include "primitives/mbarrier.cuh"
#include "primitives/tma.cuh"
#include "shared/phases.cuh"
#include "wgmma/operands.cuh"

// A ring of buffers, each with a full and an empty mbarrier, and the position of one thread in it: the stage, and the parity of
// its mbarrier phase.
template <int STAGES>
struct RingCursor {
  u32 full, empty;  // the first mbarrier of each kind
  int stage = 0;
  u32 phase = 0;

  // By one thread. A phase completes with the arrivals of `writers` threads that fill a buffer, or `readers` warps that read it.
  DEVICE void init(u32 writers, u32 readers) const {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, writers);
      mbarrier_init(empty + 8 * i, readers);
    }
  }
  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  DEVICE u32 full_barrier() const { return full + stage * 8; }
  DEVICE void wait_full() const { mbarrier_wait(full + stage * 8, phase); }
  DEVICE void wait_empty() const { mbarrier_wait(empty + stage * 8, phase ^ 1); }
  // The waits, as an inside trace shows them.
  DEVICE void wait_full(PhaseLog& log, u32 tile) const {
    log.enter(WAIT_DATA, tile);
    wait_full();
  }
  DEVICE void wait_empty(PhaseLog& log, u32 tile) const {
    log.enter(WAIT_SPACE, tile);
    wait_empty();
    log.enter(COPY, tile);
  }
  DEVICE void release(int lane) const {
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
  }
};

// wgmma.commit_group and wgmma.wait_group, as an inside trace shows them. `products`: SCORES, VALUES, ... (shared/phases.cuh)
DEVICE void wgmma_commit(PhaseLog& log, u32 products, u32 tile) {
  wgmma_commit();
  log.in_flight(products, tile);
}
template <int PENDING>
DEVICE void wgmma_wait(PhaseLog& log, u32 tile) {
  log.enter(WAIT_PRODUCTS, tile);
  wgmma_wait<PENDING>();
}

// Asks TMA for a tile of ROWS rows from `row` on, as wgmma takes it.
template <int ROWS, int COLUMNS>
DEVICE void load_tile(u32 tile, u32 full_barrier, const TensorMap* map, int row, int head, int batch) {
  mbarrier_arrive_expect_tx(full_barrier, wgmma_tile_bytes(ROWS, COLUMNS));
  for (int a = 0; a < atoms(COLUMNS); ++a) {
    tma_load_4d(tile + a * ROWS * ATOM_ROW_BYTES, map, full_barrier, a * ATOM_COLUMNS, row, head, batch);
  }
}

// By a warp: rows `first` to the last of such a tile become zeros.
template <int ROWS, int COLUMNS>
DEVICE void clear_rows(u32 tile, int first, int lane) {
  constexpr int UNITS = ATOM_ROW_BYTES / 16;  // of a row of an atom, in some order
  for (int i = first * UNITS + lane; i < ROWS * UNITS; i += 32) {
    for (int a = 0; a < atoms(COLUMNS); ++a) st_shared_vec4(tile + a * ROWS * ATOM_ROW_BYTES + i * 16, {0, 0, 0, 0});
  }
}

constexpr int NO_MORE_ITEMS = -1;  // in place of the block of an item descriptor: the thread block has no more work items
