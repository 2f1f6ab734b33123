#include "host/owners.h"

#include "host/runtime.h"

namespace cufa_host {

Owners::Owners(const CufaLaunch& launch) : launch_(launch), owner_(launch.num_arrays) {
  if (launch.mode != kChecked) return;
  for (int i = 0; i < launch.num_arrays; ++i) {
    const CufaArray& array = launch.arrays[i];
    if (array.writable) owner_[i].reset(new std::atomic<u32>[array.bytes / array.granule + 1]());
  }
}

void Owners::access(Thread& thread, int index, const void* global, u32 bytes, Access kind, Site site) {
  if (kind == Access::atomic) return;
  const CufaArray& array = launch_.arrays[index];
  const Index3 b = thread.block_index;
  const u32 me = 1 + b.x + launch_.grid[0] * (b.y + launch_.grid[1] * b.z);
  const u64 begin = reinterpret_cast<u64>(global) - reinterpret_cast<u64>(array.begin);
  for (u64 i = begin / array.granule; i <= (begin + bytes - 1) / array.granule; ++i) {
    std::atomic<u32>& owner = owner_[index][i];
    const u32 other = kind == Access::read ? owner.load() : owner.exchange(me);
    if (other == 0 || other == me) continue;
    report(*thread.block, "race", site, {"other block", 0}, [&] {
      return "blocks " + std::to_string(other - 1) + " and " + std::to_string(me - 1) + " of one launch both touch " +
             global_place(launch_, global, bytes) + ": " + describe(thread) + " at " + describe(site);
    });
    return;
  }
}

}  // namespace cufa_host
