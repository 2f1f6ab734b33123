// Checked mode: plain C++ loads and stores of a kernel. Only the kernel is compiled with -fsanitize=thread, and its code calls
// these functions before each access. They check accesses to shared memory and to arrays as primitives do. They ignore a thread's
// own stack, and loads outside of every array, such as parameters. A store there would destroy the executor's own memory:
// the block is abandoned first.
#include "host/runtime.h"

namespace cufa_host {
namespace {

inline void plain_access(const void* address, u32 bytes, Access kind) {
  if (!context) return;
  Thread& thread = current();
  if (thread.fiber.holds(address)) return;
  Block& block = *thread.block;
  const auto offset = static_cast<const unsigned char*>(address) - block.shared;
  if (offset >= 0 && offset + bytes <= block.launch.shared_bytes) {
    block.races.access(thread, kSharedBase + static_cast<u32>(offset), bytes, kind, {});
    return;
  }
  for (int i = 0; i < block.launch.num_arrays; ++i) {
    const CufaArray& array = block.launch.arrays[i];
    const u64 at = reinterpret_cast<u64>(address) - reinterpret_cast<u64>(array.begin);
    if (at >= array.bytes) continue;
    if (!is_read(kind) && array.bytes - at < bytes) break;
    check_global(thread, address, bytes, kind, "plain C++ access", {});
    return;
  }
  if (is_read(kind)) return;
  abandon(thread, "out-of-range", {}, "plain C++ store of ", bytes, " bytes at ", global_place(block.launch, address, bytes));
}

// A copied structure: loads or stores of 8, 4, 2 and 1 bytes, as its alignment allows.
inline void plain_range(const void* address, u64 bytes, Access kind) {
  auto next = static_cast<const char*>(address);
  for (const char* end = next + bytes; next != end;) {
    u32 step = 8;
    while (reinterpret_cast<u64>(next) % step || step > static_cast<u64>(end - next)) step /= 2;
    plain_access(next, step, kind);
    next += step;
  }
}

}  // namespace
}  // namespace cufa_host

extern "C" {
#define CUFA_HOOKS(size)                                                            \
  void __tsan_read##size(void* p) { plain_access(p, size, Access::read); }           \
  void __tsan_write##size(void* p) { plain_access(p, size, Access::write); }         \
  void __tsan_unaligned_read##size(void* p) { plain_access(p, size, Access::read); } \
  void __tsan_unaligned_write##size(void* p) { plain_access(p, size, Access::write); }
CUFA_HOOKS(1)
CUFA_HOOKS(2)
CUFA_HOOKS(4)
CUFA_HOOKS(8)
CUFA_HOOKS(16)
#undef CUFA_HOOKS
void __tsan_read_range(void* p, unsigned long n) { plain_range(p, n, Access::read); }
void __tsan_write_range(void* p, unsigned long n) { plain_range(p, n, Access::write); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
