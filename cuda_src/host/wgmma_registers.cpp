#include "host/wgmma_registers.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {

void WgmmaRegisters::clear() {
  ranges_.clear();
  fences_ = 0;
}

void WgmmaRegisters::fence() {
  ++fences_;
  for (auto& [first, range] : ranges_) {
    range.fenced.clear();
    if (!range.products) range.fenced.assign(first, first + range.count);
  }
}

void WgmmaRegisters::use(Thread& thread, const void* registers, u32 count, Site site) {
  const u32* first = static_cast<const u32*>(registers);
  Range& range = ranges_[first];
  const bool known = range.count == count;
  range.count = count;
  if (range.products++) return;
  const bool fenced = known ? fences_ > range.back_at : fences_ > 0;
  const bool changed = known && !range.fenced.empty() && !std::equal(first, first + count, range.fenced.begin());
  if (fenced && !changed) return;
  report(*thread.block, "wgmma-fence", site, {"", 0}, [&] {
    return std::string(fenced ? "registers of the wgmma were written after the last wgmma.fence"
                              : "no wgmma.fence since the wgmma's registers were this thread's own") +
           ": " + describe(thread) + " at " + describe(site);
  });
}

void WgmmaRegisters::hand_back(const void* registers) {
  Range& range = ranges_.at(static_cast<const u32*>(registers));
  if (--range.products) return;
  range.back_at = fences_;
  range.fenced.clear();
}

void fence_warpgroup() {
  Thread& thread = current();
  if (thread.block->checked) thread.wgmma_registers.fence();
}

}  // namespace cufa_host
