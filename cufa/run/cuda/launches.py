"""Launches of a prepared plan, one after another or as a CUDA graph; launches of a kernel that belongs to no plan.

A launch costs the host 3.6 µs, nearly all of it in the driver; a graph of three launches 1.8 µs, and 2.1 µs more if
their arguments are new (H200, driver 580).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cupy

from ...gpu.driver import driver as _driver
from ...kernels import Launch
from ...plan.planner import Plan

INVALID_CONTEXT = 201
_MAX_NODES = 4
_MAX_STREAMS = 16


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
    """The configuration of a launch; its stream is still NULL."""
    attributes = []
    if launch.dependent:
        attributes.append(_LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0)))
    if launch.cluster > 1:
        attributes.append(_LaunchAttribute(_CLUSTER_DIMENSION, 0, (launch.cluster, 1, 1)))
    array = (_LaunchAttribute * len(attributes))(*attributes) if attributes else None
    return _LaunchConfig(_sizes(launch), None, array, len(attributes))


def _sizes(launch: Launch) -> Any:
    return (ctypes.c_uint * 7)(*launch.grid, launch.num_threads, 1, 1, launch.shared_memory)


class Launches:
    """A prepared plan's launches, one after another, by ``cuLaunchKernelEx``: through ctypes its four
    arguments cost half of ``cuLaunchKernel``'s eleven. ``parameters`` are the addresses of the kernels'
    arguments, which the driver reads during the call. Only one thread may call at a time."""

    def __init__(self, prepared: Any, parameters: Sequence[int]) -> None:
        self._device_id = prepared.device_id
        self._stream = 0  # stream of all configurations; NULL at first
        self._arguments = (ctypes.c_void_p * len(parameters))(*parameters)
        self._launch = _driver().cuLaunchKernelEx
        configs = [_launch_config(launch) for launch in prepared.plan.launches]
        self._calls = [
            (config, ctypes.byref(config), ctypes.c_void_p(function))
            for config, function in zip(configs, _functions(prepared), strict=True)
        ]

    def __call__(self, stream: int) -> None:
        if stream != self._stream:
            self._stream = -1  # no stream: after a Ctrl-C below all configurations are set again
            for config, _, _ in self._calls:
                config.stream = stream
            self._stream = stream
        for _, pointer, function in self._calls:
            status = self._launch(pointer, function, self._arguments, None)
            if status:
                _launch_again(status, self._device_id, self._launch, pointer, function, self._arguments, None)


def _launch_again(status: int, device_id: int, launch: Callable[..., int], *arguments: Any) -> None:
    """If a thread's first CUDA call failed with INVALID_CONTEXT, make the context current and launch again. Raises
    CUDADriverError for any other status."""
    if status == INVALID_CONTEXT:
        cupy.cuda.runtime.setDevice(device_id)
        status = launch(*arguments)
    if status:
        raise cupy.cuda.driver.CUDADriverError(status)


class NumberKernel:
    """A kernel that belongs to no plan, with parameters of 8 bytes each (addresses, i64), or one structure of such
    members. A call costs half of CuPy's own launch."""

    def __init__(
        self, function: Any, num_arguments: int, num_threads: int, device_id: int, shared_memory: int = 0,
        as_structure: bool = False,
    ) -> None:  # fmt: skip
        self._function = function  # kept loaded
        self._device_id = device_id
        self._values = (ctypes.c_int64 * num_arguments)()
        first = ctypes.addressof(self._values)
        places = range(1 if as_structure else num_arguments)
        self._arguments = (ctypes.c_void_p * len(places))(*(first + 8 * i for i in places))
        self._config = _launch_config(Launch("", (1, 1, 1), num_threads, shared_memory))
        self._sizes = self._config.sizes
        self._call = ctypes.byref(self._config), ctypes.c_void_p(function.ptr), self._arguments, None
        self._launch = _driver().cuLaunchKernelEx
        self._lock = threading.Lock()  # the driver reads the arguments during the call

    def __call__(self, blocks: int, values: Sequence[int], rows_of_blocks: int = 1) -> None:
        """Launch on the current stream of the kernel's device, which is the current device."""
        stream = cupy.cuda.get_current_stream(self._device_id).ptr
        with self._lock:
            self._values[:] = list(values)
            self._sizes[:2] = [blocks, rows_of_blocks]
            self._config.stream = stream
            status = self._launch(*self._call)
            if status:
                _launch_again(status, self._device_id, self._launch, *self._call)


def _functions(prepared: Any) -> list[int]:
    with cupy.cuda.Device(prepared.device_id):  # `kernel` is compiled anew for any other device
        return [prepared.functions[x.entry].kernel.ptr for x in prepared.plan.launches]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared memory
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class Graphs:
    """A plan's launches as a graph for each stream: with a single graph, calls on different streams would wait for
    each other. The first call on a stream, and every call for which the driver makes no graph, is launched plainly. Not
    for streams that are being captured. Only one thread may call at a time."""

    def __init__(self, prepared: Any, parameters: Sequence[int], plainly: Callable[[int], None]) -> None:
        self._prepared, self._plainly = prepared, plainly
        self._arguments = (ctypes.c_void_p * len(parameters))(*parameters)
        self._by_stream: dict[int, _Graph | None] = {}

    @staticmethod
    def serve(plan: Plan) -> bool:
        """The plan has 2 to 4 launches, none of which overlaps with the previous launch."""
        plain = all(not x.dependent and x.cluster == 1 for x in plan.launches)
        return plain and 1 < len(plan.launches) <= _MAX_NODES

    def __call__(self, stream: int, version: int) -> None:
        """``version`` differs from the previous call's if the kernels' arguments differ."""
        if stream not in self._by_stream:
            if len(self._by_stream) >= _MAX_STREAMS:
                self._by_stream.clear()
            self._by_stream[stream] = None
            self._plainly(stream)
            return
        graph = self._by_stream[stream]
        if graph is None:
            graph = self._by_stream[stream] = _Graph(self._prepared, self._arguments)
        if not graph.launch(stream, version):
            self._plainly(stream)


class _Graph:
    """An executable graph of kernel nodes in sequence. The driver frees a running graph when it ends."""

    def __init__(self, prepared: Any, arguments: Any) -> None:
        self._driver = driver = _driver()
        self._executable = ctypes.c_void_p()
        self._version = -1
        self._failed = False
        self._nodes: list[tuple[ctypes.c_void_p, Any]] = []
        graph = ctypes.c_void_p()
        if self._fails(driver.cuGraphCreate(ctypes.byref(graph), 0)):
            return
        for launch, function in zip(prepared.plan.launches, _functions(prepared), strict=True):
            kernel = _KernelNode(function, _sizes(launch), ctypes.addressof(arguments), None, None, None)
            node, before = ctypes.c_void_p(), self._nodes[-1][0] if self._nodes else None
            after = (ctypes.byref(before), ctypes.c_size_t(1)) if before else (None, ctypes.c_size_t(0))
            self._fails(
                driver.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, *after, ctypes.byref(kernel))
            )
            self._nodes.append((node, ctypes.byref(kernel)))
        if not self._failed:
            made = driver.cuGraphInstantiateWithFlags(
                ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0)
            )
            self._fails(made)
        weakref.finalize(self, _destroy, driver, self._executable, graph).atexit = False

    def _fails(self, status: int) -> bool:
        # INVALID_CONTEXT: the thread's first CUDA call. The graph is not at fault.
        self._failed = self._failed or status not in (0, INVALID_CONTEXT)
        return status != 0

    def launch(self, stream: int, version: int) -> bool:
        """False if the driver fails: then nothing is launched."""
        if self._failed:
            return False
        if version != self._version:
            for node, kernel in self._nodes:
                if self._fails(
                    self._driver.cuGraphExecKernelNodeSetParams_v2(self._executable, node, kernel)
                ):
                    return False
            self._version = version
        return not self._fails(self._driver.cuGraphLaunch(self._executable, ctypes.c_void_p(stream)))


def _destroy(driver: Any, executable: ctypes.c_void_p, graph: ctypes.c_void_p) -> None:
    """Destroy both. The graph must outlive its executable, whose arguments are set through the graph's nodes."""
    if executable:
        driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
