"""Earlier evidence of the same GPUs, a few numbers per row: what a kernel took at earlier commits.

``python -m cufa.measure.past`` writes it below the records from this repository's history. A row keeps its deciles as
samples, so that the median, the 10th and the 90th percentile are those of all samples.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import records
from .records import SOURCES, Json

FOLDER = "past"
"""Below the records."""
_SUITES = ("forward", "backward", "decode", "versions", "float32")
_LEFT_OUT = ("needs_ns", "predicted_ns", "grid", "tiles_visited", "tiles_skipped", "workspace_bytes")


def load(name: str, directory: Path | None = None) -> list[Json]:
    """Earlier records of one GPU, by the name of its file, the oldest first; none where none are kept. Raises
    ValueError for a damaged file."""
    file = (directory or records.RECORDS_DIR) / FOLDER / f"{name}.json"
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["records"]
        return [records.upgrade(record) for record in found]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FOLDER}/{file.name} is damaged: {error}") from error


def compact(record: Json) -> Json:
    """A record with only our rows of some suites, and deciles for samples."""
    suites = {
        name: {
            **record["suites"][name],
            "rows": [_compact_row(row) for row in record["suites"][name]["rows"] if "kernel" in row],
            "skipped": [],
        }
        for name in _SUITES
        if name in record["suites"]
    }
    kept = ("schema", "environment", "limits")
    return {**{name: record[name] for name in kept}, "suites": suites}


def _compact_row(row: Json) -> Json:
    deciles = np.percentile(row["samples_ns"], np.arange(0, 101, 10))
    kept = {name: value for name, value in row.items() if name not in _LEFT_OUT}
    return {**kept, "samples_ns": [round(x) for x in deciles]}


def _versions(file: Path) -> Iterator[Json]:
    """A record as it was at each commit that changed it, the oldest first, but as it is now."""
    path = file.relative_to(SOURCES).as_posix()

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", *command], cwd=SOURCES, capture_output=True, text=True, check=True
        ).stdout

    commits = git("log", "--reverse", "--diff-filter=AM", "--format=%H", "--", path).split()
    for commit in commits[:-1]:
        yield records.upgrade(json.loads(git("show", f"{commit}:{path}")))


def write() -> list[Path]:
    """The past of every record, from the repository's history. Raises CalledProcessError outside of one."""
    written = []
    for file in sorted(records.RECORDS_DIR.glob("*.json")):
        found: dict[str, Json] = {}
        for record in _versions(file):
            found[record["environment"]["recorded"]] = compact(
                record
            )  # a record may be renewed in part: the last
        now = json.loads(file.read_text(encoding="utf-8"))["environment"]["recorded"]
        earlier = [record for date, record in found.items() if date != now]
        if earlier:
            target = records.RECORDS_DIR / FOLDER / file.name
            target.parent.mkdir(exist_ok=True)
            target.write_text(
                json.dumps({"records": earlier}, separators=(",", ":")) + "\n", encoding="utf-8"
            )
            written.append(target)
    return written


if __name__ == "__main__":
    for target in write():
        print(target)
