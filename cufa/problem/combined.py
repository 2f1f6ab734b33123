"""``a & b``, ``a | b`` and ``~a`` of masks: in the masks' own family where the result has that form, else as bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from .bits import WORD, Bits
from .columns import Columns
from .integers import Integers
from .mask import Band
from .mask_family import Edges, Mask, broadcast_count
from .tile_classes import Bools, Ints
from .where import Where, combined_where

SIGNS = {"and": " & ", "or": " | ", "not": "~"}

_MOST_KEPT = 8  # sets of lengths whose bits a mask keeps


@dataclasses.dataclass(frozen=True, repr=False)
class Combined(Mask):
    """The mask of an operator. Query i sees key j if it sees the key under every part ("and") or under some part
    ("or"). "not" has one part: the query sees the keys that it does not see under this part. Kernels read bits, made
    once for the lengths of a call."""

    operation: str
    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if (self.operation == "not") != (len(self.parts) == 1):
            raise ValueError(f"operation={self.operation!r} does not take {len(self.parts)} parts")

    def at(self, batch: int, head: int) -> Combined:
        return dataclasses.replace(self, parts=tuple(x.at(batch, head) for x in self.parts))

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """δ of the first part."""
        return self.parts[0].shift(seqlen_q, seqlen_k)

    def edges(self, seqlen_q: int, seqlen_k: int) -> Edges:
        return None, None

    def _visible(self, row: Ints, key: Ints, seqlen_q: int, seqlen_k: int) -> Bools:
        seen = [x._visible(row, key, seqlen_q, seqlen_k) for x in self.parts]
        if self.operation == "not":
            return ~seen[0]
        combine = np.logical_and if self.operation == "and" else np.logical_or
        found: Bools = functools.reduce(combine, seen)
        return found

    @property
    def spread(self) -> tuple[int, int]:
        batches, heads = zip(*(x.spread for x in self.parts), strict=True)
        return broadcast_count(*batches), broadcast_count(*heads)

    def misfit(
        self, batch: int, kv_heads: int, seqlen_q: int | None = None, seqlen_k: int | None = None,
        packed: bool = False,
    ) -> str | None:  # fmt: skip
        sizes = batch, kv_heads, seqlen_q, seqlen_k, packed
        return next(filter(None, (x.misfit(*sizes) for x in self.parts)), None)

    @property
    def known(self) -> bool:
        return all(x.known for x in self.parts)

    def on_host(self) -> Combined:
        return dataclasses.replace(self, parts=tuple(x.on_host() for x in self.parts))

    @property
    def irregular_kind(self) -> str:
        return "bits"

    def for_kernels(self, seqlen_q: int, seqlen_k: int) -> Bits:
        return self.for_sequences(((seqlen_q, seqlen_k),) * self.spread[0], seqlen_q, seqlen_k)

    reads_lengths = True

    def for_sequences(self, lengths: tuple[tuple[int, int], ...], seqlen_q: int, seqlen_k: int) -> Bits:
        kept: dict[Any, Bits] = self.__dict__.setdefault("_kept_bits", {})
        key = lengths, seqlen_q, seqlen_k
        if key not in kept:
            heads = self.spread[1]
            seen = np.zeros((len(lengths), heads, seqlen_q, seqlen_k), bool)
            for (b, (rows, keys)), h in itertools.product(enumerate(lengths), range(heads)):
                seen[b, h, :rows, :keys] = self.dense(rows, keys, b, h)
            while len(kept) >= _MOST_KEPT:
                del kept[next(iter(kept))]
            kept[key] = Bits.of(seen)
        return kept[key]

    @functools.cached_property
    def as_function(self) -> Where | None:
        """For lengths that a GPU has: the same mask as a function, whose δ is a sequence's keys less its queries. None:
        a part has no such form, or the mask has another δ."""
        bottom_right = (self.shift(0, 1), self.shift(1, 0)) == (1, -1)
        return combined_where(self.operation, self.parts) if bottom_right else None

    def __str__(self) -> str:
        sign = SIGNS[self.operation]
        return f"{sign}({self.parts[0]})" if len(self.parts) == 1 else sign.join(f"({x})" for x in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "parts": [x.as_json() for x in self.parts]}


def combined(operation: str, *parts: Mask) -> Mask:
    """The mask of an operator. Raises ValueError if the result needs values that only a GPU has."""
    if all(isinstance(x, Bits) for x in parts):
        return _combined_bits(operation, *parts)  # type: ignore[arg-type]
    function = any(isinstance(x, Where) for x in parts)
    found: Mask | None = combined_where(operation, parts) if function else None
    if found is None and operation == "and":
        found = _in_one_family(*parts)
    if found is not None:
        return found
    if function:
        raise ValueError(
            f"{' and '.join(map(str, parts))}: a function combines with bands, with masks of runs that all heads "
            "share, and with functions: write the rest in the function"
        )
    for part in parts:
        if not part.known:
            raise ValueError(
                f"{part}: its numbers are on a GPU, but the host makes the bits: use mask.on_host()"
            )
    return Combined(operation, parts)


def _combined_bits(operation: str, first: Bits, *rest: Bits) -> Bits:
    for other in rest:
        if other.matrix != first.matrix:
            raise ValueError(
                f"{first} and {other} are of different lengths: combine masks of one (seqlen_q, seqlen_k)"
            )
    words = first.by_row.array
    if operation == "not":
        last = np.full(words.shape[-1], -1, np.int32)
        last[-1:] = np.uint32((1 << (first.keys - 1) % WORD + 1) - 1).astype(np.int32)
        return Bits(
            Integers(~words & type(words)(last) if first.by_row.on_gpu else ~words & last), first.keys
        )
    other = rest[0].by_row.array
    return Bits(Integers(words & other if operation == "and" else words | other), first.keys)


def _in_one_family(a: Mask, b: Mask) -> Mask | None:
    """``a & b`` as a band, or as columns in a band. None: the result has neither form."""
    if isinstance(a, Band) and isinstance(b, Columns):
        a, b = b, a
    if isinstance(a, Columns) and isinstance(b, Band):
        band = _in_one_family(a.band, b)
        return dataclasses.replace(a, band=band, title="") if isinstance(band, Band) else None
    if isinstance(a, Columns) and isinstance(b, Columns):
        return _in_two_runs(a, b)
    if not (isinstance(a, Band) and isinstance(b, Band)) or a.irregular_kind or b.irregular_kind:
        return None
    unbounded = next(
        (y for x, y in ((a, b), (b, a)) if (x.left, x.right, x.matrix) == (None, None, None)), None
    )
    if unbounded is not None:
        return unbounded
    if (a.diagonal, a.matrix) != (b.diagonal, b.matrix):
        return None
    left, right = (
        min((x for x in sides if x is not None), default=None)
        for sides in ((a.left, b.left), (a.right, b.right))
    )
    return dataclasses.replace(a, left=left, right=right)


def _in_two_runs(a: Columns, b: Columns) -> Columns | None:
    band = _in_one_family(a.band, b.band)
    alike = a.rows == b.rows and a.intervals.shape[-1] == b.intervals.shape[-1] and a.known and b.known
    if not (alike and isinstance(band, Band) and a.num_intervals == b.num_intervals == 1):
        return None
    runs = np.concatenate(
        np.broadcast_arrays(a.intervals.values[:, None], b.intervals.values[:, None]), axis=1
    )
    pairs = runs.swapaxes(0, 1).reshape(4, *runs.shape[2:])
    return dataclasses.replace(a, band=band, intervals=Integers(pairs), title="")
