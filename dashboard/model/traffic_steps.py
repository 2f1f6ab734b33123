"""Bytes that each step of an algorithm reads and writes, per array, by the papers' pseudocode: each array once per use
(section 3.2 of the FlashAttention paper), without caches.

The walkthrough shows these steps. Tests compare their totals with counters of the executed kernels
(:mod:`cufa.run.emulate`). Tiles come from the schedule, in the order of the papers; a skipped tile moves nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from cufa.problem.problem import Problem
from cufa.schedule.decode import split_range, used_splits
from cufa.schedule.schedule import Schedule, Tile

FLOAT32 = 4
"""Bytes of an accumulator: S, partial results, FA1's O, l, m, and the log-sum-exp."""


@dataclasses.dataclass(frozen=True)
class Move:
    """One array's bytes in one step."""

    array: str
    """Name in the papers: Q, K, V, S, P, O, "l, m", L (the log-sum-exp), dO, dP, dS, dQ, dK, dV, "L, D" (two numbers
    per row of the backward), "dQ so far" (in float32), or "parts" (partial results of splits)."""
    read: int = 0
    written: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One tile of one head, or one part of a merge."""

    kernel: str
    """Launch of the algorithm: "" for the launch over tiles; "scores", "softmax" or "values"; "merge"; "prepare",
    "convert"; or the output array of a launch of the naive backward."""
    q_block: int
    kv_block: int
    """-1: a merge, or a block of rows."""
    moves: tuple[Move, ...] = ()
    skipped: bool = False

    @property
    def read(self) -> int:
        return sum(move.read for move in self.moves)

    @property
    def written(self) -> int:
        return sum(move.written for move in self.moves)


Steps = Iterator[Step]


def total(steps: Steps) -> tuple[int, int]:
    """Bytes read and bytes written."""
    moved = [(step.read, step.written) for step in steps]
    return sum(read for read, _ in moved), sum(written for _, written in moved)


class _Tiles:
    """Bytes of one head's blocks; the last block may be shorter."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.item = problem.q_element.itemsize
        self.q_blocks, self.kv_blocks = range(schedule.num_q_blocks), range(schedule.num_kv_blocks)

    def rows(self, i: int) -> int:
        return min(self.schedule.block_q, self.schedule.seqlen_q - i * self.schedule.block_q)

    def keys(self, j: int) -> int:
        return min(self.schedule.block_kv, self.schedule.seqlen_k - j * self.schedule.block_kv)

    def of_queries(self, i: int, itemsize: int = 0) -> int:
        return self.rows(i) * self.problem.head_dim * (itemsize or self.item)

    def key_block(self, j: int) -> tuple[Move, Move]:
        keys, problem = self.keys(j) * self.problem.head_dim, self.problem
        return Move("K", keys * problem.k_element.itemsize), Move("V", keys * problem.v_element.itemsize)

    def output(self, i: int) -> tuple[Move, Move]:
        rows = self.rows(i)
        out = rows * self.problem.head_dim * self.problem.out_element.itemsize
        return Move("O", written=out), Move("L", written=rows * FLOAT32)


def fa2(problem: Problem, schedule: Schedule) -> Steps:
    """FlashAttention-2: Q once, K and V per visited tile, O once (Algorithm 1 of its paper)."""
    tiles = _Tiles(problem, schedule)
    for i in tiles.q_blocks:
        visited = [j for j in tiles.kv_blocks if schedule.tiles[i, j] != Tile.SKIPPED]
        last = visited[-1] if visited else tiles.kv_blocks[-1]  # a block without a visible key stores zeros
        for j in tiles.kv_blocks:
            moves: list[Move] = []
            if j in visited:
                moves += [Move("Q", tiles.of_queries(i))] if j == visited[0] else []
                moves += tiles.key_block(j)
            if j == last:
                moves += tiles.output(i)
            yield Step("", i, j, tuple(moves), j not in visited)


def fa1(problem: Problem, schedule: Schedule) -> Steps:
    """FlashAttention: K and V once, Q, O, l and m per tile (Algorithm 1 of its paper). O is float32 until the
    last key block; the first key block reads no partial results."""
    tiles = _Tiles(problem, schedule)
    for j in tiles.kv_blocks:
        for i in tiles.q_blocks:
            O, lm = tiles.of_queries(i, FLOAT32), tiles.rows(i) * 2 * FLOAT32
            moves = [*tiles.key_block(j)] if i == 0 else []
            moves += [Move("Q", tiles.of_queries(i))]
            was, ends = j > 0, j == tiles.kv_blocks[-1]
            state = Move("O", O * was, O * (not ends)), Move("l, m", lm * was, lm * (not ends))
            moves += [move for move in state if move.read or move.written]
            moves += tiles.output(i) if ends else ()
            yield Step("", i, j, tuple(moves))


def naive(problem: Problem, schedule: Schedule) -> Steps:
    """Three kernels: S is written, read thrice (maximum, sum, exponentials) as P is written, and P read (Algorithm 0
    of the FlashAttention paper). A block of O has as many columns as a tile has keys."""
    tiles = _Tiles(problem, schedule)
    grid = [(i, j) for i in tiles.q_blocks for j in tiles.kv_blocks]
    for i, j in grid:
        S = Move("S", written=tiles.rows(i) * tiles.keys(j) * FLOAT32)
        yield Step("scores", i, j, (Move("Q", tiles.of_queries(i)), tiles.key_block(j)[0], S))
    last = tiles.kv_blocks[-1]
    for i, j in grid:
        scores = tiles.rows(i) * tiles.keys(j)
        moves = Move("S", 3 * scores * FLOAT32), Move("P", written=scores * tiles.item)
        yield Step("softmax", i, j, (*moves, tiles.output(i)[1]) if j == last else moves)
    columns = -(-problem.head_dim // schedule.block_kv)
    for i, j in grid:
        P = Move("P", columns * tiles.rows(i) * tiles.keys(j) * tiles.item)
        moves = P, tiles.key_block(j)[1]
        yield Step("values", i, j, (*moves, tiles.output(i)[0]) if j == last else moves)


def decode(problem: Problem, schedule: Schedule, num_splits: int, length: int) -> Steps:
    """Flash-Decoding over ``length`` keys: each split reads Q and its keys and values. Two or more splits write
    O, m and l in float32, which the merge reads. A query block is all rows of a key/value head."""
    tiles, rows, block = _Tiles(problem, schedule), problem.rows, schedule.block_kv
    used = used_splits(length, num_splits, block)
    part = rows * (problem.head_dim + 2) * FLOAT32
    out = rows * problem.head_dim * problem.out_element.itemsize
    result = Move("O", written=out), Move("L", written=rows * FLOAT32)
    for split in range(used):
        first, end = split_range(length, num_splits, split, block)
        for j in range(first // block, -(-end // block)):
            moves = [Move("Q", rows * problem.head_dim * tiles.item)] if j == first // block else []
            moves += tiles.key_block(j)
            if (j + 1) * block >= end:
                moves += [Move("parts", written=part)] if used > 1 else result
            yield Step("", 0, j, tuple(moves))
    if used > 1:
        yield Step("merge", 0, -1, (Move("parts", used * part), *result))


def fa2_backward(problem: Problem, schedule: Schedule) -> Steps:
    """FlashAttention-2's backward (Algorithm 2 of its paper), of a schedule by keys: K and V once; per visited tile Q,
    dO, two numbers per row, and an addition to dQ in float32. A launch before computes D = rowsum(dO ∘ O), a launch
    after rounds dQ. An addition counts as a write: the memory, not the SM, reads the old value."""
    tiles = _Tiles(problem, schedule)
    for i in tiles.q_blocks:
        dO, L, LD, dQ = _row_bytes(tiles, i)
        moves = (
            Move("dO", dO),
            Move("O", dO),
            Move("L", L),
            Move("L, D", written=LD),
            Move("dQ so far", written=dQ),
        )
        yield Step("prepare", i, -1, moves)
    for j in tiles.kv_blocks:
        visited = [i for i in tiles.q_blocks if schedule.tiles[i, j] != Tile.SKIPPED]
        last = visited[-1] if visited else tiles.q_blocks[-1]  # keys that are visible to no query get zeros
        for i in tiles.q_blocks:
            traffic: list[Move] = []
            if i in visited:
                dO, _, LD, dQ = _row_bytes(tiles, i)
                traffic += tiles.key_block(j) if i == visited[0] else ()
                traffic += [Move("Q", tiles.of_queries(i)), Move("dO", dO), Move("L, D", LD)]
                traffic += [Move("dQ so far", written=dQ)]
            if i == last:
                traffic += [Move(f"d{move.array}", written=move.read) for move in tiles.key_block(j)]
            yield Step("", i, j, tuple(traffic), i not in visited)
    for i in tiles.q_blocks:
        dQ = tiles.of_queries(i, FLOAT32)
        yield Step("convert", i, -1, (Move("dQ so far", dQ), Move("dQ", written=tiles.of_queries(i))))


def _row_bytes(tiles: _Tiles, i: int) -> tuple[int, int, int, int]:
    """Bytes of a block of dO, of L, of L and D, and of dQ in float32."""
    rows = tiles.rows(i)
    return tiles.of_queries(i), rows * FLOAT32, rows * 2 * FLOAT32, tiles.of_queries(i, FLOAT32)


def naive_backward(problem: Problem, schedule: Schedule) -> Steps:
    """Algorithm 3 of the FlashAttention paper, with stored P: one launch each for dV, dP, dS, dQ and dK, tile by tile.
    dS reads P and dP twice: for the row sums and for dS. cufa has no such kernel; the counts show what FA2 saves."""
    tiles = _Tiles(problem, schedule)
    products = (("dV", "P", "dO", True), ("dP", "dO", "V", None), ("dS", "P", "dP", None), ("dQ", "dS", "K", False),
                ("dK", "dS", "Q", True))  # fmt: skip
    for made, left, right, by_keys in products:
        for first, second in itertools.product(*((tiles.kv_blocks, tiles.q_blocks)[:: 1 if by_keys else -1])):
            i, j = (second, first) if by_keys else (first, second)
            keys = tiles.key_block(j)[0].read
            scores = tiles.rows(i) * tiles.keys(j)
            sizes = {
                "P": scores * tiles.item,
                "dP": scores * FLOAT32,
                "dS": scores * tiles.item,
                "dO": tiles.of_queries(i),
            }
            sizes |= {
                "Q": tiles.of_queries(i),
                "K": keys,
                "V": keys,
                "dQ": tiles.of_queries(i),
                "dK": keys,
                "dV": keys,
            }
            times = 2 if made == "dS" else 1
            moves = [Move(left, times * sizes[left]), Move(right, times * sizes[right])]
            ends = {None: True, True: i == tiles.q_blocks[-1], False: j == tiles.kv_blocks[-1]}[by_keys]
            moves += [Move(made, written=sizes[made])] if ends else []
            yield Step(made, i, j, tuple(moves))


#: By algorithm: steps that follow from the schedule of one head.
MODELS: dict[str, Callable[[Problem, Schedule], Steps]] = {"naive": naive, "fa1": fa1, "fa2": fa2}
BACKWARD_MODELS: dict[str, Callable[[Problem, Schedule], Steps]] = {
    "fa2_backward": fa2_backward,
    "naive_backward": naive_backward,
}
