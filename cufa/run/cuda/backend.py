"""Compile with NVRTC through CuPy and launch on CuPy's current stream. Never synchronises.

A plan is compiled once per device (:func:`prepare`); a prepared kernel is bound once per set of strides
(:class:`Binding`), after which a launch only fills in pointers. CuPy's ``RawKernel`` call marshals every
argument anew on each launch; the driver's own call on the same function through ctypes costs less than half.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import operator
import threading
from collections.abc import Sequence
from typing import Any

import cupy
import cupy.cuda  # an ImportError where cupy is just a folder of that name in the path
import numpy as np

from ...build.compiler import announced, cupy_options, find_compiled, unit_of
from ...build.phases import Logs, Room
from ...gpu.architectures import Device, find_architecture
from ...kernels import Box
from ...kernels.params import TRACE_RECORD
from ...plan.operation import Arrays, Operand
from ...plan.planner import Plan
from . import mask_bits, mask_uploads  # noqa: F401 - mask_bits: used by masks of bits on a GPU
from .launches import Graphs, Launches, NumberKernel
from .tensor_map import TensorMap
from .workspace import workspace_of

_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_DEFAULT_SHARED_LIMIT = 48 * 1024  # a function must opt in to more


@functools.cache
def device_count() -> int:
    """GPUs that CuPy can use; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def device(device_id: int) -> Device:
    """The planner's description of a GPU. Raises ValueError for a GPU older than sm_80."""
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        properties["name"].decode(),
        find_architecture(properties["major"] * 10 + properties["minor"]),
        properties["multiProcessorCount"],
    )


def current_device() -> Device:
    return device(cupy.cuda.runtime.getDevice())


class _Module:
    """One compiled translation unit on one device."""

    def __init__(self, name: str, source: str, device_id: int, options: tuple[str, ...]) -> None:
        arch = device(device_id).arch
        with cupy.cuda.Device(device_id):
            if file := find_compiled(name, source, arch.nvrtc_name):
                try:
                    self._module = cupy.RawModule(path=str(file))
                    self._module.compile()
                    return
                except cupy.cuda.driver.CUDADriverError as error:  # the compiler is newer than the driver
                    logging.getLogger("cufa").warning("%s is not used: %s", file, error)
            with announced(name, arch.name):
                self._module = cupy.RawModule(code=source, options=options)
                self._module.compile()

    def function(self, entry: str, shared_memory: int) -> Any:
        """The kernel, allowed to use that much dynamic shared memory."""
        function = self._module.get_function(entry)
        if shared_memory > _DEFAULT_SHARED_LIMIT:
            function.max_dynamic_shared_size_bytes = shared_memory
        return function


_modules: dict[tuple[str, int], _Module] = {}
_module_locks: dict[tuple[str, int], threading.Lock] = {}
_registry_lock = threading.Lock()


def _compile(name: str, source: str, device_id: int, options: tuple[str, ...]) -> _Module:
    """Compile once per device: threads that want the same unit wait for one compile, threads that want
    different ones compile side by side."""
    key = (source, device_id)
    with _registry_lock:
        lock = _module_locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _modules:
            _modules[key] = _Module(name, source, device_id, options)
        return _modules[key]


def number_kernel(
    entry: str, unit: str, num_arguments: int, num_threads: int, device_id: int, **options: Any
) -> NumberKernel:
    """A kernel of a translation unit that belongs to no plan, for the current device. ``options`` are those of
    :class:`NumberKernel`."""
    function = _compile(entry, unit, device_id, cupy_options()).function(entry, 0).kernel
    return NumberKernel(function, num_arguments, num_threads, device_id, **options)


class Prepared:
    """A plan compiled for one device: functions ready to launch."""

    def __init__(self, plan: Plan, device_id: int, trace: bool, inside: bool = False) -> None:
        self.plan = plan
        self.device_id = device_id
        options = cupy_options(plan.spec.min_capability)
        module = _compile(plan.spec.name, unit_of(plan, trace, inside), device_id, options)
        with cupy.cuda.Device(device_id):
            self.functions = {x.entry: module.function(x.entry, x.shared_memory) for x in plan.launches}


def prepare(plan: Plan, device_id: int | None = None, trace: bool = False, inside: bool = False) -> Prepared:
    """Compile ``plan`` for a device (default: the current one), or find it compiled."""
    return Prepared(plan, cupy.cuda.runtime.getDevice() if device_id is None else device_id, trace, inside)


class Binding:
    """A prepared kernel with shapes and strides filled in; only pointers are left open."""

    def __init__(self, prepared: Prepared, given: Arrays) -> None:
        plan = self._plan = prepared.plan
        self.prepared = prepared
        self._device_id = prepared.device_id
        self._params = plan.operation.pack(plan, given)
        mask_arrays = {
            name: mask_uploads.device_array(x, prepared.device_id)
            for name, x in plan.problem.mask_arrays.items()
        }
        for name, numbers in mask_arrays.items():
            setattr(plan.operation.mask_members(self._params), name, numbers.data.ptr)
        block_order = plan.block_order
        if block_order is not None:
            mask_arrays["block_order"] = mask_uploads.device_array(block_order, prepared.device_id)
            self._params.block_order = mask_arrays["block_order"].data.ptr
        self._mask_arrays = list(mask_arrays.values())  # kept while kernels read them
        operands, params = plan.operation.operands, plan.params
        # Pointers of the operands are adjacent in the structure, in its own order.
        places = [params.offset(x.field) // _POINTER_BYTES for x in operands]
        first = min(places)
        self._permuted = operator.itemgetter(*(places.index(first + i) for i in range(len(places))))
        self._pointers = (ctypes.c_void_p * len(places)).from_buffer(self._params, first * _POINTER_BYTES)
        # Pointers of optional operands are elsewhere in the structure, which may lack some of them.
        self._optional = [
            (place, ctypes.c_void_p.from_buffer(self._params, offset))
            for place, offset in plan.operation.optional_places(params)
        ]
        self._addresses = [0] * len(places)
        workspace_shapes = plan.spec.maps_of_workspace(plan.problem)
        maps = [
            (place, self._map(operands[place], given, box, workspace_shapes.get(name)))
            for name, box in plan.spec.boxes(plan.config).items()
            for place in [operands.index(plan.operation.operand(name))]
        ]
        outside = [m.address for _, m in maps if not self._lies_in_params(m.address)]
        self._maps = [(place, m) for place, m in maps if operands[place].name not in workspace_shapes]
        self._workspace_maps = [m for place, m in maps if operands[place].name in workspace_shapes]
        # The driver reads the parameters during the call, so one launch at a time may fill them in.
        self._lock = threading.Lock()
        parameters = [ctypes.addressof(self._params), *outside]
        self._launches = Launches(prepared, parameters)
        self._workspace, self._counters = plan.workspace, plan.counters
        self._workspace_field = "partial" if "partial" in params.names else "workspace"
        self._graphs = Graphs(prepared, parameters, self._launches) if Graphs.serve(plan) else None
        self._version = 0  # changes whenever a parameter changes

    def _map(
        self, operand: Operand, given: Arrays, box: Box, workspace_shape: tuple[int, ...] | None
    ) -> TensorMap:
        """The map of one operand: in the parameters if they have a place for it, else a separate argument.
        ``workspace_shape``: of the contiguous array in the workspace that kernels read instead of the operand."""
        plan = self._plan
        params = plan.params
        inside = operand.map_field in params.names
        address = ctypes.addressof(self._params) + params.offset(operand.map_field) if inside else None
        element, x = operand.element(plan.problem), given[operand.name]
        shape, strides = x.shape, x.strides
        if workspace_shape is not None:
            shape = workspace_shape
            strides = tuple(math.prod(shape[i + 1 :]) * element.itemsize for i in range(len(shape)))
        return TensorMap(element, shape, strides, box, address)

    def _lies_in_params(self, address: int) -> bool:
        start = ctypes.addressof(self._params)
        return start <= address < start + ctypes.sizeof(self._params)

    def launch(self, addresses: Sequence[int], trace: int = 0) -> None:
        """Launch on the current stream of the plan's device. ``addresses`` are those of the operands, in the order of
        :attr:`~cufa.plan.operation.Operation.operands`, 0 for None. Mask arrays live until the kernels have run, even
        if the binding is dropped."""
        if self._mask_arrays:
            mask_uploads.in_flight.append(self._mask_arrays)
        if cupy.cuda.runtime.getDevice() == self._device_id:
            self.launch_here(list(addresses), trace)
        else:
            with cupy.cuda.Device(self._device_id):
                self.launch_here(list(addresses), trace)

    def launch_here(self, addresses: list[int], trace: int = 0) -> None:
        """:meth:`launch`, where the plan's device is the current one. The caller must not change
        ``addresses`` later: the binding compares the next call's addresses with this list."""
        stream = cupy.cuda.get_current_stream(self._device_id)
        with self._lock:
            if addresses != self._addresses:
                # Ctrl-C below: no address is known, and the next call writes all of them again.
                known, self._addresses = self._addresses, [-1] * len(addresses)
                self._pointers[:] = self._permuted(addresses)
                if len(addresses) > len(self._pointers):
                    for place, pointer in self._optional:
                        if place < len(addresses):
                            pointer.value = addresses[place]
                for place, tensor_map in self._maps:
                    if addresses[place] != known[place]:
                        tensor_map.point_to(addresses[place])
                self._version += 1
                self._addresses = addresses
            if trace:  # else this is not a trace build
                self._params.trace = trace
                self._version += 1
            if not (self._workspace or self._counters):
                self._launches(stream.ptr)
            elif self._counters or stream.is_capturing():
                self._launch_in_workspace(stream)
            else:
                # From CuPy's pool: safe to drop after the launch, as the pool reuses it in stream order only.
                memory = cupy.cuda.alloc(self._workspace)
                if memory.ptr != self._params.workspace:
                    self._version += 1  # first: after a Ctrl-C here a graph sets all arguments again
                    self._params.workspace = memory.ptr
                if self._workspace_maps:
                    self._point_to_workspace(memory.ptr)
                if self._graphs is None:
                    self._launches(stream.ptr)
                else:
                    self._graphs(stream.ptr, self._version)

    def _point_to_workspace(self, address: int) -> None:
        for tensor_map in self._workspace_maps:
            tensor_map.point_to(address)

    def _launch_in_workspace(self, stream: Any) -> None:
        """Launch with the workspace of the stream or of its capture. Its counters are zero between launches."""
        workspace = workspace_of(stream, self._device_id)
        with workspace.lock:
            if self._mask_arrays:
                workspace.keep(self._mask_arrays)
            if workspace.num_counters < self._counters or workspace.partial_bytes < self._workspace:
                workspace.grow(stream, self._device_id, self._counters, self._workspace)
            held = {self._workspace_field: workspace.partial}
            if self._counters:
                held["counters"] = workspace.counters
            for name, address in held.items():
                if getattr(self._params, name) != address:
                    self._version += 1
                    setattr(self._params, name, address)
            self._point_to_workspace(workspace.partial)
            if self._graphs is None or stream.is_capturing():
                self._launches(stream.ptr)
            else:
                self._graphs(stream.ptr, self._version)


def addresses(given: Arrays) -> list[int]:
    """Addresses of operands in launch order, 0 for None."""
    return [0 if x is None else int(x.data.ptr) for x in given.values()]


def run(plan: Plan, given: Arrays) -> None:
    """Compute once, asynchronously, on CuPy arrays by operand name. Compiles on first use."""
    Binding(prepare(plan, given["q"].data.device_id), given).launch(addresses(given))


def trace(plan: Plan, given: Arrays) -> np.ndarray:
    """Run the trace build once: one :data:`~cufa.kernels.params.TRACE_RECORD` per work item, sorted by batch, head
    and query block (decode: by the span's number). Arrays are CuPy's, by operand name. Synchronises."""
    device_id = given["q"].data.device_id
    binding = Binding(prepare(plan, device_id, trace=True), given)
    records = cupy.zeros(plan.operation.num_records(plan) * TRACE_RECORD.itemsize, cupy.uint8)
    binding.launch(addresses(given), trace=records.data.ptr)
    found = cupy.asnumpy(records).view(TRACE_RECORD)
    return np.sort(found[found["end_ns"] > 0], order=["batch", "head", "q_block"])


class InsideRuns:
    """Runs of a plan's inside trace build, which logs the phases of the warps of one SM (None: of all). Compiles."""

    def __init__(self, plan: Plan, given: Arrays, sm: int | None = 0) -> None:
        self._binding = Binding(prepare(plan, given["q"].data.device_id, inside=True), given)
        self._addresses = addresses(given)
        self._room = Room(plan.operation.num_records(plan))
        self._buffer = cupy.zeros(self._room.size, cupy.uint8)
        self._head = cupy.asarray(self._room.head(sm))

    def launch(self) -> None:
        """Launch once, asynchronously, into empty logs."""
        self._buffer[self._room.before - len(self._head) : self._room.before] = self._head
        self._binding.launch(self._addresses, trace=self._buffer.data.ptr + self._room.before)

    def logs(self) -> Logs:
        """The logs of the last launch. Synchronises."""
        return self._room.read(cupy.asnumpy(self._buffer))
