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
  const u32 blocks = launch->grid[0] * launch->grid[1] * launch->grid[2];
  Findings findings;
  Owners owners(*launch);
  std::atomic<u32> next{0};
  std::atomic<bool> stop{false};
  const auto work = [&](int worker) {
    const FlushSubnormals scope;
    Block block(*launch, findings, owners, worker);
    for (u32 i; !stop && (i = next++) < blocks;) {
      const u32 linear = launch->schedule == kDescending ? blocks - 1 - i : i;
      if (!block.run(linear)) stop = true;
      if (launch->counters)
        std::memcpy(launch->counters + u64(linear) * kNumCounters, &block.counters, sizeof(Counters));
    }
  };
  std::vector<std::thread> others;
  const int workers = static_cast<int>(std::min<u32>(std::max(launch->workers, 1), std::max(blocks, 1u)));
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
