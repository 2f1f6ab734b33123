"""Compile with NVRTC through CuPy and launch on CuPy's current stream. Never synchronises.

A plan is compiled once per device (:func:`prepare`); a prepared kernel is bound once per set of strides
(:class:`Binding`), after which a launch only fills in pointers. CuPy's ``RawKernel`` call marshals every
argument anew on each launch; the driver's own call on the same function through ctypes costs less than half.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ..core.architectures import Device, find_architecture
from ..core.params import TRACE_RECORD, pack
from ..decode.plan import DecodePlan
from ..kernels import Launch
from ..nvrtc.compiler import cupy_options, translation_unit
from ..planner import Plan
from .tensor_map import TensorMap

_INVALID_CONTEXT = 201
_DEFAULT_SHARED_LIMIT = 48 * 1024  # more must be asked for, per function


@functools.cache
def device_count() -> int:
    """GPUs that CuPy can use; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def device(device_id: int) -> Device:
    """What the planner needs to know of a GPU. Raises ValueError for one older than sm_80."""
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

    def __init__(self, source: str, device_id: int, options: tuple[str, ...]) -> None:
        with cupy.cuda.Device(device_id):
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


def _compile(source: str, device_id: int, options: tuple[str, ...]) -> _Module:
    """Compile once per device: threads that want the same unit wait for one compile, threads that want
    different ones compile side by side."""
    key = (source, device_id)
    with _registry_lock:
        lock = _module_locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _modules:
            _modules[key] = _Module(source, device_id, options)
        return _modules[key]


class Prepared:
    """A plan compiled for one device: functions ready to launch."""

    def __init__(self, plan: Plan | DecodePlan, device_id: int, trace: bool) -> None:
        self.plan = plan
        self.device_id = device_id
        source = translation_unit(f"kernels/{plan.spec.source}", {**plan.constants, "TRACE": trace})
        module = _compile(source, device_id, cupy_options(plan.spec.min_capability))
        with cupy.cuda.Device(device_id):
            self.functions = {x.entry: module.function(x.entry, x.shared_memory) for x in plan.launches}

    @property
    def attributes(self) -> dict[str, dict[str, int]]:
        """What the driver reports of each loaded function: registers, local memory, shared memory."""
        with cupy.cuda.Device(self.device_id):
            return {entry: dict(f.attributes) for entry, f in self.functions.items()}

    def launch(self, q: Any, k: Any, v: Any, out: Any, lse: Any = None, trace: Any = None) -> None:
        """Launch once on 4-D arrays in (batch, heads, seqlen, head_dim) axis order."""
        binding = Binding(self, [x.strides for x in (q, k, v, out)])
        lse_pointer = lse.data.ptr if lse is not None else 0
        binding.launch(q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, lse_pointer, trace)


def prepare(plan: Plan | DecodePlan, device_id: int | None = None, trace: bool = False) -> Prepared:
    """Compile ``plan`` for a device (default: the current one), or find it compiled."""
    return Prepared(plan, cupy.cuda.runtime.getDevice() if device_id is None else device_id, trace)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with up to three integers for its value."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int * 3),
        ("rest", ctypes.c_int * 13),
    ]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


# CUlaunchAttributeID
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


def _launch_config(launch: Launch) -> _LaunchConfig:
    """All but the stream."""
    attributes = []
    if launch.dependent:
        attributes.append(_LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0)))
    if launch.cluster > 1:
        attributes.append(_LaunchAttribute(_CLUSTER_DIMENSION, 0, (launch.cluster, 1, 1)))
    sizes = (*launch.grid, launch.num_threads, 1, 1, launch.shared_memory)
    array = (_LaunchAttribute * len(attributes))(*attributes) if attributes else None
    return _LaunchConfig((ctypes.c_uint * 7)(*sizes), None, array, len(attributes))


class Launches:
    """A prepared plan's launches, one after another, by ``cuLaunchKernelEx``: through ctypes its four
    arguments cost half of ``cuLaunchKernel``'s eleven. ``parameters`` are the addresses of the kernels'
    arguments, which the driver reads during the call. By one thread at a time."""

    def __init__(self, prepared: Prepared, parameters: Sequence[int]) -> None:
        self._device_id = prepared.device_id
        self._arguments = (ctypes.c_void_p * len(parameters))(*parameters)
        self._launch = _driver().cuLaunchKernelEx
        with cupy.cuda.Device(self._device_id):  # `kernel` is compiled anew for any other device
            functions = [prepared.functions[x.entry].kernel.ptr for x in prepared.plan.launches]
        configs = [_launch_config(launch) for launch in prepared.plan.launches]
        self._calls = [
            (config, ctypes.byref(config), ctypes.c_void_p(function))
            for config, function in zip(configs, functions, strict=True)
        ]

    def __call__(self, stream: int) -> None:
        for config, pointer, function in self._calls:
            config.stream = stream
            status = self._launch(pointer, function, self._arguments, None)
            if status == _INVALID_CONTEXT:  # a thread's first CUDA call: make the context current
                cupy.cuda.runtime.setDevice(self._device_id)
                status = self._launch(pointer, function, self._arguments, None)
            if status:
                raise cupy.cuda.driver.CUDADriverError(status)


class Binding:
    """A prepared kernel with shapes and strides filled in; only pointers are left open."""

    def __init__(self, prepared: Prepared, strides: Sequence[Sequence[int]]) -> None:
        plan = prepared.plan
        assert isinstance(plan, Plan)
        self.prepared = prepared
        self._device_id = prepared.device_id
        self._workspace = plan.workspace
        self._params = pack(plan.problem, strides, plan.heads_per_group)
        box_rows = plan.spec.tensor_map_rows(plan.config)  # one each of q, k, v, o; or none
        self._maps = [
            TensorMap(plan.problem.dtype, shape, stride, rows)
            for shape, stride, rows in zip(plan.problem.shapes, strides, box_rows, strict=False)
        ]
        addresses = [ctypes.addressof(self._params), *(m.address for m in self._maps)]
        self._pointers: tuple[int, ...] = ()
        # The driver reads the parameters during the call, so one launch at a time may fill them in.
        self._lock = threading.Lock()
        self._launches = Launches(prepared, addresses)

    def launch(self, q: int, k: int, v: int, o: int, lse: int = 0, trace: Any = None) -> None:
        """Launch on the current stream of the plan's device. Arguments are device addresses."""
        if cupy.cuda.runtime.getDevice() != self._device_id:
            with cupy.cuda.Device(self._device_id):
                self.launch(q, k, v, o, lse, trace)
            return
        stream = cupy.cuda.get_current_stream()
        workspace = self._allocate_workspace(stream) if self._workspace else None
        params = self._params
        with self._lock:
            if (q, k, v, o) != self._pointers:
                params.q, params.k, params.v, params.o = q, k, v, o
                for tensor_map, pointer in zip(self._maps, (q, k, v, o), strict=False):
                    tensor_map.point_to(pointer)
                self._pointers = (q, k, v, o)
            params.lse = lse
            if workspace is not None:
                params.workspace = workspace.ptr
            if trace is not None:  # else this is not a trace build
                params.trace = trace.data.ptr
            self._launches(stream.ptr)

    def _allocate_workspace(self, stream: Any) -> Any:
        """From CuPy's pool: safe to drop after the launch, as the pool reuses it in stream order only."""
        if stream.is_capturing():
            raise RuntimeError(
                f"{self.prepared.plan.spec.name} needs {self._workspace:,} B of workspace, which a graph "
                "cannot hold: capture algorithm='auto' or 'fa2' instead"
            )
        return cupy.cuda.alloc(self._workspace)


def trace(plan: Plan, q: Any, k: Any, v: Any) -> tuple[Any, np.ndarray]:
    """Run the trace build once: (output, one :data:`~cufa.core.params.TRACE_RECORD` per query block and head,
    sorted by batch, head and query block).

    Arrays are 4-D CuPy arrays in (batch, heads, seqlen, head_dim) axis order. Synchronises.
    """
    prepared = prepare(plan, q.data.device_id, trace=True)
    problem = plan.problem
    items = problem.batch * problem.heads * plan.schedule.num_q_blocks
    records = cupy.zeros(items * TRACE_RECORD.itemsize, cupy.uint8)
    out = cupy.empty(q.shape, q.dtype)
    prepared.launch(q, k, v, out, trace=records)
    return out, np.sort(cupy.asnumpy(records).view(TRACE_RECORD), order=["batch", "head", "q_block"])
