"""One's own rows of Q and K as text: one row a line, its numbers separated by spaces or commas."""

from __future__ import annotations

import re

from cufa.dashboard.model.walkthrough import BLOCK, DECODE_TILES, HEAD_DIM, Rows

_LARGEST = 10.0
_MOST = DECODE_TILES * BLOCK
WANTED = "rows of numbers such as 1,0.5;-2,0"
HELP = (
    f"One row a line (or separated by semicolons), up to {HEAD_DIM} numbers a row, from −{_LARGEST:g} to {_LARGEST:g}. "
    "Brackets, as NumPy prints them, are ignored. Missing numbers are 0. Rows that you do not give stay random."
)


def read(text: str) -> Rows:
    """Raises ValueError for the first number or row that cannot be used."""
    ends = r"\]" if "[" in text else r"[\n;]"  # NumPy breaks long rows
    lines = (re.split(r"[\[,;\s]+", line.strip("[,; \t\r\n")) for line in re.split(ends, text))
    rows = tuple(_row(n, line) for n, line in enumerate((x for x in lines if x != [""]), 1))
    if len(rows) > _MOST:
        raise ValueError(f"{len(rows)} rows; this page has at most {_MOST}")
    return rows


def write(rows: Rows) -> str:
    return ";".join(",".join(f"{x:g}" for x in row) for row in rows)


def _row(n: int, words: list[str]) -> tuple[float, ...]:
    if len(words) > HEAD_DIM:
        raise ValueError(f"row {n} has {len(words)} numbers; a row here has at most {HEAD_DIM}")
    return tuple(_number(n, word) for word in words)


def _number(n: int, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise ValueError(f"row {n}: {word[:20]!r} is not a number") from None
    if not abs(number) <= _LARGEST:  # NaN neither
        raise ValueError(f"row {n}: {word[:20]} is not from −{_LARGEST:g} to {_LARGEST:g}")
    return number
