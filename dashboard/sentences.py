"""Numbers in sentences."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

_IRREGULAR = {
    "is": "are", "has": "have", "was": "were", "does": "do", "shows": "show", "takes": "take",
    "query": "queries", "entry": "entries", "access": "accesses", "launch": "launches", "pass": "passes",
}  # fmt: skip


def count(number: int, noun: str) -> str:
    """No run, 1 run, 2 runs, 1,000 runs."""
    return f"{number:,} {plural(number, noun)}" if number else f"no {plural(number, noun)}"


def plural(number: int, word: str) -> str:
    """A noun or a verb after a number: run or runs, is or are."""
    if number == 1:
        return word
    return _IRREGULAR.get(word, f"{word}s")


def listed(words: Iterable[str], most: int = 6) -> str:
    """a; a and b; a, b and c; a, b and 7 more."""
    names = list(words)
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def seconds(number: float) -> str:
    """A waiting time: 2 s, 3 min, 5.5 h, 12 days, or years."""
    if number < 100:
        return f"{max(number, 2):.0f} s"
    for unit, size, most in (("min", 60, 5400), ("h", 3600, 172_800), ("days", 86_400, 63_115_200)):
        if number < most:
            return f"{number / size:.1f} h" if unit == "h" else f"{number / size:.0f} {unit}"
    return f"{number / 31_557_600:,.0f} years"


def share(part: float) -> str:
    """A share in percent; 0% and 100% are exact."""
    if part <= 0 or part >= 1:
        return f"{part:.0%}"
    return "less than 0.1%" if part < 0.001 else "more than 99.9%" if part > 0.999 else f"{part:.1%}"


@functools.cache
def sections(name: str) -> dict[str, tuple[str, str]]:
    """Title and text of each section, by name, of a file of prose in this folder: "## name: title", then the text."""
    parts = (
        part.partition("\n") for part in Path(__file__).with_name(name).read_text("utf-8").split("## ")[1:]
    )
    heads = {head.partition(": ")[::2]: text.strip() for head, _, text in parts}
    return {name: (title, text) for (name, title), text in heads.items()}


def of_masks(kinds: Iterable[str]) -> str:
    """One line per kind of mask, for the help text of a control."""
    return "  \n".join("**{}**: {}".format(*sections("masks.md")[kind]) for kind in kinds)
