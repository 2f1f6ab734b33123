// ldmatrix, stmatrix, shuffles and votes.
#include <algorithm>
#include <cstring>

#include "host/runtime.h"

namespace cufa_host {
namespace {

const unsigned char kZeros[16] = {};

// f(thread, its address, the bytes there or null) for rows 0-7 of matrix `m`: lane 8m + r gives the address of row r.
template <typename F>
void for_each_row(Block& block, Warp& warp, int m, Access kind, F f) {
  u32 addresses[8];
  for (int r = 0; r < 8; ++r) {
    Thread& thread = block.thread(warp, 8 * m + r);
    addresses[r] = warp.operands[thread.lane].smem;
    unsigned char* row = shared_bytes(thread, addresses[r], 16, warp.collective->name, warp.site);
    f(r, row);
    if (block.checked && row) block.races.access(thread, addresses[r], 16, kind, warp.site);
  }
  if (!block.counted) return;
  const int waves = wavefronts(addresses, 8, 16);
  block.counters.shared_wavefronts += waves;
  block.counters.bank_conflicts += waves - 1;
  keep_pass(is_read(kind) ? CufaPass::kLdmatrix : CufaPass::kStmatrix, warp.site, m, addresses, nullptr, 8, 16, waves);
}

template <int COUNT, bool TRANSPOSED>
void execute_ldmatrix(Block& block, Warp& warp) {
  for (int m = 0; m < COUNT; ++m) {
    u16 rows[8][8];
    for_each_row(block, warp, m, Access::read, [&](int r, const unsigned char* row) {
      std::memcpy(rows[r], row ? row : kZeros, 16);
    });
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      warp.operands[lane].registers[m] =
          TRANSPOSED ? rows[2 * t][g] | u32(rows[2 * t + 1][g]) << 16 : rows[g][2 * t] | u32(rows[g][2 * t + 1]) << 16;
    }
  }
  ++block.counters.ldmatrix;
  block.counters.shared_read_bytes += COUNT * 128;
}

template <bool TRANSPOSED>
void execute_stmatrix(Block& block, Warp& warp) {
  for (int m = 0; m < 4; ++m) {
    u16 rows[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const u32 pair = warp.operands[lane].registers[m];
      for (int i = 0; i < 2; ++i) (TRANSPOSED ? rows[2 * t + i][g] : rows[g][2 * t + i]) = u16(pair >> 16 * i);
    }
    for_each_row(block, warp, m, Access::write, [&](int r, unsigned char* row) {
      if (row) std::memcpy(row, rows[r], 16);
    });
  }
  ++block.counters.stmatrix;
  block.counters.shared_write_bytes += 512;
}

const Collective kLdmatrixX2 = {"ldmatrix.x2", execute_ldmatrix<2, false>, true};
const Collective kLdmatrixX4 = {"ldmatrix.x4", execute_ldmatrix<4, false>, true};
const Collective kLdmatrixX2Trans = {"ldmatrix.x2.trans", execute_ldmatrix<2, true>, true};
const Collective kLdmatrixX4Trans = {"ldmatrix.x4.trans", execute_ldmatrix<4, true>, true};
const Collective kStmatrixX4 = {"stmatrix.x4", execute_stmatrix<false>, true};
const Collective kStmatrixX4Trans = {"stmatrix.x4.trans", execute_stmatrix<true>, true};

void move_matrices(const Collective& collective, const u32* registers, u32 smem, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.registers = const_cast<u32*>(registers);  // stmatrix only reads them
  operand.smem = smem;
  rendezvous(thread, collective, site);
}

const Collective kShuffle = {"shfl",
                             [](Block& block, Warp& warp) {
                               ++block.counters.shuffles;
                               for (Operand& operand : warp.operands) operand.result = warp.operands[operand.lane].value;
                             },
                             false};
const Collective kVote = {"vote.any",
                          [](Block& block, Warp& warp) {
                            ++block.counters.votes;
                            u32 any = 0;
                            for (const Operand& operand : warp.operands) any |= operand.value;
                            for (Operand& operand : warp.operands) operand.result = any;
                          },
                          false};
const Collective kReduceMax = {"redux.max",
                               [](Block& block, Warp& warp) {
                                 ++block.counters.shuffles;
                                 u32 largest = 0;
                                 for (const Operand& operand : warp.operands) largest = std::max(largest, operand.value);
                                 for (Operand& operand : warp.operands) operand.result = largest;
                               },
                               false};

// The result of a collective on one value of each lane.
u32 exchange(const Collective& collective, u32 value, int source_lane, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.value = value;
  operand.lane = source_lane & 31;
  return rendezvous(thread, collective, site).result;
}

}  // namespace
}  // namespace cufa_host

void ldmatrix_x4(u32 (&r)[4], u32 smem, Site site) { move_matrices(kLdmatrixX4, r, smem, site); }
void ldmatrix_x2(u32 (&r)[2], u32 smem, Site site) { move_matrices(kLdmatrixX2, r, smem, site); }
void ldmatrix_x4_trans(u32 (&r)[4], u32 smem, Site site) { move_matrices(kLdmatrixX4Trans, r, smem, site); }
void ldmatrix_x2_trans(u32 (&r)[2], u32 smem, Site site) { move_matrices(kLdmatrixX2Trans, r, smem, site); }
void stmatrix_x4(u32 smem, const u32 (&r)[4], Site site) { move_matrices(kStmatrixX4, r, smem, site); }
void stmatrix_x4_trans(u32 smem, const u32 (&r)[4], Site site) { move_matrices(kStmatrixX4Trans, r, smem, site); }

u32 shfl(u32 v, int source_lane, Site site) { return exchange(kShuffle, v, source_lane, site); }
u32 shfl_xor(u32 v, int lane_mask, Site site) { return shfl(v, current().lane ^ lane_mask, site); }
float shfl_xor(float v, int lane_mask, Site site) { return u32_as_float(shfl_xor(float_as_u32(v), lane_mask, site)); }
u32 redux_max(u32 v, Site site) { return exchange(kReduceMax, v, 0, site); }
bool warp_any(bool v, Site site) { return exchange(kVote, v, 0, site) != 0; }
bool elect_one(Site site) { return warp_any(true, site) && current().lane == 0; }
