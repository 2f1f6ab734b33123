"""A plan executed on a CPU: memory for its kernels, its launches, and their results."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...build.compiler import trace_constants
from ...build.phases import Logs, Room
from ...build.score_text import score_text
from ...kernels.params import TRACE_RECORD
from ...plan.operation import Arrays, Operand
from ...plan.planner import Plan
from ...problem.lengths import Cached
from . import build
from .launch import EmulationError, Execution, Finding, execute_all
from .memory import GlobalArray, guarded_copy, tensor_map


@dataclasses.dataclass(frozen=True)
class Emulation:
    """The results of one run."""

    plan: Plan
    mode: str
    results: dict[str, Any]
    """The call's results, by operand name; None for a result that was not asked for."""
    findings: tuple[Finding, ...]
    """Empty outside checked mode, and for a clean kernel."""
    counters: dict[str, npt.NDArray[Any]]
    """By launch: a structured array, one row per block. Every mode counts tiles (by the kernel itself), products,
    exponentials, asynchronous copies and barriers; counted mode also bytes, sectors, wavefronts and bank conflicts."""
    records: npt.NDArray[Any]
    """The kernel's trace: one :data:`~cufa.kernels.params.TRACE_RECORD` per query block and head, sorted by batch,
    head and query block. Split keys: one per split with keys. Backward: one per key block and key/value head. Decode:
    one per span; ``head`` is the number of the key/value head and block of rows, ``q_block`` the span's number within
    its work item. Empty for kernels without a trace."""
    seconds: float
    """Time in the kernels, on this CPU."""
    inside: Logs | None = None
    """The inside trace: the phases of each warp, in order. Its clock counts the primitives that each CPU thread has
    executed, and "SM" is the number of that thread: the clock gives order, not time."""

    @property
    def out(self) -> npt.NDArray[Any]:
        """q's shape, layout and dtype."""
        out: npt.NDArray[Any] = self.results["out"]
        return out

    @property
    def lse(self) -> npt.NDArray[np.float32]:
        """Natural-log LSE, (batch, heads, seqlen_q)."""
        lse: npt.NDArray[np.float32] = self.results["lse"]
        return lse

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Counters summed over blocks and launches."""
        sums: dict[str, int] = {}
        for counts in self.counters.values():
            for name in counts.dtype.names or ():
                sums[name] = sums.get(name, 0) + int(counts[name].sum())
        return sums


def run_plan(
    plan: Plan, given: Arrays, execution: Execution, trace: bool = True, launches: int = 1,
    inside: bool | Room = False,
) -> Emulation:  # fmt: skip
    """Execute a plan's launches. ``given`` maps operand names to NumPy arrays, axes in canonical order; results are
    written to these arrays.

    ``launches`` repeats the whole with the same workspace and counters, as a replayed graph does. ``inside`` makes an
    inside trace, and may give its capacity. Raises EmulationError, also if a counter is not zero at the end.
    """
    operation, problem, checked = plan.operation, plan.problem, execution.mode == "checked"
    operands = _operand_memory(plan, given, checked)
    room = inside if isinstance(inside, Room) else Room(operation.num_records(plan))
    own = _own_memory(plan, room if inside else None)
    masks = {name: GlobalArray(f"mask.{name}", x.values, False) for name, x in problem.mask_arrays.items()}
    params = operation.pack(
        plan, {name: operands[name].array if name in operands else None for name in given}
    )
    for array in (*operands.values(), *own.values()):
        setattr(params, array.name, array.address)
    if inside:
        params.trace += room.before
    for name, array in masks.items():
        setattr(operation.mask_members(params), name, array.address)
    boxes = _fill_maps(plan, params, operands, own)
    entries = build.kernel(
        plan.spec.source_of(plan.config), {**plan.constants, **trace_constants(trace, bool(inside))},
        list(dict.fromkeys(launch.entry for launch in plan.launches)), checked,
        [plan.params.struct, *["TensorMap"] * len(boxes)], score_text(problem, plan.spec.folds_score_scale),
    )  # fmt: skip
    memory = [*operands.values(), *own.values(), *masks.values()]
    start = time.perf_counter()
    counters, findings = execute_all(
        entries, plan.launches * launches, [params, *boxes], memory, execution, problem.deterministic
    )
    seconds = time.perf_counter() - start
    for name, x in operands.items():
        if x.writable and x.array is not given[name]:
            given[name][...] = x.array
    if "counters" in own and own["counters"].array.any():
        raise _unusable(findings, "counters", f"{plan.spec.name} left counters that are not zero")
    try:
        logs = room.read(own["trace"].array) if inside else None
        records = own["trace"].array if logs is None else logs.items
        written = np.sort(records[records["end_ns"] > 0], order=["batch", "head", "q_block"])
        if len(written) and plan.split is None:
            # The launch with tiles in shared memory writes the trace.
            entry = max(plan.launches, key=lambda launch: launch.shared_memory).entry
            counters[entry] = _with_tiles(counters[entry], written)
    except (IndexError, ValueError) as error:
        raise _unusable(
            findings, "trace", f"{plan.spec.name} left a trace that cannot be read: {error}"
        ) from error
    results = {x.name: given[x.name] for x in operation.all_operands if x.result and x.name in given}
    return Emulation(plan, execution.mode, results, findings, counters, written, seconds, logs)


def _unusable(findings: tuple[Finding, ...], kind: str, message: str) -> EmulationError:
    return EmulationError((*findings, Finding(kind, 1, "", 0, message)))


def _operand_memory(plan: Plan, given: Arrays, checked: bool) -> dict[str, GlobalArray]:
    """The given arrays, as kernels see them. Checked mode copies each array of a call without a cache and puts poison
    after each head's rows. A cache is not copied: it already has rows past the ends of its sequences."""
    cached = plan.operation.split_selects_kernel
    gap = max(plan.config.block_q, plan.config.block_kv) if checked and not cached else 0
    memory = {}
    for x in plan.operation.all_operands:
        array = given.get(x.name)
        if array is None or x.field not in plan.params.names:
            continue
        writable = x.result or (x.written and _is_written_to(plan, x))
        if gap and x.stride and not (plan.problem.lengths.in_cache and x.name[0] in "kv"):
            memory[x.name] = guarded_copy(x.field, array, gap, writable=writable)
            if not writable and plan.problem.lengths.ragged:
                _forbid_tails(plan, memory[x.name])
        else:
            memory[x.name] = GlobalArray(x.field, array, writable=writable)
    return memory


_E4M3_NAN = 0x7F


def _forbid_tails(plan: Plan, memory: GlobalArray) -> None:
    """Padding after a sequence must not be read. The copy engine reads whole tiles: there the padding is NaN, which
    must not reach a result."""
    problem = plan.problem
    if problem.scales and memory.name == "v" and not problem.values_in_rows:  # zeros follow a sequence
        return
    array, valid = memory.array, memory.valid
    assert valid is not None
    allowed = np.zeros(array.shape, np.uint8)
    for part in problem.parts:
        allowed[part.batch, :, part.keys if memory.name in ("k", "v") else part.rows] = 1
    if plan.spec.uses_copy_engine and memory.name not in plan.spec.maps_of_workspace(problem):
        array[allowed == 0] = _E4M3_NAN if array.dtype == np.uint8 else np.nan
    else:
        elements = [stride // array.itemsize for stride in array.strides]
        mine = np.lib.stride_tricks.as_strided(valid, array.shape, elements)
        mine &= allowed


def _is_written_to(plan: Plan, operand: Operand) -> bool:
    """Whether kernels write to an input: to a running result, and to a cache if there are new tokens."""
    if plan.problem.running is not None:
        return not operand.stride
    lengths = plan.problem.lengths
    cache = lengths if isinstance(lengths, Cached) else lengths.in_cache
    return cache is not None and cache.new_tokens > 0


def _own_memory(plan: Plan, room: Room | None = None) -> dict[str, GlobalArray]:
    """Trace, workspace, counters and the order of blocks, by the name of their pointer in the parameters."""
    own: dict[str, Any] = {"trace": np.zeros(plan.operation.num_records(plan), TRACE_RECORD)}
    if room is not None:
        own["trace"] = np.zeros(-(-room.size // 8), np.uint64).view(np.uint8)[: room.size]
        own["trace"][room.before - len(room.head()) : room.before] = room.head()
    workspace = np.full(plan.workspace + 32, 0xFF, np.uint8)  # NaN in every format
    aligned = workspace[-workspace.ctypes.data % 16 :][: max(plan.workspace, 16)]
    names = plan.params.names
    if "partial" in names:
        own["partial"] = aligned.view(np.float32)
    else:
        own["workspace"] = aligned
    if "counters" in names:
        own["counters"] = np.zeros(max(plan.counters, 1), np.uint32)
    found = {name: GlobalArray(name, x, writable=True) for name, x in own.items()}
    if plan.block_order is not None:
        found["block_order"] = GlobalArray("block_order", plan.block_order.values, writable=False)
    return found


def _fill_maps(
    plan: Plan, params: Any, operands: Mapping[str, GlobalArray], own: Mapping[str, GlobalArray]
) -> list[Any]:
    """Writes tensor maps to the parameters; returns the maps that are separate kernel arguments."""
    outside = []
    workspace_shapes = plan.spec.maps_of_workspace(plan.problem)
    for name, box in plan.spec.boxes(plan.config).items():
        field = plan.operation.operand(name).map_field
        x = operands[name].array
        if name in workspace_shapes:
            shape = workspace_shapes[name]
            x = own["workspace"].array.view(x.dtype)[: math.prod(shape)].reshape(shape)
        filled = tensor_map(x, box.rows)
        if field in plan.params.names:
            ctypes.memmove(getattr(params, field), ctypes.addressof(filled), ctypes.sizeof(filled))
        else:
            outside.append(filled)
    return outside


def _with_tiles(counters: npt.NDArray[Any], records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The counters of each block, preceded by its tiles; a block may have several trace records."""
    tiles = [(x, np.uint64) for x in ("tiles_visited", "tiles_skipped", "tiles_clear")]
    both = np.zeros(len(counters), [*tiles, *counters.dtype.descr])
    for name in counters.dtype.names or ():
        both[name] = counters[name]
    for name, _ in tiles:
        np.add.at(both[name], records["thread_block"], records[name].astype(np.uint64))
    return both
