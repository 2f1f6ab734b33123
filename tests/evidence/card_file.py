"""The file of one card: lines are added at its end, and rewritten only to be stamped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cufa.measure.cards import Card, of_lines, read_lines, without_samples
from cufa.measure.measured import row_json
from cufa.measure.runner import Row

Json = dict[str, Any]


class CardFile:
    """``session``: the environment of this machine now; written before the first line that is of it."""

    def __init__(self, path: Path, session: Json) -> None:
        self.path, self.session, self.begun = path, session, False
        self.lines = read_lines(path) if path.exists() else []
        self.problems = {_key(_problem(x)): x["id"] for x in self.lines if x.get("what") == "problem"}

    @property
    def card(self) -> Card:
        return of_lines(self.path.stem, self.lines)

    def add(self, what: str, **content: Any) -> None:
        """A line that is no row."""
        self._begin()
        self._append({"what": what, "recorded": self.session["recorded"], **content})

    def add_rows(self, suite: str, rows: Iterable[Row]) -> None:
        """The rows of one case."""
        self._begin()
        commit = {"commit": self.session["commit"]} if "commit" in self.session else {}
        head = {
            "suite": suite,
            "card": self.session["device"],
            "recorded": self.session["recorded"],
            **commit,
        }
        for row in without_samples([row_json(row) for row in rows]):
            self._append({**head, **row, "problem": self._id(row["problem"])})

    def rewrite(self, change: Callable[[Json], Json]) -> None:
        self.lines = [change(line) for line in self.lines]
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


def _problem(line: Json) -> Json:
    return {name: value for name, value in line.items() if name not in ("what", "id")}


def _key(problem: Json) -> str:
    return json.dumps(problem, sort_keys=True)


def _text(line: Json) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
