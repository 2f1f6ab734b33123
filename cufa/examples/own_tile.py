"""A tile of one's own: FA2's CUDA source with 32 × 32 tiles, executed on the CPU (needs g++) and checked for races."""

import dataclasses

import numpy as np

import cufa


def main() -> int:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 70, 64)).astype(np.float16)
    tile = cufa.plan(q, k, v, causal=True, algorithm="fa2", device="sm_90").config
    mine = dataclasses.replace(tile, block_q=32, block_kv=32, num_warps=2)
    for config in (tile, mine):
        run = cufa.emulate(q, k, v, causal=True, config=config, mode="checked")
        error = abs(run.out - cufa.attention_reference(q, k, v, causal=True)).max()
        print(f"{config}: {len(run.findings)} findings, largest error {error:.1e}")
    return len(run.findings)


if __name__ == "__main__":
    main()
