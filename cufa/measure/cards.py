"""Measurements that ship with the package: one file of JSON lines for each GPU model, ``cufa/records/<card>.jsonl``.

A line without ``what`` is a measurement row. The contenders of one case form a group (:attr:`Measured.group`); the
newest session of a group is the measurement, older sessions are its past. A row has the fields of
:func:`cufa.measure.measured.row_of` without samples and without fields that are computed from other fields (rates,
shares of a ceiling, predictions). It also has

========================  ============================================================================================
``problem``               ``id`` of the line that holds the problem
``suite``                 name of the suite that the case belongs to
``card``                  name of the GPU
``recorded``, ``commit``  date and time (UTC) of the session, and commit of the measured checkout
``digest``                digest of the kernel's sources: information only
``code``                  digest of the kernel's machine code under the pinned NVRTC; null: not known
``n``                     number of samples
``low_ns``, ``high_ns``   95% interval of the median
``over``                  {label: [low, high]}: 95% interval of that contender's median ÷ this one's, same rounds
========================  ============================================================================================

Other lines: ``problem`` (with its ``id``, before its rows), ``session`` (environment), ``ceilings`` (:class:`Limits`),
``tests`` (GPU tests), ``host`` (host time of calls), ``compile`` (seconds of one cold compile of a kernel). The newest
line of each kind counts.
``machine_code.json`` lists the ``code`` of rows and traces whose kernels still compile to the same machine code.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..gpu.architectures import Device
from ..problem.problem import Problem
from .limits import Limits
from .measured import Json, Measured

RECORDS_DIR = Path(__file__).parent.parent / "records"
CURRENT = RECORDS_DIR / "machine_code.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Card:
    """All measurements of one GPU model."""

    name: str
    """Name of its file, e.g. ``nvidia-h200``."""
    rows: tuple[Measured, ...]
    """The rows of each group's newest session, in the order of the file."""
    past: tuple[Measured, ...]
    """Older rows of the same groups, the oldest first."""
    sessions: dict[str, Json]
    """Environment by date and time."""
    limits: Limits | None = None
    others: dict[str, Json] = dataclasses.field(default_factory=dict)
    """Newest lines of the kinds ceilings, tests, host, and "compile KERNEL"."""

    @functools.cached_property
    def environment(self) -> Json:
        """Environment of the session that measured the newest row."""
        return self.sessions[max(row.recorded for row in self.rows)]

    @property
    def device(self) -> Device:
        """The card, as the planner takes it."""
        typical = Device.typical(self.environment["arch"])
        return Device(
            self.environment["device"], typical.arch, self.environment.get("num_sms", typical.num_sms)
        )

    @property
    def stale(self) -> list[str]:
        """Kernels whose machine code has changed since a row was measured."""
        return list(dict.fromkeys(row.json["kernel"] for row in self.rows if row.is_stale))

    @property
    def changed(self) -> str:
        """One sentence on kernels whose machine code has changed; "" where there is none."""
        return f"Changed since measured: {', '.join(self.stale)}." if self.stale else ""

    def of_suite(self, suite: str) -> list[Measured]:
        return [row for row in self.rows if row.suite == suite]


def path_of(device_name: str, directory: Path | None = None) -> Path:
    """The file of one GPU model."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return (directory or RECORDS_DIR) / f"{slug}.jsonl"


def load_all(directory: Path | None = None) -> dict[str, Card]:
    """Every card by the name of its file. Raises ValueError for a damaged file."""
    return {file.stem: load(file) for file in sorted((directory or RECORDS_DIR).glob("*.jsonl"))}


def load(file: Path) -> Card:
    """Raises ValueError for a damaged file."""
    try:
        return of_lines(file.stem, read_lines(file))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file.name} is damaged: {error!r}"[:400]) from error


def read_lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def of_lines(name: str, lines: Iterable[Json]) -> Card:
    """Raises KeyError or TypeError for damaged lines."""
    groups: dict[Any, list[Measured]] = {}
    sessions, others, problems = dict[str, Json](), dict[str, Json](), dict[int, Problem]()
    for line in lines:
        what = line.get("what")
        if what is None:
            row = Measured(line, problems[line["problem"]])
            groups.setdefault(row.group, []).append(row)
        elif what == "problem":
            problems[line["id"]] = Problem.from_json(
                {k: x for k, x in line.items() if k not in ("what", "id")}
            )
        elif what == "session":
            sessions[line["recorded"]] = {key: x for key, x in line.items() if key != "what"}
        else:
            key = f"{what} {line['kernel']}" if what == "compile" else what
            if key not in others or others[key]["recorded"] <= line["recorded"]:
                others[key] = line
    newest, past = [], []
    for rows in groups.values():
        last = max(row.recorded for row in rows)
        newest += [row for row in rows if row.recorded == last]
        past += [row for row in rows if row.recorded != last]
    past.sort(key=lambda row: row.recorded)
    ceilings = others.get("ceilings")
    limits = (
        Limits(**{k: x for k, x in ceilings.items() if k not in ("what", "recorded")}) if ceilings else None
    )
    return Card(name, tuple(newest), tuple(past), sessions, limits, others)


@functools.cache
def current_code() -> frozenset[str]:
    """Digests of the machine code of rows and traces that today's sources still compile to."""
    try:
        return frozenset(json.loads(CURRENT.read_text(encoding="utf-8"))["current"])
    except FileNotFoundError:
        return frozenset()
