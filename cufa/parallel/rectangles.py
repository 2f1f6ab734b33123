"""Rectangles of visible scores: each is one call of a kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from ..problem.columns import Columns
from ..problem.mask import Band
from .placement import Segment
from .schedule import Call, Step, rest
from .slices import Whole


def seen(mask: Whole, queries: Sequence[Segment], keys: Segment) -> Segment:
    """The keys of a segment that some query may see."""
    ranges = [mask.trimmed((x.token, x.end), (keys.token, keys.end))[1] for x in queries]
    ranges = [x for x in ranges if x[0] < x[1]]
    if not ranges:
        return keys.cut(keys.token, keys.token)
    return keys.cut(min(x[0] for x in ranges), max(x[1] for x in ranges))


def calls_of(mask: Whole, queries: Sequence[Segment], keys: Sequence[Segment]) -> list[Call]:
    """Rectangles that together cover each visible score of these segments, put one after another, once."""
    queries, keys = _merged(queries), _merged(keys)
    if not queries or not keys:
        return []
    row, key = (list(itertools.accumulate((x.length for x in xs), initial=0)) for xs in (queries, keys))
    band = mask.mask.band if isinstance(mask.mask, Columns) else mask.mask
    assert isinstance(band, Band)
    same = [(x.token, x.length) for x in queries] == [(x.token, x.length) for x in keys]
    causal = (band.right, mask.shift) == (0, 0)
    plain = band.left is None and (causal or band.right is None) and not band.irregular_kind
    if same and len(queries) > 1 and plain and not mask.alibi:
        joined = mask.joined(queries, keys, causal)
        return [Call((0, row[-1]), (0, key[-1]), joined, _visible(mask, queries, keys))]
    in_band = dataclasses.replace(mask, mask=band)
    runs = [_runs(mask, in_band, q, keys) for q in queries]
    found = []
    # Neighbouring queries share calls if they see the same runs of keys, and all of them whole.
    for _, members in itertools.groupby(
        range(len(queries)), lambda i: runs[i] if all(clear for *_, clear in runs[i]) else i
    ):
        top, *others = members
        some = queries[top : top + 1 + len(others)]
        for first, end, _ in runs[top]:
            found += _call(mask, some, keys[first:end], row[top], key[first])
    return found


def _call(mask: Whole, queries: list[Segment], keys: list[Segment], row: int, key: int) -> list[Call]:
    """The call over these segments, which begin at ``row`` and ``key`` in the arrays; no call if no score is
    visible."""
    count = _visible(mask, queries, keys)
    if not count:
        return []
    if len(queries) == len(keys) == 1:
        q, k = queries[0], keys[0]
        rows, columns = mask.trimmed((q.token, q.end), (k.token, k.end))
        at, to = row - q.token, key - k.token
        ranges = (rows[0] + at, rows[1] + at), (columns[0] + to, columns[1] + to)
        return [Call(*ranges, mask.part(rows, columns), count)]
    ranges = (row, row + sum(x.length for x in queries)), (key, key + sum(x.length for x in keys))
    return [Call(*ranges, mask.joined(queries, keys), count)]


def _visible(mask: Whole, queries: Sequence[Segment], keys: Sequence[Segment]) -> int:
    """Visible scores of one head."""
    return sum(mask.visible((q.token, q.end), (k.token, k.end)) for q in queries for k in keys)


def _runs(mask: Whole, in_band: Whole, q: Segment, keys: Sequence[Segment]) -> list[tuple[int, int, bool]]:
    """Neighbouring segments of keys that one call may take with these queries: (first, end, the whole band sees
    them)."""
    runs: list[tuple[int, int, bool]] = []
    for j, k in enumerate(keys):
        rows, columns = (q.token, q.end), (k.token, k.end)
        if not mask.rectangle(rows, columns)[0]:
            continue
        clear = in_band.rectangle(rows, columns)[1] and not mask.alibi
        if runs and clear and runs[-1][1] == j and runs[-1][2]:
            runs[-1] = (runs[-1][0], j + 1, True)
        else:
            runs.append((j, j + 1, clear))
    return runs


def with_order(steps: Sequence[Step], sink: bool) -> tuple[Step, ...]:
    """The steps with ``fresh`` and ``done`` of each call filled in."""
    calls = [call for step in steps for call in step.calls]
    numbered = []
    for i, call in enumerate(calls):
        fresh = rest(call.rows, [x.rows for x in calls[:i]])
        done = rest(call.rows, [x.rows for x in calls[i + 1 :]])
        numbered.append((call, fresh, done))
    alone = all(fresh == done == [call.rows] for call, fresh, done in numbered)
    began = alone or (not sink and all(len(fresh) <= 1 for _, fresh, _ in numbered))
    ordered = iter(
        dataclasses.replace(
            call,
            fresh=fresh[0] if began and fresh else (0, 0),
            done=max(done, key=lambda rows: rows[1] - rows[0], default=(0, 0)),
        )
        for call, fresh, done in numbered
    )
    return tuple(dataclasses.replace(x, calls=tuple(next(ordered) for _ in x.calls)) for x in steps)


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """The segments in order; segments of neighbouring tokens become one, whichever rank they came from."""
    merged: list[Segment] = []
    for x in segments:
        if merged and merged[-1].end == x.token:
            last = merged.pop()
            x = Segment(last.rank, last.row, last.token, last.length + x.length)
        merged.append(x)
    return merged
