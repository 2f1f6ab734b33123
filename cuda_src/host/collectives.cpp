// ldmatrix, stmatrix, shuffles and votes.
#include <cstring>

#include "host/backward_host.h"
#include "host/runtime.h"

namespace cufa_host {
namespace {

const unsigned char kZeros[16] = {};

// Matrix `m` of an ldmatrix: lane 8m + r gives the address of row r.
template <bool TRANSPOSED>
void load_matrix(Block& block, Warp& warp, int m, Site site, const char* name) {
  u16 rows[8][8];
  u32 addresses[8];
  for (int r = 0; r < 8; ++r) {
    Thread& thread = block.thread(warp, 8 * m + r);
    addresses[r] = warp.operands[thread.lane].smem;
    const unsigned char* row = shared_bytes(thread, addresses[r], 16, name, site);
    std::memcpy(rows[r], row ? row : kZeros, 16);
    if (block.checked && row) block.races.access(thread, addresses[r], 16, Access::read, site);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    u32& out = warp.operands[lane].registers[m];
    out =
        TRANSPOSED ? rows[2 * t][g] | u32(rows[2 * t + 1][g]) << 16 : rows[g][2 * t] | u32(rows[g][2 * t + 1]) << 16;
  }
  if (block.counted) {
    const int waves = wavefronts(addresses, 8, 16);
    block.counters.shared_wavefronts += waves;
    block.counters.bank_conflicts += waves - 1;
  }
}

template <int COUNT, bool TRANSPOSED>
void execute_ldmatrix(Block& block, Warp& warp) {
  for (int m = 0; m < COUNT; ++m) load_matrix<TRANSPOSED>(block, warp, m, warp.site, warp.collective->name);
  ++block.counters.ldmatrix;
  block.counters.shared_read_bytes += COUNT * 128;
}

const Collective kLoadMatrices[] = {{"ldmatrix.x2", execute_ldmatrix<2, false>, true},
                                    {"ldmatrix.x4", execute_ldmatrix<4, false>, true},
                                    {"ldmatrix.x2.trans", execute_ldmatrix<2, true>, true},
                                    {"ldmatrix.x4.trans", execute_ldmatrix<4, true>, true}};

// Matrix `m` of an stmatrix: lane 8m + r gives the address of row r, and registers[m] of all lanes the elements.
template <bool TRANSPOSED>
void execute_stmatrix(Block& block, Warp& warp) {
  for (int m = 0; m < 4; ++m) {
    u16 rows[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const u32 pair = warp.operands[lane].registers[m];
      for (int i = 0; i < 2; ++i) (TRANSPOSED ? rows[2 * t + i][g] : rows[g][2 * t + i]) = u16(pair >> 16 * i);
    }
    u32 addresses[8];
    for (int r = 0; r < 8; ++r) {
      Thread& thread = block.thread(warp, 8 * m + r);
      addresses[r] = warp.operands[thread.lane].smem;
      unsigned char* row = shared_bytes(thread, addresses[r], 16, warp.collective->name, warp.site);
      if (!row) continue;
      std::memcpy(row, rows[r], 16);
      if (block.checked) block.races.access(thread, addresses[r], 16, Access::write, warp.site);
    }
    if (block.counted) {
      const int waves = wavefronts(addresses, 8, 16);
      block.counters.shared_wavefronts += waves;
      block.counters.bank_conflicts += waves - 1;
    }
  }
  ++block.counters.stmatrix;
  block.counters.shared_write_bytes += 512;
}

const Collective kStoreMatrices[] = {{"stmatrix.x4", execute_stmatrix<false>, true},
                                     {"stmatrix.x4.trans", execute_stmatrix<true>, true}};

// Operand::value is what a lane gives, Operand::smem what it receives.
void exchange(Block& block, Warp& warp) {
  ++block.counters.shuffles;
  for (Operand& operand : warp.operands) operand.smem = warp.operands[operand.lane].value;
}
const Collective kShuffle = {"shfl", exchange, false};

const Collective kVote = {"vote.any",
                          [](Block& block, Warp& warp) {
                            ++block.counters.votes;
                            u32 any = 0;
                            for (const Operand& operand : warp.operands) any |= operand.value;
                            for (Operand& operand : warp.operands) operand.smem = any;
                          },
                          false};

const Collective kReduceMax = {"redux.max",
                               [](Block& block, Warp& warp) {
                                 ++block.counters.shuffles;
                                 u32 largest = 0;
                                 for (const Operand& o : warp.operands)
                                   largest = o.value > largest ? o.value : largest;
                                 for (Operand& operand : warp.operands) operand.smem = largest;
                               },
                               false};

}  // namespace

void load_matrices(Matrices form, u32* registers, u32 smem, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.registers = registers;
  operand.smem = smem;
  rendezvous(thread, kLoadMatrices[static_cast<int>(form)], site);
}

void store_matrices(bool transposed, const u32* registers, u32 smem, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.registers = const_cast<u32*>(registers);  // which are only read
  operand.smem = smem;
  rendezvous(thread, kStoreMatrices[transposed], site);
}

u32 shuffle_from(u32 value, int source_lane, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.value = value;
  operand.lane = source_lane & 31;
  rendezvous(thread, kShuffle, site);
  return operand.smem;
}

u32 shuffle_xor(u32 value, int lane_mask, Site site) {
  return shuffle_from(value, current().lane ^ (lane_mask & 31), site);
}

u32 reduce_max(u32 value, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.value = value;
  rendezvous(thread, kReduceMax, site);
  return operand.smem;
}

bool vote_any(bool value, Site site) {
  Thread& thread = current();
  Operand& operand = thread.warp->operands[thread.lane];
  operand.value = value;
  rendezvous(thread, kVote, site);
  return operand.smem != 0;
}

}  // namespace cufa_host
