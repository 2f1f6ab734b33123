// What every kernel uses. For execution on a CPU, a host compiler takes the host twins instead.
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
