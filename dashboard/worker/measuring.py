"""Runs one job, case by case, with :mod:`cufa.measure`."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from cufa.dashboard.worker.jobs import Job, Json, gpu_index
from cufa.dashboard.worker.memory import shortfall
from cufa.gpu.architectures import Device
from cufa.measure import measured
from cufa.measure.cases import Case
from cufa.measure.limits import Limits, measure_limits
from cufa.measure.runner import run_case
from cufa.measure.timing import Watch

Tell = Callable[[Json], None]
"""Writes one event to disk. Raises CannotWrite."""

#: Minimum interval between events with samples: writing must not disturb the measurement.
_SAMPLES_SECONDS = 0.25


class CannotWrite(OSError):
    """The run's folder cannot be written: mostly a full disk."""


#: Maximum age of measured ceilings.
_LIMITS_SECONDS = 120.0
_limits_measured: dict[Device | None, float] = {}


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a job."""

    record: Json
    failures: list[Json]
    """One per failed case: problem, kind, message, detail."""
    poisoned: bool
    """The GPU context is lost: this process cannot compute any more."""


def measure(job: Job, tell: Tell) -> Result:
    """Run all cases of a job. A failed case does not stop the next case, unless the GPU context is lost.

    Raises :class:`CannotWrite` from ``tell``.
    """
    device = _device(job.device)
    tell({"event": "phase", "text": "measuring this machine's ceilings"})
    limits = _limits(device)
    record = measured.run_json((), (), device, limits)
    tell({"event": "about", "record": record})
    failures: list[Json] = []
    for number, case in enumerate(job.cases):
        try:
            rows, skipped = _measure(case, job, number, device, limits, tell)
        except CannotWrite:
            raise
        except Exception as error:  # any error of a kernel, compiler or driver is a result
            failure = {"problem": case.problem.as_json(), **explain(error)}
            failures.append(failure)
            tell({"event": "failed", "record": failure})
            if failure["kind"] == "kernel error":
                return Result(record | {"failed": failures}, failures, poisoned=True)
            rows, skipped = [], []
        for kind, section, rows_of in (("row", "rows", rows), ("skipped", "skipped", skipped)):
            record[section] += rows_of
            for one in rows_of:
                tell({"event": kind, "record": one})
        tell({"event": "case done", "number": number})
    _free(device)
    return Result(record | {"failed": failures}, failures, poisoned=False)


def _measure(
    case: Case, job: Job, number: int, device: Device | None, limits: Limits, tell: Tell
) -> tuple[list[Json], list[Json]]:
    """Row records of one case, and records of skipped contenders."""
    # Otherwise the system would kill the worker.
    if device is None and (lacking := shortfall(case.problem)):
        raise MemoryError(lacking)
    prepared = _prepare(case, device, tell)
    names = ", ".join(c.label for c in case.contenders)
    tell({"event": "phase", "text": f"timing {names}, {job.regime}: {case.title}"})
    rows, skipped = run_case(
        case, device, limits, regime=job.regime, seconds=job.seconds, seed=number, watch=_watch(tell)
    )
    return [_row_record(row, prepared) for row in rows], [measured.skipped_json(x) for x in skipped]


def _watch(tell: Tell) -> Watch:
    """Sends the new samples of each contender between rounds, for pages that show the run."""
    sent: dict[str, int] = {}
    last = time.monotonic()

    def watch(samples: Mapping[str, Sequence[float]]) -> None:
        nonlocal last
        if time.monotonic() - last < _SAMPLES_SECONDS:
            return
        new = {name: [round(1e9 * s) for s in taken[sent.get(name, 0) :]] for name, taken in samples.items()}
        tell({"event": "samples", "samples_ns": new})
        sent.update({name: len(taken) for name, taken in samples.items()})
        last = time.monotonic()

    return watch


def _row_record(row: measured.Measured, seconds: dict[str, float]) -> Json:
    """The row record with the plan in words and the kernel's preparation time."""
    if row.plan is None:
        return row.json
    return {**row.json, "plan": str(row.plan), "prepare_seconds": seconds.get(row.label)}


def _limits(device: Device | None) -> Limits:
    """Recent ceilings, at current clocks and load."""
    now = time.monotonic()
    if now - _limits_measured.get(device, -_LIMITS_SECONDS) >= _LIMITS_SECONDS:
        measure_limits.cache_clear()
        _limits_measured[device] = now
    return measure_limits(device)


def _device(name: str) -> Device | None:
    index = gpu_index(name)
    if index is None:
        return None
    import cupy

    from cufa.run.cuda import backend as cuda

    cupy.cuda.Device(index).use()
    return cuda.current_device()


def _prepare(case: Case, device: Device | None, tell: Tell) -> dict[str, float]:
    """Compile before the timing; seconds by label, empty on a CPU."""
    if device is None:
        return {}
    from cufa.run.cuda import backend as cuda

    seconds = {}
    for contender in case.contenders:
        if not contender.is_ours:
            continue
        tell({"event": "phase", "text": f"compiling {contender.label}"})
        try:
            plan = contender.plan(case.problem, device)
        except ValueError:  # no kernel serves the problem: run_case() reports it
            continue
        start = time.perf_counter()
        cuda.prepare(plan)
        seconds[contender.label] = round(time.perf_counter() - start, 3)
    return seconds


def _free(device: Device | None) -> None:
    """Release GPU memory for other processes."""
    if device is not None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def explain(error: BaseException) -> Json:
    """kind, message and detail of an error, in words for the page."""
    name = type(error).__name__
    text = str(error).strip() or name
    if isinstance(error, MemoryError):  # CuPy's OutOfMemoryError is one
        kind = "out of memory"
    elif name in ("CUDARuntimeError", "CUDADriverError"):
        kind = "kernel error"
    elif name in ("CompileException", "NVRTCError"):
        kind = "does not compile"
    else:
        kind = "error"
        text = f"{name}: {text}"
    lines = text.splitlines()
    detail = "".join(traceback.format_exception(error))
    return {"kind": kind, "message": lines[0][:600], "detail": detail[-2500:]}
