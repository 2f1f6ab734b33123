"""Who computes what, and who sends what when: one value for every scheme, without arrays.

A rank's :class:`Work` is attention of some queries and query heads. It has steps; each step needs the keys of some
ranks, and is computed by calls over rectangles of scores. What travels follows: every segment of queries or keys that
a step needs and another rank holds, and every result whose owner is another rank. :mod:`cufa.parallel.schemes` makes
schedules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from ..problem.mask import Mask
from .placement import Placement, Range, Segment

AHEAD = 2
"""Steps that a step's arrays travel ahead of it."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel: a rectangle of scores."""

    rows: Range
    """Of the work's queries."""
    keys: Range
    """Of the step's keys."""
    mask: Mask
    scores: int
    """Visible scores of one head."""
    fresh: Range = (0, 0)
    """Rows without an earlier partial result."""
    done: Range = (0, 0)
    """Rows without a later one."""

    @property
    def plain(self) -> bool:
        """The whole attention of its rows."""
        return self.fresh == self.done == self.rows


@dataclasses.dataclass(frozen=True)
class Step:
    keys: tuple[Segment, ...]
    """The keys in the order of the step's array."""
    calls: tuple[Call, ...]

    @property
    def scores(self) -> int:
        return sum(call.scores for call in self.calls)


@dataclasses.dataclass(frozen=True)
class Work:
    """Attention of some queries and heads on one rank."""

    heads: Range
    kv_heads: Range
    queries: tuple[Segment, ...]
    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        return sum(x.length for x in self.queries)

    @functools.cached_property
    def uncovered(self) -> list[Range]:
        """Rows that no call has."""
        return rest((0, self.rows), [call.rows for step in self.steps for call in step.calls])

    @functools.cached_property
    def unfinished(self) -> list[Range]:
        """Rows with a partial result that no call finished."""
        calls = [call for step in self.steps for call in step.calls]
        return rest((0, self.rows), [*(call.done for call in calls), *self.uncovered])


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The works of every rank, in order. Prints who computes what with which keys, and what travels."""

    scheme: str
    queries: Placement
    keys: Placement
    heads: int
    kv_heads: int
    works: tuple[tuple[Work, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.works)

    def moves(self, rank: int) -> Iterator[tuple[int, str, int, Segment, Range]]:
        """What ``rank`` receives: (step counted over all works, "q" or "kv", sender, tokens, heads)."""
        at = 0
        for work in self.works[rank]:
            for i, step in enumerate(work.steps or (Step((), ()),)):
                if i == 0:
                    yield from ((at, "q", x.rank, x, work.heads) for x in work.queries if x.rank != rank)
                yield from ((at, "kv", x.rank, x, work.kv_heads) for x in step.keys if x.rank != rank)
                at += 1

    def scores(self, rank: int) -> int:
        """Visible scores that a rank computes, over all its heads, of one sequence."""
        return sum(
            step.scores * (work.heads[1] - work.heads[0]) for work in self.works[rank] for step in work.steps
        )

    def received(self, rank: int, head_dim: int, itemsize: int, backward: bool = False) -> int:
        """Bytes of q, k, v, results and gradients that reach a rank in one direction of one sequence."""
        size = head_dim * itemsize
        found = 0
        for _, what, _, x, (first, end) in self.moves(rank):
            arrays = {"q": 3 if backward else 1, "kv": 2}[what]  # backward: q, dout, out
            found += arrays * x.length * (end - first) * size
        for other in range(self.ranks):  # results: what was sent out comes back
            for _, what, sender, x, (first, end) in self.moves(other):
                if sender == rank and (what == "q" or backward):
                    found += {"q": 1, "kv": 2}[what] * x.length * (end - first) * size
        return found

    def __str__(self) -> str:
        lines = [f"{self.scheme}: {self.heads}/{self.kv_heads} heads", str(self.queries)]
        for rank, works in enumerate(self.works):
            lines.append(f"rank {rank} computes {self.scores(rank):,} scores")
            moves = list(self.moves(rank))
            at = 0
            for work in works:
                for step in work.steps or (Step((), ()),):
                    heads = f"heads {work.heads[0]}-{work.heads[1] - 1}"
                    lines.append(f"  step {at}   {heads}")
                    lines += [
                        f"    gets {what} {x.token}-{x.end - 1} from rank {sender}"
                        for when, what, sender, x, _ in moves
                        if when == at
                    ]
                    lines += [
                        f"    queries {_tokens(work.queries, call.rows)} × keys {_tokens(step.keys, call.keys)}: "
                        f"{call.mask}"
                        for call in step.calls
                    ]
                    at += 1
        return "\n".join(lines)


def rest(whole: Range, taken: Sequence[Range]) -> list[Range]:
    """What of a range is in none of ``taken``."""
    found = [whole] if whole[0] < whole[1] else []
    for begin, end in taken:
        if begin < end:
            pieces = [((a, min(b, begin)), (max(a, end), b)) for a, b in found]
            found = [x for pair in pieces for x in pair if x[0] < x[1]]
    return found


def _tokens(segments: Sequence[Segment], rows: Range) -> str:
    """The tokens of rows of the segments put one after another."""
    found, at = [], 0
    for x in segments:
        begin, end = max(rows[0] - at, 0), min(rows[1] - at, x.length)
        if begin < end:
            found.append(f"{x.token + begin}-{x.token + end - 1}")
        at += x.length
    return "+".join(found)
