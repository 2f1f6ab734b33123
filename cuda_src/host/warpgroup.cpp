#include "host/warpgroup.h"

#include <algorithm>

#include "host/fragments.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

// A wgmma operand in shared memory, decoded from its 64-bit descriptor. The swizzle is always that of 128 bytes.
struct Operand64 {
  u32 start, leading, stride;
  explicit Operand64(u64 descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {}
  // The 128-byte swizzle works on addresses: bits 4-6 are XORed with bits 7-9.
  static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
  // 16 bytes: k = 8 kb ... 8 kb + 7 of a row.
  u32 k_major(int row, int kb) const { return swizzled(start + row / 8 * stride + row % 8 * 128 + kb * 16); }
  // 16 bytes: columns 8 j ... 8 j + 7 of row k.
  u32 mn_major(int k, int j) const {
    return swizzled(start + j / 8 * leading + k / 8 * stride + k % 8 * 128 + j % 8 * 16);
  }
};

// f(addresses of eight rows, whether they are A's) for every 8x8 matrix that a warp reads. A GPU reads B once per warpgroup.
template <typename F>
void for_each_matrix(const WarpgroupProduct& p, int warp_in_group, F f) {
  u32 rows[8];
  if (!p.a_in_registers) {
    const Operand64 a(p.a_descriptor);
    for (int m = 0; m < 4; ++m) {
      for (int r = 0; r < 8; ++r) rows[r] = a.k_major(16 * warp_in_group + m % 2 * 8 + r, m / 2);
      f(rows, true);
    }
  }
  const Operand64 b(p.b_descriptor);
  for (int j = 0; j < p.n / 8; ++j) {
    for (int kb = 0; kb < 2; ++kb) {
      for (int r = 0; r < 8; ++r) rows[r] = p.transposed ? b.mn_major(8 * kb + r, j) : b.k_major(8 * j + r, kb);
      f(rows, false);
    }
  }
}

// Lane 0 reads on behalf of its warp: when the product is issued, and again when it is executed.
void record_reads(Block& block, Warp& warp, const WarpgroupProduct& p, Site site) {
  Thread& agent = block.thread(warp, 0);
  for_each_matrix(p, warp.index % 4, [&](const u32(&rows)[8], bool) {
    for (const u32 row : rows) {
      if (shared_bytes(agent, row, 16, "wgmma operand", site)) block.races.access(agent, row, 16, Access::proxy_read, site);
    }
  });
}

template <typename Element>
void load_row(Block& block, Warp& warp, u32 address, Site site, float* out) {
  const unsigned char* bytes = shared_bytes(block.thread(warp, 0), address, 16, "wgmma operand", site);
  u32 words[4] = {};
  if (bytes) std::memcpy(words, bytes, 16);
  widen<Element>(words, 4, out);
}

// This warp's 16 rows of A, in four blocks of 8 rows and 16 bytes.
template <typename Element>
void load_a(Block& block, Warp& warp, const WarpgroupProduct& p, const u32 (&a)[4][32], Site site,
            float (&A)[4][8][kWidth<Element>]) {
  if (p.a_in_registers) return widen<Element>(a[0], 128, &A[0][0][0]);
  const Operand64 operand(p.a_descriptor);
  for (int m = 0; m < 4; ++m) {
    for (int r = 0; r < 8; ++r) {
      load_row<Element>(block, warp, operand.k_major(16 * (warp.index % 4) + m % 2 * 8 + r, m / 2), site, A[m][r]);
    }
  }
}

// Columns 8 j ... 8 j + 7 of B.
template <typename Element>
void load_b(Block& block, Warp& warp, const WarpgroupProduct& p, int j, Site site, Row (&B)[2 * kWidth<Element>]) {
  constexpr int kHalf = kWidth<Element>;
  const Operand64 operand(p.b_descriptor);
  if (p.transposed) {  // 16-bit elements only
    for (int k = 0; k < 16; ++k) load_row<Element>(block, warp, operand.mn_major(k, j), site, reinterpret_cast<float*>(&B[k]));
    return;
  }
  float row[kHalf];
  for (int i = 0; i < 16; ++i) {
    load_row<Element>(block, warp, operand.k_major(8 * j + i % 8, i / 8), site, row);
    for (int k = 0; k < kHalf; ++k) B[i / 8 * kHalf + k][i % 8] = row[k];
  }
}

}  // namespace

void WarpgroupQueue::clear() {
  entries_.clear();
  groups_.clear();
  committed_ = 0;
  for (int lane = 0; lane < 32; ++lane) count_[lane] = commits_[lane] = 0;
}

void WarpgroupQueue::push(Thread& thread, const WarpgroupProduct& product, bool guard, Site site) {
  const int lane = thread.lane;
  const u32 n = count_[lane]++;
  if (n == entries_.size()) entries_.emplace_back();
  Entry& entry = entries_[n];
  if (lane == 0) entry.shared = product;
  entry.site = site;
  entry.d[lane] = product.d;
  for (int i = 0; i < 4; ++i) entry.a[i][lane] = product.a[i];
  entry.a_registers[lane] = product.a_registers;
  entry.kept[lane].clear();
  if (!guard) return;
  thread.wgmma_registers.use(thread, product.d, product.n / 2, site);
  if (product.a_registers) thread.wgmma_registers.use(thread, product.a_registers, 4, site);
  if (float_as_u32(product.d[0]) == kPoison) return;
  entry.kept[lane].assign(product.d, product.d + product.n / 2);
  for (int i = 0; i < product.n / 2; ++i) product.d[i] = u32_as_float(kPoison);
}

void WarpgroupQueue::commit(int lane) {
  ++commits_[lane];
  if (lane) return;
  groups_.push_back(count_[0] - committed_);
  committed_ = count_[0];
}

void WarpgroupQueue::execute(Block& block, Warp& warp, u32 pending) {
  for (int lane = 1; lane < 32; ++lane) {
    if (count_[lane] == count_[0] && commits_[lane] == commits_[0]) continue;
    abandon(block, "divergence", entries_.empty() ? Site() : entries_[0].site,
            text_of("wgmma was executed by some lanes of warp ", warp.index, " only, ", block.thread(warp, lane),
                    " differs from lane 0: all 32 must reach it together"));
  }
  if (groups_.size() <= pending) return;
  const std::size_t groups = groups_.size() - pending;
  std::size_t n = 0;
  for (std::size_t g = 0; g < groups; ++g) n += groups_[g];
  for (std::size_t i = 0; i < n; ++i) run(block, warp, entries_[i]);
  entries_.erase(entries_.begin(), entries_.begin() + n);
  groups_.erase(groups_.begin(), groups_.begin() + groups);
  committed_ -= n;
  for (u32& count : count_) count -= n;
  if (!block.checked) return;
  VectorClock read(block.cluster.clocks.size);  // the reads of lane 0 are the warp's
  block.races.release(block.thread(warp, 0), read);
  for (int lane = 1; lane < 32; ++lane) block.races.acquire(block.thread(warp, lane), read);
}

void WarpgroupQueue::check_registers(Thread& thread, const Entry& entry) {
  const int lane = thread.lane;
  const std::vector<float>& kept = entry.kept[lane];
  const auto touched = [](float x) { return float_as_u32(x) != kPoison; };
  const auto report_touched = [&](const char* what) {
    report(*thread.block, "accumulator-touched", entry.site, {}, [&] {
      return text_of(what, " of the wgmma at ", entry.site, " were written before it was waited for: ", thread);
    });
  };
  if (std::any_of(entry.d[lane], entry.d[lane] + kept.size(), touched)) report_touched("accumulators");
  std::copy(kept.begin(), kept.end(), entry.d[lane]);
  thread.wgmma_registers.hand_back(entry.d[lane]);
  const u32* a = entry.a_registers[lane];
  if (!a) return;
  int i = 0;
  while (i < 4 && a[i] == entry.a[i][lane]) ++i;
  if (i < 4) report_touched("operand registers");
  thread.wgmma_registers.hand_back(a);
}

template <typename Element>
void WarpgroupQueue::multiply(Block& block, Warp& warp, const Entry& entry) {
  constexpr int kHalf = kWidth<Element>;
  const WarpgroupProduct& p = entry.shared;
  float A[4][8][kHalf];
  load_a<Element>(block, warp, p, entry.a, entry.site, A);
  for (int j = 0; j < p.n / 8; ++j) {
    Row B[2 * kHalf], C[16] = {};
    load_b<Element>(block, warp, p, j, entry.site, B);
    if (p.accumulate) gather_rows(entry.d, 4 * j, C);
    multiply_add<kHalf>(A, B, C);
    scatter_rows(C, entry.d, 4 * j);
  }
  block.counters.products += 16 * 2 * kHalf * p.n;
}

void WarpgroupQueue::run(Block& block, Warp& warp, Entry& entry) {
  const WarpgroupProduct& p = entry.shared;
  if (block.checked) {
    record_reads(block, warp, p, entry.site);
    for (int lane = 0; lane < 32; ++lane) check_registers(block.thread(warp, lane), entry);
  }
  if (p.b_descriptor >> 62 != 1 || (!p.a_in_registers && p.a_descriptor >> 62 != 1)) {
    abandon(block, "barrier", entry.site, text_of("only wgmma descriptors with 128-byte swizzle are emulated: ", entry.site));
  }
  with_element(p.format, [&](auto element) { multiply<decltype(element)>(block, warp, entry); });
  ++block.counters.wgmma;
  if (!block.counted) return;
  int part = 0;
  for_each_matrix(p, warp.index % 4, [&](const u32(&rows)[8], bool is_a) {
    if (!is_a && warp.index % 4) return;  // the four warps share B
    const int waves = wavefronts(rows, 8, 16);
    block.counters.shared_read_bytes += 128;
    block.counters.add_engine_wavefronts(waves);
    block.counters.bank_conflicts += waves - 1;
    keep_pass(is_a ? CufaPass::kWgmmaA : CufaPass::kWgmmaB, entry.site, part++, rows, nullptr, 8, 16, waves);
  });
}

void queue_warpgroup_product(const WarpgroupProduct& product, Site site) {
  Thread& thread = current();
  Block& block = *thread.block;
  thread.warp->warpgroup.push(thread, product, block.checked, site);
  if (block.checked && thread.lane == 0) record_reads(block, *thread.warp, product, site);
}

void await_warpgroup_products(u32 pending, Site site) {
  static const Collective kWait = {
      "wgmma.wait_group",
      [](Block& block, Warp& warp) { warp.warpgroup.execute(block, warp, warp.operands[0].value); }, true};
  Thread& thread = current();
  thread.warp->operands[thread.lane].value = pending;
  rendezvous(thread, kWait, site);
}

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
  report(thread, "wgmma-fence", site,
         fenced ? "registers of the wgmma were written after the last wgmma.fence"
                : "no wgmma.fence since the wgmma's registers were this thread's own");
}

void WgmmaRegisters::hand_back(const void* registers) {
  Range& range = ranges_.at(static_cast<const u32*>(registers));
  if (--range.products) return;
  range.back_at = fences_;
  range.fenced.clear();
}

}  // namespace cufa_host

void wgmma_fence() {
  Thread& thread = current();
  if (thread.block->checked) thread.wgmma_registers.fence();
}
void wgmma_commit() {
  Thread& thread = current();
  thread.warp->warpgroup.commit(thread.lane);
}
