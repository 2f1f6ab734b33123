"""Decoding: one token at a time against a cache in pages, as a language model generates text."""

from typing import Any

import cufa

try:
    import cupy as xp
except ImportError:
    import numpy as xp


def main(steps: int = 8) -> Any:
    batch, heads, kv_heads, head_dim, page_size = 2, 8, 2, 64, 16
    pages = xp.zeros((2, batch * 4, kv_heads, page_size, head_dim), xp.float16)  # keys, values
    table = xp.arange(batch * 4, dtype=xp.int32).reshape(batch, 4)  # pages of each sequence
    lengths = xp.array([5, 30], xp.int32)  # tokens in the cache
    random = xp.random.default_rng(0)
    for _ in range(steps):
        q, k, v = (
            random.standard_normal((batch, n, 1, head_dim), xp.float32).astype(xp.float16)
            for n in (heads, kv_heads, kv_heads)
        )
        out = cufa.flash_decode(
            q, *pages, cache_seqlens=lengths, block_table=table, k_new=k, v_new=v, window=(20, 0)
        )
        lengths += 1
        print(lengths, float(abs(out).max()))
    return lengths


if __name__ == "__main__":
    main()
