"""The measurement file of one card. Lines are appended; only ``stamp`` rewrites the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cufa.measure.cards import Card, of_lines, read_lines
from cufa.measure.measured import Measured
from cufa.measure.timing import speedup

Json = dict[str, Any]


class CardFile:
    """``session``: this machine's environment, written before the first line that this machine records."""

    def __init__(self, path: Path, session: Json) -> None:
        self.path, self.session, self.begun = path, session, False
        self.lines = read_lines(path) if path.exists() else []
        self.problems = {_key(x): x["id"] for x in self.lines if x.get("what") == "problem"}

    @property
    def card(self) -> Card:
        return of_lines(self.path.stem, self.lines)

    def add(self, what: str, **content: Any) -> None:
        """Append a line that holds no measurement: trace, test result, host time or compile time."""
        self._begin()
        self._append({"what": what, "recorded": self.session["recorded"], **content})

    def add_rows(self, suite: str, rows: Iterable[Measured]) -> None:
        """Append the rows of one case."""
        self._begin()
        head = {"suite": suite, "card": self.session["device"], "recorded": self.session["recorded"]}
        head |= {"commit": self.session["commit"]} if "commit" in self.session else {}
        for row in without_samples([row.json for row in rows]):
            self._append({**head, **row, "problem": self._id(row["problem"])})

    def rewrite(self) -> None:
        """Replace the file by the lines in memory, rows of a group together: similar lines compress well."""
        card, groups = self.card, dict[Any, list[Json]]()
        for row in (*card.rows, *card.past):
            groups.setdefault(row.group, []).append(row.json)
        others = [line for line in self.lines if "what" in line]
        self.lines = [*others, *(line for rows in groups.values() for line in rows)]
        self.path.write_text("".join(map(_text, self.lines)), encoding="utf-8")

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self._append({"what": "session", **self.session})

    def _id(self, problem: Json) -> int:
        if (key := _key(problem)) not in self.problems:
            self.problems[key] = len(self.problems)
            self._append({"what": "problem", "id": self.problems[key], **problem})
        return self.problems[key]

    def _append(self, line: Json) -> None:
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_text(line))


def _key(problem: Json) -> str:
    return json.dumps({name: x for name, x in problem.items() if name not in ("what", "id")}, sort_keys=True)


def _text(line: Json) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


_LEFT_OUT = (
    "samples_ns", "tflops", "gbytes_per_s", "scores", "of_ceiling", "ceiling", "needs_ns", "predicted_ns",
)  # fmt: skip
"""Samples, and what follows from time, problem, plan and the card's ceilings."""


def without_samples(group: list[Json]) -> Iterator[Json]:
    """The rows of one case, all its contenders, as they are kept: intervals in place of samples."""
    rows = [Measured(row) for row in group]
    for row in rows:
        low, high = row.timing.median_interval
        kept = {name: value for name, value in row.json.items() if name not in _LEFT_OUT}
        if row.json["max_error"] is not None:
            kept["max_error"] = float(f"{row.json['max_error']:.4g}")
        kept |= {"n": row.timing.count, "low_ns": round(low * 1e9), "high_ns": round(high * 1e9)}
        over = {}
        for other in rows:
            if _keeps(row, other, rows):
                ratio = speedup(other.timing, row.timing)
                over[other.label] = [float(f"{x:.6g}") for x in (ratio.low, ratio.high)]
        yield kept | ({"over": over} if over else {})


def _keeps(row: Measured, other: Measured, rows: list[Measured]) -> bool:
    """Whether ``row`` keeps the interval of the pair: the row of our kernel does, else the later row."""
    if row is other:
        return False
    if row.is_ours != other.is_ours:
        return row.is_ours
    return rows.index(other) < rows.index(row)
