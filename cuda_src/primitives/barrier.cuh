// Barriers among the threads of a block or of a warp.
#pragma once
#include "primitives/types.cuh"

// bar.sync id, count: wait until `num_threads` threads (whole warps) have arrived at barrier `id`.
DEVICE void bar_sync(int id, int num_threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory"); }

// bar.arrive id, count: arrive without waiting.
DEVICE void bar_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Whole block.
DEVICE void block_sync() { __syncthreads(); }

// Whole warp; orders shared-memory accesses among its lanes.
DEVICE void warp_sync() { __syncwarp(); }
