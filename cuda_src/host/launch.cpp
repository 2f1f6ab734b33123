#include "host/launch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "host/runtime.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

using namespace cufa_host;

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

}  // namespace

int cufa_launch(const CufaLaunch* launch) {
  const u32 size = launch->cluster, clusters = launch->grid[0] * launch->grid[1] * launch->grid[2] / size;
  Findings findings;
  Owners owners(*launch);
  std::atomic<u32> next{0};
  std::atomic<bool> stop{false};
  const auto work = [&](int worker) {
    const FlushSubnormals scope;
    Cluster cluster(*launch, findings, owners, worker);
    for (u32 i; !stop && (i = next++) < clusters;) {
      const u32 first = (launch->schedule == kDescending ? clusters - 1 - i : i) * size;
      if (!cluster.run(first)) stop = true;
      if (!launch->counters) continue;
      for (u32 rank = 0; rank < size; ++rank) {
        std::memcpy(launch->counters + u64(first + rank) * kNumCounters, &cluster.blocks[rank]->counters,
                    sizeof(Counters));
      }
    }
  };
  std::vector<std::thread> others;
  // Every fiber's stack is two mappings, of which a process has some 65,000.
  const u32 most = std::max(1u, 24576 / (size * launch->num_threads));
  const u32 wanted = std::min<u32>(std::max(launch->workers, 1), std::max(clusters, 1u));
  const int workers = static_cast<int>(std::min(wanted, most));
  for (int i = 1; i < workers; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();

  if (launch->findings_bytes) {
    const std::string text = findings.text();
    const std::size_t n = std::min<std::size_t>(text.size(), launch->findings_bytes - 1);
    std::memcpy(launch->findings, text.data(), n);
    launch->findings[n] = 0;
  }
  return stop ? 2 : findings.empty() ? 0 : 1;
}

const char* cufa_counter_names() { return kCounterNames; }
