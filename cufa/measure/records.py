"""Results as JSON: what was measured, of which sources, where, and how.

A *run* is what `cufa bench --json` prints. An *evidence* file is a run of the recorded suites plus the GPU
tests, one file per GPU model under ``cufa/records``, shipped with the package: CI has no GPU, so a test there
compares each kernel's source digest with the one that its evidence was recorded for.

Rows of all operations and regimes look the same. :func:`upgrade` brings records of older schemas to this one,
and :class:`cufa.measure.recorded.Recorded` is a row read back.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..build.compiler import cupy_options, source_digest
from ..gpu.architectures import Device, find_architecture
from ..kernels import KERNELS, Kernel
from ..plan.planner import Plan
from ..plan.tuning import write_json
from . import records_v1
from .limits import Limits
from .runner import Row, Skipped
from .sustained import Load
from .timing import as_nanoseconds

SCHEMA = 2
RECORDS_DIR = Path(__file__).parent.parent / "records"
SOURCES = Path(__file__).parents[2]
FLOP_CONVENTION = "4 * head_dim per visible score (backward: 10): the exact count that the mask lets through"

Json = dict[str, Any]


def digest(spec: Kernel) -> str:
    """Digest of the sources of a kernel, comments and white space aside."""
    return source_digest(spec.source)


def row_record(row: Row) -> Json:
    """One measured row. Times are nanoseconds, all samples kept; rates follow from them and the problem."""
    record: Json = {
        "case": row.case,
        "label": row.label,
        "problem": row.problem.as_json(),
        "regime": row.regime.value,
        "samples_ns": as_nanoseconds(row.timing),
        "p10_ns": round(row.timing.p10 * 1e9),
        "p50_ns": round(row.timing.p50 * 1e9),
        "p90_ns": round(row.timing.p90 * 1e9),
        **dataclasses.asdict(row.work),
        "tflops": round(row.tflops, 3),
        "gbytes_per_s": round(row.gbytes, 3),
        "of_ceiling": round(row.of_ceiling, 4),
        "ceiling": row.bound,
        # JSON has no NaN: an error that is no number is recorded as null.
        "max_error": row.error if row.error == row.error else None,
    }
    if row.lengths is not None:
        record["lengths"] = list(row.lengths)
    if row.load is not None:
        record["load"] = _load_record(row, row.load)
    if row.plan is not None:
        record |= plan_record(row.plan)
    if row.predicted is not None:
        record |= {
            "predicted_ns": round(row.predicted * 1e9),
            "needs_ns": {name: round(seconds * 1e9) for name, seconds in row.needs.items()},
        }
    return record


def plan_record(plan: Plan) -> Json:
    """What a row keeps of the plan that ran."""
    heads, schedule = plan.problem.batch * plan.problem.heads, plan.schedule
    return {
        "kernel": plan.spec.name,
        "digest": digest(plan.spec),
        "config": dataclasses.asdict(plan.config),
        "grid": [list(launch.grid) for launch in plan.launches],
        "tiles_visited": schedule.visited * heads,
        "tiles_skipped": schedule.skipped * heads,
        "workspace_bytes": plan.workspace,
        **({"split": dataclasses.asdict(plan.split)} if plan.split else {}),
    }


def _load_record(row: Row, load: Load) -> Json:
    """Of a contender that ran alone. What NVML did not tell is null, and ``missing`` says why."""
    power, per_joule = load.power, row.tflop_per_joule
    return {
        "calls": load.calls,
        "input_sets": load.sets,
        "host_bound": load.host_bound,
        "clock_mhz": power.clock_mhz,
        "watts": None if power.watts is None else round(power.watts, 1),
        "joules": None if power.joules is None else float(f"{power.joules:.4g}"),
        "tflop_per_joule": None if per_joule is None else round(per_joule, 4),
        "missing": power.missing,
        "throttled": {name: round(share, 3) for name, share in power.throttled.items()},
    }


def skipped_record(skipped: Skipped) -> Json:
    problem = skipped.problem.as_json()
    return {"case": skipped.case, "label": skipped.label, "problem": problem, "reason": skipped.reason}


def run_record(
    rows: Iterable[Row], skipped: Iterable[Skipped], device: Device | None, limits: Limits | None
) -> Json:
    """A self-describing benchmark run."""
    return {
        "schema": SCHEMA,
        "environment": environment(device),
        "limits": dataclasses.asdict(limits) if limits else None,
        "flop_convention": FLOP_CONVENTION,
        "rows": [row_record(row) for row in rows],
        "skipped": [skipped_record(s) for s in skipped],
    }


def environment(device: Device | None) -> Json:
    """Where and with what: device, clocks, driver, host, versions, commit, compiler flags, time."""
    record: Json = {
        "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _cpu_name() if device is None else device.name,
        "versions": _versions(),
    }
    commit = _commit()
    if commit:
        record["commit"] = commit
    if device is not None:
        import cupy

        runtime = cupy.cuda.runtime
        major, minor = cupy.cuda.nvrtc.getVersion()
        record |= {
            "arch": device.arch.name,
            "host": _cpu_name(),
            "num_sms": device.num_sms,
            "nvrtc": f"{major}.{minor}",
            "cuda_driver": runtime.driverGetVersion(),
            "flags": [o for o in cupy_options() if not o.startswith("-I")] + ["-std=c++17", "-ftz=true"],
            "gpu": gpu_state(),
        }
    return record


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("cufa", "numpy", "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "cufa" not in found:  # run from a checkout that is not installed
        from .. import __version__

        found["cufa"] = __version__
    return found


def _commit() -> str:
    """Of the checkout that this runs from, and whether it was changed since; "" outside of one."""
    if not (SOURCES / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def gpu_state() -> Json | None:
    """Driver and clocks as nvidia-smi reports them now; None where it is missing."""
    fields = (
        "driver_version",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "power.draw",
        "power.limit",
        "temperature.gpu",
    )
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields, (value.strip() for value in answer.stdout.split(",")), strict=False))


def evidence_path(device_name: str, directory: Path = RECORDS_DIR) -> Path:
    """The evidence file of one GPU model."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return directory / f"{slug}.json"


def load_all(directory: Path = RECORDS_DIR) -> dict[str, Json]:
    """Recorded evidence by file name, e.g. ``nvidia-h200``, in this version's schema. Raises ValueError for a
    damaged file."""
    found = {}
    for file in sorted(directory.glob("*.json")):
        try:
            found[file.stem] = upgrade(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file.name}: {error}") from error
    return found


def upgrade(record: Json) -> Json:
    """A record in this version's schema. Raises ValueError for one that this version does not read."""
    schema = record.get("schema")
    if schema == SCHEMA:
        return record
    if schema != 1:
        raise ValueError(f"it has schema {schema!r}; this version reads 1 to {SCHEMA}")
    try:
        return records_v1.upgraded(record)
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error


def save(record: Mapping[str, Any], file: Path) -> Path:
    """Write a record, all of it or nothing."""
    write_json(file, record)
    return file


def stale_kernels(record: Mapping[str, Any]) -> list[str]:
    """Kernels of the record whose sources are no longer those that it was recorded for."""
    recorded = {name: kernel["digest"] for name, kernel in record["kernels"].items()}
    return [name for name, spec in KERNELS.items() if name in recorded and recorded[name] != digest(spec)]


def missing_kernels(record: Mapping[str, Any]) -> list[str]:
    """Kernels that the GPU of a record runs and that it does not hold."""
    arch = find_architecture(record["environment"]["arch"])
    recorded = record["kernels"]
    return [name for name, spec in KERNELS.items() if name not in recorded and spec.runs_on(arch.capability)]


def unproven_kernels(evidence: Iterable[Mapping[str, Any]]) -> list[str]:
    """Kernels that no record holds as they are now. (A GPU's record holds those that run on it, and may be older than
    that of another GPU.)"""
    fresh = {name for record in evidence for name in record["kernels"].keys() - {*stale_kernels(record)}}
    return [name for name in KERNELS if name not in fresh]
