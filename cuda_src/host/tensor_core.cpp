#include "host/tensor_core.h"

#include <cstring>

#include "host/runtime.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace cufa_host {
namespace {

using Row = float __attribute__((vector_size(32)));  // 8 columns of D or B

float half_value(u32 x) { return float_from_half(static_cast<u16>(x)); }
float bfloat16_value(u32 x) { return u32_as_float(x << 16); }

// 2n 16-bit values in n words, in order.
template <float (*VALUE)(u32)>
void widen(const u32* words, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    out[2 * i] = VALUE(words[i] & 0xffff);
    out[2 * i + 1] = VALUE(words[i] >> 16);
  }
}
#ifdef __F16C__
template <>
void widen<half_value>(const u32* words, int n, float* out) {
  for (int i = 0; i < n; i += 4) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i));
    _mm256_storeu_ps(out + 2 * i, _mm256_cvtph_ps(eight));
  }
}
#endif

// A (16 x 8*KB) in 2*KB blocks of 8x8, B in KB blocks of rows k; D is 16x8.
template <float (*VALUE)(u32)>
void load_operands_16bit(const u32 (*a)[32], const u32 (*b)[32], float (*A)[8][8], Row* B) {
  widen<VALUE>(a[0], 128, &A[0][0][0]);
  for (int half = 0; half < 2; ++half) {
    float pairs[4][8][2];  // [t][column][k parity]
    widen<VALUE>(b[half], 32, &pairs[0][0][0]);
    for (int t = 0; t < 4; ++t) {
      for (int column = 0; column < 8; ++column) {
        B[8 * half + 2 * t][column] = pairs[t][column][0];
        B[8 * half + 2 * t + 1][column] = pairs[t][column][1];
      }
    }
  }
}

// The result of 16 x KDIM times KDIM x 8, added to C in order of k. (The hardware adds in a wider fixed-point sum;
// golden vectors say how far apart the two are.)
template <int BLOCK_K>
void multiply_add(const float (*A)[8][BLOCK_K], const Row* B, Row* C) {
  for (int half = 0; half < 2; ++half) {  // rows 0-7, rows 8-15: eight accumulators stay in registers
    Row c[8];
    for (int r = 0; r < 8; ++r) c[r] = C[8 * half + r];
    for (int kb = 0; kb < 2; ++kb) {
      const float(*block)[BLOCK_K] = A[2 * kb + half];
      for (int k = 0; k < BLOCK_K; ++k) {
        const Row b = B[BLOCK_K * kb + k];
        for (int r = 0; r < 8; ++r) c[r] += block[r][k] * b;
      }
    }
    for (int r = 0; r < 8; ++r) C[8 * half + r] = c[r];
  }
}

}  // namespace

void ProductQueue::push(int lane, Product kind, float* d, const u32* a, u32 b0, u32 b1, bool guard,
                        Site site) {
  const u32 n = count_[lane]++;
  if (n == entries_.size()) entries_.emplace_back();
  Entry& entry = entries_[n];
  for (int i = 0; i < 4; ++i) entry.a[i][lane] = a[i];
  const int transposed = (lane % 4) * 8 + lane / 4;
  entry.b[0][transposed] = b0;
  entry.b[1][transposed] = b1;
  entry.d[lane] = d;
  entry.first &= ~(1u << lane);
  if (guard && float_as_u32(d[0]) != kPoison) {
    entry.first |= 1u << lane;
    std::memcpy(entry.kept[lane], d, 16);
    for (int i = 0; i < 4; ++i) d[i] = u32_as_float(kPoison);
  }
  entry.kind = kind;
  entry.site = site;
}

void ProductQueue::restore(Block& block, Warp& warp, const Entry& entry) {
  for (u32 lanes = entry.first; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    float* d = entry.d[lane];
    for (int i = 0; i < 4; ++i) {
      if (float_as_u32(d[i]) == kPoison) continue;
      report(block, "accumulator-touched", entry.site, {"", 0}, [&] {
        return "accumulators of the mma at " + describe(entry.site) + " were written before mma_fence(): " +
               describe(block.thread(warp, lane));
      });
      return;
    }
    std::memcpy(d, entry.kept[lane], 16);
  }
}

void ProductQueue::execute(Block& block, Warp& warp) {
  const u32 n = count_[0];
  for (const u32 other : count_) {
    if (other == n) continue;
    abandon(block, "divergence", entries_[0].site,
            "mma at " + describe(entries_[0].site) + " was executed by some lanes of warp " +
                std::to_string(warp.index) + " only: all 32 must reach it together");
  }
  for (u32 i = 0; i < n; ++i) {
    const Entry& entry = entries_[i];
    if (block.checked) restore(block, warp, entry);
    alignas(32) float A[4][8][8];
    Row B[16], C[16];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      std::memcpy(reinterpret_cast<float*>(&C[g]) + 2 * t, entry.d[lane], 8);
      std::memcpy(reinterpret_cast<float*>(&C[g + 8]) + 2 * t, entry.d[lane] + 2, 8);
    }
    if (entry.kind == Product::m16n8k8_tf32) {
      float narrow[4][8][4];
      for (int r = 0; r < 4; ++r) {
        for (int l = 0; l < 32; ++l) (&narrow[r][0][0])[l] = u32_as_float(entry.a[r][l] & 0xffffe000u);
      }
      for (int k = 0; k < 8; ++k) {
        for (int c = 0; c < 8; ++c) B[k][c] = u32_as_float(entry.b[k / 4][(k % 4) * 8 + c] & 0xffffe000u);
      }
      multiply_add<4>(narrow, B, C);
      block.counters.products += 16 * 8 * 8;
    } else {
      if (entry.kind == Product::m16n8k16_f16) {
        load_operands_16bit<half_value>(entry.a, entry.b, A, B);
      } else {
        load_operands_16bit<bfloat16_value>(entry.a, entry.b, A, B);
      }
      multiply_add<8>(A, B, C);
      block.counters.products += 16 * 8 * 16;
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      std::memcpy(entry.d[lane], reinterpret_cast<float*>(&C[g]) + 2 * t, 8);
      std::memcpy(entry.d[lane] + 2, reinterpret_cast<float*>(&C[g + 8]) + 2 * t, 8);
    }
  }
  block.counters.mma += n;
  clear();
}

void queue_product(Product kind, float* d, const u32* a, u32 b0, u32 b1, Site site) {
  Thread& thread = current();
  thread.warp->products.push(thread.lane, kind, d, a, b0, b1, thread.block->checked, site);
}

void execute_products(Site site) {
  static const Collective kFence = {"mma_fence", [](Block&, Warp&) {}, false};
  rendezvous(current(), kFence, site);  // a rendezvous executes whatever is queued
}

}  // namespace cufa_host
