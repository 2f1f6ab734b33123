// Dropout: which weights of P V are kept. A random byte belongs to each (sequence, head, query, key), so that all kernels, tiles
// and GPUs agree; the definition and its form in NumPy are cufa/problem/dropout.py.
//
// A call of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) gives the bytes of 16 scores:
// queries i, i + 1, i + 8, i + 9 times keys j, j + 1, j + 8, j + 9. In an accumulator, two lanes, 4 apart, hold them, whether
// rows are queries or keys. Each lane makes the calls of every second 16 columns; then both exchange half of their bits.
#pragma once
#include "shared/element.cuh"
#include "shared/fragment_view.cuh"

struct PhiloxKey {
  u32 low, high;
};

// One round for each of COUNT counters.
template <int COUNT>
DEVICE void philox_round(u32 (&x)[COUNT][4], const PhiloxKey& key) {
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    // __umulhi: a 64-bit product with a constant, shifted to its upper half, takes two more instructions.
    const u32 first = x[c][0], second = x[c][2];
    x[c][0] = __umulhi(second, 0xCD9E8D57u) ^ x[c][1] ^ key.low;
    x[c][1] = second * 0xCD9E8D57u;
    x[c][2] = __umulhi(first, 0xD2511F53u) ^ x[c][3] ^ key.high;
    x[c][3] = first * 0xD2511F53u;
  }
}
template <int COUNT>
DEVICE void philox(u32 (&x)[COUNT][4], PhiloxKey key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    philox_round(x, key);
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
}

// The factor of a row of O or dV at the end: the sums are over kept weights only.
template <typename Params>
DEVICE float of_kept(const Params& p, float factor) {
  if constexpr (DROPOUT) return factor * p.kept_factor;
  return factor;
}

// Index of the call that covers a query or key: four calls for each 16 positions.
DEVICE u32 philox_call(int position) { return u32(position) / 16 * 4 + u32(position) % 8 / 2; }

// The highest bit of each byte: whether the byte is at least p.dropped.
template <typename Params>
DEVICE u32 kept_bytes(const Params& p, u32 bytes) {
  const u32 low_bits = (bytes | 0x80808080u) - p.dropped_low_bits;  // highest bit: the low 7 bits are at least these
  return (bytes & low_bits) | (p.dropped_below_half & (bytes | low_bits));
}

// The weights that a lane keeps, of 16 rows and 8 * TILES columns. KEYS_IN_ROWS: rows are keys, columns are queries.
// MOST_AT_ONCE: calls of Philox that run together. They overlap, and take four registers each.
template <int TILES, bool KEYS_IN_ROWS, int MOST_AT_ONCE = 4>
struct KeptWeights {
  static_assert(TILES == 1 || TILES % 2 == 0, "a call of Philox serves 16 columns, or one of their halves");
  static constexpr int CHUNK = TILES < 16 ? TILES : 16;            // tiles whose calls are made together
  static constexpr int CHUNKS = (TILES + CHUNK - 1) / CHUNK;
  static constexpr int CALLS = (CHUNK + 3) / 4, STEPS = 2 * CALLS;  // per lane and chunk
  static constexpr int AT_ONCE = CALLS < MOST_AT_ONCE ? CALLS : MOST_AT_ONCE;

  static constexpr bool IN_ONE_WORD = STEPS <= 4;

  // Step s of a chunk has bit 8 - STEPS + s of each byte. [0]: of even 16 columns, [1]: of odd ones. IN_ONE_WORD: bit
  // 4 - STEPS + s for odd ones.
  u32 bits[CHUNKS][IN_ONE_WORD ? 1 : 2];

  // `row` and `column` are the lane's first.
  template <typename Params>
  DEVICE void draw(const Params& p, u32 head, int row, int column) {
    const u64 seed = ld_global<u64>(p.seed), number = ld_global<u64>(p.seed + 1);
    const PhiloxKey key{u32(seed), u32(seed >> 32)};
    const bool odd = lane_id() & 4;
    const u32 of_row = philox_call(row), of_column = philox_call(column) + (odd ? 4 : 0);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      u32 x[AT_ONCE][4];
      u32 of_parity[2] = {0, 0};  // for lanes with even rows, and with odd rows
#pragma unroll
      for (int c = 0; c < CALLS; ++c) {
        const int first = c % AT_ONCE;
        if (first == 0) {
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) {
            const u32 here = of_column + (chunk * CHUNK / 2 + 2 * (c + n)) * 4;
            x[n][0] = KEYS_IN_ROWS ? of_row : here;
            x[n][1] = KEYS_IN_ROWS ? here : of_row;
            x[n][2] = head;
            x[n][3] = u32(number);
          }
          philox(x, key);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const u32 kept = kept_bytes(p, x[first][KEYS_IN_ROWS ? 2 * e + parity : 2 * parity + e]);
            of_parity[parity] = (of_parity[parity] >> 1) | (kept & 0x80808080u);
          }
        }
      }
      const u32 own = odd ? of_parity[1] : of_parity[0], sent = odd ? of_parity[0] : of_parity[1];
      const u32 received = shfl_xor(sent, 4);
      const u32 of_even = odd ? received : own, of_odd = odd ? own : received;
      bits[chunk][0] = IN_ONE_WORD ? of_even | of_odd >> 4 : of_even;
      if constexpr (!IN_ONE_WORD) bits[chunk][1] = of_odd;
      if constexpr (TILES == 1) bits[0][0] >>= column / 8 % 2 * (KEYS_IN_ROWS ? 16 : 8);
    }
  }

  // All ones in the halves of a packed pair that are kept: row r and both columns of tile n.
  DEVICE u32 pair(int r, int n) const {
    const int byte = byte_of(r, n);
    return byte_permute(word(n, 0), word(n, 1), u32(byte * 0x1111 + 0xcc88));
  }
  DEVICE float value(float x, int r, int n, int e) const {
    return u32_as_float(float_as_u32(x) & byte_permute(word(n, e), 0, u32(byte_of(r, n) * 0x1111 + 0x8888)));
  }

 private:
  static DEVICE constexpr int byte_of(int r, int n) { return KEYS_IN_ROWS ? n % 2 * 2 + r % 2 : r % 2 * 2 + n % 2; }
  // The highest bits of its bytes are those of column e of tile n.
  DEVICE u32 word(int n, int e) const {
    const int of_chunk = n % CHUNK, step = of_chunk / 4 * 2 + e, is_odd = of_chunk / 2 % 2;
    if constexpr (IN_ONE_WORD) return bits[n / CHUNK][0] << (STEPS - 1 - step + 4 * is_odd);
    return bits[n / CHUNK][is_odd] << (STEPS - 1 - step);
  }
};

// x + y. DROPOUT: x is a gradient of weights; dropped ones are 0, kept ones scaled.
template <typename Params, typename Kept>
DEVICE float add_to_kept(const Params& p, const Kept& kept, float x, float y, int r, int n, int e) {
  if constexpr (DROPOUT) return fmaf(kept.value(x, r, n, e), p.kept_factor, y);
  return x + y;
}
