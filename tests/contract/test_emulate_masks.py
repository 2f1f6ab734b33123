"""Bands and soft caps in every forward kernel, executed on a CPU in checked mode: results, and the class of every
tile, against brute force from the inequality that defines a band."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from support import DTYPES, make_inputs

from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, TileConfig
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.mask import Band
from cufa.problem.problem import Problem
from cufa.run.emulate.calls import Emulation, Execution, run_plan

DEVICE = Device.typical("sm_90")
CHECKED = Execution("checked")
TOLERANCE = {"float16": 6e-3, "float32": 2e-6}

KERNEL_NAMES = ("naive", "fa1_forward", "fa1_forward_f32", "fa2_forward", "fa2_forward_f32", "fa3_forward")
LENGTHS = ((1, 1), (7, 200), (63, 65), (64, 64), (127, 7), (200, 127), (65, 200))
MASKS = {
    "full": Band(),
    "causal": Band(right=0),
    "causal top-left": Band(right=0, diagonal="top-left"),
    "causal, diagonal -13": Band(right=0, diagonal=-13),
    "own key only": Band(0, 0),
    "one to the left": Band(1, 0, "top-left"),
    "7 each way": Band(7, 7, diagonal=5),
    "wider than a tile": Band(130, 20),
    "left edge only": Band(left=40),
    "beyond the keys": Band(3, 3, diagonal=500),
}


def visible(mask: Band, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Query i sees key j when i + diagonal - left <= j <= i + diagonal + right."""
    shift = {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}.get(mask.diagonal, mask.diagonal)
    distance = np.arange(seqlen_k)[None, :] - np.arange(seqlen_q)[:, None] - shift
    left = np.inf if mask.left is None else mask.left
    right = np.inf if mask.right is None else mask.right
    return (-left <= distance) & (distance <= right)


def attention(q, k, v, seen: np.ndarray, softcap: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64; keys and values have one head."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    p = np.where(seen, np.exp(s), 0)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(total == 0, 1, total), np.log(total)[..., 0]


def run(
    kernel: str,
    seqlen_q: int,
    seqlen_k: int,
    mask: Band,
    softcap: float | None = None,
    *,
    head_dim: int = 64,
    config: TileConfig | None = None,
    blocks: int | None = None,
    execution: Execution = CHECKED,
) -> Emulation:
    """One run of two heads that share keys: no findings, right results, tiles as brute force has them."""
    spec = KERNELS[kernel]
    dtype = spec.dtypes[0]
    q, k, v = make_inputs(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype)
    precision = "float32" if dtype == "float32" else "native"
    problem = Problem(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype, mask, head_dim**-0.5, softcap, precision)
    plan = make_plan(problem, DEVICE, spec.algorithm, config)
    if blocks is not None:
        launch = dataclasses.replace(plan.launches[0], grid=(min(blocks, plan.launches[0].grid[0]), 1, 1))
        plan = dataclasses.replace(plan, launches=(launch,))
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    result = run_plan(plan, arrays, execution)
    assert not result.findings, "\n".join(map(str, result.findings))
    seen = visible(mask, seqlen_q, seqlen_k)
    expected, expected_lse = attention(q, k, v, seen, softcap)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5 + 4e-7 * (softcap or 0))
    assert not out[:, :, ~seen.any(1)].any(), "rows that see no key are zero"
    assert_tiles(result, seen)
    return result


def assert_tiles(result: Emulation, seen: np.ndarray) -> None:
    """A tile is visited when a row of its block sees a key of it (all tiles by kernels that skip none), and clear
    when it is whole and every row sees every key."""
    config, rows = result.plan.config, len(seen)
    for record in result.records:
        block = seen[record["q_block"] * config.block_q : (record["q_block"] + 1) * config.block_q]
        keys = range(0, seen.shape[1], config.block_kv)
        tiles = [block[:, j : j + config.block_kv] for j in keys]
        skips = result.plan.spec.skip_masked_tiles
        visited = [j for j, tile in enumerate(tiles) if tile.any() or not skips]
        clear = [j for j, tile in enumerate(tiles) if tile.all() and tile.shape[1] == config.block_kv]
        got = range(record["first_tile"], record["first_tile"] + record["tiles_visited"])
        got_clear = range(record["first_clear"], record["first_clear"] + record["tiles_clear"])
        assert list(got) == visited and record["tiles_skipped"] == len(tiles) - len(visited), rows
        assert list(got_clear) == clear, rows


def smallest(kernel: str, head_dim: int = 64) -> TileConfig:
    """The tiling with the smallest tiles: the most tiles for the length."""
    return min(fitting_configs(KERNELS[kernel], head_dim, DEVICE), key=lambda c: c.block_q * c.block_kv)


@pytest.mark.sampled(each="mask", dated=0)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_bands(kernel, mask):
    for lengths in LENGTHS:
        run(kernel, *lengths, mask, config=smallest(kernel))


@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["7 each way"]], ids=str)
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_soft_caps(kernel, mask):
    """A cap that bends most scores, and one so large that it changes none by more than rounding."""
    options = {"config": smallest(kernel)}
    run(kernel, 65, 200, mask, 0.7, **options)
    plain, huge = (run(kernel, 65, 200, mask, softcap, **options) for softcap in (None, 1e3))
    np.testing.assert_allclose(huge.lse, plain.lse, atol=5e-4 if huge.out.dtype == np.float16 else 2e-4)


def _wide_configs() -> list:
    """fa3 tilings of several consumers, at the largest head dim of each."""
    configs = [c for c in KERNELS["fa3_forward"].configs if c.block_q > 64]
    return [
        pytest.param(c, c.max_head_dim, id=f"{c.block_q}x{c.block_kv}-d{c.max_head_dim}") for c in configs
    ]


@pytest.mark.sampled(fixed=1, dated=1)
@pytest.mark.parametrize(("config", "head_dim"), _wide_configs())
def test_consumers_pass_over_tiles_at_both_ends(config, head_dim):
    """Narrow bands over many tiles on one or two persistent blocks: consumers see tiles at different places, some
    see none, some query blocks see none at all. Whatever the order of warps, nothing stalls."""
    masks = [Band(0, 0), Band(20, 5), Band(70, 0, "top-left"), Band(config.block_kv + 9, 3), Band(9, 9, -150)]
    lengths = [(config.block_q + 69, 4 * config.block_kv + 3), (3 * config.block_q - 60, config.block_kv + 7)]
    outputs: dict[object, bytes] = {}
    for n, (mask, blocks) in enumerate(itertools.product(masks, (1, 2))):
        seqlen_q, seqlen_k = lengths[n // 2 % 2]
        execution = Execution("plain", "descending" if blocks == 1 else n)
        options = {"config": config, "head_dim": head_dim, "blocks": blocks, "execution": execution}
        result = run("fa3_forward", seqlen_q, seqlen_k, mask, **options)
        assert outputs.setdefault(mask, result.out.tobytes()) == result.out.tobytes()


@pytest.mark.parametrize("seed", range(15))
def test_random_bands(seed):
    """Random lengths and edges, of every kernel."""
    rng = random.Random(seed)
    kernel = KERNEL_NAMES[seed % len(KERNEL_NAMES)]
    seqlen_q, seqlen_k = rng.randint(1, 300), rng.randint(1, 300)
    left, right = (rng.choice([None, rng.randint(0, 200)]) for _ in range(2))
    diagonal = rng.choice(["bottom-right", "top-left", rng.randint(-300, 300)])
    run(kernel, seqlen_q, seqlen_k, Band(left, right, diagonal), config=smallest(kernel))


def test_dtypes_are_those_of_the_kernels():
    assert {KERNELS[name].dtypes[0] for name in KERNEL_NAMES} == set(TOLERANCE) <= set(DTYPES)
