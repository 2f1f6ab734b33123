#include "host/launch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host/runtime.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace {

// Kernels are compiled for the GPU with -ftz=true: subnormal operands and results of float32 arithmetic are zero.
class FlushSubnormals {
#ifdef __SSE__
 public:
  FlushSubnormals() { _mm_setcsr(saved_ | kFlushResults | kOperandsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushResults = 0x8000, kOperandsAreZero = 0x0040;
  const unsigned saved_ = _mm_getcsr();
#endif
};

// Whether any CPU thread can go on, when clusters wait for counters that other clusters change.
class Standstill {
 public:
  explicit Standstill(int workers) : standing_(workers, kRunning) {}
  // A worker has run a cluster, which may have changed counters.
  void moved() { ++moves_; }
  u64 moves() const { return moves_; }
  // All clusters of a worker wait: it has seen no change up to `moves`. Returns whether they wait forever: all workers wait, and
  // no cluster has run since the first of them looked.
  bool stand(int worker, u64 moves) {
    const std::lock_guard<std::mutex> lock(mutex_);
    standing_[worker] = moves;
    return std::all_of(standing_.begin(), standing_.end(), [&](u64 since) { return since == kLeft || since == moves_; });
  }
  static constexpr u64 kRunning = ~0ull, kLeft = ~0ull - 1;
  void set(int worker, u64 to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    standing_[worker] = to;
  }

 private:
  std::mutex mutex_;
  std::atomic<u64> moves_{0};
  std::vector<u64> standing_;
};

// One launch, on several CPU threads. Each runs its clusters one after another. If a cluster waits for a counter that another
// cluster changes, the next cluster begins meanwhile.
class Run {
 public:
  Run(const CufaLaunch& launch, int workers, u32 most_waiting)
      : launch_(launch),
        size_(launch.cluster),
        clusters_(launch.grid[0] * launch.grid[1] * launch.grid[2] / size_),
        most_waiting_(most_waiting),
        owners_(launch),
        standstill_(workers) {}

  void work(int worker) {
    const FlushSubnormals scope;
    std::vector<Held> waiting, spare;
    while (!stop_) {
      const u64 moves = standstill_.moves();
      auto next = std::find_if(waiting.begin(), waiting.end(), [](Held& held) { return held.cluster->wake(); });
      if (next == waiting.end()) {
        u32 i = clusters_;
        if (waiting.size() < most_waiting_) i = std::min(next_++, clusters_);
        if (i == clusters_) {
          if (waiting.empty()) break;
          if (standstill_.stand(worker, moves)) {
            if (!stop_.exchange(true)) waiting.front().cluster->report_stuck();
          }
          std::this_thread::yield();
          continue;
        }
        if (spare.empty()) spare.push_back({std::make_unique<Cluster>(launch_, findings_, owners_, worker), 0});
        waiting.push_back(std::move(spare.back()));
        spare.pop_back();
        next = waiting.end() - 1;
        next->first = (launch_.schedule == kDescending ? clusters_ - 1 - i : i) * size_;
        next->cluster->start(next->first);
      }
      standstill_.set(worker, Standstill::kRunning);
      const Cluster::State state = next->cluster->run();
      standstill_.moved();
      if (state == Cluster::State::waiting) continue;
      if (state == Cluster::State::failed) stop_ = true;
      write_counters(*next);
      spare.push_back(std::move(*next));
      waiting.erase(next);
    }
    standstill_.set(worker, Standstill::kLeft);
  }

  bool stopped() const { return stop_; }
  std::string findings() { return findings_.text(); }

 private:
  struct Held {
    std::unique_ptr<Cluster> cluster;
    u32 first;  // number of its first block
  };

  void write_counters(const Held& held) {
    for (u32 rank = 0; rank < size_ && launch_.counters; ++rank) {
      std::memcpy(launch_.counters + u64(held.first + rank) * kNumCounters, &held.cluster->blocks[rank]->counters,
                  sizeof(Counters));
    }
  }

  const CufaLaunch& launch_;
  const u32 size_, clusters_, most_waiting_;
  Findings findings_;
  Owners owners_;
  Standstill standstill_;
  std::atomic<u32> next_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace

int cufa_launch(const CufaLaunch* launch) {
  const u32 clusters = launch->grid[0] * launch->grid[1] * launch->grid[2] / launch->cluster;
  // The stack of a fiber takes two memory mappings; Linux allows a process about 65,000.
  const u32 most = std::max(1u, 24576 / (launch->cluster * launch->num_threads));
  const u32 wanted = std::min<u32>(std::max(launch->workers, 1), std::max(clusters, 1u));
  const int workers = static_cast<int>(std::min(wanted, most));
  Run run(*launch, workers, most / workers);
  std::vector<std::thread> others;
  for (int i = 1; i < workers; ++i) others.emplace_back([&run, i] { run.work(i); });
  run.work(0);
  for (std::thread& other : others) other.join();

  const std::string text = run.findings();
  if (launch->findings_bytes) {
    const std::size_t n = std::min<std::size_t>(text.size(), launch->findings_bytes - 1);
    std::memcpy(launch->findings, text.data(), n);
    launch->findings[n] = 0;
  }
  return run.stopped() ? 2 : text.empty() ? 0 : 1;
}

const char* cufa_counter_names() { return kCounterNames; }
