#include "host/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#ifndef CUFA_UCONTEXT
// Under the System V ABI a callee preserves rbx, rbp, r12-r15 and rsp: these seven are the whole state of a fiber that is inside
// a call. (swapcontext also saves the signal mask, by a system call: about seven times slower.)
extern "C" void cufa_switch_stack(void** save, void* load);
asm(R"(
    .text
    .globl  cufa_switch_stack
    .hidden cufa_switch_stack
    .type   cufa_switch_stack, @function
cufa_switch_stack:
    subq    $48, %rsp
    movq    %rbx,  0(%rsp)
    movq    %rbp,  8(%rsp)
    movq    %r12, 16(%rsp)
    movq    %r13, 24(%rsp)
    movq    %r14, 32(%rsp)
    movq    %r15, 40(%rsp)
    movq    %rsp, (%rdi)
    movq    %rsi, %rsp
    movq    0(%rsp), %rbx
    movq    8(%rsp), %rbp
    movq    16(%rsp), %r12
    movq    24(%rsp), %r13
    movq    32(%rsp), %r14
    movq    40(%rsp), %r15
    addq    $48, %rsp
    ret
    .size   cufa_switch_stack, . - cufa_switch_stack
)");
#endif

namespace cufa_host {
namespace {
constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kColors = 128, kColorBytes = 448;  // an odd multiple of 64: successive fibers, successive sets
}  // namespace

Fiber::~Fiber() {
  if (stack_) munmap(stack_ - kGuardBytes, kStackBytes + kGuardBytes);
}

void Fiber::start(void (*function)(), int color) {
  if (!stack_) {
    void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, kGuardBytes, PROT_NONE);
    stack_ = static_cast<char*>(memory) + kGuardBytes;
  }
  char* top = stack_ + kStackBytes - (color % kColors) * kColorBytes;
#ifdef CUFA_UCONTEXT
  getcontext(&state_);
  state_.uc_stack.ss_sp = stack_;
  state_.uc_stack.ss_size = top - stack_;
  state_.uc_link = nullptr;
  makecontext(&state_, function, 0);
#else
  // cufa_switch_stack pops six saved registers and returns to the next word. A function is entered with rsp = 16n + 8; a null
  // return address ends backtraces.
  auto* frame = reinterpret_cast<std::uintptr_t*>(top) - 8;
  for (int i = 0; i < 6; ++i) frame[i] = 0;
  frame[6] = reinterpret_cast<std::uintptr_t>(function);
  frame[7] = 0;
  stack_pointer_ = frame;
#endif
}

void Fiber::switch_to(Fiber& to) {
#ifdef CUFA_UCONTEXT
  swapcontext(&state_, &to.state_);
#else
  cufa_switch_stack(&stack_pointer_, to.stack_pointer_);
#endif
}

}  // namespace cufa_host
