"""Schemes: how attention is distributed over the ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from ..problem.mask import Band
from .placement import Placement, Range, Segment
from .rectangles import calls_of, seen, with_order
from .schedule import Schedule, Step, Work
from .slices import Whole

SCHEMES = ("auto", "heads", "ulysses", "zigzag", "allgather", "2d")


@functools.lru_cache(64)
def make_schedule(
    scheme: str, mask: Whole, queries: Placement, keys: Placement, heads: tuple[tuple[int, int], ...],
    backward: bool = False, sink: bool = False,
) -> Schedule:  # fmt: skip
    """The schedule of a scheme for these placements. Raises ValueError for a scheme that needs another placement.

    ``heads``: (query heads, key/value heads) that each rank holds; all equal unless heads are placed.
    ``backward``: gradients, whose calls are independent of each other. ``sink``: partial results begin with the sink,
    so that no row is fresh."""
    ranks, kind = queries.ranks, queries.kind
    chosen = choose(mask, queries, heads[0][1]) if scheme == "auto" else scheme
    _check(chosen, kind)
    makers = [Maker(mask, queries, keys, *held, backward, sink) for held in heads]
    make = makers[0]
    works: list[list[Work]]
    if chosen == "heads":
        works = [
            [each.work((0, each.heads), queries.segments(r), [keys.segments(r)])]
            for r, each in enumerate(makers)
        ]
    elif make.heads == 0:
        works = [[]] * ranks
    elif chosen == "zigzag":
        works = [make.ring(r) for r in range(ranks)]
    else:
        degree = {"allgather": 1, "ulysses": ranks, "2d": _inner(ranks, make.kv_heads)}[chosen]
        works = [make.gathered(r, degree) for r in range(ranks)]
    return Schedule(chosen, queries, keys, heads, tuple(map(tuple, works)))


def choose(mask: Whole, queries: Placement, kv_heads: int) -> str:
    """The scheme of "auto": the valid one with the least exposed traffic and equal work on all ranks."""
    ranks, plain = queries.ranks, isinstance(mask.mask, Band) and not mask.mask.irregular_kind
    if queries.kind == "heads":
        return "heads"
    if queries.kind == "documents":
        return "zigzag"
    if queries.kind == "zigzag" and plain and mask.mask.edges(mask.seqlen_q, mask.seqlen_k)[0] is None:
        return "zigzag"
    if kv_heads % ranks == 0:
        return "ulysses"
    return "2d" if 1 < _inner(ranks, kv_heads) < ranks else "allgather"


def _check(scheme: str, kind: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not known; use {', '.join(map(repr, SCHEMES))}")
    needed = {"heads": ("heads",), "zigzag": ("zigzag", "documents")}.get(
        scheme, ("contiguous", "zigzag", "documents", "custom")
    )
    if kind not in needed:
        raise ValueError(
            f"scheme={scheme!r} takes placement {' or '.join(map(repr, needed))}, not {kind!r}: make parts with "
            f"cufa.parallel.distribute(x, group, placement={needed[0]!r})"
        )


def _inner(ranks: int, kv_heads: int) -> int:
    """Ranks that share the heads: the greatest common divisor of ranks and key/value heads."""
    return max(n for n in range(1, ranks + 1) if ranks % n == kv_heads % n == 0)


def shares(heads: int, kv_heads: int, parts: int) -> list[Range]:
    """Query heads of each part: whole query groups. If there are more parts than key/value heads: equal pieces of query
    groups, where that is possible."""
    group, pieces = heads // kv_heads, parts // kv_heads
    if pieces > 1 and parts % kv_heads == group % pieces == 0:
        each = group // pieces
        return [(i * each, (i + 1) * each) for i in range(parts)]
    ends = [i * kv_heads // parts * group for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


def head_groups(kv_heads: int, backward: bool) -> list[int]:
    """Key/value heads of a rank's head groups. The inputs of the next group travel while this group is computed.
    Forward: a small first group, because kernels wait for its copies, then the rest in two. Backward: two. More groups
    would hide more of the copies, but cost the host more time than they save (NOTES.md)."""
    first = 0 if backward else min(max(kv_heads // 8, 1), kv_heads)
    rest = kv_heads - first
    return [x for x in (first, rest - rest // 2, rest // 2) if x > 0] or [0]


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the works of ranks. Raises ValueError unless heads are a multiple of the key/value heads."""

    mask: Whole
    queries: Placement
    keys: Placement
    heads: int
    kv_heads: int
    backward: bool
    sink: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads if self.kv_heads else self.heads:
            raise ValueError(
                f"q has {self.heads} heads and k {self.kv_heads}: heads must be a multiple of kv_heads"
            )

    @property
    def query_group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    def ring(self, rank: int) -> list[Work]:
        """Zig-zag: the rank's own keys first, then those of the other ranks, one rank after another. Each segment comes
        straight from its owner. Backward: the rank's own keys are computed for half of the heads first, and for the
        other half last: the last gradients travel under it."""
        ranks, own = self.queries.ranks, self.queries.segments(rank)
        others = [self.keys.segments((rank + s) % ranks) for s in range(1, ranks)]
        everything, home = (0, self.heads), self.keys.segments(rank)
        half = self.kv_heads // 2 * self.query_group
        travelled = self.work(everything, own, others)
        if not self.backward or half == 0 or not any(step.calls for step in travelled.steps):
            return [self.work(everything, own, [home, *others])]
        halves = (0, half), (half, self.heads)
        return [self.work(halves[0], own, [home]), travelled, self.work(halves[1], own, [home])]

    def gathered(self, rank: int, degree: int) -> list[Work]:
        """Groups of ``degree`` ranks share heads out: a rank gathers its heads of the group's queries, and of all keys
        that these queries see, and computes its head groups one after another."""
        first = rank // degree * degree
        queries = [x for r in range(first, first + degree) for x in self.queries.segments(r)]
        keys = [x for r in range(self.keys.ranks) for x in self.keys.segments(r)]
        queries, keys = sorted(queries, key=lambda x: x.token), sorted(keys, key=lambda x: x.token)
        begin, end = shares(self.heads, self.kv_heads, degree)[rank - first]
        group = self.query_group
        if begin % group or end % group or self.queries.ranks == 1:
            return [self.work((begin, end), queries, [keys])]
        ends = itertools.accumulate(head_groups((end - begin) // group, self.backward), initial=0)
        cuts = itertools.pairwise(begin + x * group for x in ends)
        return [self.work(x, queries, [keys]) for x in cuts]

    def work(self, heads: Range, queries: Sequence[Segment], steps: Sequence[Sequence[Segment]]) -> Work:
        """Attention of some heads of ``queries``. A step has the keys of its segments that some query sees."""
        if heads[0] == heads[1] or not queries:
            return Work(heads, (0, 0), (), ())
        kv_heads = heads[0] // self.query_group, -(-heads[1] // self.query_group)
        mask = self.mask.of_heads(kv_heads, self.kv_heads)
        found = []
        for keys in steps:
            there = [x for x in (seen(mask, queries, segment) for segment in keys) if x.length]
            if calls := calls_of(mask, queries, there):
                found.append(Step(tuple(there), tuple(calls)))
        ordered = with_order(found, self.sink) or (Step((), ()),)
        return Work(heads, kv_heads, tuple(queries), ordered)
