// Types and function qualifiers. 16-bit floats are held as bits (u16, two in a u32), and primitives convert them: no CUDA header
// is needed, and a host compiler can build the kernels.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(16) vec4 {
  u32 x, y, z, w;
};
struct alignas(8) vec2 {
  u32 x, y;
};

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// A compile-time number as an argument.
template <int VALUE>
struct Size {
  static constexpr int value = VALUE;
};

// Bytes before a member of a structure. (NVRTC 13.0 has neither <cstddef> nor __builtin_offsetof.)
#define OFFSET_OF(structure, member) u32(reinterpret_cast<u64>(&reinterpret_cast<structure*>(0)->member))

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// The block's dynamic shared memory, 1024-byte aligned as 128-byte-swizzled tiles need. Offsets: struct SharedMemory of each
// kernel.
#define DYN_SMEM(name) extern __shared__ __align__(1024) unsigned char name[]
#else
#include "host/cuda_language.h"
#endif
