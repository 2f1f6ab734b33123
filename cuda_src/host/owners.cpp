#include "host/owners.h"

#include <algorithm>

#include "host/runtime.h"

namespace cufa_host {
namespace {
std::atomic<u64> launches{0};
}

Owners::Owners(const CufaLaunch& launch)
    : launch_(launch), launch_number_(++launches), elements_(launch.num_arrays) {
  if (launch.mode != kChecked) return;
  for (int i = 0; i < launch.num_arrays; ++i) {
    const CufaArray& array = launch.arrays[i];
    if (array.writable) elements_[i].reset(new Element[array.bytes / array.granule + 1]());
  }
  lessons_.resize(u64(launch.grid[0]) * launch.grid[1] * launch.grid[2] / launch.cluster);
}

u32 Owners::cluster_of(const Thread& thread) const {
  const Index3 b = thread.block_index;
  return (b.x + launch_.grid[0] * (b.y + launch_.grid[1] * b.z)) / launch_.cluster;
}

bool Owners::same_block(const Thread& thread, u64 mark) const {
  return cluster_of(mark) == cluster_of(thread) && number_of(mark) / launch_.num_threads == thread.block->rank;
}

bool Owners::knows(const Thread& thread, const Lesson& lesson) {
  return lesson.thread == thread.number ||
         thread.block->cluster.clocks.of[thread.number][lesson.thread] >= lesson.time;
}

bool Owners::ordered(const Thread& thread, u64 mark) const {
  const ClusterClocks& clocks = thread.block->cluster.clocks;
  const u32 cluster = cluster_of(mark), time = u32(mark & kLastTime);
  const int number = number_of(mark);
  if (cluster == cluster_of(thread)) return number == thread.number || clocks.of[thread.number][number] >= time;
  const std::vector<Lesson>& lessons = lessons_[cluster_of(thread)];
  return std::any_of(lessons.rbegin(), lessons.rend(), [&](const Lesson& lesson) {
    if (!knows(thread, lesson)) return false;
    const auto theirs = lesson.learned->find(cluster);
    return theirs != lesson.learned->end() && (*theirs->second)[number] >= time;
  });
}

u64 Owners::with_addition(u64 owner, u64 mark) {
  thread_local struct {
    u64 launch, owner, mark, result;
  } last = {};  // adjacent elements nearly always have the same history
  if (last.launch == launch_number_ && last.owner == owner && last.mark == mark) return last.result;
  const std::lock_guard<std::mutex> lock(adding_);
  u64 before = owner & kSums ? owner : 0;
  // Only a thread's latest addition counts: an access ordered after it is ordered after the thread's earlier additions.
  if (before && additions_[before & ~kSums].mark >> kTimeBits == mark >> kTimeBits) {
    before = additions_[before & ~kSums].before;
  }
  u64& result = known_additions_[{before, mark}];
  if (!result) {
    result = kSums | additions_.size();
    additions_.push_back({mark, before});
  }
  last = {launch_number_, owner, mark, result};
  return result;
}

u32 Owners::unordered_writer(const Thread& thread, u64 owner) {
  if (owner & kSums) {
    const std::lock_guard<std::mutex> lock(adding_);
    std::vector<u64> awaited;  // threads whose latest addition is done, and therefore also their earlier asynchronous ones
    for (; owner; owner = additions_[owner & ~kSums].before) {
      const u64 mark = additions_[owner & ~kSums].mark, adder = mark >> kTimeBits;
      if ((mark & kLastTime) != kLastTime) {
        awaited.push_back(adder);
      } else if (std::find(awaited.begin(), awaited.end(), adder) != awaited.end()) {
        continue;
      }
      if (!same_block(thread, mark) && !ordered(thread, mark)) return block_of(mark);
    }
    return ~0u;
  }
  return owner && !same_block(thread, owner) && !ordered(thread, owner) ? block_of(owner) : ~0u;
}

bool Owners::access(Thread& thread, int index, const void* global, u32 bytes, Access kind, Site site) {
  constexpr auto relaxed = std::memory_order_relaxed;  // findings do not depend on the order of two racing workers
  const CufaArray& array = launch_.arrays[index];
  const u64 now = std::min<u64>(thread.block->cluster.clocks.time[thread.number / 32], kLastTime);
  const u64 time = kind == Access::async_sum ? kLastTime : now;  // no access is ordered after an addition in flight
  const u64 mark = (u64(cluster_of(thread) + 1) << kThreadBits | u64(thread.number)) << kTimeBits | time;
  const u64 begin = reinterpret_cast<u64>(global) - reinterpret_cast<u64>(array.begin);
  const bool reads = is_read(kind), adds = is_atomic(kind);
  Element* const elements = elements_[index].get();
  const bool alone = launch_.cluster == 1;  // the race detector orders threads of one block
  const auto own = [&](u64 other) { return alone && !(other & kSums) && cluster_of(other) == cluster_of(mark); };
  for (u64 i = begin / array.granule; i <= (begin + bytes - 1) / array.granule; ++i) {
    Element& element = elements[i];
    u64 owner = element.written.load(relaxed), reader = 0;
    if (!reads) {
      while (!element.written.compare_exchange_weak(owner, adds ? with_addition(owner, mark) : mark, relaxed)) {
      }
      reader = element.read.exchange(0, relaxed);
    } else if (kind == Access::read) {
      const u64 earlier = element.read.load(relaxed);
      if (earlier != mark && (!earlier || own(earlier) || ordered(thread, earlier))) element.read.store(mark, relaxed);
    }
    if ((!owner || own(owner)) && (!reader || own(reader))) continue;
    const bool summed = adds && owner & kSums, any_order = !launch_.ordered_sums || kind == Access::atomic;
    u32 other = summed && any_order ? ~0u : unordered_writer(thread, owner);
    if (other == ~0u) other = unordered_writer(thread, reader);
    if (other == ~0u) continue;
    if (kind == Access::proxy_read) return false;
    report(*thread.block, summed ? "unordered-sum" : "race", site, {"other block", 0}, [&] {
      return text_of("blocks ", other, " and ", block_of(mark), " of one launch ",
                     summed ? "add in any order to " : "both touch ", global_place(launch_, global, bytes), ": ", thread,
                     " at ", site);
    });
    break;
  }
  return true;
}

namespace {
void learn(Knowledge& all, u32 whose, const std::shared_ptr<const VectorClock>& clock) {
  std::shared_ptr<const VectorClock>& known = all[whose];
  if (!known) {
    known = clock;
  } else if (known != clock) {
    auto both = std::make_shared<VectorClock>(*known);
    both->join(*clock);
    known = both;
  }
}
void learn(Knowledge& all, const Knowledge& more) {
  for (const auto& [whose, clock] : more) learn(all, whose, clock);
}
}  // namespace

void Owners::hand(Thread& thread, const u32* counter) {
  Cluster& cluster = thread.block->cluster;
  const u32 me = cluster_of(thread);
  Knowledge all;
  if (const auto& earlier = handed_[counter]) all = *earlier;
  for (const Lesson& lesson : lessons_[me]) {
    if (knows(thread, lesson)) learn(all, *lesson.learned);
  }
  VectorClock& own = cluster.counters.try_emplace(counter, cluster.clocks.size).first->second;
  thread.block->races.release(thread, own);
  learn(all, me, std::make_shared<const VectorClock>(own));
  handed_[counter] = std::make_shared<const Knowledge>(std::move(all));
}

void Owners::take(Thread& thread, const u32* counter) {
  Cluster& cluster = thread.block->cluster;
  const auto own = cluster.counters.find(counter);
  if (own != cluster.counters.end()) thread.block->races.acquire(thread, own->second);
  const auto handed = handed_.find(counter);
  if (handed == handed_.end()) return;
  // Another cluster also passes on what it has learned of this cluster's threads.
  const auto mine = handed->second->find(cluster_of(thread));
  if (mine != handed->second->end()) thread.block->races.acquire(thread, *mine->second);
  std::vector<Lesson>& lessons = lessons_[cluster_of(thread)];
  for (auto lesson = lessons.rbegin(); lesson != lessons.rend(); ++lesson) {
    if (lesson->thread == thread.number && lesson->learned == handed->second) return;
  }
  lessons.push_back({thread.number, cluster.clocks.time[thread.number / 32], handed->second});
}

u32 Owners::count_in(Thread& thread, u32* counter, u32 last) {
  const std::lock_guard<std::mutex> lock(counting_);
  take(thread, counter);
  hand(thread, counter);
  const u32 old = *counter;
  *counter = old >= last ? 0 : old + 1;
  return old;
}

void Owners::release(Thread& thread, u32* counter, u32 value) {
  const std::lock_guard<std::mutex> lock(counting_);
  hand(thread, counter);
  *counter += value;
}

u32 Owners::load(Thread& thread, const u32* counter) {
  const std::lock_guard<std::mutex> lock(counting_);
  take(thread, counter);
  return *counter;
}

}  // namespace cufa_host
