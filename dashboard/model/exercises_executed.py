"""The two exercises that the executor grades: the answer changes kernel source, which is compiled and run on the CPU.

An answer selects given statements or numbers; no visitor's text is compiled. Without a C++ compiler both raise
:class:`~cufa.run.emulate.build.CompilerError`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cufa.build.compiler import SOURCE_DIR
from cufa.dashboard.model.exercises import Verdict
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, Launch
from cufa.plan.planner import make_plan
from cufa.problem.mask import FULL
from cufa.problem.problem import Problem, default_scale
from cufa.run.emulate import build
from cufa.run.emulate.calls import EmulationError, Execution, Finding, run_plan
from cufa.run.emulate.launch import execute
from cufa.run.emulate.memory import GlobalArray

KERNEL = "forward/fa1/kernel.cu"
STATEMENTS = ("cp_async_commit();", "cp_async_wait<0>();", "block_sync();")
"""The three lines in the kernel's order."""
PLANTED = ("cp_async_commit();", "block_sync();", "cp_async_wait<0>();")
_PLACE = "\n".join(f"  {x}" for x in STATEMENTS)
_COMMENT = "  // the copies of all threads have landed"
_BEFORE, _AFTER = 5, 3
"""Lines shown before and after the three lines."""
_LENGTH, _HEAD_DIM = 128, 64


def excerpt() -> tuple[str, str]:
    """The kernel's lines before and after the three lines."""
    before, after = (SOURCE_DIR / KERNEL).read_text("utf-8").split(_PLACE + _COMMENT)
    return "\n".join(before.split("\n")[-1 - _BEFORE : -1]), "\n".join(after.split("\n")[1 : 1 + _AFTER])


@functools.cache
def race(answer: tuple[str, str, str]) -> Verdict:
    """Run FA1 with these three lines under the race detector."""
    findings = _findings("\n".join(f"  {x}" for x in answer))
    if not findings:
        text = (
            "The race detector finds nothing. Commit closes the group of copies, wait waits for own copies, "
        )
        return Verdict(True, f"{text}and after the barrier each thread sees the copies of all threads.")
    last = {x: n for n, x in enumerate(answer)}
    commit, wait, sync = (last.get(x) for x in STATEMENTS)
    if wait is None:
        why = "Nothing waits for the copies: cp.async only starts them."
    elif commit is None or commit > wait:
        why = "The wait covers only groups that are committed before it."
    elif sync is None:
        why = "Each thread waits for its own copies only, and then reads rows that other threads still copy."
    else:
        why = (
            "A thread may pass this barrier while its own copies are in flight, and other threads read them."
        )
    first = next((f for f in findings if f.kind in ("copy-not-awaited", "race")), findings[0])
    return Verdict(False, f"{why} The race detector's first finding: {first}")


def _findings(lines: str) -> Sequence[Finding]:
    """What checked mode finds in FA1 with other lines in place of the three."""
    problem = Problem(1, 1, 1, _LENGTH, _LENGTH, _HEAD_DIM, "float16", FULL, default_scale(_HEAD_DIM))
    tile = next(c for c in KERNELS["fa1_forward"].configs if (c.block_q, c.block_kv) == (64, 64))
    plan = make_plan(problem, Device.typical("sm_90"), "fa1", tile)  # K and V go to registers at once
    shape = 1, 1, _LENGTH, _HEAD_DIM
    arrays = {name: np.ones(shape, np.float16) for name in ("q", "k", "v", "out")}
    arrays["lse"] = np.empty(shape[:3], np.float32)
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, "kernel.cu")
        shutil.copy(SOURCE_DIR / KERNEL.replace("kernel.cu", "config.cuh"), folder)
        changed.write_text((SOURCE_DIR / KERNEL).read_text("utf-8").replace(_PLACE, lines), encoding="utf-8")
        spec = type(
            "Changed", (type(plan.spec),), {"source": str(changed)}
        )()  # a copy would be the registered kernel
        try:
            plan = dataclasses.replace(plan, spec=spec)
            findings = run_plan(plan, arrays, Execution("checked"), trace=False).findings
        except EmulationError as error:
            findings = error.findings
    return [dataclasses.replace(f, message=f.message.replace(str(changed), KERNEL)) for f in findings]


_SWIZZLE = str(Path(__file__).with_name("swizzle.cu"))
_ROWS, _ROW_BYTES, _UNIT = 32, 128, 16
"""Rows of the tile, bytes of a row, and bytes of a unit, which lies in four banks."""


class _Params(ctypes.Structure):
    _fields_ = (("tile", ctypes.c_void_p), ("out", ctypes.c_void_p))


def banks(bits: int, base: int, shift: int) -> list[list[int]]:
    """The group of four banks that holds each 16-byte unit, by row of an ldmatrix and unit."""
    offsets = np.arange(8)[:, None] * _ROW_BYTES + np.arange(8) * _UNIT
    moved = offsets ^ ((offsets >> shift) & (((1 << bits) - 1) << base))
    units: list[list[int]] = (moved % _ROW_BYTES // _UNIT).tolist()
    return units


@functools.cache
def swizzle(bits: int, base: int, shift: int) -> Verdict:
    """Bank conflicts of the executed kernel with this swizzle."""
    constants = {"BITS": bits, "BASE": base, "SHIFT": shift, "SMEM_BYTES": _ROWS * _ROW_BYTES}
    entry = build.kernel(_SWIZZLE, constants, ["swizzle"], False, ["ExerciseParams"])["swizzle"]
    tile, out = np.arange(_ROWS * _ROW_BYTES // 4, dtype=np.uint32), np.zeros(32, np.uint32)
    memory = [GlobalArray("tile", tile, writable=False), GlobalArray("out", out, writable=True)]
    params = _Params(tile.ctypes.data, out.ctypes.data)
    launch = Launch("swizzle", (1, 1, 1), 32, _ROWS * _ROW_BYTES)
    counts, _ = execute(entry, launch, [params], memory, Execution("counted", threads=1))
    conflicts, column = int(counts["bank_conflicts"].sum()), [row[0] for row in banks(bits, base, shift)]
    if not conflicts:
        return Verdict(
            True, "The executor counts no bank conflict: the 8 rows of each ldmatrix lie in different banks."
        )
    most = max(map(column.count, column))
    text = f"The executor counts {conflicts} bank conflicts: {most} of 8 rows of an ldmatrix lie in the same banks. "
    return Verdict(
        False, f"{text}Bits 7 to 9 of the offset are the row, bits 4 to 6 the unit, which decides the banks."
    )
