#include "host/bank_model.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "host/runtime.h"

namespace cufa_host {

int wavefronts(const std::uint32_t* addresses, int count, std::uint32_t bytes) {
  constexpr int kBanks = 32;
  std::uint32_t words[kBanks][kBanks];
  int distinct[kBanks] = {};
  for (int i = 0; i < count; ++i) {
    for (std::uint32_t word = addresses[i] / 4; word <= (addresses[i] + bytes - 1) / 4; ++word) {
      std::uint32_t* seen = words[word % kBanks];
      int& n = distinct[word % kBanks];
      if (std::find(seen, seen + n, word) == seen + n) seen[n++] = word;
    }
  }
  return *std::max_element(distinct, distinct + kBanks);
}

namespace {
struct Kept {
  CufaPass* begin = nullptr;
  std::uint64_t capacity = 0, count = 0;
  std::int32_t instructions = 0;
} kept;
}  // namespace

void keep_pass(CufaPass::Kind kind, Site site, int part, const std::uint32_t* addresses, const std::uint8_t* lanes, int count,
               std::uint32_t bytes, int waves) {
  if (kept.count == kept.capacity) return;
  if (part == 0) ++kept.instructions;
  CufaPass& pass = kept.begin[kept.count++];
  pass = {site.file, site.line, kind, kept.instructions, count, bytes, static_cast<std::uint32_t>(waves), {}, {}};
  for (int i = 0; i < count; ++i) {
    pass.addresses[i] = addresses[i] - kSharedBase;
    pass.lanes[i] = lanes ? lanes[i] : static_cast<std::uint8_t>((8 * part + i) % 32);
  }
}

void AccessLog::add(Kind kind, Site site, int lane, std::uint64_t address, std::uint32_t bytes) {
  entries_.push_back({site, 0, kind, static_cast<std::uint8_t>(lane), bytes, address});
}

void AccessLog::flush(Counters& counters) {
  if (entries_.empty()) return;
  std::map<std::tuple<const char*, int, Kind, int>, std::uint32_t> times;
  for (Entry& e : entries_) e.occurrence = times[{e.site.file, e.site.line, e.kind, e.lane}]++;
  const auto key = [](const Entry& e) {
    return std::tuple(e.site.file, e.site.line, e.kind, e.bytes, e.occurrence, e.lane);
  };
  std::sort(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) { return key(a) < key(b); });
  const auto same_instruction = [](const Entry& a, const Entry& b) {
    return a.site.file == b.site.file && a.site.line == b.site.line && a.kind == b.kind && a.bytes == b.bytes &&
           a.occurrence == b.occurrence;
  };
  for (std::size_t first = 0, last; first < entries_.size(); first = last) {
    for (last = first + 1; last < entries_.size() && same_instruction(entries_[first], entries_[last]);) ++last;
    count_group(&entries_[first], &entries_[0] + last, counters);
  }
  entries_.clear();
}

void AccessLog::count_group(const Entry* first, const Entry* last, Counters& counters) {
  if (first->kind == global_read || first->kind == global_write) {
    std::set<std::uint64_t> sectors;
    for (const Entry* e = first; e != last; ++e) {
      for (std::uint64_t s = e->address / 32; s <= (e->address + e->bytes - 1) / 32; ++s) sectors.insert(s);
    }
    (first->kind == global_read ? counters.global_read_sectors : counters.global_write_sectors) += sectors.size();
    return;
  }
  const std::uint32_t bytes = first->bytes;
  const Kind kind = first->kind;
  const Site site = first->site;
  const int lanes_per_pass = bytes <= 4 ? 32 : 128 / bytes;
  for (int part = 0; first != last; ++part) {
    std::uint32_t addresses[32];
    std::uint8_t lanes[32];
    const int pass = first->lane / lanes_per_pass;
    int count = 0;
    for (; first != last && first->lane / lanes_per_pass == pass; ++first) {
      lanes[count] = first->lane;
      addresses[count++] = static_cast<std::uint32_t>(first->address);
    }
    const int waves = wavefronts(addresses, count, bytes);
    counters.shared_wavefronts += waves;
    counters.bank_conflicts += waves - 1;
    const auto pass_kind = kind == shared_read ? CufaPass::kLoad : CufaPass::kStore;
    keep_pass(pass_kind, site, part, addresses, lanes, count, bytes, waves);
  }
}

}  // namespace cufa_host

std::uint64_t cufa_keep_passes(CufaPass* begin, std::uint64_t capacity) {
  const std::uint64_t count = cufa_host::kept.count;
  cufa_host::kept = {begin, capacity, 0, 0};
  return count;
}
