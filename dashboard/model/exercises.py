"""Graders of the exercises: an answer in, a verdict and its reason out. Planner and simulation decide.

:mod:`cufa.dashboard.model.exercises_executed` has the two exercises that the executor grades.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cufa import masks
from cufa.dashboard.model.launch import KEYS, Blocks, Timeline, predict
from cufa.gpu.architectures import ARCHITECTURES
from cufa.gpu.occupancy import Occupancy, occupancy
from cufa.kernels import KERNELS, TileConfig
from cufa.problem.tile_classes import TileClass
from cufa.schedule.decode import balanced_shares, split_range
from cufa.schedule.schedule import Schedule


class Verdict(NamedTuple):
    """Whether an answer is right, and why."""

    right: bool
    why: str


TOKENS, BLOCK, BEFORE = 96, 16, 20
"""Queries and keys, tokens of a tile's side, and keys before a query that its window shows."""
WINDOW = Schedule(TOKENS, TOKENS, BLOCK, BLOCK, masks.window(BEFORE, 0))


def tiles(answer: Mapping[int, Collection[int]]) -> Verdict:
    """``answer``: key blocks by query block."""
    for i, row in enumerate(WINDOW.classes):
        needed = set(np.flatnonzero(row != TileClass.SKIP).tolist())
        for j in sorted(needed ^ set(answer[i])):
            first, last, key = i * BLOCK, (i + 1) * BLOCK - 1, j * BLOCK
            query = max(first, key)
            if j in needed:
                why = f"compute it. Query {query} sees key {max(query - BEFORE, key)}; one visible score is enough."
            elif j > i:
                why = f"skip it. All these keys come after query {last}, the last of the block."
            else:
                why = f"skip it. The oldest key that these queries see is {first} − {BEFORE} = {first - BEFORE}."
            span = f"queries {first}–{last}), key block {j} (keys {key}–{key + BLOCK - 1}"
            return Verdict(False, f"Query block {i} ({span}): {why}")
    left = f"{WINDOW.visited} of {WINDOW.total} tiles are left."
    return Verdict(
        True, f"{left} The work of a window grows with its width, not with the square of the tokens."
    )


STEPS = {
    "weights": "P = exp(S − m′)",
    "add": "l = l + row sum of P,  O = O + P V",
    "maximum": "m′ = max(m, largest score of the tile)",
    "rescale": "α = exp(m − m′),  l = α l,  O = α O,  m = m′",
}
"""The steps as first shown: in a wrong order."""
_ROWS = {
    "A row with scores 1 to 4": ((1, 2), (4, 3), (2, 4)),
    "A row with a score of 100": ((1, 2), (100, 99), (98, 2)),
}
"""Three tiles of two scores each."""
_WHY = {
    (
        "maximum",
        "rescale",
    ): "Before the new maximum is known, α = exp(m − m) = 1: the old l and O keep their scale.",
    (
        "weights",
        "add",
    ): "P of this tile does not exist yet: the weights of the previous tile are added once more.",
    (
        "rescale",
        "add",
    ): "α also shrinks what this tile has just added. Only the old l and O are on the old scale.",
    (
        "maximum",
        "weights",
    ): "P is taken against the old maximum. If this tile has a much larger score, exp overflows.",
}
"""The reason for each pair of steps: the first must come before the second."""


def order(answer: Sequence[str]) -> Verdict:
    """Run the four steps in this order, tile by tile, and compare O / l with the plain softmax."""
    missing = [words for name, words in STEPS.items() if name not in answer]
    if missing:
        return Verdict(False, f"Each step is needed once. Missing: {missing[0]}")
    for name, scores in _ROWS.items():
        got, exact = _run(answer, scores)
        if not abs(got - exact) < 1e-3:
            why = next(why for (a, b), why in _WHY.items() if answer.index(a) > answer.index(b))
            return Verdict(
                False, f"{name}: after three tiles O / l = {got:.3f}, the softmax gives {exact:.3f}. {why}"
            )
    return Verdict(
        True, "O / l of both rows is the plain softmax. P and α both need only m′: these steps may swap."
    )


@np.errstate(over="ignore", invalid="ignore")
def _run(steps: Sequence[str], row: Sequence[Sequence[float]]) -> tuple[float, float]:
    """O / l of a row in float32, and the exact result. The values are 1, 2, 3, …."""
    S = np.array(row, np.float32)
    V = np.arange(1, S.size + 1, dtype=np.float32).reshape(S.shape)
    m = new = S[0].max()  # the first tile is done
    P = np.exp(S[0] - m)
    l, O = P.sum(), P @ V[0]
    for scores, values in zip(S[1:], V[1:], strict=True):
        for step in steps:
            if step == "maximum":
                new = max(m, scores.max())
            elif step == "weights":
                P = np.exp(scores - new)
            elif step == "rescale":
                alpha = np.exp(m - new)
                l, O, m = alpha * l, alpha * O, new
            else:
                l, O = l + P.sum(), O + P @ values
    weights = np.exp(S.astype(float) - S.max())
    return float(O / l), float((weights * V).sum() / weights.sum())


ARCH, HEAD_DIM, BLOCKS = ARCHITECTURES[80], 128, 2
ROOM = ARCH.shared_memory // 1024
_FA2 = KERNELS["fa2_forward"]
TILES = {f"{c.block_q} × {c.block_kv}": c for c in _FA2.configs if c.fits(HEAD_DIM)}
"""Tile configs by their shape, query rows × keys."""


def resident(config: TileConfig) -> Occupancy:
    """Thread blocks on one SM, with the most registers that the launch bounds of the build permit."""
    threads = 32 * config.num_warps
    registers = min(255, ARCH.registers // (config.blocks_per_sm * threads))
    shared = _FA2.shared_bytes(config, HEAD_DIM)
    return occupancy(ARCH, registers=registers, threads=threads, shared_memory=shared)


def tile(answer: str) -> Verdict:
    """The most query rows of which :data:`BLOCKS` thread blocks fit on an SM."""
    chosen, fit = TILES[answer], resident(TILES[answer])
    own = fit.granted_shared_memory / 1024
    best = max(
        (c for c in TILES.values() if resident(c).blocks >= BLOCKS), key=lambda c: (c.block_q, c.block_kv)
    )
    if fit.blocks < BLOCKS:
        text = f"A thread block takes {own:.0f} KiB, {BLOCKS} take {BLOCKS * own:.0f} of {ROOM} KiB. Q takes rows × "
        return Verdict(
            False, f"{text}{HEAD_DIM} × 2 bytes (and padding); the stages take 4 × keys × {HEAD_DIM} × 2."
        )
    if chosen != best:
        times = best.block_q / chosen.block_q
        text = f"{fit.blocks} thread blocks fit, but {BLOCKS} also fit with {best.block_q} rows. Each block reads "
        return Verdict(False, f"{text}all K and V: {chosen.block_q} rows read them {times:g} times as often.")
    return Verdict(
        True, f"{BLOCKS} thread blocks of {own:.0f} KiB fit in {ROOM} KiB; tiles with more keys do not."
    )


CACHED, KV_BLOCK, SMS, OVERHEAD = (4096, 512, 512, 512), 64, 8, 1
"""Keys of each sequence, keys of a tile, SMs, and units of time that a thread block takes beside its tiles."""
SPLITS = (1, 2, 4, 5, 6, 8, 12, 16)


def split_timeline(long: int, short: int) -> Timeline:
    """The thread blocks with ``long`` splits of the longest sequence, and ``short`` splits of each other sequence."""
    owner, count = list[int](), list[int]()
    for number, length in enumerate(CACHED):
        splits = short if number else long
        ranges = [split_range(length, splits, part, KV_BLOCK) for part in range(splits)]
        tiles = [-(-(end - first) // KV_BLOCK) for first, end in ranges if end > first]
        owner, count = owner + [number] * len(tiles), count + tiles
    zeros = np.zeros(len(owner), np.int64)
    return predict(Blocks(zeros + KEYS, zeros, np.array(owner), np.array(count)), SMS, 1, OVERHEAD)


@functools.cache
def balanced_span() -> int:
    """Units of time with cufa's equal shares, one for each SM."""
    spent = np.zeros(SMS, int)
    for span in balanced_shares(CACHED, 1, SMS, KV_BLOCK, ragged=False, min_shares=1):
        spent[span.share] += -(-(span.last_key - span.first_key) // KV_BLOCK) + OVERHEAD
    return int(spent.max())


def ragged(answer: Sequence[int]) -> Verdict:
    """Right if the batch ends at most a tenth later than with equal shares. ``answer``: splits of the longest sequence,
    and of each other sequence."""
    line, best = split_timeline(*answer), balanced_span()
    longest = int(line.blocks.tiles.max())
    ends = f"{len(line.blocks)} thread blocks end after {line.span:.0f} units, equal shares of all tiles after {best}."
    if line.span <= 1.1 * best:
        return Verdict(True, f"{ends} No SM waits long for another.")
    if longest > 0.8 * line.span:
        return Verdict(False, f"{ends} One thread block has {longest} tiles: the other SMs wait for it.")
    text = f"{ends} They do not fit on {SMS} SMs at once: some SMs take one more thread block while others have none, "
    return Verdict(False, f"{text}and each thread block costs {OVERHEAD} unit for its start and merge.")
