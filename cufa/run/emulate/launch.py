"""One launch of a compiled kernel on a CPU: the interface of cuda_src/host/launch.h."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels import Launch
from ..cpu.blas import usable_cores
from . import build as host_build
from .memory import GlobalArray, Touched, as_ctypes, untouched

MODES = ("plain", "checked", "counted")
SCHEDULES = ("ascending", "descending")
#: Most blocks of a cluster: kernels may ask a GPU for more than the portable 8.
MAX_CLUSTER = 16
_RANDOM = 2
_FINDINGS_BYTES = 1 << 20
_STOPPED = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    """A defect of a kernel. The same mistake by many threads is one finding."""

    kind: str
    """race, unordered-sum (of a deterministic kernel), proxy-fence, wgmma-fence, copy-not-awaited, never-written,
    out-of-range, misaligned, divergence, deadlock, barrier, copy-in-flight, accumulator-touched, never-released (the
    next launch), block-not-running (of a cluster), counters (not zero at the end) or trace (cannot be read)."""
    count: int
    file: str
    line: int
    message: str
    """Names block, warp and lane of the first occurrence, and the source lines involved."""

    def __str__(self) -> str:
        times = f" ({self.count:,} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{times}"


class EmulationError(RuntimeError):
    """A block could not go on (deadlock, divergent warp, a store into the executor's memory), or the kernel's records
    cannot be read: there is no result. Carries all ``findings``."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(str(f) for f in findings))
        self.findings = findings


class _Launch(ctypes.Structure):
    """``CufaLaunch`` of cuda_src/host/launch.h."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("num_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("workers", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("late_copies", ctypes.c_int32),
        ("ordered_sums", ctypes.c_int32),
        ("arrays", ctypes.c_void_p),
        ("num_arrays", ctypes.c_int32),
        ("counters", ctypes.c_void_p),
        ("findings", ctypes.c_char_p),
        ("findings_bytes", ctypes.c_uint64),
    ]


@functools.cache
def runtime() -> ctypes.CDLL:
    library = host_build.load(str(host_build.runtime()))
    library.cufa_launch.argtypes = [ctypes.POINTER(_Launch)]
    library.cufa_counter_names.restype = ctypes.c_char_p
    library.cufa_keep_passes.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.cufa_keep_passes.restype = ctypes.c_uint64
    return library


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the executor runs a kernel; ``threads`` counts CPU threads. See :func:`emulate`."""

    mode: str = "plain"
    schedule: str | int = "ascending"
    copies: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not known; use one of {', '.join(MODES)}")
        seed = (
            isinstance(self.schedule, int)
            and not isinstance(self.schedule, bool)
            and 0 <= self.schedule < 1 << 32
        )
        if self.schedule not in SCHEDULES and not seed:
            raise ValueError(
                f"schedule={self.schedule!r} is not known; use 'ascending', 'descending' or a seed (an int below 2**32)"
            )
        threads = self.threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads={threads!r} must be an int from 1 up, or None for all cores")
        if self.copies not in (None, "early", "late"):
            raise ValueError(f"copies={self.copies!r} is not known; use 'early', 'late' or None")

    @property
    def late_copies(self) -> bool:
        return self.mode == "checked" if self.copies is None else self.copies == "late"


def execute(
    entry: int, launch: Launch, arguments: Sequence[ctypes.Structure], memory: list[GlobalArray],
    execution: Execution, before: Touched | None = None, now: Touched | None = None,
    ordered_sums: bool = False,
) -> tuple[npt.NDArray[Any], tuple[Finding, ...]]:  # fmt: skip
    """Run one launch. Returns the counters, one row per block, and the findings.

    ``entry`` comes from :func:`cufa.run.emulate.build.kernel`; ``memory`` is all memory that the kernel may touch.
    Checked mode: ``before`` has the accesses of the previous launch, if this launch may begin before its end; ``now``
    receives the accesses of this launch; ``ordered_sums`` requires additions to memory in a fixed order. Raises
    EmulationError, and ValueError if the grid cannot be divided into clusters.
    """
    if not 1 <= launch.cluster <= MAX_CLUSTER:
        raise ValueError(f"{launch.entry}: a cluster has 1 to {MAX_CLUSTER} blocks, not {launch.cluster}")
    if launch.grid[0] % launch.cluster:
        raise ValueError(
            f"{launch.entry}: {launch.grid[0]} blocks along x cannot be cut into clusters of {launch.cluster}"
        )
    library = runtime()
    names = [x for x in library.cufa_counter_names().decode().split(",") if x]
    counters = np.zeros(int(np.prod(launch.grid)), [(name, np.uint64) for name in names])
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
    table, findings = as_ctypes(memory, before, now), ctypes.create_string_buffer(_FINDINGS_BYTES)
    random = isinstance(execution.schedule, int)
    call = _Launch(
        entry=entry, arguments=ctypes.addressof(pointers), grid=launch.grid, num_threads=launch.num_threads,
        shared_bytes=launch.shared_memory, cluster=launch.cluster,
        workers=min(execution.threads or usable_cores(), len(counters) or 1),
        mode=MODES.index(execution.mode),
        schedule=_RANDOM if random else SCHEDULES.index(str(execution.schedule)),
        seed=int(execution.schedule) if random else 0, late_copies=execution.late_copies,
        ordered_sums=ordered_sums, arrays=ctypes.addressof(table), num_arrays=len(memory),
        counters=counters.ctypes.data, findings=ctypes.cast(findings, ctypes.c_char_p),
        findings_bytes=_FINDINGS_BYTES,
    )  # fmt: skip
    status = library.cufa_launch(ctypes.byref(call))
    # A text that fills the buffer may end within a line.
    lines = findings.value.decode(errors="replace").splitlines(keepends=True)
    found = tuple(_parse(line.rstrip("\n")) for line in lines if line.endswith("\n"))
    if status == _STOPPED:
        raise EmulationError(found)
    return counters, found


def execute_all(
    entries: Mapping[str, int], launches: Sequence[Launch], arguments: Sequence[ctypes.Structure],
    memory: list[GlobalArray], execution: Execution, ordered_sums: bool = False,
) -> tuple[dict[str, npt.NDArray[Any]], tuple[Finding, ...]]:  # fmt: skip
    """Run launches one after another. Returns the counters of each entry's last launch, and all findings. If a launch
    may begin before the previous launch ends, checked mode finds its early accesses. ``ordered_sums``: see
    :func:`execute`."""
    counters: dict[str, npt.NDArray[Any]] = {}
    findings: tuple[Finding, ...] = ()
    before: Touched | None = None
    for launch, following in zip(launches, [*launches[1:], None], strict=True):
        overlapped = execution.mode == "checked" and following is not None and following.dependent
        now = untouched(memory) if overlapped else None
        early = before if launch.dependent else None
        try:
            counters[launch.entry], found = execute(
                entries[launch.entry], launch, arguments, memory, execution, early, now, ordered_sums
            )
        except EmulationError as error:
            raise EmulationError(findings + error.findings) from None
        findings += found
        if overlapped and following is not None and not counters[launch.entry]["grid_releases"].any():
            findings += (_never_released(launch, following),)
        before = now
    return counters, findings


def _never_released(launch: Launch, following: Launch) -> Finding:
    message = (
        f"{following.entry} may begin before {launch.entry} ends, but no block of {launch.entry} calls "
        "grid_release_next()"
    )
    return Finding("never-released", 1, "", 0, message)


def _parse(line: str) -> Finding:
    kind, count, file, number, message = line.split("\t", 4)
    return Finding(kind, int(count), file, int(number), message)
