// A tree of new tokens (speculative decoding): a token sees the keys before the first of them, its ancestors and itself.
// The host's side: cufa/problem/tree.py.
#pragma once
#include "primitives/primitives.cuh"

enum TreeKind { NO_TREE, TREE_PARENTS, TREE_MATRIX };

// The new tokens that each token sees, as bits, by a warp. `tree`: PARENTS (batch, tokens) int32; a parent that does not
// precede its child marks a root. MATRIX (batch, tokens, tokens), bytes that are 0 for a hidden token. At most MOST tokens.
template <int KIND, int MOST>
struct WarpTree {
  static_assert(MOST <= 64, "a lane holds two tokens");
  const void* tree;
  int tokens;
  int parent[2];  // PARENTS: the parents of tokens lane and lane + 32; a root is its own parent

  // Starts loading the parents; of() waits for them.
  DEVICE WarpTree(const void* tree_, int batch, int tokens_, int lane)
      : tree(static_cast<const char*>(tree_) + i64(batch) * tokens_ * (KIND == TREE_PARENTS ? 4 : tokens_)), tokens(tokens_) {
    if constexpr (KIND == TREE_PARENTS) {
#pragma unroll
      for (int h = 0; h < 1 + (MOST > 32); ++h) {
        const int token = lane + 32 * h;
        const int found = token < tokens ? int(ld_global<u32>(static_cast<const i32*>(tree) + token)) : token;
        parent[h] = u32(found) < u32(token) ? found : token;
      }
    }
  }

  // PARENTS: the tokens that token `lane` sees (low), and of those that token `lane + 32` sees, the first 32 (high_low) and the
  // others (high). Pointer jumping: a token also sees what its ancestor `reach` steps up sees; each round doubles `reach`.
  DEVICE void climb(u32& low, u32& high, u32& high_low, int lane) const {
    low = 1u << lane, high = high_low = 0;
    u32 above = u32(parent[0]), high_above = 0;
    if constexpr (MOST > 32) {
      high = low;
      high_above = u32(parent[1]);
    }
#pragma unroll 1
    for (int reach = 1; reach < tokens; reach *= 2) {
      const u32 of_low = shfl(low, high_above % 32), its_above = shfl(above, high_above % 32);
      if constexpr (MOST > 32) {
        const u32 a = shfl(high, high_above % 32), b = shfl(high_low, high_above % 32), c = shfl(high_above, high_above % 32);
        const bool is_high = high_above >= 32;
        high |= is_high ? a : 0;
        high_low |= is_high ? b : of_low;
        high_above = is_high ? c : its_above;
      }
      low |= shfl(low, above);
      above = shfl(above, above);
    }
  }

  // Calls write(token, bits of the tokens that it sees) for tokens lane and lane + 32. Past the last token, bits are undefined.
  // All lanes take part.
  template <typename Write>
  DEVICE void of_lane(int lane, const Write& write) const {
    if constexpr (KIND == TREE_PARENTS) {
      u32 low, high, high_low;
      climb(low, high, high_low, lane);
      write(lane, u64(low));
      write(lane + 32, u64(high) << 32 | high_low);
    } else {
#pragma unroll 1
      for (int token = lane; token < 64; token += 32) {
        const u64 own = u64(1) << token;
        write(token, (bytes_as_bits(min(token, tokens - 1)) & (own - 1)) | own);
      }
    }
  }
  // MATRIX: which bytes of a token's row are not 0; undefined from bit `tokens` on. If rows are aligned, loads have 16 bytes.
  DEVICE u64 bytes_as_bits(int token) const {
    const char* const row = static_cast<const char*>(tree) + token * tokens;
    u64 bits = 0;
    if (tokens % 16 == 0 && u64(tree) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < MOST; i += 16) {  // without branches: the loads are in flight together
        vec4 x{};
        if (i < tokens) x = ld_global<vec4>(row + i);
        bits |= u64(nibble(x.x) | nibble(x.y) << 4 | nibble(x.z) << 8 | nibble(x.w) << 12) << i;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < tokens; i += 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) bits |= u64(ld_global<char>(row + min(i + e, tokens - 1)) != 0) << (i + e);
      }
    }
    return bits;
  }
  // Which of 4 bytes are not 0. The product brings the bits together at the top.
  DEVICE static u32 nibble(u32 x) { return (((x & 0x7f7f7f7f) + 0x7f7f7f7f | x) >> 7 & 0x01010101) * 0x10204080 >> 28; }

  // What the tokens of this lane's ROWS rows see. A quad of lanes has the same rows; all lanes take part.
  template <int ROWS>
  DEVICE void of(u64 (&seen)[ROWS], const int (&token)[ROWS], int lane) const {
    if constexpr (KIND == TREE_PARENTS) {
      u32 low, high, high_low;
      climb(low, high, high_low, lane);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        seen[r] = shfl(low, token[r] % 32);
        if constexpr (MOST > 32) {
          const u64 both = u64(shfl(high, token[r] % 32)) << 32 | shfl(high_low, token[r] % 32);
          if (token[r] >= 32) seen[r] = both;
        }
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const char* row = static_cast<const char*>(tree) + i64(token[r]) * tokens;
        u32 own[2] = {};
#pragma unroll
        for (int i = 0; i < MOST / 4; ++i) {  // each lane of the quad reads every fourth byte
          const int at = lane % 4 + 4 * i;
          if (at == token[r] || (at < token[r] && ld_global<char>(row + at) != 0)) own[i / 8] |= 1u << at % 32;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          own[h] |= shfl_xor(own[h], 1);
          own[h] |= shfl_xor(own[h], 2);
        }
        seen[r] = u64(own[1]) << 32 | own[0];
      }
    }
  }
};
