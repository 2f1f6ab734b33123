// Special registers, for traces and to save registers; and the atomic addition of persistent schedules.
#pragma once
#include "primitives/types.cuh"

// Nanoseconds, common to all SMs; ticks every 32 ns on Hopper.
DEVICE u64 global_timer() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

DEVICE u32 sm_id() {
  u32 id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  return id;
}

// threadIdx.x % 32, read each time: values derived from it are recomputed, not kept in a register.
DEVICE int lane_id() {
  int id;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(id));
  return id;
}

// threadIdx.x, read each time.
DEVICE int thread_id() {
  int id;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(id));
  return id;
}

DEVICE u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
