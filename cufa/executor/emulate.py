"""The CUDA kernels executed on a CPU: every thread of every block, from the very .cu files that a GPU runs.

A microscope, not a backend: it says which tiles a kernel visits, what it moves, where shared memory has bank
conflicts, whether a race or a deadlock is possible. :func:`emulate` is the whole of it:

>>> run = cufa.emulate(q, k, v, causal=True, mode="checked")  # doctest: +SKIP
>>> run.out, run.lse, run.findings, run.records  # doctest: +SKIP
>>> cufa.emulate(q, k, v, mode="counted").totals["bank_conflicts"]  # doctest: +SKIP

What it cannot say: how fast a kernel is, how many registers it takes, whether the operand string of an
``asm`` statement is right. The primitives' results are held to a GPU's by golden vectors (``tests/golden``).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.architectures import Device
from ..core.params import TRACE_RECORD, pack
from ..kernels import TileConfig
from ..ops import arrays
from ..planner import Plan, make_plan
from . import build as host_build
from .launch import EmulationError, Execution, Finding, execute
from .memory import GlobalArray, guarded_copy, tensor_map

__all__ = ["Emulation", "EmulationError", "Execution", "Finding", "emulate", "run_plan"]


@dataclasses.dataclass(frozen=True)
class Emulation:
    """What one run gave."""

    plan: Plan
    mode: str
    out: npt.NDArray[Any]
    """q's shape, layout and dtype."""
    lse: npt.NDArray[np.float32]
    """Natural-log LSE, (batch, heads, seqlen_q)."""
    findings: tuple[Finding, ...]
    """Empty outside checked mode, and for a clean kernel."""
    counters: dict[str, npt.NDArray[Any]]
    """Of each launch: a structured array, one row per block. Tiles (as the kernel itself counts them),
    products, exponentials, asynchronous copies and barriers are counted in every mode; bytes, sectors,
    wavefronts and bank conflicts in counted mode."""
    records: npt.NDArray[Any]
    """One :data:`~cufa.core.params.TRACE_RECORD` per query block and head, sorted by batch, head and query
    block: the kernel's own tile counters. Empty for kernels that keep none."""
    seconds: float
    """Time in the kernels, on this CPU."""

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Counters summed over blocks and launches."""
        sums: dict[str, int] = {}
        for counts in self.counters.values():
            for name in counts.dtype.names or ():
                sums[name] = sums.get(name, 0) + int(counts[name].sum())
        return sums


def emulate(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    algorithm: str = "fa2",
    precision: str | None = None,
    mode: str = "plain",
    schedule: str | int = "ascending",
    copies: str | None = None,
    threads: int | None = None,
    config: TileConfig | None = None,
    arch: str = "sm_90",
    trace: bool = True,
) -> Emulation:
    """Attention by a CUDA kernel, executed on this CPU. Needs a C++ compiler, not a GPU.

    Parameters
    ----------
    q, k, v, causal, scale, layout, algorithm, precision
        As for :func:`cufa.flash_attention`; NumPy arrays of a dtype that the kernel serves.
    mode : "plain", "checked" or "counted"
        "plain" only computes. "checked" also finds races and reads of never-written shared memory, accesses
        outside shared memory or the arrays (which lie in memory poisoned with NaN), missing proxy fences,
        stores to blocks of a cluster that may not run, divergent collectives;
        a deadlock is found in every mode. "counted" counts bytes, wavefronts and bank conflicts.
    schedule : "ascending", "descending" or int
        Which warp, and which lane, runs next when several can; an integer seeds a random choice.
    copies : None, "early" or "late"
        When ``cp.async`` writes shared memory: when issued, or when waited for. None: late in checked mode,
        else early.
    threads : int, optional
        CPU threads; blocks are spread over them. Default: all cores.
    config : TileConfig, optional
        Tiles; default as planned for ``arch``.
    arch : str
        The architecture that the plan is made for, e.g. "sm_80".
    trace : bool
        Build the kernel with its tile records, which cost a barrier. False: exactly as a GPU runs it, and
        ``records`` is empty.

    Raises
    ------
    TypeError, ValueError
        As :func:`cufa.flash_attention`, naming the argument.
    EmulationError
        A deadlock or a divergent warp.
    cufa.executor.build.CompilerError
        No C++ compiler, or it refused the kernel.
    """
    execution = Execution(mode, schedule, copies, threads)
    inputs = {name: arrays.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in inputs.items():
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} is on a GPU; emulation takes NumPy arrays: use {name}.get()")
        arrays.check_last_axis(name, x)
    problem = arrays.make_problem(
        [x.shape for x in inputs.values()],
        arrays.dtype_name(inputs, on_gpu=True),
        causal=causal,
        scale=scale,
        layout=layout,
        precision=precision,
        alignment=arrays.alignment(*inputs.values()),
    )
    if problem.empty:
        raise ValueError(f"nothing to execute: {problem} has an empty axis")
    plan = make_plan(problem, Device.typical(arch), algorithm, config)
    out = np.empty_like(inputs["q"])
    operands = [x.transpose(arrays.LAYOUTS[layout]) for x in (*inputs.values(), out)]
    return run_plan(plan, operands, out, execution, trace)


def run_plan(
    plan: Plan,
    operands: list[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    execution: Execution,
    trace: bool = True,
) -> Emulation:
    """Execute a plan's launches. ``operands`` are q, k, v and o, axes in the order (batch, heads, seqlen,
    head_dim), o a view of ``out``."""
    problem, checked = plan.problem, execution.mode == "checked"
    names = [launch.entry for launch in plan.launches]
    constants = {**plan.constants, "TRACE": trace}
    box_rows = plan.spec.tensor_map_rows(plan.config)
    parameters = ["AttentionParams", *["TensorMap"] * len(box_rows)]
    entries = host_build.kernel(f"kernels/{plan.spec.source}", constants, names, checked, parameters)

    gap = max(plan.config.block_q, plan.config.block_kv) if checked else 0
    memory = [
        guarded_copy(name, x, gap, writable=name == "o")
        if checked
        else GlobalArray(name, x, writable=name == "o")
        for name, x in zip("qkvo", operands, strict=True)
    ]
    lse = np.full((problem.batch, problem.heads, problem.seqlen_q), np.nan, np.float32)
    items = problem.batch * problem.heads * plan.schedule.num_q_blocks
    records = np.zeros(items, TRACE_RECORD)
    workspace = np.full(plan.workspace + 16, 0xFF, np.uint8)  # NaN in every format
    aligned = workspace[-workspace.ctypes.data % 16 :][: plan.workspace]
    memory += [
        GlobalArray(n, x, writable=True)
        for n, x in (("lse", lse), ("trace", records), ("workspace", aligned))
    ]

    params = pack(problem, [x.array.strides for x in memory[:4]], plan.heads_per_group)
    for array in memory:
        setattr(params, array.name, array.address)
    findings: list[Finding] = []
    maps = [tensor_map(x.array, rows) for x, rows in zip(memory, box_rows, strict=False)]
    counters, start = {}, time.perf_counter()
    for launch in plan.launches:
        counters[launch.entry], found = execute(
            entries[launch.entry], launch, [params, *maps], memory, execution
        )
        findings += found
    seconds = time.perf_counter() - start
    if checked:
        operands[3][...] = memory[3].array
    written = records[records["end_ns"] > 0]
    written = np.sort(written, order=["batch", "head", "q_block"])
    if len(written):  # kernels that keep records have one launch
        entry = plan.launches[0].entry
        counters[entry] = _with_tiles(counters[entry], written)
    return Emulation(plan, execution.mode, out, lse, tuple(findings), counters, written, seconds)


def _with_tiles(counters: npt.NDArray[Any], records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The counters of each block with its tiles in front; a block may have several records."""
    tiles = [(x, np.uint64) for x in ("tiles_visited", "tiles_skipped", "tiles_unmasked")]
    both = np.zeros(len(counters), [*tiles, *counters.dtype.descr])
    for name in counters.dtype.names or ():
        both[name] = counters[name]
    for name, _ in tiles:
        np.add.at(both[name], records["thread_block"], records[name].astype(np.uint64))
    return both
