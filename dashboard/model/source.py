"""CUDA source lines that implement the content of a figure. A marker text finds them: line numbers would change with
each edit of a file. ``source.md`` lists them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cufa.build.compiler import SOURCE_DIR


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """Lines from ``marker`` to the next empty line."""

    title: str
    file: str
    """Path below ``cuda_src``."""
    marker: str

    @property
    def lines(self) -> tuple[int, list[str]]:
        """Number of the first line, and the lines. Raises LookupError unless exactly one line has the marker."""
        text = (SOURCE_DIR / self.file).read_text(encoding="utf-8").splitlines()
        where = [n for n, line in enumerate(text) if self.marker in line]
        if len(where) != 1:
            raise LookupError(f"{self.file} has {self.marker!r} in {len(where)} lines: it must be in one")
        first = where[0]
        end = next((n for n in range(first, len(text)) if not text[n].strip()), len(text))
        return first + 1, text[first:end]

    @property
    def numbered(self) -> str:
        """The lines with their numbers."""
        first, lines = self.lines
        indent = min(
            len(line) - len(line.lstrip()) for line in lines if line.strip() and not line.startswith("#")
        )
        shown = (line if line.startswith("#") else line[indent:] for line in lines)
        width = len(str(first + len(lines)))
        return "\n".join(f"{first + n:>{width}}  {line}" for n, line in enumerate(shown))

    @property
    def heading(self) -> str:
        return f"**{self.title}**, `cuda_src/{self.file}`"


FIGURES: dict[str, list[Excerpt]] = {}
"""Excerpts by key of the figure."""
PHASES: dict[str, dict[str, Excerpt]] = {}
"""Excerpts of the walkthrough by algorithm and step."""
for _line in Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()[5:]:
    _names, *_fields = _line.strip("| ").split(" | ")
    for _name in _names.split("; "):
        _algorithm, _, _step = _name.partition(": ")
        if _step:
            PHASES.setdefault(_algorithm, {})[_step] = Excerpt(*_fields)
        else:
            FIGURES.setdefault(_name, []).append(Excerpt(*_fields))
