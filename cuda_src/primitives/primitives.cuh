// What every kernel uses. If a host compiler builds the kernel for execution on a CPU: the host twins.
#pragma once
#ifdef __CUDACC__
#include "primitives/types.cuh"
#include "primitives/barrier.cuh"
#include "primitives/convert.cuh"
#include "primitives/math.cuh"
#include "primitives/memory.cuh"
#include "primitives/shuffle.cuh"
#include "primitives/special_registers.cuh"
#else
#include "host/primitives_host.h"
#endif
