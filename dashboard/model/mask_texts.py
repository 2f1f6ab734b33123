"""Masks as text: lengths of consecutive texts, and rows from which keys are hidden."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cufa.problem.columns import FROM_THE_START, TO_THE_END, Columns
from cufa.problem.mask_family import shift_of

_MOST = 1 << 17
"""Maximum count of numbers in a text, and their maximum."""
_NUMBER = re.compile(r"(?:(\d{1,7})[x×*])?(\d{1,7})", re.ASCII)
_HIDDEN = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?:(\d{0,7})-(\d{0,7})", re.ASCII)

Value = TypeVar("Value")
Lengths = tuple[int, ...]
Rows = npt.NDArray[np.int64]


def read_lengths(text: str) -> Lengths:
    """Raises ValueError for the first invalid length."""
    lengths: list[int] = []
    for word in filter(None, re.split(r"[,;\s\[\]()]+", re.sub(r"\s*([x×*])\s*", r"\1", text))):
        match = _NUMBER.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:40]!r} is not a whole number, nor like 64x128")
        times, number = int(match[1] or 1), int(match[2])
        if max(number, len(lengths) + times) > _MOST:
            raise ValueError(f"{word!r} is too large: at most {_MOST:,} numbers of at most {_MOST:,}")
        lengths += [number] * times
    return tuple(lengths)


def write_lengths(lengths: Iterable[int]) -> str:
    """The shortest text of these lengths."""
    runs = ((number, len(list(group))) for number, group in itertools.groupby(lengths))
    return ",".join(f"{times}x{number}" if times > 1 else str(number) for number, times in runs)


def fit(lengths: Lengths, room: int) -> Lengths:
    """The lengths, cut to ``room`` tokens."""
    ends = np.minimum(np.cumsum(lengths, dtype=np.int64), room)
    cut = np.diff(ends, prepend=0)
    return tuple(int(n) for n, length in zip(cut, lengths, strict=True) if n or not length)


def shared_out(room: int, shares: Iterable[int]) -> Lengths:
    """Lengths in these proportions that fill the room."""
    shares = tuple(shares)
    ends = [room * share // sum(shares) for share in itertools.accumulate(shares)]
    return tuple(int(n) for n in np.diff(ends, prepend=0))


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Keys ``first`` to ``last`` are hidden from rows ``lo`` to ``hi``, all included; None: from the start, to the
    end."""

    first: int
    last: int
    lo: int | None
    hi: int | None

    def __str__(self) -> str:
        keys = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{keys}:{'' if self.lo is None else self.lo}-{'' if self.hi is None else self.hi}"


def read_hidden(text: str) -> tuple[Hidden, ...]:
    """Raises ValueError for the first invalid entry."""
    if "[" in text:
        return _read_lo_hi([read_lengths(part) for part in re.findall(r"\[([^\[\]]*)", text) if part.strip()])
    entries = []
    for word in filter(None, re.split(r"[,;\n]+", re.sub(r"[^\S\n]+", "", text))):
        match = _HIDDEN.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:40]!r} is not of the form keys: rows, such as 0-1023: 2048-4095")
        first, last = int(match[1]), int(match[2] or match[1])
        lo, hi = (int(x) if x else None for x in match.groups()[2:])
        if last < first or (lo is not None and hi is not None and hi < lo):
            raise ValueError(f"{word!r} ends before it begins")
        entries.append(Hidden(first, last, lo, hi))
    _check_runs(entries)
    return tuple(entries)


def _read_lo_hi(vectors: list[Lengths]) -> tuple[Hidden, ...]:
    """Hidden rows from lo and hi, or two such pairs: the arguments of :func:`cufa.masks.columns`."""
    counts = [len(x) for x in vectors]
    if len(vectors) not in (2, 4) or len(set(counts)) > 1:
        sizes = " and ".join(map(str, counts))
        raise ValueError(
            f"lists of {sizes} numbers are not lo and hi: give one number for each key in 2 or 4 lists"
        )
    entries = []
    for lo, hi in zip(vectors[::2], vectors[1::2], strict=True):
        key = 0
        for (begin, end), same in itertools.groupby(zip(lo, hi, strict=True)):
            first, key = key, key + len(list(same))
            if begin < end:
                entries.append(Hidden(first, key - 1, begin or None, None if end == _MOST else end - 1))
    return tuple(entries)


def write_hidden(hidden: Iterable[Hidden]) -> str:
    return ",".join(map(str, hidden))


def _check_runs(hidden: list[Hidden]) -> None:
    """Raises ValueError for a key that is hidden from three runs of rows."""
    edges = sorted([(h.first, 1) for h in hidden] + [(h.last + 1, -1) for h in hidden])
    for (key, _), count in zip(edges, itertools.accumulate(step for _, step in edges), strict=True):
        if count > 2:
            raise ValueError(f"key {key:,} is hidden from three runs of rows; a mask stores two per key")


def runs_of(hidden: Iterable[Hidden], keys: int) -> list[Rows]:
    """lo and hi of each key, twice if a key has a second run: the arguments of :func:`cufa.masks.columns`."""
    lo, hi = (np.zeros((2, keys), np.int64) for _ in "lh")
    used = np.zeros(keys, np.int64)
    for h in hidden:
        hidden_keys = np.arange(h.first, min(h.last + 1, keys))
        lo[used[hidden_keys], hidden_keys] = FROM_THE_START if h.lo is None else h.lo
        hi[used[hidden_keys], hidden_keys] = TO_THE_END if h.hi is None else h.hi + 1
        used[hidden_keys] += 1
    return [lo[0], hi[0]] if used.max(initial=0) < 2 else [lo[0], hi[0], lo[1], hi[1]]


def hidden_of(mask: Columns, seqlen_q: int, seqlen_k: int) -> tuple[Hidden, ...]:
    """Hidden rows of a mask's columns, with equal neighbours joined. Raises ValueError if the columns differ between
    sequences or heads."""
    if mask.spread != (1, 1) or not mask.known:
        raise ValueError(f"{mask} has different numbers per sequence or head")
    shift = shift_of(mask.rows, seqlen_q, seqlen_k)
    values = mask.intervals.values[:, 0, 0, :seqlen_k].astype(np.int64)
    entries = []
    for lo, hi in zip(values[::2], values[1::2], strict=True):
        starts = np.flatnonzero(np.diff(lo, prepend=lo[:1] - 1) | np.diff(hi, prepend=hi[:1] - 1))
        for first, end in itertools.pairwise([*starts.tolist(), seqlen_k]):
            low, high = int(lo[first]) - shift, int(hi[first]) - shift
            if max(low, 0) < min(high, seqlen_q):
                ends = low if low > 0 else None, high - 1 if high < seqlen_q else None
                entries.append(Hidden(first, end - 1, *ends))
    return tuple(sorted(entries, key=lambda h: (h.first, h.last)))


@dataclasses.dataclass(frozen=True)
class Form(Generic[Value]):
    """A kind of text: reader, writer, and help."""

    read: Callable[[str], Value]
    write: Callable[[Value], str]
    wanted: str
    help: str


LENGTHS = Form[Lengths](
    read_lengths,
    write_lengths,
    "numbers such as 700,1500,64x128",
    "Whole numbers, separated by commas, spaces or lines; 64x128 means 64 times 128.",
)
HIDDEN = Form[Sequence[Hidden]](
    read_hidden,
    write_hidden,
    "keys and rows such as 0-1023:2048-4095",
    "One entry per line, or separated by commas: keys, a colon, rows. 0-1023: 2048-4095 hides keys 0 to 1023 from rows "
    "2048 to 4095; 7: 100- hides key 7 from row 100 on, 7: -99 up to row 99. A key may have two runs of rows. Or lo "
    "and hi of every key, as cufa.masks.columns takes them, each in brackets: [0,2,2] [0,5,5] hides keys 1 and 2 from "
    "rows 2 to 4.",
)
