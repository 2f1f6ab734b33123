// The order of keys in transposed values: the accumulator of S, packed to e4m3 as it lies in registers, is the A operand of P V.
//
// PTX ISA, fragments of mma.m16n8k32 and wgmma.m64nNk32 (thread t of a quad, rows g and g + 8):
//   accumulator: of each 8 columns (tile n), columns 8n + 2t and 8n + 2t + 1;
//   A, 8 bits:   registers 0 and 1 hold k = 4t ... 4t + 3, registers 2 and 3 hold k = 16 + 4t ... 16 + 4t + 3.
// So position 16h + 4t + 2a + e of 32 keys holds key 16h + 8a + 2t + e: P needs neither shuffles nor byte permutes.
// cufa/problem/float8.py has the same order as a table; a test compares them.
#pragma once

constexpr int KEY_GROUP = 32;

// The position of a key in its group of 32.
constexpr int position_of_key(int key) { return key / 16 * 16 + key / 2 % 4 * 4 + key / 8 % 2 * 2 + key % 2; }
