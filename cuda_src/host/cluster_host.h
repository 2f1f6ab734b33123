// Host twins of primitives/cluster.cuh: cluster_memory.cpp, cluster_barrier.cpp, mbarrier.cpp.
#pragma once
#include "host/primitives_host.h"

u32 cluster_rank();
void cluster_arrive(SITE);
void cluster_arrive_relaxed(SITE);
void cluster_wait(SITE);
u32 cluster_address(u32 smem, u32 rank, SITE);
void st_cluster_vec2(u32 address, vec2 v, SITE);
void st_cluster_vec4(u32 address, vec4 v, SITE);
void st_async_vec2(u32 address, vec2 v, u32 barrier, SITE);
void st_async_vec4(u32 address, vec4 v, u32 barrier, SITE);
void cluster_copy(u32 address, u32 smem, u32 bytes, u32 barrier, SITE);
void mbarrier_arrive_cluster_relaxed(u32 barrier, SITE);
