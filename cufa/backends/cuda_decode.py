"""Decode plans on a GPU: launched on CuPy's current stream, never synchronised, safe in CUDA graphs.

Partial results and the counters of the kernels that merge them lie in a workspace of each stream: calls on
one stream follow one another, and a kernel leaves its counters at zero for the next. A call that is being
captured gets a workspace of its own, which lives as long as the process: its graph may be replayed at any
time, on any stream.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import Any

import cupy
import numpy as np

from ..decode.operands import DecodeOperands
from ..decode.params import ARRAYS, MAPS, pack
from ..decode.plan import DecodePlan
from ..params import TRACE_RECORD
from .cuda import Launches, Prepared, prepare
from .tensor_map import TensorMap

#: What :meth:`DecodeBinding.launch` takes, in this order: the inputs of DecodeOperands, then out and lse.
LAUNCH_ORDER = (
    "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "k_new", "v_new", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip
_FIELDS = tuple({name: field for field, name in ARRAYS.items()}[name] for name in LAUNCH_ORDER)

_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, another stream in every thread


def run(plan: DecodePlan, operands: DecodeOperands, device_id: int | None = None) -> None:
    """Decode once, asynchronously. Compiles on first use."""
    bind(plan, operands, device_id).launch(*addresses(operands))


def bind(plan: DecodePlan, operands: DecodeOperands, device_id: int | None = None) -> DecodeBinding:
    """A plan compiled, with shapes and strides filled in. ``device_id`` defaults to q's."""
    device = operands.q.data.device_id if device_id is None else device_id
    return DecodeBinding(prepare(plan, device), operands)


def addresses(operands: DecodeOperands) -> list[int]:
    """Of all arrays in :data:`LAUNCH_ORDER`; 0 for those that are not there."""
    arrays = (getattr(operands, name) for name in LAUNCH_ORDER)
    return [0 if x is None else int(x.data.ptr) for x in arrays]


class DecodeBinding:
    """A prepared kernel with shapes and strides filled in; only pointers are left open."""

    def __init__(self, prepared: Prepared, operands: DecodeOperands) -> None:
        plan = prepared.plan
        assert isinstance(plan, DecodePlan)
        self.prepared, self.plan = prepared, plan
        self._device_id = prepared.device_id
        self._params = pack(plan, operands)
        switches = dict(plan.config.switches)
        box_rows = plan.spec.tensor_map_rows(plan.config)
        self._maps = [
            (name, self._map(field, getattr(operands, name), rows, switches))
            for (field, name), rows in zip(MAPS.items(), box_rows, strict=False)
        ]
        self._launches = Launches(prepared, [ctypes.addressof(self._params)])
        self._counters = plan.items if plan.workspace else 0
        # The driver reads the parameters during the call, so one launch at a time may fill them in.
        self._lock = threading.Lock()

    def _map(self, field: str, cache: Any, rows: int, switches: dict[str, int | bool]) -> TensorMap:
        """Of one cache, kept in the parameters."""
        address = ctypes.addressof(self._params) + int(getattr(type(self._params), field).offset)
        return TensorMap(
            self.plan.problem.cache_dtype,
            cache.shape,
            cache.strides,
            rows,
            address,
            whole_rows=bool(switches["WHOLE_ROWS"]),
            promotion=int(switches["L2_PROMOTION"]),
        )

    def launch(self, *addresses: int, trace: int = 0) -> None:
        """Launch on the current stream of the plan's device: device addresses in :data:`LAUNCH_ORDER`, 0 for
        what is not there; the last, lse, may be left out."""
        if cupy.cuda.runtime.getDevice() != self._device_id:
            with cupy.cuda.Device(self._device_id):
                self.launch(*addresses, trace=trace)
            return
        stream = cupy.cuda.get_current_stream()
        with self._lock:
            params = self._params
            params.lse = None
            for field, address in zip(_FIELDS, addresses, strict=False):
                setattr(params, field, address)
            for name, tensor_map in self._maps:
                tensor_map.point_to(addresses[LAUNCH_ORDER.index(name)])
            if self._counters:
                workspace = _workspace(stream, self._device_id, self._counters, self.plan.workspace)
                params.counters, params.partial = workspace.counters.ptr, workspace.partial.ptr
            params.trace = trace
            self._launches(stream.ptr)


@dataclasses.dataclass(frozen=True)
class _Workspace:
    counters: Any
    """Zero whenever no kernel runs."""
    num_counters: int
    partial: Any
    partial_bytes: int


_workspaces: dict[tuple[int, int, int], _Workspace] = {}
_captured: list[_Workspace] = []


def _workspace(stream: Any, device_id: int, num_counters: int, partial_bytes: int) -> _Workspace:
    """The current stream's, grown when it is too small. (Replaced memory goes back to CuPy's pool, which
    gives it to the same stream only.)"""
    if stream.is_capturing():
        zeroing = cupy.cuda.Stream(non_blocking=True)  # not part of the graph
        workspace = _allocate(num_counters, partial_bytes, zeroing)
        zeroing.synchronize()
        _captured.append(workspace)
        return workspace
    thread = threading.get_ident() if stream.ptr == _PER_THREAD_STREAM else 0
    key = device_id, stream.ptr, thread
    present = _workspaces.get(key)
    if present is None:
        present = _workspaces[key] = _allocate(num_counters, partial_bytes, stream)
    elif present.num_counters < num_counters or present.partial_bytes < partial_bytes:
        num_counters = max(num_counters, present.num_counters)
        partial_bytes = max(partial_bytes, present.partial_bytes)
        present = _workspaces[key] = _allocate(num_counters, partial_bytes, stream)
    return present


def _allocate(num_counters: int, partial_bytes: int, stream: Any) -> _Workspace:
    counters = cupy.cuda.alloc(num_counters * 4)
    counters.memset_async(0, num_counters * 4, stream)
    return _Workspace(counters, num_counters, cupy.cuda.alloc(max(partial_bytes, 16)), partial_bytes)


def trace(plan: DecodePlan, operands: DecodeOperands) -> np.ndarray:
    """Run the trace build once: one :data:`~cufa.params.TRACE_RECORD` per piece, sorted by batch, head and
    number of the piece (see :class:`cufa.emulator_decode.DecodeEmulation`). Synchronises."""
    device_id = operands.q.data.device_id
    binding = DecodeBinding(prepare(plan, device_id, trace=True), operands)
    records = cupy.zeros(num_records(plan) * TRACE_RECORD.itemsize, cupy.uint8)
    binding.launch(*addresses(operands), trace=records.data.ptr)
    found = cupy.asnumpy(records).view(TRACE_RECORD)
    return np.sort(found[found["end_ns"] > 0], order=["batch", "head", "q_block"])


def num_records(plan: DecodePlan) -> int:
    """Pieces that a trace build has room for: a split of an item, or, balanced, share and item counted up."""
    fixed = plan.schedule == "fixed"
    return plan.items * plan.num_splits if fixed else plan.items + plan.num_splits
