// A small ring of tiles with one bug at a time, chosen by the argument bug; NONE is a correct kernel. Two warps: every
// tile of 32 rows of 64 bytes is copied by cp.async into one of two stages, and read by the other warp.
#include "primitives/cp_async.cuh"
#include "primitives/ldmatrix.cuh"
#include "primitives/mma.cuh"
#include "primitives/primitives.cuh"

enum {  // name, kind of the finding that must come, and a pattern of its message
  NONE,
  MISSING_BARRIER,  // race: no barrier orders this access after another thread's: shared offset
  MISSING_WAIT,  // copy-not-awaited: touches data of an asynchronous copy that was not waited for
  WRONG_STAGE,  // race: no barrier orders this access after another thread's: shared offset
  ROW_PAST_THE_END,  // out-of-range: of in, which has 6144
  SHARED_PAST_THE_END,  // out-of-range: outside the block's 5376 bytes
  MISALIGNED,  // misaligned: is not aligned
  DIVERGENT_SHUFFLE,  // divergence: lanes 4-31 wait for shfl
  DIVERGENT_LDMATRIX,  // divergence: while other lanes wait at
  DIVERGENT_MMA,  // divergence: executed by some lanes of warp
  MISSING_FENCE,  // accumulator-touched: were written before mma_fence\(\)
  SKIPPED_BARRIER,  // deadlock: warp 0 all lanes wait for the block's barrier at /.*planted\.cu:
  WRONG_BARRIER_COUNT,  // barrier|deadlock: barrier 1
  NEVER_WRITTEN,  // never-written: shared memory that nothing has written
  MISSING_WARP_SYNC,  // race: no barrier orders this access after another thread's: shared offset
  PLAIN_ACCESS,  // race: at plain C\+\+ access
  GLOBAL_RACE,  // race: of scratch, block
  SHARED_OUTPUT,  // race: of one launch both touch byte
  COPY_IN_FLIGHT,  // copy-in-flight: kernel ends with cp\.async still in flight
  PLAIN_GLOBAL_RACE,  // race: of one launch both touch byte
  UNPADDED,
  STRUCTURES,
  STRUCTURE_RACE,  // race: of one launch both touch byte
  STORE_ELSEWHERE,  // out-of-range: plain C\+\+ store of 4 bytes at
  STORE_ACROSS_THE_END,  // out-of-range: plain C\+\+ store of 4 bytes at byte 510 of scratch, which has 512
};

struct PlantedParams {
  i32 bug;
  const u32* in;  // (tiles * 32, 16)
  u32* out;       // (2, 64)
  u32* scratch;   // (2, 64)
  i32 tiles;
};

// Copied as one: the compiler makes a single access of 28 bytes of it.
struct Words {
  u32 word[7];
};

constexpr u32 TILE_BYTES = 32 * 80;
static_assert(SMEM_BYTES == 2 * TILE_BYTES + 256, "two stages, and a word a thread");

// Five units of 16 bytes: the eight rows of an ldmatrix lie in different banks. Four units: they do not.
DEVICE u32 pitch(const PlantedParams& p) { return p.bug == UNPADDED ? 64 : 80; }

DEVICE void copy_tile(const PlantedParams& p, u32 stage, int tile) {
  const int row = threadIdx.x / 2;
  for (int i = 0; i < 2; ++i) {
    const int unit = threadIdx.x % 2 * 2 + i;
    const int past = p.bug == ROW_PAST_THE_END ? 1 : 0;
    cp_async_16(stage + row * pitch(p) + unit * 16 + (p.bug == MISALIGNED ? 8 : 0),
                p.in + ((tile * 32 + row + past) * 4 + unit) * 4, true);
  }
}

KERNEL planted(const __grid_constant__ PlantedParams p) {
  DYN_SMEM(smem);
  const u32 base = smem_address(smem), thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 words = base + 2 * TILE_BYTES;
  float D[4] = {};
  u32 sum = 0;
  copy_tile(p, base, 0);
  cp_async_commit();
  for (int t = 0; t < p.tiles; ++t) {
    const u32 stage = base + (t + (p.bug == WRONG_STAGE ? 1 : 0)) % 2 * TILE_BYTES;
    if (p.bug != MISSING_WAIT) cp_async_wait<0>();
    if (p.bug != MISSING_BARRIER && !(p.bug == SKIPPED_BARRIER && warp == 1 && t == 1)) block_sync();
    if (t + 1 < p.tiles || p.bug == COPY_IN_FLIGHT) copy_tile(p, base + (t + 1) % 2 * TILE_BYTES, min(t + 1, p.tiles - 1));
    cp_async_commit();
    const u32 row = stage + (warp ^ 1) * 16 * pitch(p) + lane % 16 * pitch(p) + lane / 16 * 16;
    u32 A[4];
    if (!(p.bug == DIVERGENT_LDMATRIX && lane >= 16)) ldmatrix_x4(A, p.bug == SHARED_PAST_THE_END ? row + 3 * TILE_BYTES : row);
    if (!(p.bug == DIVERGENT_MMA && lane == 7)) mma_m16n8k16_f16(D, A, A[0], A[1]);
    if (p.bug != MISSING_FENCE) mma_fence();
    D[0] += 1.0f;
    sum += shfl_xor(A[0], 1);
    if (!(p.bug == DIVERGENT_SHUFFLE && lane < 4)) sum += shfl(A[1], 3);
  }
  mma_fence();
  sum += float_as_u32(D[0]);

  u32 other = 0;
  if (p.bug != NEVER_WRITTEN) st_shared_u32(words + thread * 4, sum);
  if (p.bug != MISSING_WARP_SYNC) warp_sync();
  if (p.bug == PLAIN_ACCESS) {
    other = *reinterpret_cast<const volatile u32*>(smem + 2 * TILE_BYTES + (thread ^ 32) * 4);
  } else {
    other = ld_shared_u32(words + (thread ^ 1) * 4);
  }
  if (p.bug == WRONG_BARRIER_COUNT) bar_sync(1, warp == 0 ? 64 : 32);

  st_global<u32>(p.scratch + blockIdx.x * 64 + thread, other);
  if (p.bug != GLOBAL_RACE) block_sync();
  u32 exchanged = ld_global<u32>(p.scratch + blockIdx.x * 64 + (thread ^ 32));
  if (p.bug == PLAIN_GLOBAL_RACE) exchanged += static_cast<volatile u32*>(p.scratch)[(blockIdx.x ^ 1) * 64 + thread];
  if (p.bug == STRUCTURES || p.bug == STRUCTURE_RACE) {
    block_sync();
    u32* to = p.scratch + (p.bug == STRUCTURE_RACE ? 0 : blockIdx.x * 64);
    if (thread == 0) *reinterpret_cast<Words*>(to) = *reinterpret_cast<const Words*>(p.in);
  }
  if (p.bug == STORE_ELSEWHERE && thread == 0) p.scratch[i64(1) << 40] = 1;
  if (p.bug == STORE_ACROSS_THE_END && thread == 0) {
    *reinterpret_cast<u32*>(reinterpret_cast<char*>(p.scratch) + 510) = 1;
  }
  st_global<u32>(p.out + (p.bug == SHARED_OUTPUT ? 0 : blockIdx.x * 64) + thread, exchanged);
}
