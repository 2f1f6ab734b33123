// Host twins of primitives/cluster.cuh.
#pragma once
#include "host/primitives_host.h"

namespace cufa_host {

// cluster_memory.cpp
u32 cluster_block_rank();
u32 address_in_cluster(u32 smem, u32 rank, Site site);
void store_cluster(u32 address, const void* value, u32 bytes, Site site);
void store_async(u32 address, const void* value, u32 bytes, u32 barrier, Site site);
void copy_in_cluster(u32 address, u32 smem, u32 bytes, u32 barrier, Site site);

// mbarrier.cpp
void arrive_in_cluster(u32 barrier, Site site);

// cluster_barrier.cpp
void arrive_at_cluster(bool release, Site site);
void wait_for_cluster(Site site);

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

DEVICE u32 cluster_rank() { return cufa_host::cluster_block_rank(); }
DEVICE void cluster_arrive(SITE) { cufa_host::arrive_at_cluster(true, site); }
DEVICE void cluster_arrive_relaxed(SITE) { cufa_host::arrive_at_cluster(false, site); }
DEVICE void cluster_wait(SITE) { cufa_host::wait_for_cluster(site); }
DEVICE u32 cluster_address(u32 smem, u32 rank, SITE) { return cufa_host::address_in_cluster(smem, rank, site); }
DEVICE void st_cluster_vec2(u32 address, vec2 v, SITE) { cufa_host::store_cluster(address, &v, 8, site); }
DEVICE void st_cluster_vec4(u32 address, vec4 v, SITE) { cufa_host::store_cluster(address, &v, 16, site); }
DEVICE void st_async_vec2(u32 address, vec2 v, u32 barrier, SITE) {
  cufa_host::store_async(address, &v, 8, barrier, site);
}
DEVICE void st_async_vec4(u32 address, vec4 v, u32 barrier, SITE) {
  cufa_host::store_async(address, &v, 16, barrier, site);
}
DEVICE void cluster_copy(u32 address, u32 smem, u32 bytes, u32 barrier, SITE) {
  cufa_host::copy_in_cluster(address, smem, bytes, barrier, site);
}
DEVICE void mbarrier_arrive_cluster_relaxed(u32 barrier, SITE) { cufa_host::arrive_in_cluster(barrier, site); }

#undef SITE
