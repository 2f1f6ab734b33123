"""Decode kernels executed on a CPU, as :mod:`cufa.executor.emulate` does it for ``flash_attention``'s."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.params import TRACE_RECORD
from ..decode.operands import DecodeOperands
from ..decode.params import MAPS, pack, pointers
from ..decode.plan import DecodePlan
from . import build as host_build
from .launch import Execution, Finding, execute
from .memory import GlobalArray, row_map, tensor_map


@dataclasses.dataclass(frozen=True)
class DecodeEmulation:
    """What one run gave, beyond what it wrote to the operands."""

    plan: DecodePlan
    findings: tuple[Finding, ...]
    """Empty outside checked mode, and for a clean kernel."""
    counters: dict[str, npt.NDArray[Any]]
    """Of each launch: a structured array, one row per block (see :class:`.emulate.Emulation`)."""
    records: npt.NDArray[Any]
    """One :data:`~cufa.core.params.TRACE_RECORD` per piece: q_block is the piece's number within its item,
    head that of key/value head and block of rows, tiles_visited its tiles, tiles_unmasked its first tile."""
    seconds: float
    """Time in the kernels, on this CPU."""


def run_decode_plan(
    plan: DecodePlan,
    operands: DecodeOperands,
    execution: Execution,
    trace: bool = True,
    launches: int = 1,
) -> DecodeEmulation:
    """Execute a plan's launches on NumPy operands: writes ``out``, ``lse`` and, with new tokens, the cache.

    ``launches`` repeats the whole with the same workspace and counters, as a replayed graph does. Raises
    EmulationError, or RuntimeError when the kernels leave a counter that is not zero.
    """
    checked = execution.mode == "checked"
    names = [launch.entry for launch in plan.launches]
    constants = {**plan.constants, "TRACE": trace}
    entries = host_build.kernel(f"kernels/{plan.spec.source}", constants, names, checked, ["DecodeParams"])
    written = {"o", "lse"} | ({"k_cache", "v_cache"} if plan.problem.new_tokens else set())
    memory = [GlobalArray(n, x, writable=n in written) for n, x in pointers(operands).items()]
    records = np.zeros(plan.items * plan.num_splits + plan.items + plan.num_splits, TRACE_RECORD)
    counts = np.zeros(max(plan.counters, 1), np.uint32)
    partial = np.full(plan.workspace // 4 + 4, np.nan, np.float32)
    partial = partial[-partial.ctypes.data % 16 // 4 :][: max(plan.workspace // 4, 1)]
    own = {"partial": partial, "counters": counts, "trace": records}
    memory += [GlobalArray(name, x, writable=True) for name, x in own.items()]
    params = pack(plan, operands)
    for array in memory:
        setattr(params, array.name, array.address)
    for (field, name), rows in zip(MAPS.items(), plan.spec.tensor_map_rows(plan.config), strict=False):
        shape = row_map if dict(plan.config.switches)["WHOLE_ROWS"] else tensor_map
        box = shape(getattr(operands, name), rows)
        ctypes.memmove(getattr(params, field), ctypes.addressof(box), ctypes.sizeof(box))
    findings: list[Finding] = []
    counters, start = {}, time.perf_counter()
    for _ in range(launches):
        for launch in plan.launches:
            counters[launch.entry], found = execute(
                entries[launch.entry], launch, [params], memory, execution
            )
            findings += found
    seconds = time.perf_counter() - start
    if counts.any():
        raise RuntimeError(f"{plan.spec.name} left counters that are not zero: {counts[counts != 0]}")
    ended = np.sort(records[records["end_ns"] > 0], order=["batch", "head", "q_block"])
    return DecodeEmulation(plan, tuple(findings), counters, ended, seconds)
