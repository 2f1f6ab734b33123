// What NVRTC knows by itself and g++ does not: qualifiers, built-in variables, arithmetic functions. Every kernel includes this
// file on a host (through primitives/types.cuh): it has no standard headers, which would slow each build.
//
// `__shared__` is left out on purpose: shared memory is dynamic only, and a static array must not compile.
#pragma once

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))

#define DEVICE inline  // not always_inline, with which g++ takes 40% longer
#define KERNEL extern "C" void
#define DYN_SMEM(name) unsigned char* const name = cufa_host::shared_memory()

extern "C" void* memcpy(void* to, const void* from, unsigned long bytes) noexcept;

namespace cufa_host {

struct Index3 {
  unsigned int x, y, z;
};

// The built-in variables of a CUDA thread. The runtime's Thread extends it.
struct ThreadContext {
  Index3 thread_index, block_index, block_size, grid_size;
};

// The CUDA thread that this CPU thread is executing; null while the scheduler runs.
extern thread_local ThreadContext* context __attribute__((tls_model("initial-exec")));

unsigned char* shared_memory();

// Where a primitive is called. As a defaulted last argument it names the kernel's own file and line.
struct Site {
  const char* file = "";
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

}  // namespace cufa_host

#define SITE cufa_host::Site site = cufa_host::Site::here()

#define threadIdx (cufa_host::context->thread_index)
#define blockIdx (cufa_host::context->block_index)
#define blockDim (cufa_host::context->block_size)
#define gridDim (cufa_host::context->grid_size)

namespace cufa_host {
// Kernels are compiled with -ftz=true: a subnormal operand or result is zero.
DEVICE float flush_subnormal(float x) {
  return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x;
}
}  // namespace cufa_host

// As in CUDA: if one operand is NaN, the result is the other.
DEVICE float fmaxf(float a, float b) { return cufa_host::flush_subnormal(a > b || b != b ? a : b); }
DEVICE float fminf(float a, float b) { return cufa_host::flush_subnormal(a < b || b != b ? a : b); }
DEVICE float fabsf(float x) { return __builtin_fabsf(x); }
DEVICE float logf(float x) { return __builtin_logf(x); }
DEVICE float sqrtf(float x) { return __builtin_sqrtf(x); }
DEVICE float sinf(float x) { return __builtin_sinf(x); }
DEVICE float cosf(float x) { return __builtin_cosf(x); }
DEVICE float floorf(float x) { return __builtin_floorf(x); }
DEVICE float ceilf(float x) { return __builtin_ceilf(x); }
DEVICE float powf(float x, float y) { return __builtin_powf(x, y); }
DEVICE int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
DEVICE unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <typename T>
constexpr DEVICE T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr DEVICE T max(T a, T b) {
  return a < b ? b : a;
}
