"""What of recorded evidence a changed kernel has made stale, and how it is taken out to be measured again.

Every row of ours keeps the digest and the tiles of what ran, so a record says by itself which of its parts (the cases
of one suite under one regime) still show what would run today.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..gpu.architectures import Device
from ..kernels import KERNELS
from ..plan.planner import Plan
from ..problem.problem import Problem
from . import host_times, records
from .evidence_parts import EVIDENCE, Part
from .recorded import Recorded, rows_of
from .records import Json
from .regimes import Regime
from .sustained import WARM_SECONDS

Key = tuple[str, str, Problem]
"""Case, label and problem of a row: there is one of each in a part."""


@functools.cache
def digest_of(kernel: str) -> str:
    """Of the sources of a registered kernel as they are now."""
    return records.digest(KERNELS[kernel])


def device_of(record: Json) -> Device:
    """The card of a record, as plans are made for it."""
    typical = Device.typical(record["environment"]["arch"])
    sms = record["environment"].get("num_sms", typical.num_sms)
    return Device(record["environment"]["device"], typical.arch, sms)


def stale_parts(record: Json, device: Device) -> dict[str, str]:
    """Parts of evidence that must be measured again, or for the first time, by name, and why."""
    why = ((part.name, _why(record, part, device)) for part in EVIDENCE)
    return {name: reason for name, reason in why if reason}


def _why(record: Json, part: Part, device: Device) -> str:
    """ "" where every row shows what would run now."""
    if part.name not in record.get("parts", ()):
        return "not measured yet"
    planned = dict(_planned(part, device))
    ran: dict[Key, Recorded] = {
        (row.case, row.label, row.problem): row for row in rows_of(record) if part.keeps(row.suite, row.json)
    }
    told = {
        (x["case"], x["label"], Problem.from_json(x["problem"]))
        for x in record["suites"][part.kept_in]["skipped"]
        if part.keeps(part.kept_in, x)
    }
    changed, otherwise = set(), 0
    for key, plan in planned.items():
        if plan is None or key not in ran:
            continue
        if ran[key].json.get("digest") != digest_of(plan.spec.name):
            changed.add(plan.spec.name)
        elif not _same(ran[key].json, records.plan_record(plan)):
            otherwise += 1
    new, gone = planned.keys() - ran.keys() - told, ran.keys() - planned.keys()
    reasons = [f"{', '.join(sorted(changed))} changed"] if changed else []
    reasons += [f"{otherwise} rows are planned otherwise now"] if otherwise else []
    reasons += [f"{len(new)} rows are new"] if new else []
    reasons += [f"{len(gone)} rows are no longer asked for"] if gone else []
    return "; ".join(reasons)


def least_seconds(part: Part, device: Device) -> float:
    """What measuring a part takes by its regime alone, without inputs, references and compilation."""
    cases = part.cases(device)
    seconds = part.seconds or part.regime.seconds
    if part.regime is Regime.IN_TURNS:
        return len(cases) * seconds
    return sum(len(case.contenders) for case in cases) * (seconds + WARM_SECONDS)


def usual_seconds(part: Part, device: Device, recorded: Collection[Json]) -> float:
    """What measuring a part took in ``recorded`` evidence, with inputs, references and compilation; at least what its
    regime takes."""
    sections = (record["suites"].get(part.kept_in, {}) for record in recorded)
    measured = (section.get("measured", {}).get(part.regime, {}) for section in sections)
    return max(least_seconds(part, device), *(float(x.get("seconds", 0)) for x in measured), 0.0)


def usual_test_seconds(recorded: Collection[Json]) -> float:
    """What the GPU tests took in ``recorded`` evidence."""
    return max([(record["tests"] or {}).get("seconds", 0.0) for record in recorded], default=0.0)


def _planned(part: Part, device: Device) -> Iterator[tuple[Key, Plan | None]]:
    """What a part measures; None for what is not ours, or does not serve the problem."""
    for case in part.cases(device):
        for contender in case.contenders:
            key = case.name, contender.label, case.problem_of(contender)
            try:
                yield key, contender.plan(case.problem, device) if contender.is_ours else None
            except ValueError:
                yield key, None


def _same(row: Json, plan: Json) -> bool:
    """Whether a row is of this plan's tiles and splits, as far as both name them: a record may lack what a newer
    version has."""
    return all(
        mine == theirs
        for name in ("config", "split")
        for mine, theirs in _common(row.get(name) or {}, plan.get(name) or {})
    )


def _common(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((value, second[name]) for name, value in first.items() if name in second)


def take_out(record: Json, parts: Iterable[str], device: Device) -> None:
    """Take these parts out of a record, with all else that a changed kernel makes stale: its own entry, the host's
    times of calls that run it, and the results of the tests, which are of all kernels together."""
    changed = {*records.stale_kernels(record), *records.missing_kernels(record)}
    if changed:
        record.pop("begun", None)
    for part in (part for part in EVIDENCE if part.name in set(parts) & set(record["parts"])):
        take_out_rows(record, part)
        record["suites"][part.kept_in].get("measured", {}).pop(part.regime, None)
        record["parts"].remove(part.name)
    record["kernels"] = {
        name: kernel for name, kernel in record["kernels"].items() if name in KERNELS and name not in changed
    }
    if changed & host_times.kernels(device):
        for name in ("host_calls", "first_result_seconds", "host_measured"):
            record.pop(name, None)
    if changed:
        record["tests"] = None
        for kernel in record["kernels"].values():
            kernel.pop("tests_passed", None)


def take_out_rows(record: Json, part: Part) -> None:
    """What a part has measured, and what it says of contenders that were skipped."""
    section = record["suites"][part.kept_in]
    for kind in ("rows", "skipped"):
        section[kind] = [x for x in section[kind] if not part.keeps(part.kept_in, x)]


def differing(record: Json, here: Json) -> Json:
    """What of the environment ``here`` is not as the record says it of the whole."""
    return {name: value for name, value in here.items() if record["environment"].get(name) != value}


def settle(record: Json) -> None:
    """Where every part was measured anew, when and where the last of them was becomes the record's own; the ceilings,
    which stay, then say of when they are."""
    sections = record["suites"].values()
    parts = [part for section in sections for part in section.get("measured", {}).values()]
    if not parts or not all("recorded" in part for part in parts):
        return
    begun = record["environment"]
    places = [*parts, *(record[x] for x in ("host_measured",) if x in record)]
    places += [record["tests"]["measured"]] if "measured" in (record["tests"] or {}) else []
    wholes = [{**begun, **{name: part[name] for name in begun.keys() & part.keys()}} for part in places]
    record["environment"] = max(wholes[: len(parts)], key=lambda whole: whole["recorded"])
    for part, whole in zip(places, wholes, strict=True):
        for name in begun:
            part.pop(name, None)
        part |= differing(record, whole)
    record["limits_measured"] = {**differing(record, begun), **record.get("limits_measured", {})}


def environment_of(record: Json, suite: str, regime: str) -> Json:
    """Where and when the rows of one part were measured: as the record's, but for what its section says."""
    measured = record.get("suites", {}).get(suite, {}).get("measured", {}).get(regime, {})
    return {**record["environment"], **measured}


def changed_since(record: Json) -> str:
    """One sentence on kernels whose rows are of older sources; "" where there is none."""
    stale = records.stale_kernels(record)
    return f"Changed since this was measured: {', '.join(stale)}." if stale else ""


def other_days(record: Json, suites: Iterable[str] = ()) -> str:
    """One sentence on parts that were measured on another day than the record's, or with another driver; "" where all
    were measured together. ``suites``: those that are asked about, else all."""
    whole, found = record["environment"], dict[str, list[str]]()
    for suite in suites or record["suites"]:
        for regime in record["suites"].get(suite, {}).get("measured", {}):
            when = _apart(environment_of(record, suite, regime), whole)
            if when:
                found.setdefault(when, []).append(f"{suite} ({regime})")
    return " ".join(f"Measured {when}: {', '.join(names)}." for when, names in found.items())


def days_of(record: Json, suite: str) -> str:
    """The day, or the days, on which the parts of a suite were measured."""
    regimes = {row.regime.value for row in rows_of(record) if row.suite == suite}
    days = {environment_of(record, suite, regime)["recorded"][:10] for regime in regimes}
    return " and ".join(sorted(days or {record["environment"]["recorded"][:10]}))


def when_else(record: Json, measured: Json) -> str:
    """When something outside of the suites was measured, after a space; "" where that was with the record."""
    when = _apart({**record["environment"], **measured}, record["environment"])
    return f" {when}" if when else ""


def _apart(environment: Json, whole: Json) -> str:
    """What sets an environment apart from that of the whole record; "" where nothing does that a reader must know."""
    day, driver = environment["recorded"][:10], _driver(environment)
    words = [f"on {day}"] if day != whole["recorded"][:10] else []
    words += [f"with driver {driver}"] if driver != _driver(whole) else []
    return " ".join(words)


def _driver(environment: Json) -> str:
    return str((environment.get("gpu") or {}).get("driver_version", ""))
