"""Who computes what, and who sends what when: one value for every scheme, without arrays.

A rank's :class:`Work` is attention of some queries and query heads. It has steps; each step needs the keys of some
ranks, and is computed by calls over rectangles of scores. What travels follows: every segment of queries or keys that
a step needs and another rank holds, and every result whose owner is another rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from ..problem.columns import Columns
from ..problem.mask import FULL, Band, Mask
from .placement import Placement, Range, Segment
from .slices import Whole

SCHEMES = ("auto", "heads", "ulysses", "zigzag", "allgather", "2d")

_HEAD_GROUPS = 2
"""Head groups of a rank whose inputs travel one after another: the next group's under the products of this one. More
groups hide more of the copies, and cost the host more than they save (NOTES.md)."""


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

    @property
    def uncovered(self) -> list[Range]:
        """Rows that no call has."""
        return _rest((0, self.rows), [call.rows for step in self.steps for call in step.calls])

    @property
    def unfinished(self) -> list[Range]:
        """Rows with a partial result that no call finished."""
        calls = [call for step in self.steps for call in step.calls]
        return _rest((0, self.rows), [*(call.done for call in calls), *self.uncovered])


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


@functools.lru_cache(64)
def make_schedule(
    scheme: str, mask: Whole, queries: Placement, keys: Placement, heads: int, kv_heads: int,
    backward: bool = False, sink: bool = False,
) -> Schedule:  # fmt: skip
    """The schedule of a scheme for these placements. Raises ValueError for a scheme that needs another placement.

    ``backward``: of the gradients, whose calls are independent of each other. ``sink``: partial results begin with it,
    so that no row of them is fresh."""
    ranks, kind = queries.ranks, queries.kind
    chosen = choose(mask, queries, heads, kv_heads) if scheme == "auto" else scheme
    _check(chosen, kind)
    make = _Maker(mask, queries, keys, heads, kv_heads, backward, sink)
    if chosen == "heads":
        works = [[make.work((0, heads), queries.segments(r), [keys.segments(r)])] for r in range(ranks)]
    elif chosen == "zigzag":
        works = [make.ring(r) for r in range(ranks)]
    elif chosen == "allgather":
        works = [make.gathered(r, 1) for r in range(ranks)]
    else:
        degree = ranks if chosen == "ulysses" else _inner(ranks, kv_heads)
        works = [make.gathered(r, degree) for r in range(ranks)]
    return Schedule(chosen, queries, keys, heads, kv_heads, tuple(map(tuple, works)))


def choose(mask: Whole, queries: Placement, heads: int, kv_heads: int) -> str:
    """The scheme of "auto": the valid one with the least exposed traffic and equal work on all ranks."""
    ranks, plain = queries.ranks, isinstance(mask.mask, Band) and not mask.mask.irregular_kind
    if queries.kind == "heads":
        return "heads"
    if queries.kind == "zigzag" and plain and mask.mask.edges(mask.seqlen_q, mask.seqlen_k)[0] is None:
        return "zigzag"
    if kv_heads % ranks == 0:
        return "ulysses"
    return "2d" if 1 < _inner(ranks, kv_heads) < ranks else "allgather"


def _check(scheme: str, kind: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not known; use {', '.join(map(repr, SCHEMES))}")
    needed = {"heads": ("heads",), "zigzag": ("zigzag",)}.get(scheme, ("contiguous", "zigzag", "custom"))
    if kind not in needed:
        raise ValueError(
            f"scheme={scheme!r} takes placement {' or '.join(map(repr, needed))}, not {kind!r}: make parts with "
            f"cufa.parallel.distribute(x, group, placement={needed[0]!r})"
        )


def pieces(
    mask: Whole, heads: Range, queries: Sequence[Segment], keys: Sequence[Segment], sink: bool
) -> Work:
    """Attention of ``queries`` to pieces of keys that come one after another. ``heads``: of queries and of keys."""
    placement = Placement.of_lengths([0])
    make = _Maker(mask, placement, placement, *heads, False, sink)
    return make.work((0, heads[0]), queries, [[x] for x in keys])


def _inner(ranks: int, kv_heads: int) -> int:
    """The largest number of ranks that divides both: the ranks that share the heads."""
    return max(n for n in range(1, ranks + 1) if ranks % n == kv_heads % n == 0)


def shares(heads: int, kv_heads: int, parts: int) -> list[Range]:
    """Query heads of each part: whole query groups, or if there are more parts than key/value heads equal pieces of
    them where that is possible."""
    group = heads // kv_heads if kv_heads else 0
    pieces = parts // kv_heads if kv_heads and parts % kv_heads == 0 else 1
    if parts > kv_heads and pieces > 1 and group % pieces == 0:
        each = group // pieces
        return [(i * each, (i + 1) * each) for i in range(parts)]
    ends = [i * kv_heads // parts * group for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


@dataclasses.dataclass(frozen=True)
class _Maker:
    mask: Whole
    queries: Placement
    keys: Placement
    heads: int
    kv_heads: int
    backward: bool
    sink: bool

    def ring(self, rank: int) -> list[Work]:
        """Zig-zag: the rank's own keys first, then those of the other ranks, one rank after another. Each segment comes
        straight from its owner. Backward: the own keys are computed in two halves of the heads, before and after the
        others, so that the last gradients travel under the second half."""
        ranks, own = self.queries.ranks, self.queries.segments(rank)
        others = [self.keys.segments((rank + s) % ranks) for s in range(1, ranks)]
        everything, home = (0, self.heads), self.keys.segments(rank)
        if not self.backward:
            return [self.work(everything, own, [home, *others])]
        half = self.kv_heads // 2 * (self.heads // max(self.kv_heads, 1))
        if half == 0 or ranks == 1:
            return [self.work(everything, own, [home, *others])]
        halves = (0, half), (half, self.heads)
        return [
            self.work(halves[0], own, [home]),
            self.work(everything, own, others),
            self.work(halves[1], own, [home]),
        ]

    def gathered(self, rank: int, degree: int) -> list[Work]:
        """Ranks in groups of ``degree`` share heads out: each gathers its heads of the group's queries, and of all
        keys that they see, and computes its head groups one after another."""
        first = rank // degree * degree
        queries = [x for r in range(first, first + degree) for x in self.queries.segments(r)]
        keys = [x for r in range(self.keys.ranks) for x in self.keys.segments(r)]
        queries, keys = sorted(queries, key=lambda x: x.token), sorted(keys, key=lambda x: x.token)
        begin, end = shares(self.heads, self.kv_heads, degree)[rank - first]
        group = self.heads // max(self.kv_heads, 1)
        if begin % max(group, 1) or end % max(group, 1) or self.queries.ranks == 1:
            return [self.work((begin, end), queries, [keys])]
        count = (end - begin) // group if group else 0
        stages = max(min(_HEAD_GROUPS, count), 1)
        ends = [begin + i * count // stages * group for i in range(stages + 1)]
        return [self.work(x, queries, [keys]) for x in itertools.pairwise(ends)]

    def work(self, heads: Range, queries: Sequence[Segment], steps: Sequence[Sequence[Segment]]) -> Work:
        group = self.heads // max(self.kv_heads, 1)
        kv_heads = (heads[0] // group, -(-heads[1] // group)) if heads[1] > heads[0] else (0, 0)
        if kv_heads == (0, 0) or not queries:
            return Work(heads, kv_heads, tuple(queries) if kv_heads != (0, 0) else (), ())
        mask = self.mask.of_heads(kv_heads, self.kv_heads)
        found = []
        for keys in steps:
            seen = [x for x in (_seen(mask, queries, segment) for segment in keys) if x.length]
            if calls := calls_of(mask, queries, seen):
                found.append(Step(tuple(seen), tuple(calls)))
        rows = sum(x.length for x in queries)
        return Work(heads, kv_heads, tuple(queries), _with_order(found, rows, self.sink))


def _seen(mask: Whole, queries: Sequence[Segment], keys: Segment) -> Segment:
    """The keys of a segment that some query may see."""
    found = [mask.trimmed((x.token, x.end), (keys.token, keys.end))[1] for x in queries]
    found = [x for x in found if x[0] < x[1]]
    if not found:
        return keys.cut(keys.token, keys.token)
    return keys.cut(min(x[0] for x in found), max(x[1] for x in found))


def calls_of(mask: Whole, queries: Sequence[Segment], keys: Sequence[Segment]) -> list[Call]:
    """Rectangles that cover all visible scores of these segments, put one after another, each once."""
    queries, keys = _merged(queries), _merged(keys)
    if not queries or not keys:
        return []
    row, key = _starts(queries), _starts(keys)
    scores = [[mask.visible((q.token, q.end), (k.token, k.end)) for k in keys] for q in queries]
    band = mask.mask.band if isinstance(mask.mask, Columns) else mask.mask
    assert isinstance(band, Band)
    same = [(x.token, x.length) for x in queries] == [(x.token, x.length) for x in keys]
    only_causal = (band.left, band.right, mask.shift) == (None, 0, 0) and not band.irregular_kind
    if same and len(queries) > 1 and only_causal and not mask.alibi:
        joined = mask.joined(queries, keys, causal=True)
        return [Call((0, row[-1]), (0, key[-1]), joined, sum(map(sum, scores)))]
    in_band = dataclasses.replace(mask, mask=band)
    runs = [_runs(mask, in_band, q, keys) for q in queries]
    found, i = [], 0
    while i < len(queries):
        last = i + 1
        while last < len(queries) and runs[last] == runs[i] and all(x[2] for x in runs[i]):
            last += 1
        for first, end, clear in runs[i]:
            count = sum(sum(scores[n][first:end]) for n in range(i, last))
            if last - i == end - first == 1:
                q, k = queries[i], keys[first]
                rows, columns = mask.trimmed((q.token, q.end), (k.token, k.end))
                if not count:
                    continue
                at, to = row[i] - q.token, key[first] - k.token
                of_array = (rows[0] + at, rows[1] + at), (columns[0] + to, columns[1] + to)
                found.append(Call(*of_array, mask.part(rows, columns), count))
            elif count:
                assert clear
                joined = mask.joined(queries[i:last], keys[first:end])
                found.append(Call((row[i], row[last]), (key[first], key[end]), joined, count))
        i = last
    return found


def _runs(mask: Whole, in_band: Whole, q: Segment, keys: Sequence[Segment]) -> list[tuple[int, int, bool]]:
    """Neighbouring segments of keys that one call may take with these queries: (first, end, the whole band sees
    them)."""
    found: list[tuple[int, int, bool]] = []
    for j, k in enumerate(keys):
        rows, columns = (q.token, q.end), (k.token, k.end)
        if not mask.rectangle(rows, columns)[0]:
            continue
        clear = in_band.rectangle(rows, columns)[1] and not mask.alibi
        if found and clear and found[-1][1] == j and found[-1][2]:
            found[-1] = (found[-1][0], j + 1, True)
        else:
            found.append((j, j + 1, clear))
    return found


def _with_order(steps: Sequence[Step], rows: int, sink: bool) -> tuple[Step, ...]:
    """The steps, whose calls know which of their rows begin and end with them."""
    calls = [call for step in steps for call in step.calls]
    numbered = []
    for i, call in enumerate(calls):
        fresh = _rest(call.rows, [x.rows for x in calls[:i]])
        done = _rest(call.rows, [x.rows for x in calls[i + 1 :]])
        numbered.append((call, fresh, done))
    alone = all(fresh == done == [call.rows] for call, fresh, done in numbered)
    began = alone or (not sink and all(len(fresh) <= 1 for _, fresh, _ in numbered))
    found = iter(
        dataclasses.replace(
            call,
            fresh=fresh[0] if began and fresh else (0, 0),
            done=done[0] if len(done) == 1 else (0, 0),
        )
        for call, fresh, done in numbered
    )
    return tuple(dataclasses.replace(x, calls=tuple(next(found) for _ in x.calls)) for x in steps)


def _rest(whole: Range, taken: Sequence[Range]) -> list[Range]:
    """What of a range is in none of ``taken``."""
    found = [whole] if whole[0] < whole[1] else []
    for begin, end in taken:
        if begin < end:
            pieces = [((a, min(b, begin)), (max(a, end), b)) for a, b in found]
            found = [x for pair in pieces for x in pair if x[0] < x[1]]
    return found


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Segments put one after another, where neighbouring tokens are one segment, whichever rank they came from."""
    found: list[Segment] = []
    for x in segments:
        if found and found[-1].end == x.token:
            last = found.pop()
            x = Segment(last.rank, last.row, last.token, last.length + x.length)
        found.append(x)
    return found


def _starts(segments: Sequence[Segment]) -> list[int]:
    found = [0]
    for x in segments:
        found.append(found[-1] + x.length)
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


__all__ = ["FULL", "SCHEMES", "Call", "Schedule", "Step", "Work", "make_schedule"]
