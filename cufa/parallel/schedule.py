"""Which rank computes which scores, and which tokens travel when: one value for every scheme, without arrays.

A rank's :class:`Work` is attention of some queries and query heads. It has steps; each step needs the keys of some
ranks, and is computed by calls over rectangles of scores. The transfers follow: every segment of queries or keys that
a step needs and another rank holds, and every result whose owner is another rank. :mod:`cufa.parallel.schemes` makes
schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ..problem.mask import Mask
from .placement import Placement, Range, Segment

AHEAD = 2
"""A step's arrays travel this many steps earlier."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel: a rectangle of scores."""

    rows: Range
    """Rows of the work's queries."""
    keys: Range
    """Rows of the step's keys."""
    mask: Mask
    scores: int
    """Visible scores of one head."""
    fresh: Range = (0, 0)
    """Rows without an earlier partial result."""
    done: Range = (0, 0)
    """Rows without a later partial result: the call writes their result. If there are several runs of such rows: the
    longest."""

    @property
    def plain(self) -> bool:
        """Whether the call is the whole attention of its rows."""
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
    """At least one, unless the work has no queries: a step without keys if no key is visible."""

    @property
    def rows(self) -> int:
        return sum(x.length for x in self.queries)

    @functools.cached_property
    def uncovered(self) -> list[Range]:
        """Rows that no call covers."""
        return rest((0, self.rows), [call.rows for step in self.steps for call in step.calls])

    @functools.cached_property
    def unfinished(self) -> list[Range]:
        """Rows with a partial result that no call finished."""
        calls = [call for step in self.steps for call in step.calls]
        return rest((0, self.rows), [*(call.done for call in calls), *self.uncovered])


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Tokens of another rank that a step needs."""

    step: int
    """Counted over all works of the rank."""
    what: str
    """ "q" or "kv"."""
    segment: Segment
    heads: Range

    @property
    def rows(self) -> int:
        """Rows of one array: a row is one token of one head."""
        return self.segment.length * (self.heads[1] - self.heads[0])

    def __str__(self) -> str:
        x = self.segment
        return f"    gets {self.what} {x.token}-{x.end - 1} from rank {x.rank}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The works of every rank, in order. Prints the scores that each rank computes, and the tokens that travel."""

    scheme: str
    queries: Placement
    keys: Placement
    heads: tuple[tuple[int, int], ...]
    """Query heads and key/value heads that each rank holds."""
    works: tuple[tuple[Work, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.works)

    def steps(self, rank: int) -> Iterator[tuple[int, Work, Step]]:
        """The steps of a rank, numbered over all its works."""
        pairs = ((work, step) for work in self.works[rank] for step in work.steps)
        return ((at, work, step) for at, (work, step) in enumerate(pairs))

    def arrivals(self, rank: int) -> Iterator[Arrival]:
        """The tokens that ``rank`` receives, step by step."""
        for at, work, step in self.steps(rank):
            if step is work.steps[0]:
                yield from (Arrival(at, "q", x, work.heads) for x in work.queries if x.rank != rank)
            yield from (Arrival(at, "kv", x, work.kv_heads) for x in step.keys if x.rank != rank)

    def scores(self, rank: int) -> int:
        """Visible scores that a rank computes, over all its heads, of one sequence."""
        return sum(step.scores * (work.heads[1] - work.heads[0]) for _, work, step in self.steps(rank))

    @functools.cached_property
    def summed(self) -> tuple[str, ...]:
        """The gradients that are sums over several calls, of "dq", "dk" and "dv": their shares are float32."""
        if self.scheme == "heads":  # ranks have heads of their own
            return ()
        calls = [(w, s, call) for works in self.works for w in works for s in w.steps for call in s.calls]
        dq = [(w.heads, x) for w, _, call in calls for x in _ranges(w.queries, call.rows)]
        dk = [(w.kv_heads, x) for w, s, call in calls for x in _ranges(s.keys, call.keys)]
        return ("dq",) * _overlap(dq) + ("dk", "dv") * _overlap(dk)

    def __str__(self) -> str:
        heads, kv_heads = self.heads[0]
        lines = [f"{self.scheme}: {heads}/{kv_heads} heads", str(self.queries)]
        for rank in range(self.ranks):
            lines.append(f"rank {rank} computes {self.scores(rank):,} scores")
            arrivals = list(self.arrivals(rank))
            for at, work, step in self.steps(rank):
                lines.append(f"  step {at}   heads {work.heads[0]}-{work.heads[1] - 1}")
                lines += [str(x) for x in arrivals if x.step == at]
                lines += [
                    f"    queries {_tokens(work.queries, call.rows)} × keys {_tokens(step.keys, call.keys)}: "
                    f"{call.mask}"
                    for call in step.calls
                ]
        return "\n".join(lines)


def rest(whole: Range, taken: Sequence[Range]) -> list[Range]:
    """The pieces of a range outside of all ``taken``."""
    pieces_left = [whole] if whole[0] < whole[1] else []
    for begin, end in taken:
        if begin < end:
            pieces = [((a, min(b, begin)), (max(a, end), b)) for a, b in pieces_left]
            pieces_left = [x for pair in pieces for x in pair if x[0] < x[1]]
    return pieces_left


def _ranges(segments: Sequence[Segment], rows: Range) -> Iterator[Range]:
    """The tokens of ``rows``, which count over the segments put one after another."""
    at = 0
    for x in segments:
        begin, end = max(rows[0] - at, 0), min(rows[1] - at, x.length)
        if begin < end:
            yield x.token + begin, x.token + end
        at += x.length


def _tokens(segments: Sequence[Segment], rows: Range) -> str:
    return "+".join(f"{begin}-{end - 1}" for begin, end in _ranges(segments, rows))


def _overlap(boxes: Sequence[tuple[Range, Range]]) -> bool:
    """Whether two boxes of heads and tokens have a cell in common."""
    heads, tokens = (
        {x: i for i, x in enumerate(sorted({*itertools.chain(*(box[axis] for box in boxes))}))}
        for axis in (0, 1)
    )
    count = np.zeros((len(heads), len(tokens)), int)
    for (h, h_end), (t, t_end) in boxes:
        count[heads[h] : heads[h_end], tokens[t] : tokens[t_end]] += 1
    return bool((count > 1).any())
