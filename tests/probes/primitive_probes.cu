// One small kernel per group of primitives: what each gives for given bits. Run once on a GPU to record golden vectors
// (tests/golden), and by g++ in every test run: the host twins must give the same. Every primitive is probed; a test
// compares the names.
#include "primitives/cp_async.cuh"
#include "primitives/ldmatrix.cuh"
#include "primitives/mma.cuh"
#include "primitives/primitives.cuh"

struct ProbeParams {
  const u32* in;
  u32* out;
};

// One thread, one result: out[i] = f(in[2i], in[2i + 1]).
template <typename F>
DEVICE void for_each_pair(const ProbeParams& p, F f) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  st_global<u32>(p.out + i, f(ld_global<u32>(p.in + 2 * i), ld_global<u32>(p.in + 2 * i + 1)));
}

// ---- math.cuh, and the built-in functions that kernels use
KERNEL probe_ex2(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32) { return float_as_u32(ex2(u32_as_float(a))); });
}
KERNEL probe_lg2(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32) { return float_as_u32(lg2(u32_as_float(a))); });
}
KERNEL probe_rcp(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32) { return float_as_u32(rcp(u32_as_float(a))); });
}
KERNEL probe_fmaxf(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return float_as_u32(fmaxf(u32_as_float(a), u32_as_float(b))); });
}
KERNEL probe_fminf(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return float_as_u32(fminf(u32_as_float(a), u32_as_float(b))); });
}
KERNEL probe_fmaf(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return float_as_u32(fmaf(u32_as_float(a), 1.5f, u32_as_float(b))); });
}
KERNEL probe_fma_sat(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return float_as_u32(fma_sat(u32_as_float(a), 1.5f, u32_as_float(b))); });
}

// ---- convert.cuh
KERNEL probe_cvt_f16x2(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return cvt_f16x2(u32_as_float(a), u32_as_float(b)); });
}
KERNEL probe_cvt_f16x2_satfinite(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return cvt_f16x2_satfinite(u32_as_float(a), u32_as_float(b)); });
}
KERNEL probe_cvt_bf16x2(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32 b) { return cvt_bf16x2(u32_as_float(a), u32_as_float(b)); });
}
KERNEL probe_cvt_f32_f16(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32) { return float_as_u32(cvt_f32_f16(u16(a))); });
}
KERNEL probe_cvt_f32_bf16(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32) { return float_as_u32(cvt_f32_bf16(u16(a))); });
}
KERNEL probe_cvt_tf32(const __grid_constant__ ProbeParams p) {
  for_each_pair(p, [](u32 a, u32) { return cvt_tf32(u32_as_float(a)); });
}

// ---- memory.cuh, special_registers.cuh. Blocks of one warp; each lane owns 16 bytes of the input.
DEVICE vec4 load_input(const ProbeParams& p) {
  return ld_global<vec4>(p.in + (blockIdx.x * 32 + threadIdx.x) * 4);
}
DEVICE void store_output(const ProbeParams& p, int item, int items, vec4 v) {
  st_global<vec4>(p.out + ((blockIdx.x * 32 + threadIdx.x) * items + item) * 4, v);
}

KERNEL probe_shared(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  constexpr u32 REGION = 512;  // 32 lanes of 16 bytes
  const u32 base = smem_address(smem), lane = threadIdx.x;
  const vec4 v = load_input(p);
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  const u32 mine = base + lane * 16;
  st_shared_vec4(mine, v);
  st_shared_vec2(mine + REGION, vec2{v.x, v.y});
  st_shared_vec2(mine + REGION + 8, vec2{v.z, v.w});
  for (int i = 0; i < 4; ++i) {
    st_shared_u32(mine + 2 * REGION + i * 4, words[i]);
    st_shared_f32(mine + 3 * REGION + i * 4, u32_as_float(words[i]));
    st_shared_u16(mine + 4 * REGION + i * 4, u16(words[i]));
    st_shared_u16(mine + 4 * REGION + i * 4 + 2, u16(words[i] >> 16));
  }
  warp_sync();
  const u32 other = base + (lane ^ 5) * 16;
  for (int r = 0; r < 5; ++r) store_output(p, r, 7, ld_shared_vec4(other + r * REGION));
  const vec2 pair = ld_shared_vec2(other + 8);
  store_output(p, 5, 7, vec4{ld_shared_u16(other + 2), ld_shared_u32(other + 4), pair.x, pair.y});
  store_output(p, 6, 7, vec4{float_as_u32(ld_shared_f32(other)), smem_address(smem + 48) - base, 0, 0});
}

KERNEL probe_global(const __grid_constant__ ProbeParams p) {
  const char* in = reinterpret_cast<const char*>(p.in) + threadIdx.x * 64;
  char* out = reinterpret_cast<char*>(p.out) + threadIdx.x * 64;
  st_global(out, ld_global<u16>(in));
  st_global(out + 2, ld_global<u16>(in + 2));
  st_global(out + 4, ld_global<u32>(in + 4));
  st_global(out + 8, ld_global<u64>(in + 8));
  st_global(out + 16, ld_global<float>(in + 16));
  st_global(out + 20, ld_global<float>(in + 20));
  st_global(out + 24, ld_global<vec2>(in + 24));
  st_global(out + 32, ld_global<vec4>(in + 32));
  st_global(out + 48, ld_global<vec4>(in + 48));
}

KERNEL probe_special_registers(const __grid_constant__ ProbeParams p) {
  const u64 start = global_timer();
  const u32 before = atomic_add(p.out, ld_global<u32>(p.in + threadIdx.x) & 0xff);
  st_global<u32>(p.out + 1 + threadIdx.x, (global_timer() >= start) + 2 * (sm_id() < 4096) + 4 * (before < 32 * 256) +
                                              8 * lane_id());
}

// ---- cp_async.cuh
KERNEL probe_cp_async(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 lane = threadIdx.x, mine = smem_address(smem) + lane * 16;
  const char* in = reinterpret_cast<const char*>(p.in + (blockIdx.x * 32 + lane) * 4);
  for (int r = 0; r < 3; ++r) st_shared_vec4(mine + r * 512, vec4{1, 2, 3, 4});
  warp_sync();
  cp_async_16(mine, in, lane % 3 != 0);
  cp_async_commit();
  for (int i = 0; i < 2; ++i) cp_async_small<8>(mine + 512 + i * 8, in + i * 8, (lane + i) % 3 != 0);
  for (int i = 0; i < 3; ++i) cp_async_small<4>(mine + 1024 + i * 4, in + i * 4, (lane + i) % 3 != 0);
  cp_async_commit();
  cp_async_wait<1>();
  warp_sync();
  const u32 other = smem_address(smem) + (31 - lane) * 16;
  store_output(p, 0, 3, ld_shared_vec4(other));
  cp_async_wait<0>();
  warp_sync();
  store_output(p, 1, 3, ld_shared_vec4(other + 512));
  store_output(p, 2, 3, ld_shared_vec4(other + 1024));
}

// ---- ldmatrix.cuh: 32 rows of 16 bytes, addressed out of order
KERNEL probe_ldmatrix(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 lane = threadIdx.x, base = smem_address(smem);
  st_shared_vec4(base + lane * 16, load_input(p));
  warp_sync();
  const u32 row = base + (lane * 5 + 3) % 32 * 16;
  u32 four[4], two[2], four_trans[4], two_trans[2];
  ldmatrix_x4(four, row);
  ldmatrix_x2(two, row);
  ldmatrix_x4_trans(four_trans, row);
  ldmatrix_x2_trans(two_trans, row);
  store_output(p, 0, 3, vec4{four[0], four[1], four[2], four[3]});
  store_output(p, 1, 3, vec4{four_trans[0], four_trans[1], four_trans[2], four_trans[3]});
  store_output(p, 2, 3, vec4{two[0], two[1], two_trans[0], two_trans[1]});
}

// ---- mma.cuh: ten words per lane (A, B, D), one product per block
template <typename F>
DEVICE void multiply(const ProbeParams& p, F mma) {
  const u32 thread = blockIdx.x * 32 + threadIdx.x;
  u32 words[10];
  for (int i = 0; i < 10; ++i) words[i] = ld_global<u32>(p.in + thread * 10 + i);
  const u32 A[4] = {words[0], words[1], words[2], words[3]};
  float D[4] = {u32_as_float(words[6]), u32_as_float(words[7]), u32_as_float(words[8]), u32_as_float(words[9])};
  mma(D, A, words[4], words[5]);
  mma_fence();
  for (int i = 0; i < 4; ++i) st_global<float>(p.out + thread * 4 + i, D[i]);
}
KERNEL probe_mma_f16(const __grid_constant__ ProbeParams p) {
  multiply(p, [](float (&D)[4], const u32 (&A)[4], u32 b0, u32 b1) { mma_m16n8k16_f16(D, A, b0, b1); });
}
KERNEL probe_mma_bf16(const __grid_constant__ ProbeParams p) {
  multiply(p, [](float (&D)[4], const u32 (&A)[4], u32 b0, u32 b1) { mma_m16n8k16_bf16(D, A, b0, b1); });
}
KERNEL probe_mma_tf32(const __grid_constant__ ProbeParams p) {
  multiply(p, [](float (&D)[4], const u32 (&A)[4], u32 b0, u32 b1) { mma_m16n8k8_tf32(D, A, b0, b1); });
}

// ---- shuffle.cuh
KERNEL probe_shuffle(const __grid_constant__ ProbeParams p) {
  const u32 lane = threadIdx.x;
  const vec4 v = load_input(p);
  store_output(p, 3, 4, vec4{redux_max(v.x), redux_max(v.y % 1000), redux_max(lane), redux_max(7)});
  store_output(p, 0, 4, vec4{shfl_xor(v.x, 1), shfl_xor(v.x, 2), shfl_xor(v.y, 16), shfl_xor(v.y, 31)});
  store_output(p, 1, 4,
               vec4{float_as_u32(shfl_xor(u32_as_float(v.z), 4)), float_as_u32(shfl_xor(u32_as_float(v.z), 8)),
                    shfl(v.w, 5), shfl(v.w, int(lane * 7 + 3) % 32)});
  store_output(p, 2, 4, vec4{warp_any(v.x % 16 == 0), warp_any(v.x % 64 == 0), warp_any(false), warp_any(lane == 9)});
}

// ---- barrier.cuh: blocks of two warps
KERNEL probe_barriers(const __grid_constant__ ProbeParams p) {
  DYN_SMEM(smem);
  const u32 thread = threadIdx.x, base = smem_address(smem);
  const u32 value = ld_global<u32>(p.in + thread);
  st_shared_u32(base + thread * 4, value);
  block_sync();
  u32 sum = ld_shared_u32(base + (63 - thread) * 4);
  if (thread < 32) {  // the first warp hands its values to the second
    st_shared_u32(base + 256 + thread * 4, value * 3);
    bar_arrive(1, 64);
  } else {
    bar_sync(1, 64);
    sum += ld_shared_u32(base + 256 + (63 - thread) * 4);
  }
  st_shared_u32(base + 512 + thread * 4, sum);
  warp_sync();
  st_global<u32>(p.out + thread, ld_shared_u32(base + 512 + (thread ^ 1) * 4));
}
