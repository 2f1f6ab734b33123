"""Made-up cards: lines as a recording leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def lines_of(
    suites: dict[str, list[Json]], environment: Json, limits: Json | None = None, *others: Json
) -> list[Json]:
    """``suites``: rows by suite, as :func:`cufa.measure.measured.row_of` makes them; their samples may stay."""
    recorded, ids = environment["recorded"], dict[str, int]()
    lines: list[Json] = [{"what": "session", **environment}]
    if limits:
        lines.append({"what": "ceilings", "recorded": recorded, **limits})
    lines += [{"recorded": recorded, **line} for line in others]
    for suite, rows in suites.items():
        for row in rows:
            key = json.dumps(row["problem"])
            if key not in ids:
                ids[key] = len(ids)
                lines.append({"what": "problem", "id": ids[key], **row["problem"]})
            about = {"suite": suite, "card": environment["device"], "recorded": recorded}
            lines.append({**about, **row, "problem": ids[key]})
    return lines


def write_lines(file: Path, lines: list[Json]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def edit(file: Path, change: Callable[[Json], Json | None]) -> None:
    """Each line as ``change`` returns it; None leaves it out."""
    changed = (change(json.loads(line)) for line in file.read_text().splitlines())
    write_lines(file, [line for line in changed if line is not None])


def edit_rows(file: Path, change: Callable[[Json], Any]) -> None:
    """``change`` alters rows in place."""

    def line(found: Json) -> Json:
        if "what" not in found:
            change(found)
        return found

    edit(file, line)
