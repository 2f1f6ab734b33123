"""Lengths of the sequences of a call, and their places in the arrays.

Dense: every sequence fills the arrays. Padded: a sequence is the first rows of its batch entry. Packed: sequences are
concatenated. A cache has room for ``seqlen_k`` keys per sequence; the valid lengths may be known on the device only.

The parts of a problem (:func:`parts`) have one score matrix each: sequences of different lengths, and sequences or
heads with masks of their own. A part is a dense problem; a count of the whole problem is a sum over its parts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .problem import Problem

Place = tuple[int, slice, slice, slice]
"""A sequence: its index, and slices of arrays (batch, heads, seqlen, head_dim): batch, queries, keys."""

_ALL = slice(None)


LENGTH_KINDS = ("dense", "padded", "packed", "cached padded", "cached packed")
"""Kinds of lengths that kernels are compiled for: LengthsKind of cuda_src/shared/lengths.cuh. (Decode has its own
kernels.)"""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Base class: dense lengths."""

    kind: ClassVar[str] = "dense"
    """One of the first three of :data:`LENGTH_KINDS`."""

    @property
    def in_cache(self) -> Cached | None:
        """The cache that holds the keys of a forward call. None: keys in arrays, or decoding (:class:`Cached`)."""
        return None

    @property
    def compiled_kind(self) -> str:
        """One of :data:`LENGTH_KINDS`."""
        return f"cached {self.kind}" if self.in_cache else self.kind

    @property
    def ragged(self) -> bool:
        """Lengths differ from sequence to sequence and are read on the device."""
        return False

    @property
    def known(self) -> bool:
        """The host knows the lengths. (True for a cache: plans do not depend on its lengths.)"""
        return True

    def places(self) -> list[Place] | None:
        """The place of each sequence, an upper bound if unknown; None: every sequence fills the arrays."""
        return None

    def of_sequences(self, seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence; empty if every sequence fills the arrays, or if a GPU has the lengths."""
        return tuple(
            (seqlen_q if rows == _ALL else _size(rows), seqlen_k if keys == _ALL else _size(keys))
            for _, _, rows, keys in (self.places() if self.known else None) or ()
        )

    def blocks(self, block: int, batch: int, seqlen: int, of_keys: bool = False) -> int:
        """Blocks of ``block`` rows (or keys) of one head, over all sequences, that a grid needs room for."""
        return -(-seqlen // block) * batch

    def tokens(self, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Sums over all sequences: (queries, keys)."""
        return batch * seqlen_q, batch * seqlen_k

    def as_json(self) -> dict[str, Any]:
        return {"kind": type(self).__name__.lower(), **dataclasses.asdict(self)}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Lengths:
        fields = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record.items()
            if name != "kind"
        }
        if cache := record.get("cache"):
            fields["cache"] = Cached(**cache)
        kinds = {"lengths": Lengths, "cached": Cached, "padded": Padded, "packed": Packed}
        return kinds[record["kind"]](**fields)

    def __str__(self) -> str:
        return "dense"


@dataclasses.dataclass(frozen=True)
class Cached(Lengths):
    """Keys and values are in a cache, contiguous or in pages; the queries are the last tokens of each sequence."""

    page_size: int = 0
    """Tokens per page; 0: contiguous."""
    max_pages: int = 0
    """Entries of one sequence in the block table."""
    num_pages: int = 0
    """Pages in the cache."""
    given: bool = False
    """Lengths are given (``cache_seqlens``); else every sequence fills its capacity."""
    new_tokens: int = 0
    """Tokens of ``k_new``, appended to the cache by the call."""
    quantize_new: bool = False
    """New tokens have q's element, and the call quantises them to the cache's e4m3."""

    @property
    def ragged(self) -> bool:
        return self.given

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    def __str__(self) -> str:
        where = f"pages of {self.page_size}" if self.paged else "cached"
        return where + (f", {self.new_tokens} appended" if self.new_tokens else "")


Numbers = tuple[int, ...]


class _Ragged(Lengths):
    """Base class of padded and packed lengths."""

    queries: Numbers | None
    keys: Numbers | None
    cache: Cached | None
    """Keys are in a cache; ``keys`` then counts a sequence's keys after new tokens are appended."""

    @property
    def in_cache(self) -> Cached | None:
        return self.cache

    @property
    def ragged(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Padded(_Ragged):
    """Dense arrays with padding: a sequence is the first rows of its batch entry."""

    queries: Numbers | None = None
    """Queries of each sequence; None: all rows, or known on the device only. ``keys`` is the same for keys."""
    keys: Numbers | None = None
    on_host: bool = True
    cache: Cached | None = None

    kind: ClassVar[str] = "padded"

    @property
    def known(self) -> bool:
        return self.on_host

    def places(self) -> list[Place] | None:
        if not self.on_host or (self.queries is None and self.keys is None):
            return None
        count = len(self.queries or self.keys or ())
        queries, keys = (
            [_ALL] * count if x is None else [slice(0, n) for n in x] for x in (self.queries, self.keys)
        )
        return [(b, slice(b, b + 1), queries[b], keys[b]) for b in range(count)]

    def tokens(self, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        return (
            batch * seqlen_q if self.queries is None else sum(self.queries),
            batch * seqlen_k if self.keys is None else sum(self.keys),
        )

    def __str__(self) -> str:
        if not self.on_host:
            return "padded, lengths on the GPU" + _cache_text(self.cache)
        words = (("queries", self.queries), ("keys", self.keys))
        lengths = ", ".join(f"{_range(x)} {name}" for name, x in words if x is not None)
        return f"padded, {lengths}" + _cache_text(self.cache)


@dataclasses.dataclass(frozen=True)
class Packed(_Ragged):
    """Concatenated sequences in arrays of ``total_q`` queries and ``total_k`` keys; rows after the last sequence are
    padding."""

    total_q: int = 0
    total_k: int = 0
    queries: Numbers | None = None
    """Queries of each sequence; None: known on the device only. ``keys`` is the same for keys."""
    keys: Numbers | None = None
    cache: Cached | None = None

    kind: ClassVar[str] = "packed"

    @property
    def known(self) -> bool:
        return self.queries is not None

    def blocks(self, block: int, batch: int, seqlen: int, of_keys: bool = False) -> int:
        """The last block of a sequence may be partly empty, and the padding after the last sequence has blocks too:
        ``num_packed_blocks`` of cuda_src/shared/lengths.cuh."""
        return (self.total_k if of_keys else self.total_q) // block + batch + 1

    def places(self) -> list[Place] | None:
        if self.queries is None or self.keys is None:
            return [(0, slice(0, 1), slice(0, self.total_q), slice(0, self.total_k))]
        queries, keys = (list(itertools.accumulate(x, initial=0)) for x in (self.queries, self.keys))
        return [
            (b, slice(0, 1), slice(queries[b], queries[b + 1]), slice(keys[b], keys[b + 1]))
            for b in range(len(self.queries))
        ]

    def tokens(self, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        if self.queries is None or self.keys is None:
            return self.total_q, self.total_k
        return sum(self.queries), sum(self.keys)

    def __str__(self) -> str:
        if self.queries is None or self.keys is None:
            totals = f"{self.total_q:,}×{self.total_k:,}"
            return f"packed in {totals}, lengths on the GPU" + _cache_text(self.cache)
        return f"packed, {_range(self.queries)} queries, {_range(self.keys)} keys" + _cache_text(self.cache)


def _cache_text(cache: Cached | None) -> str:
    return "" if cache is None else f", {cache}"


def _range(lengths: Numbers) -> str:
    least, most = min(lengths, default=0), max(lengths, default=0)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


DENSE = Lengths()


# --- Parts with one score matrix each ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some sequences and heads, as slices of arrays (batch, heads, seqlen, head_dim)."""

    problem: Problem
    """Dense, with one mask for all its sequences and heads."""
    sequence: int
    """Index of the first sequence in the whole problem."""
    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    keys: slice

    def queries(self, x: Any) -> Any:
        """This part of an array of queries, or of one number per query."""
        return x[self.batch, self.heads, self.rows]

    def of_keys(self, x: Any) -> Any:
        return x[self.batch, self.kv_heads, self.keys]


def parts(problem: Problem) -> tuple[Part, ...]:
    """The parts of a problem. If the mask's arrays are on a GPU, parts have its outline (:attr:`Mask.outline`)."""
    return tuple(_parts(dataclasses.replace(problem, mask=problem.mask.outline)))


def _parts(problem: Problem) -> Iterator[Part]:
    sequence_masks, head_masks = problem.mask.spread
    sequences = problem.lengths.places()
    if sequences is None and (sequence_masks, head_masks) == (1, 1):
        dense = (
            problem if isinstance(problem.lengths, Cached) else dataclasses.replace(problem, lengths=DENSE)
        )
        yield Part(dense, 0, _ALL, _ALL, _ALL, _ALL, _ALL)
        return
    if sequences is None:
        step = 1 if sequence_masks > 1 else max(problem.batch, 1)
        sequences = [(b, slice(b, b + step), _ALL, _ALL) for b in range(0, problem.batch, step)]
    group = problem.group_size
    if head_masks > problem.kv_heads:  # heads of a query group differ
        each = [(h, slice(h // group, h // group + 1), slice(h, h + 1)) for h in range(problem.heads)]
    else:
        step = 1 if head_masks > 1 else max(problem.kv_heads, 1)
        firsts = range(0, problem.kv_heads, step)
        each = [(h, slice(h, h + step), slice(h * group, (h + step) * group)) for h in firsts]
    for (sequence, batch, rows, keys), (head, kv_heads, heads) in itertools.product(sequences, each):
        dense = dataclasses.replace(
            problem, batch=_size(batch), heads=_size(heads), kv_heads=_size(kv_heads),
            seqlen_q=problem.seqlen_q if rows == _ALL else _size(rows),
            seqlen_k=problem.seqlen_k if keys == _ALL else _size(keys),
            mask=problem.mask.at(sequence, head), lengths=DENSE,
        )  # fmt: skip
        yield Part(dense, sequence, batch, kv_heads, heads, rows, keys)


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
