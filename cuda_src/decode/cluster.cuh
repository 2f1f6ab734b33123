// CLUSTER_MERGE: the splits of a work item are merged through the shared memory of a thread block cluster (sm_90), without global
// memory, a counter or a second launch. Split i is block i of its cluster. Each split that has keys merges an equal share of the
// work item's vectors (four columns of a row): every split sends this share of its partial O, and m and l of all rows, to the
// merging block, whose mbarrier counts the bytes. When the mbarrier's phase completes, no other block writes to this block's
// shared memory any more: the block may end before the others.
#pragma once
#include "primitives/cluster.cuh"
#include "decode/tile.cuh"

// a / b, exact for 0 <= a < 2^20: (a + 1/2) / b is further from an integer than the rounding error.
DEVICE int divide_small(int a, int b) { return int((float(a) + 0.5f) * rcp(float(b))); }

struct ClusterMerge {
  u32 smem;          // begin of the block's shared memory
  int rows, splits;  // valid rows of the work item; splits that have keys
  int share;         // vectors that one split merges

  // All threads of splits with keys call this before any send. Splits without keys have exited: cluster barriers skip them.
  static DEVICE void begin(u32 smem, int thread) {
    if (thread == 0) {
      mbarrier_init(smem + SharedMemory::RECEIVED_BARRIER, 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
  }

  DEVICE ClusterMerge(u32 smem_, int rows_, int splits_)
      : smem(smem_), rows(rows_), splits(splits_), share(divide_small(rows_ * VECTORS + splits_ - 1, splits_)) {}

  DEVICE int first(int split) const { return split * share; }
  DEVICE int count(int split) const { return min(share, rows * VECTORS - first(split)); }

  DEVICE void send(int split, int i, const float (&o)[4]) const {
    const int to = divide_small(i, share);
    const u32 place = smem + SharedMemory::RECEIVED_O + (split * share + i - first(to)) * 16;
    st_async_vec4(cluster_address(place, to), accumulator_bits(o),
                  cluster_address(smem + SharedMemory::RECEIVED_BARRIER, to));
  }
  DEVICE void send_ml(int split, int to, int row, RowSums sums) const {
    st_async_vec2(cluster_address(smem + SharedMemory::RECEIVED_ML + (row * MAX_SPLITS + split) * 8, to),
                  sums.bits(), cluster_address(smem + SharedMemory::RECEIVED_BARRIER, to));
  }
  DEVICE void await(int split, int thread) const {
    const u32 barrier = smem + SharedMemory::RECEIVED_BARRIER;
    if (thread == 0) mbarrier_arrive_expect_tx(barrier, splits * (max(count(split), 0) * 16 + rows * 8));
    mbarrier_wait_cluster(barrier, 0);
  }

  // Adds every split's partial result of vector `i` of this split's share to `o`. Returns the merged m and l of the row.
  DEVICE RowSums merge(int split, int i, float (&o)[4]) const {
    const u32 ml = smem + SharedMemory::RECEIVED_ML + (first(split) + i) / VECTORS * MAX_SPLITS * 8;
    RowSums whole = {NO_SCORE, 0.0f};
#pragma unroll 4
    for (int j = 0; j < splits; ++j) whole.m = fmaxf(whole.m, RowSums::load_m(ml + j * 8));
#pragma unroll 4
    for (int j = 0; j < splits; ++j) {
      const RowSums sums = RowSums::load(ml + j * 8);
      const vec4 x = ld_shared_vec4(smem + SharedMemory::RECEIVED_O + (j * share + i) * 16);
      const float weight = ex2(sums.m - whole.m);
      whole.l += sums.l * weight;
      o[0] += u32_as_float(x.x) * weight;
      o[1] += u32_as_float(x.y) * weight;
      o[2] += u32_as_float(x.z) * weight;
      o[3] += u32_as_float(x.w) * weight;
    }
    return whole;
  }
};
