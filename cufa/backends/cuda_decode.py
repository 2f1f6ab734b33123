"""Decode plans on a GPU: launched on CuPy's current stream, never synchronised, safe in CUDA graphs."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import cupy
import numpy as np

from ..core.params import TRACE_RECORD
from ..decode.operands import DecodeOperands
from ..decode.params import ARRAYS, MAPS, pack
from ..decode.plan import DecodePlan
from .cuda import Launches, Prepared, prepare
from .decode_workspace import workspace_of
from .tensor_map import TensorMap

#: What :meth:`DecodeBinding.launch` takes, in this order: the inputs of DecodeOperands, then out and lse.
LAUNCH_ORDER = (
    "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "k_new", "v_new", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip


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
        first = getattr(type(self._params), next(iter(ARRAYS))).offset  # the other pointers follow it
        self._pointers = (ctypes.c_void_p * len(ARRAYS)).from_buffer(self._params, first)
        switches = dict(plan.config.switches)
        box_rows = plan.spec.tensor_map_rows(plan.config)
        self._maps = [
            self._map(field, getattr(operands, name), rows, switches)
            for (field, name), rows in zip(MAPS.items(), box_rows, strict=False)
        ]
        self._launches = Launches(prepared, [ctypes.addressof(self._params)])
        self._counters = plan.counters
        self._partial_bytes = plan.workspace
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

    def launch(
        self, q: int, k_cache: int, v_cache: int, cache_seqlens: int, block_table: int, k_new: int,
        v_new: int, k_scale: int, v_scale: int, out: int, lse: int = 0, *, trace: int = 0,
    ) -> None:  # fmt: skip
        """Launch on the current stream of the plan's device: device addresses in :data:`LAUNCH_ORDER`, 0 for
        what is not there."""
        pointers = [q, k_cache, v_cache, k_new, v_new, out, lse, cache_seqlens, block_table, k_scale, v_scale]
        if cupy.cuda.runtime.getDevice() != self._device_id:
            with cupy.cuda.Device(self._device_id):
                self._launch(pointers, trace)
        else:
            self._launch(pointers, trace)

    def _launch(self, pointers: list[Any], trace: int) -> None:
        """Pointers as they lie in the parameters, in the order of :data:`~cufa.decode.params.ARRAYS`."""
        stream = cupy.cuda.get_current_stream()
        with self._lock:
            self._pointers[:] = pointers
            for tensor_map, cache in zip(self._maps, pointers[1:3], strict=False):  # both, or none
                tensor_map.point_to(cache)
            params = self._params
            if trace:
                params.trace = trace
            if not self._counters:
                self._launches(stream.ptr)
                return
            workspace = workspace_of(stream, self._device_id)
            with workspace.lock:
                if workspace.num_counters < self._counters or workspace.partial_bytes < self._partial_bytes:
                    workspace.grow(stream, self._device_id, self._counters, self._partial_bytes)
                params.counters, params.partial = workspace.counters, workspace.partial
                self._launches(stream.ptr)


def trace(plan: DecodePlan, operands: DecodeOperands) -> np.ndarray:
    """Run the trace build once: one :data:`~cufa.core.params.TRACE_RECORD` per piece, sorted by batch, head
    and number of the piece (see :class:`cufa.executor.decode.DecodeEmulation`). Synchronises."""
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
