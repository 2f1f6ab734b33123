// A fiber: a stack of its own, entered and left by a switch that saves only the registers that a function call must preserve.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) || defined(CUFA_PORTABLE_FIBERS)
#define CUFA_UCONTEXT 1
#include <ucontext.h>
#endif

namespace cufa_host {

class Fiber {
 public:
  static constexpr std::size_t kStackBytes = 256 * 1024;

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // (Re)start at `function`, which must never return. `color` staggers the first frame: otherwise a local of every fiber falls
  // into the same L1 set, and each switch costs a cache miss per line.
  void start(void (*function)(), int color);

  // Suspend this fiber and continue `to`.
  void switch_to(Fiber& to);

  bool holds(const void* address) const {
    return static_cast<const char*>(address) >= stack_ && static_cast<const char*>(address) < stack_ + kStackBytes;
  }

 private:
  char* stack_ = nullptr;  // lowest address; an unmapped page below it stops an overflow
#ifdef CUFA_UCONTEXT
  ucontext_t state_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace cufa_host
