"""Attention over two sets of keys, merged exactly: a shared prompt, or keys that lie on two devices."""

import numpy as np

import cufa


def main() -> float:
    random = np.random.default_rng(0)
    q = random.standard_normal((1, 8, 16, 64), np.float32)
    k, v = random.standard_normal((2, 1, 8, 500, 64), np.float32)
    parts = [
        cufa.flash_attention(q, k[:, :, s], v[:, :, s], return_lse=True)
        for s in (slice(300), slice(300, None))
    ]
    merged, _ = cufa.merge_attention_states(*parts[0], *parts[1])
    difference = float(abs(merged - cufa.flash_attention(q, k, v)).max())
    print(f"largest difference from attention over all keys at once: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
