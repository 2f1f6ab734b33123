#include "host/tensor_core.h"

#include <algorithm>
#include <cstring>

#include "host/fragments.h"
#include "host/runtime.h"

namespace cufa_host {

void ProductQueue::push(int lane, Format format, float* d, const u32* a, u32 b0, u32 b1, bool guard, Site site) {
  const u32 n = count_[lane]++;
  if (n == entries_.size()) entries_.emplace_back();
  Entry& entry = entries_[n];
  for (int i = 0; i < 4; ++i) entry.a[i][lane] = a[i];
  const int transposed = (lane % 4) * 8 + lane / 4;
  entry.b[0][transposed] = b0;
  entry.b[1][transposed] = b1;
  entry.d[lane] = d;
  entry.first &= ~(1u << lane);
  if (guard && float_as_u32(d[0]) != kPoison) {
    entry.first |= 1u << lane;
    std::memcpy(entry.kept[lane], d, 16);
    for (int i = 0; i < 4; ++i) d[i] = u32_as_float(kPoison);
  }
  entry.format = format;
  entry.site = site;
}

void ProductQueue::restore(Block& block, Warp& warp, const Entry& entry) {
  for (u32 lanes = entry.first; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    float* d = entry.d[lane];
    if (std::any_of(d, d + 4, [](float x) { return float_as_u32(x) != kPoison; })) {
      report(block, "accumulator-touched", entry.site, {}, [&] {
        return text_of("accumulators of the mma at ", entry.site, " were written before mma_fence(): ", block.thread(warp, lane));
      });
      return;
    }
    std::memcpy(d, entry.kept[lane], 16);
  }
}

template <typename Element>
void ProductQueue::multiply(Block& block, const Entry& entry) {
  constexpr int kPer = kPerWord<Element>, kHalf = kWidth<Element>;
  alignas(32) float A[4][8][kHalf];
  float columns[2][4][8][kPer];  // [half of K][t][column][k % kPer]
  Row B[2 * kHalf], C[16];
  widen<Element>(entry.a[0], 128, &A[0][0][0]);
  widen<Element>(entry.b[0], 64, &columns[0][0][0][0]);
  for (int k = 0; k < 2 * kHalf; ++k) {
    for (int column = 0; column < 8; ++column) B[k][column] = columns[k / kHalf][k % kHalf / kPer][column][k % kPer];
  }
  gather_rows(entry.d, 0, C);
  multiply_add<kHalf>(A, B, C);
  scatter_rows(C, entry.d, 0);
  block.counters.products += 16 * 8 * 2 * kHalf;
}

void ProductQueue::execute(Block& block, Warp& warp) {
  const u32 n = count_[0];
  for (const u32 other : count_) {
    if (other == n) continue;
    abandon(block, "divergence", entries_[0].site,
            text_of("mma at ", entries_[0].site, " was executed by some lanes of warp ", warp.index,
                    " only: all 32 must reach it together"));
  }
  for (u32 i = 0; i < n; ++i) {
    const Entry& entry = entries_[i];
    if (block.checked) restore(block, warp, entry);
    with_element(entry.format, [&](auto element) { multiply<decltype(element)>(block, entry); });
  }
  block.counters.mma += n;
  clear();
}

static void queue(Format format, float* d, const u32* a, u32 b0, u32 b1, Site site) {
  Thread& thread = current();
  thread.warp->products.push(thread.lane, format, d, a, b0, b1, thread.block->checked, site);
}

}  // namespace cufa_host

void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  queue(Format::f16, d, a, b0, b1, site);
}
void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  queue(Format::bf16, d, a, b0, b1, site);
}
void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  queue(Format::tf32, d, a, b0, b1, site);
}
void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  queue(Format::e4m3, d, a, b0, b1, site);
}
void mma_fence(Site site) {
  static const Collective kFence = {"mma_fence", [](Block&, Warp&) {}, false};
  rendezvous(current(), kFence, site);  // a rendezvous executes the queued products
}
