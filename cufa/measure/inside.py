"""Inside traces: the phases of each warp over time, of the blocks of one SM. Recorded on a GPU or executed on a CPU.

A trace file has logs (:mod:`cufa.build.phases`, :mod:`cufa.measure.kernel_runs`). The files under
``cufa/records/inside`` ship with the package and are shown on machines without a GPU. On a CPU the clock counts
executed primitives: such a trace shows order, not time, and is not kept.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..build.compiler import keeps_logs
from ..build.phases import LOG_HEAD, PHASES, STAMP, Logs, intervals, mistakes
from ..kernels import KERNELS
from ..kernels.params import TRACE_RECORD
from ..plan.planner import Plan
from . import kernel_runs, measured, measuring, timing
from .cards import RECORDS_DIR
from .inputs import Inputs, given_to
from .kernel_runs import KernelRun
from .machine import environment
from .runner import bind

INSIDE_DIR = RECORDS_DIR / "inside"
_RUNS = 5
_TIMED = 0.2
"""Seconds of timing, of the builds with and without stamps together."""


@dataclasses.dataclass(frozen=True)
class InsideTrace(KernelRun):
    """One run of one kernel, with the phases of its warps."""

    clock: str
    """ "cycles" of a GPU's SM, or "executed": the number of primitives that a CPU has executed: order, not time."""
    phases: tuple[str, ...]
    """Names of the phase numbers in the stamps."""
    slowdown: float | None
    """Time of the build with stamps over time of the build without, timed in turns; None: executed on a CPU."""
    logs: Logs = dataclasses.field(repr=False)

    @property
    def is_time(self) -> bool:
        return self.clock == "cycles"

    @property
    def unit(self) -> str:
        """Unit of :meth:`intervals`."""
        return "µs" if self.is_time else "primitives executed"

    def intervals(self) -> npt.NDArray[Any]:
        """:data:`cufa.build.phases.INTERVAL`, in :attr:`unit`."""
        return intervals(self.logs, self.logs.ticks_per_ns() * 1e3 if self.is_time else 1.0)

    @property
    def name(self) -> str:
        """Name of its file, without suffix."""
        return self.file_name(str(self.config))


def record(plan: Plan, sm: int = 0) -> InsideTrace:
    """Trace a plan on the current GPU. Of a few runs, the shortest on SM ``sm`` is kept: its caches are warm.

    Raises ValueError for a kernel that keeps no logs, or whose logs are not sound.
    """
    from ..run.cuda import backend as cuda

    assert plan.device is not None
    _check_keeps_logs(plan)
    given = given_to(plan.operation, Inputs(plan.problem, on_gpu=True, seed=0).arrays(plan.problem))
    stamping, runs = cuda.InsideRuns(plan, given, sm), []
    for _ in range(_RUNS):
        stamping.launch()
        runs.append(stamping.logs())
    if not all(len(run.heads) for run in runs):
        raise ValueError(
            f"no block of {plan.spec.name} ran on SM {sm}: take a larger problem, or name another SM"
        )
    shortest = min(runs, key=lambda run: int(run.heads["end_clock"].max() - run.heads["start_clock"].min()))
    if wrong := mistakes(shortest):
        raise ValueError(f"the logs of {plan.spec.name} are not sound: {wrong[0]}")
    contenders: dict[str, list[timing.Run]] = {"stamping": [stamping.launch], "plain": [bind(plan, given)]}
    times = measuring.measure(contenders, on_gpu=True, seconds=_TIMED)
    slowdown = timing.speedup(times["stamping"], times["plain"]).value
    return _of(plan, "cycles", environment(plan.device), shortest, slowdown)


def execute(plan: Plan) -> InsideTrace:
    """Execute a plan on this CPU, on random inputs. Raises the errors of :func:`record` and of :func:`cufa.emulate`."""
    from ..run.emulate.calls import run_plan
    from ..run.emulate.launch import Execution

    _check_keeps_logs(plan)
    given = given_to(plan.operation, Inputs(plan.problem, on_gpu=False, seed=0).arrays(plan.problem))
    # On one thread all blocks run on one "SM", and their phases have one order.
    run = run_plan(plan, given, Execution("plain", threads=1), inside=True)
    assert run.inside is not None
    return _of(plan, "executed", {}, run.inside)


def _check_keeps_logs(plan: Plan) -> None:
    if not keeps_logs(plan.spec.source):
        keeping = [name for name, spec in KERNELS.items() if keeps_logs(spec.source)]
        raise ValueError(
            f"{plan.spec.name} keeps no logs of its phases; kernels that do: {', '.join(keeping)}"
        )


def _of(
    plan: Plan, clock: str, where: dict[str, Any], logs: Logs, slowdown: float | None = None
) -> InsideTrace:
    digest = measured.digest(plan.spec)
    return InsideTrace(
        plan.spec.name, digest, plan.problem, plan.config, where, clock, PHASES, slowdown, logs
    )


def save(trace: InsideTrace, directory: Path) -> Path:
    """Write ``<name>.trace``, whole or not at all. Raises ValueError for a trace that a CPU executed."""
    if not trace.is_time:
        raise ValueError(
            "this trace was made on a CPU: its clock counts primitives, not time, so it cannot be stored"
        )
    logs = trace.logs
    stamps = np.concatenate([np.zeros(0, STAMP), *logs.stamps])
    # Clock differences and one array per field compress to half the size.
    clocks = [np.diff(x["clock"], prepend=x["clock"][:1]) for x in logs.stamps if len(x)]
    arrays = kernel_runs.fields_of(logs.heads, "head_") | kernel_runs.fields_of(logs.items, "item_")
    arrays |= {
        "kept": np.array([len(x) for x in logs.stamps]),
        "first": np.array([x["clock"][0] if len(x) else 0 for x in logs.stamps], np.uint32),
        "clock": np.concatenate([np.zeros(0, np.uint32), *clocks]),
        "code": stamps["code"],
    }
    described = trace.described() | {"refused": logs.refused}
    return kernel_runs.save(directory / f"{trace.name}{kernel_runs.SUFFIX}", described, arrays)


def load(file: Path) -> InsideTrace:
    """Raises ValueError for a file that is no inside trace of this version."""
    return kernel_runs.load(file, "inside trace", _read)


def _read(described: dict[str, Any], stored: kernel_runs.Arrays) -> InsideTrace:
    described["phases"] = tuple(described["phases"])
    if described["phases"] != PHASES:
        raise ValueError("its phases have other numbers than those of this version")
    ends = np.cumsum(stored["kept"])[:-1]
    clocks, codes = np.split(stored["clock"], ends), np.split(stored["code"], ends)
    stamps = []
    for first, clock, code in zip(stored["first"], clocks, codes, strict=True):
        log = np.zeros(len(code), STAMP)
        log["clock"] = np.cumsum(clock, dtype=np.uint32) + first
        log["code"] = code
        stamps.append(log)
    heads, items = (
        kernel_runs.struct_of(stored, dtype, prefix)
        for dtype, prefix in ((LOG_HEAD, "head_"), (TRACE_RECORD, "item_"))
    )
    logs = Logs(heads, tuple(stamps), items, described.pop("refused"))
    return InsideTrace(**described, logs=logs)


def load_all(directory: Path = INSIDE_DIR) -> dict[str, InsideTrace]:
    """Every inside trace of a directory by file name. Raises ValueError for a damaged file."""
    return {file.stem: load(file) for file in sorted(directory.glob(f"*{kernel_runs.SUFFIX}"))}
