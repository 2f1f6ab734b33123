// The splits of an item merged through the shared memory of a thread block cluster (sm_90): nothing goes through global
// memory, no counter, no second launch. Split i is block i of its cluster. Each of the splits that have keys ("parts")
// merges an equal share of the item's vectors (four columns of a row): all send it what they have of them, and the m and l of
// all rows, and an mbarrier counts the bytes. Who has received everything is sent nothing more, so it may end before others.
#pragma once
#include "primitives/cluster.cuh"
#include "decode/tile.cuh"

// a / b, for 0 <= a < 2^20: the fraction of (a + 1/2) / b is further from 0 and 1 than rounding leads.
DEVICE int divide_small(int a, int b) { return int((float(a) + 0.5f) * rcp(float(b))); }

struct ClusterMerge {
  u32 smem;  // where the block's shared memory begins
  int rows, parts;
  int share;  // vectors of a part

  // By all threads of all parts, before anything is sent. (Nobody waits for blocks that have ended: splits without keys.)
  static DEVICE void begin(u32 smem, int thread) {
    if (thread == 0) {
      mbarrier_init(smem + SharedMemory::RECEIVED_BARRIER, 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
  }

  DEVICE ClusterMerge(u32 smem_, int rows_, int parts_)
      : smem(smem_), rows(rows_), parts(parts_), share(divide_small(rows_ * VECTORS + parts_ - 1, parts_)) {}

  DEVICE int first(int part) const { return part * share; }
  DEVICE int count(int part) const { return min(share, rows * VECTORS - first(part)); }

  DEVICE void send(int part, int i, const float (&o)[4]) const {
    const int to = divide_small(i, share);
    const u32 place = smem + SharedMemory::RECEIVED_O + (part * share + i - first(to)) * 16;
    st_async_vec4(cluster_address(place, to), accumulator_bits(o),
                  cluster_address(smem + SharedMemory::RECEIVED_BARRIER, to));
  }
  DEVICE void send_ml(int part, int to, int row, RowSums sums) const {
    st_async_vec2(cluster_address(smem + SharedMemory::RECEIVED_ML + (row * MAX_SPLITS + part) * 8, to),
                  sums.bits(), cluster_address(smem + SharedMemory::RECEIVED_BARRIER, to));
  }
  DEVICE void await(int part, int thread) const {
    const u32 barrier = smem + SharedMemory::RECEIVED_BARRIER;
    if (thread == 0) mbarrier_arrive_expect_tx(barrier, parts * (max(count(part), 0) * 16 + rows * 8));
    mbarrier_wait_cluster(barrier, 0);
  }

  // Adds vector `i` of the share of `part`, from all parts, to `o`. Returns the m and l of its row.
  DEVICE RowSums merge(int part, int i, float (&o)[4]) const {
    const u32 ml = smem + SharedMemory::RECEIVED_ML + (first(part) + i) / VECTORS * MAX_SPLITS * 8;
    RowSums whole = {NO_SCORE, 0.0f};
#pragma unroll 4
    for (int j = 0; j < parts; ++j) whole.m = fmaxf(whole.m, RowSums::load_m(ml + j * 8));
#pragma unroll 4
    for (int j = 0; j < parts; ++j) {
      const RowSums sums = RowSums::load(ml + j * 8);
      const vec4 o_part = ld_shared_vec4(smem + SharedMemory::RECEIVED_O + (j * share + i) * 16);
      const float weight = ex2(sums.m - whole.m);
      whole.l += sums.l * weight;
      o[0] += u32_as_float(o_part.x) * weight;
      o[1] += u32_as_float(o_part.y) * weight;
      o[2] += u32_as_float(o_part.z) * weight;
      o[3] += u32_as_float(o_part.w) * weight;
    }
    return whole;
  }
};
