"""Measuring one part of the evidence, case by case. Cut off by a lost machine, or by the end of the time that was
given, it goes on with the next case where card, driver, versions, commit and day are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..gpu.architectures import Device
from . import records, renewal
from .cases import Case
from .evidence_parts import Part
from .limits import Limits
from .records import Json
from .regimes import Regime
from .runner import run_case
from .suites import SUITES

#: A record, which is some megabytes, is written at most so often within a part.
KEEP_SECONDS = 20.0


def measure(
    record: Json,
    part: Part,
    cases: Sequence[Case],
    device: Device,
    seconds: float,
    here: Json,
    keep: Callable[[Json], object],
    check_time: Callable[[], None],
) -> None:
    """Add the rows of one part to the section of the record that it is kept in, those of one regime together, with the
    seconds that they took and with what of the environment (``here``) differs from the record's. ``check_time`` raises
    where another case would not end in time."""
    if part.seconds is not None or part.regime is not Regime.IN_TURNS:
        seconds = part.seconds or part.regime.seconds
    section = record["suites"].setdefault(part.kept_in, {"rows": [], "skipped": []})
    section["title"] = SUITES[part.kept_in].title
    begun, limits = _begin(record, part, here), Limits(**record["limits"])
    kept = time.perf_counter()
    for seed, case in enumerate(cases):
        if seed < begun["cases"]:
            continue
        check_time()
        started = time.perf_counter()
        rows, skipped = run_case(case, device, limits, regime=part.regime, seconds=seconds, seed=seed)
        section["rows"] += [records.row_record(row) for row in rows]
        section["skipped"] += [{**records.skipped_record(s), "regime": part.regime.value} for s in skipped]
        now = time.perf_counter()
        begun["cases"], begun["seconds"] = seed + 1, begun["seconds"] + now - started
        if now - kept > KEEP_SECONDS:
            keep(record)
            kept = now
    regimes = [regime.value for regime in Regime]
    section["rows"].sort(key=lambda row: regimes.index(row["regime"]))
    measured = {"seconds": round(begun["seconds"], 1), "gpu_after": records.gpu_state()}
    section.setdefault("measured", {})[part.regime.value] = measured | renewal.differing(record, here)
    del record["begun"]
    record["parts"].append(part.name)
    keep(record)


def _begin(record: Json, part: Part, here: Json) -> Json:
    """What is known of a part that was begun: how many cases are measured, and in how many seconds. What was measured
    in other circumstances is taken out."""
    where = {name: value for name, value in here.items() if name not in ("recorded", "gpu")}
    where |= {"day": here["recorded"][:10], "driver": here["gpu"].get("driver_version")}
    begun: Json = record.get("begun", {})
    if (begun.get("part"), begun.get("where")) != (part.name, where):
        renewal.take_out_rows(record, part)
        begun = record["begun"] = {"part": part.name, "where": where, "cases": 0, "seconds": 0.0}
    return begun
