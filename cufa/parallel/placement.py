"""Which rank holds which tokens or heads: pure Python, printable, the same for NumPy, one GPU or many."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

Range = tuple[int, int]
"""Begin and exclusive end."""

KINDS = ("contiguous", "zigzag", "heads")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the tokens of a sequence lie.

    >>> print(Placement.zigzag(16, 2))
    zigzag placement of 16 tokens on 2 ranks
      rank 0   8 tokens   0-3, 12-15
      rank 1   8 tokens   4-11
    """

    kind: str
    """ "contiguous", "zigzag", "documents", "heads", or "custom"."""
    seqlen: int
    ranges: tuple[tuple[Range, ...], ...]
    """For each rank: the ranges of its tokens, ascending. A local part holds the tokens in this order. With "heads"
    every rank holds all tokens."""

    @classmethod
    def contiguous(cls, seqlen: int, ranks: int) -> Placement:
        """Rank r holds one run of tokens; lengths differ by at most one."""
        return cls.of_lengths([(r + 1) * seqlen // ranks - r * seqlen // ranks for r in range(ranks)])

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Placement:
        """Contiguous: rank r holds the ``lengths[r]`` tokens after those of rank r - 1. Lengths may be 0."""
        ends = list(itertools.accumulate(lengths))
        ranges = (_joined([(end - n, end)]) for end, n in zip(ends, lengths, strict=True))
        return cls("contiguous", ends[-1], tuple(ranges))

    @classmethod
    def zigzag(cls, seqlen: int, ranks: int) -> Placement:
        """The sequence in 2P chunks; rank r holds chunks r and 2P - 1 - r, so that under a causal mask all ranks have
        the same work (ring-flash-attention's placement)."""
        ends = [i * seqlen // (2 * ranks) for i in range(2 * ranks + 1)]
        chunks = list(itertools.pairwise(ends))
        return cls(
            "zigzag", seqlen, tuple(_joined([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks))
        )

    @classmethod
    def documents(cls, lengths: Sequence[int], ranks: int) -> Placement:
        """Documents of these lengths, one after another: each rank holds whole documents, so that no keys travel. If
        the work of a rank would exceed the mean by more than 5%, the longest documents are cut as by :meth:`zigzag`.

        >>> print(Placement.documents([4, 4, 3, 3], 2))
        documents placement of 14 tokens on 2 ranks
          rank 0   7 tokens   0-3, 8-10
          rank 1   7 tokens   4-7, 11-13
        """
        ends = itertools.accumulate(map(int, lengths), initial=0)
        runs = sorted(itertools.pairwise(ends), key=lambda x: x[0] - x[1])
        limit = 0.05 * sum((end - begin) ** 2 for begin, end in runs)
        for cut in range(len(runs) + 1):
            held: list[list[Range]] = [[] for _ in range(ranks)]
            work = [0] * ranks
            for begin, end in runs[cut:]:
                rank = work.index(min(work))
                work[rank] += (end - begin) ** 2
                held[rank].append((begin, end))
            if max(work) * ranks - sum(work) <= limit:
                break
        for begin, end in runs[:cut]:
            for rank, chunks in enumerate(cls.zigzag(end - begin, ranks).ranges):
                held[rank] += [(begin + first, begin + last) for first, last in chunks]
        return cls("documents", int(sum(lengths)), tuple(_joined(sorted(x)) for x in held))

    @classmethod
    def heads(cls, seqlen: int, ranks: int) -> Placement:
        """Every rank holds all tokens of some heads."""
        return cls("heads", seqlen, (_joined([(0, seqlen)]),) * ranks)

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    def length(self, rank: int) -> int:
        """Tokens of the local part."""
        return sum(end - begin for begin, end in self.ranges[rank])

    @property
    def lengths(self) -> list[int]:
        return [self.length(rank) for rank in range(self.ranks)]

    def segments(self, rank: int) -> list[Segment]:
        """The local part in runs of neighbouring tokens."""
        found, at = [], 0
        for begin, end in self.ranges[rank]:
            found.append(Segment(rank, at, begin, end - begin))
            at += end - begin
        return found

    def __str__(self) -> str:
        lines = [f"{self.kind} placement of {self.seqlen:,} tokens on {self.ranks} ranks"]
        for rank, ranges in enumerate(self.ranges):
            text = ", ".join(f"{begin}-{end - 1}" for begin, end in ranges) or "none"
            lines.append(f"  rank {rank}   {self.length(rank):,} tokens   {text}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring tokens in an array: ``length`` tokens from ``token`` on, which the part of ``rank`` holds from row
    ``row`` on."""

    rank: int
    row: int
    token: int
    length: int

    @property
    def end(self) -> int:
        return self.token + self.length

    def cut(self, begin: int, end: int) -> Segment:
        """The tokens ``begin`` … ``end`` - 1 of this segment."""
        return Segment(self.rank, self.row + begin - self.token, begin, end - begin)


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    """The ranges without empty ones; adjacent ranges are joined."""
    joined: list[Range] = []
    for begin, end in ranges:
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return tuple(joined)


def placed(placement: Any, seqlen: int, ranks: int) -> Placement:
    """The placement of ``seqlen`` tokens: the object as given, or made from its name. Raises ValueError for an unknown
    name."""
    if isinstance(placement, Placement):
        return placement
    if placement not in KINDS:
        raise ValueError(
            f"placement={placement!r} is not known; use {', '.join(map(repr, KINDS))}, or a cufa.parallel.Placement"
        )
    made: Placement = getattr(Placement, placement)(seqlen, ranks)
    return made


def resolve(placement: Any, lengths: Sequence[int], name: str) -> Placement:
    """The placement of parts with ``lengths`` tokens: the object as given, or made from its name. ``name``:
    of the arrays. Raises ValueError if the lengths do not fit."""
    if placement == "contiguous":
        resolved = Placement.of_lengths(lengths)
    else:
        resolved = placed(placement, lengths[0] if placement == "heads" else sum(lengths), len(lengths))
    if resolved.lengths != list(lengths):
        raise ValueError(
            f"{name} has local parts of {', '.join(map(str, lengths))} tokens, but the {resolved.kind} placement of "
            f"{resolved.seqlen:,} tokens on {resolved.ranks} ranks has {', '.join(map(str, resolved.lengths))}: "
            "cufa.parallel.distribute makes parts that fit"
        )
    return resolved
