// Dropout: which weights of P V are kept. A random byte belongs to each (sequence, head, query, key), so that all kernels, tiles
// and GPUs agree; the definition and its form in NumPy are cufa/problem/dropout.py.
//
// Two calls of Philox4x32-7 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) give the bytes of a group of 32
// scores: queries i, i + 1, i + 8, i + 9 times keys j ... j + 3 and j + 8 ... j + 11 (i even, j a multiple of 4). Word k of the
// eight holds bit k of each byte, so that eight instructions compare 32 bytes with the threshold. In an accumulator, four lanes
// hold a group, whether rows are queries or keys. Each lane draws for every fourth 16 columns; then the four exchange bits.
//
// A counter is (head, keys of the group, number, queries of the group and call). Its first three rounds depend on keys and on
// queries almost apart (PhiloxKeys, PhiloxQueries): a lane computes what its row decides once for several calls.
#pragma once
#include "primitives/opaque.cuh"
#include "shared/element.cuh"
#include "shared/fragment_view.cuh"

constexpr u32 PHILOX_0 = 0xD2511F53u, PHILOX_1 = 0xCD9E8D57u;          // multipliers
constexpr u32 PHILOX_STEP_0 = 0x9E3779B9u, PHILOX_STEP_1 = 0xBB67AE85u;  // increments of the key
constexpr int PHILOX_ROUNDS = 7;

// The generator's key, and a number that is a word of each counter.
struct PhiloxSeed {
  u32 low, high, number;

  template <typename Params>
  DEVICE explicit PhiloxSeed(const Params& p) {
    const u64 seed = ld_global<u64>(p.seed);
    low = u32(seed), high = u32(seed >> 32), number = u32(ld_global<u64>(p.seed + 1));
  }
  DEVICE u32 low_of(int round) const { return low + round * PHILOX_STEP_0; }
  DEVICE u32 high_of(int round) const { return high + round * PHILOX_STEP_1; }
};

// Rounds FIRST ... 6 of Philox4x32-7.
template <int FIRST, typename Seed>
DEVICE void philox(u32 (&x)[4], const Seed& seed) {
#pragma unroll
  for (int round = FIRST; round < PHILOX_ROUNDS; ++round) {
    // __umulhi: a 64-bit product with a constant, shifted to its upper half, takes two more instructions.
    const u32 first = x[0], second = x[2];
    x[0] = __umulhi(second, PHILOX_1) ^ x[1] ^ seed.low_of(round);
    x[1] = second * PHILOX_1;
    x[2] = __umulhi(first, PHILOX_0) ^ x[3] ^ seed.high_of(round);
    x[3] = first * PHILOX_0;
  }
}

// Three rounds from (head, keys, number, queries) lead to {a ^ a', b, c ^ c', d'}: a, b, c depend on keys, not on queries; a', c'
// and d' depend on queries, not on keys.
struct PhiloxKeys {
  u32 a, b, c;
  // of_seed(), of_head(): parts that many counters share.
  DEVICE PhiloxKeys(u32 of_seed, u32 of_head, u32 keys) {
    const u32 first = of_seed ^ keys, second = __umulhi(first, PHILOX_0) ^ of_head;
    a = __umulhi(second, PHILOX_1), b = second * PHILOX_1, c = first * PHILOX_0;
  }
  static DEVICE u32 of_seed(const PhiloxSeed& seed) { return __umulhi(seed.number, PHILOX_1) ^ seed.low; }
  static DEVICE u32 of_head(const PhiloxSeed& seed, u32 head) { return head * PHILOX_0 ^ seed.high_of(1); }
};
struct PhiloxQueries {
  u32 a, c, d;
  PhiloxQueries() = default;
  DEVICE PhiloxQueries(const PhiloxSeed& seed, u32 of_head, u32 queries) {
    const u32 second = of_head ^ queries, first = __umulhi(second, PHILOX_1) ^ seed.number * PHILOX_1 ^ seed.low_of(1);
    a = second * PHILOX_1 ^ seed.low_of(2), c = __umulhi(first, PHILOX_0) ^ seed.high_of(2), d = first * PHILOX_0;
  }
  static DEVICE u32 of_head(const PhiloxSeed& seed, u32 head) { return __umulhi(head, PHILOX_0) ^ seed.high; }
};
DEVICE void join(u32 (&x)[4], const PhiloxKeys& keys, const PhiloxQueries& queries) {
  x[0] = keys.a ^ queries.a, x[1] = keys.b, x[2] = keys.c ^ queries.c, x[3] = queries.d;
}

// The factor of a row of O or dV at the end: the sums are over kept weights only.
template <typename Params>
DEVICE float of_kept(const Params& p, float factor) {
  if constexpr (DROPOUT) return factor * p.kept_factor;
  return factor;
}

// Words of a counter: a group's keys, and its queries with the first of its two calls. The second call has one more.
DEVICE u32 keys_of_group(int key) { return u32(key) / 16 * 2 + u32(key) % 8 / 4; }
DEVICE u32 queries_of_group(int query) { return u32(query) / 16 * 8 + u32(query) % 8 / 2 * 2; }

// The smallest byte of a kept weight. Word k: all bits set if its bit k is 0, else none.
struct Threshold {
  u32 zeros[8];

  Threshold() = default;
  template <typename Params>
  DEVICE explicit Threshold(const Params& p) {
    const u32 words[2] = {opaque(p.zeros_low), opaque(p.zeros_high)};  // the compiler would keep eight words, and spill
#pragma unroll
    for (int k = 0; k < 8; ++k) zeros[k] = byte_permute(words[k / 4], 0, u32(0x8888 + k % 4 * 0x1111));
  }
  // Which of 32 bytes are at least the threshold.
  DEVICE u32 kept(const u32 (&x)[2][4]) const {
    u32 found = ~0u;  // from the lowest bit on: where bits differ, a higher one decides
#pragma unroll
    for (int k = 0; k < 8; ++k) found = (x[k / 4][k % 4] & found) | (zeros[k] & (x[k / 4][k % 4] | found));
    return found;
  }
};

// Selectors of byte_permute() by which lanes exchange bits of 16 and of 32 columns.
struct ExchangeSelectors {
  u32 of_16, of_32;

  ExchangeSelectors() = default;
  DEVICE ExchangeSelectors(bool odd, bool upper) : of_16(odd ? 0x3715 : 0x6240), of_32(upper ? 0x3276 : 0x5410) {}
};

// What a lane's rows, which are queries, decide for many tiles. Left alone, the compiler computes most of it again for each tile:
// opaque(), shfl(). MORE_REGISTERS: they suffice for threshold and selectors, too.
template <bool MORE_REGISTERS>
struct PhiloxRows {
  u32 round_keys[2 * PHILOX_ROUNDS];  // from round 3 on
  u32 of_seed, of_head, lane_keys;
  PhiloxQueries calls[2];
  Threshold threshold;
  ExchangeSelectors selectors;  // MORE_REGISTERS

  PhiloxRows() = default;
  // `row`: the lane's first. `column`: of the lane's first group in 64 columns. By all lanes of a warp.
  template <typename Params>
  DEVICE PhiloxRows(const Params& p, u32 head, int row, int column) : threshold(p) {
    const PhiloxSeed seed(p);
#pragma unroll
    for (int round = 3; round < PHILOX_ROUNDS; ++round) {
      round_keys[2 * round] = shfl(seed.low_of(round), 0), round_keys[2 * round + 1] = shfl(seed.high_of(round), 0);
    }
    of_seed = shfl(PhiloxKeys::of_seed(seed), 0), of_head = opaque(PhiloxKeys::of_head(seed, head));
    lane_keys = opaque(keys_of_group(column));
#pragma unroll
    for (u32 call = 0; call < 2; ++call) {
      const PhiloxQueries x(seed, PhiloxQueries::of_head(seed, head), queries_of_group(row) + call);
      calls[call].a = opaque(x.a), calls[call].c = opaque(x.c), calls[call].d = opaque(x.d);
    }
    if constexpr (MORE_REGISTERS) {
      const ExchangeSelectors found(column & 16, column & 32);
      selectors.of_16 = opaque(found.of_16), selectors.of_32 = opaque(found.of_32);
#pragma unroll
      for (u32& x : threshold.zeros) x = opaque(x);
    }
  }
  DEVICE u32 low_of(int round) const { return round_keys[2 * round]; }
  DEVICE u32 high_of(int round) const { return round_keys[2 * round + 1]; }
};

// The weights that a lane keeps, of 16 rows and 8 * TILES columns. KEYS_IN_ROWS: rows are keys, columns are queries.
template <int TILES, bool KEYS_IN_ROWS>
struct KeptWeights {
  static_assert(TILES == 1 || TILES % 2 == 0, "the lanes of a group have 16 columns each, or one half of them");

  static constexpr int OTHER = KEYS_IN_ROWS ? 8 : 1;  // distance of lanes that exchange bits of 32 columns; of 16 columns: 4

  u32 bits[(TILES + 7) / 8];  // of 64 columns each

  // The first column, of 64, for which a lane draws; `column`: its first in an accumulator.
  static DEVICE int first_drawn(int column) { return column + (lane_id() & 4 ? 16 : 0) + (lane_id() & OTHER ? 32 : 0); }

  // `row` and `column` are the lane's first. By all lanes of a warp.
  template <typename Params>
  DEVICE void draw(const Params& p, u32 head, int row, int column) {
    const PhiloxSeed seed(p);
    const u32 of_seed = PhiloxKeys::of_seed(seed), of_keys = PhiloxKeys::of_head(seed, head);
    const u32 of_queries = PhiloxQueries::of_head(seed, head);
    const int key = KEYS_IN_ROWS ? row : first_drawn(column), query = KEYS_IN_ROWS ? first_drawn(column) : row;
    const ExchangeSelectors selectors(lane_id() & 4, lane_id() & OTHER);
    draw(Threshold(p), seed, selectors, [&](int chunk, u32 call, u32 (&x)[4]) {
      join(x, PhiloxKeys(of_seed, of_keys, keys_of_group(key) + (KEYS_IN_ROWS ? 0 : chunk * 8)),
           PhiloxQueries(seed, of_queries, queries_of_group(query) + (KEYS_IN_ROWS ? chunk * 32 : 0) + call));
    });
    if constexpr (TILES == 1) bits[0] >>= column / 8 % 2 * (KEYS_IN_ROWS ? 1 : 2);
  }
  // `column`: the first of the tile, a multiple of 16.
  template <bool MORE_REGISTERS>
  DEVICE void draw(const PhiloxRows<MORE_REGISTERS>& rows, int column) {
    const ExchangeSelectors selectors = MORE_REGISTERS ? rows.selectors : ExchangeSelectors(lane_id() & 4, lane_id() & OTHER);
    draw(rows.threshold, rows, selectors, [&](int chunk, u32 call, u32 (&x)[4]) {
      join(x, PhiloxKeys(rows.of_seed, rows.of_head, rows.lane_keys + u32(column) / 8 + chunk * 8), rows.calls[call]);
    });
  }

  // All ones in the halves of a packed pair that are kept: row r and both columns of tile n.
  DEVICE u32 pair(int r, int n) const {
    const int low = bit(r, n, 0), high = bit(r, n, 1);
    return byte_permute(word(r, n, 0), word(r, n, 1), u32(low / 8 * 0x11 + high / 8 * 0x1100 + 0xcc88));
  }
  DEVICE float value(float x, int r, int n, int e) const {
    return u32_as_float(float_as_u32(x) & byte_permute(word(r, n, e), 0, u32(bit(r, n, e) / 8 * 0x1111 + 0x8888)));
  }

 private:
  // begin(chunk, call, x): the state of this lane's calls after three rounds.
  template <typename Seed, typename Begin>
  DEVICE void draw(const Threshold& threshold, const Seed& seed, const ExchangeSelectors& selectors, const Begin& begin) {
#pragma unroll
    for (int chunk = 0; chunk < (TILES + 7) / 8; ++chunk) {
      u32 x[2][4];
#pragma unroll
      for (u32 call = 0; call < 2; ++call) {
        begin(chunk, call, x[call]);
        philox<3>(x[call], seed);
      }
      u32 kept = threshold.kept(x);
      const u32 other = shfl_xor(kept, 4);
      if constexpr (KEYS_IN_ROWS) {
        const bool odd = lane_id() & 4;
        const u32 own = odd ? 0xf0f0f0f0u : 0x0f0f0f0fu, turn = odd ? 28 : 4;
        kept = (kept & own) | ((other << turn | other >> (32 - turn)) & ~own);
      } else {
        kept = byte_permute(kept, other, selectors.of_16);
      }
      bits[chunk] = byte_permute(kept, shfl_xor(kept, OTHER), selectors.of_32);
    }
  }

  // Where column e of tile n has its bit. After the exchange a lane's bits say: which of four 16 columns (two bits of the place),
  // which column of a pair, which of two tiles and of two rows.
  static DEVICE constexpr int bit(int r, int n, int e) {
    const int block = n / 2 % 4;
    return KEYS_IN_ROWS ? block / 2 * 16 + e * 8 + block % 2 * 4 + r % 2 * 2 + n % 2 : block * 8 + e * 4 + n % 2 * 2 + r % 2;
  }
  DEVICE u32 word(int r, int n, int e) const { return bits[n / 8] << (7 - bit(r, n, e) % 8); }  // that bit leads its byte
};

// x + y. DROPOUT: x is a gradient of weights; dropped ones are 0, kept ones scaled.
template <typename Params, typename Kept>
DEVICE float add_to_kept(const Params& p, const Kept& kept, float x, float y, int r, int n, int e) {
  if constexpr (DROPOUT) return fmaf(kept.value(x, r, n, e), p.kept_factor, y);
  return x + y;
}
