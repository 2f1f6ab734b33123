"""How one checked call is carried out: on the CPU, on a GPU, or from the host on a GPU; and the short cut for
calls on CuPy arrays that were seen before."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays, tuning
from .architectures import Device
from .planner import Plan, make_plan
from .problem import Problem

_MAX_SEEN = 1024
_seen: dict[tuple[Any, ...], SeenCall] = {}


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one ``flash_attention`` call, inputs as NumPy or CuPy arrays in one place."""

    q: Any
    k: Any
    v: Any
    out: Any
    return_lse: bool
    algorithm: str
    layout: str
    options: dict[str, Any]
    """causal, scale and precision"""

    @property
    def inputs(self) -> dict[str, Any]:
        return {"q": self.q, "k": self.k, "v": self.v}

    def check(self, on_gpu: bool) -> Problem:
        """Everything that can be wrong with a call, found before anything runs."""
        dtype = arrays.dtype_name(self.inputs, on_gpu)
        shapes = [x.shape for x in self.inputs.values()]
        problem = arrays.make_problem(shapes, dtype, layout=self.layout, **self.options)
        for name, x in self.inputs.items():
            arrays.check_last_axis(name, x)
        if self.out is not None:
            arrays.same_place({"q": self.q, "out": self.out})
            arrays.check_out(self.out, self.inputs)
        return problem

    def views(self, out: Any) -> list[Any]:
        """q, k, v and out with axes in the order (batch, heads, seqlen, head_dim), over the same memory."""
        return [x.transpose(arrays.LAYOUTS[self.layout]) for x in (*self.inputs.values(), out)]


def run_on_cpu(call: Call) -> Any:
    from .backends import cpu

    problem = call.check(on_gpu=False)
    plan = plan_for(problem, None, call.algorithm)
    out = np.empty(call.q.shape, call.q.dtype) if call.out is None else call.out
    lse = np.empty(_lse_shape(problem), np.float32) if call.return_lse else None
    if _nothing_to_do(problem):
        fill_empty(out, lse)
    else:
        q, k, v, o = call.views(out)
        cpu.run(plan, q, k, v, o, lse)
    return (out, lse) if call.return_lse else out


def run_on_gpu_from_host(call: Call) -> Any:
    """NumPy arrays: there and back again, synchronously."""
    call.check(on_gpu=True)
    import cupy

    on_device = {name: cupy.asarray(x) for name, x in call.inputs.items()}
    result, lse = run_on_gpu(dataclasses.replace(call, **on_device, out=None, return_lse=True), None)
    if call.out is None:
        out = cupy.asnumpy(result)
    else:
        out = call.out
        out[...] = cupy.asnumpy(result)
    return (out, cupy.asnumpy(lse)) if call.return_lse else out


def run_on_gpu(call: Call, key: tuple[Any, ...] | None) -> Any:
    """CuPy arrays, asynchronously; remembered under ``key`` for :func:`seen_before`."""
    problem = call.check(on_gpu=True)
    import cupy

    cuda = cuda_module()
    device_id = call.q.data.device_id
    with cupy.cuda.Device(device_id):
        out = cupy.ndarray(call.q.shape, call.q.dtype) if call.out is None else call.out
        lse = cupy.ndarray(_lse_shape(problem), np.float32) if call.return_lse else None
        if _nothing_to_do(problem):
            fill_empty(out, lse)
            return (out, lse) if call.return_lse else out
        problem = dataclasses.replace(
            problem,
            alignment=arrays.alignment(*call.inputs.values(), out),
            positive_strides=arrays.positive_strides(*call.inputs.values()),
        )
        plan = plan_for(problem, cuda.device(device_id), call.algorithm)
        views = call.views(out)
        binding = cuda.Binding(cuda.prepare(plan, device_id), [x.strides for x in views])
        binding.launch(*(x.data.ptr for x in views), lse.data.ptr if lse is not None else 0)
    if key is not None:
        remember(key, SeenCall(binding.launch, call.inputs, out, _lse_shape(problem), arrays.check_out))
    return (out, lse) if call.return_lse else out


def plan_for(problem: Problem, device: Device | None, algorithm: str) -> Plan:
    """The plan for this machine: with the tiles that `cufa tune` measured, if it has been run."""
    return make_plan(problem, device, algorithm, tuned=tuning.load(device.name) if device else None)


def cuda_module() -> Any:
    """The CUDA backend, imported late: it needs CuPy."""
    from .backends import cuda

    return cuda


@functools.cache
def gpu_available() -> bool:
    """A driver, CuPy and a GPU that the kernels run on."""
    try:
        cuda = cuda_module()
    except ImportError:
        return False
    if cuda.device_count() == 0:
        return False
    try:
        cuda.current_device()
    except ValueError:  # older than sm_80
        return False
    return True


def _lse_shape(problem: Problem) -> tuple[int, int, int]:
    return problem.batch, problem.heads, problem.seqlen_q


def _nothing_to_do(problem: Problem) -> bool:
    """No query, or queries that have no key at all: not worth a launch, and grids cannot be empty."""
    return 0 in (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)


def fill_empty(out: Any, lse: Any) -> None:
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf


def seen_before(key: tuple[Any, ...] | None) -> SeenCall | None:
    return _seen.get(key) if key is not None else None


def remember(key: tuple[Any, ...], call: SeenCall) -> None:
    if len(_seen) >= _MAX_SEEN:
        _seen.clear()
    _seen[key] = call


class SeenCall:
    """A call like one that went through every check: only addresses are new. (Python time is the host
    cost of a call: this path is what keeps it under PyTorch's.)

    ``launch`` takes the addresses of the inputs (0 for those that are None), of out and of lse. ``check(out,
    inputs)`` raises when memory that is written is also read or written through another argument: called for
    arrays whose ranges meet, once for each way in which they lie to each other. ``written`` names the inputs
    that the call writes to.
    """

    def __init__(
        self,
        launch: Callable[..., None],
        inputs: dict[str, Any],
        out: Any,
        lse_shape: tuple[int, ...],
        check: Callable[[Any, dict[str, Any]], None],
        written: Sequence[str] = (),
    ) -> None:
        self._launch, self._check, self._names = launch, check, tuple(inputs)
        self._out_shape, self._dtype, self._lse_shape = out.shape, out.dtype, lse_shape
        self._device_id = out.data.device_id
        places = [self._names.index(name) for name in written]
        self._pairs = _pairs(list(inputs.values()), places)
        self._pairs_with_out = _pairs([*inputs.values(), out], [len(inputs), *places])
        self._apart: set[tuple[int, int, int]] = set()

    def __call__(self, inputs: Sequence[Any], out: Any, return_lse: bool) -> Any:
        import cupy

        if cupy.cuda.runtime.getDevice() != self._device_id:  # outputs are allocated on the current device
            with cupy.cuda.Device(self._device_id):
                return self(inputs, out, return_lse)
        addresses = [0 if x is None else x.data.ptr for x in inputs]
        if out is not None:
            addresses.append(out.data.ptr)
            self._check_overlap(self._pairs_with_out, addresses, inputs, out)
        else:  # what is yet to be allocated shares no memory
            self._check_overlap(self._pairs, addresses, inputs, out)
            out = cupy.ndarray(self._out_shape, self._dtype)
            addresses.append(out.data.ptr)
        if return_lse:
            lse = cupy.ndarray(self._lse_shape, np.float32)
            self._launch(*addresses, lse.data.ptr)
            return out, lse
        self._launch(*addresses)
        return out

    def _check_overlap(
        self, pairs: list[_Pair], addresses: list[int], inputs: Sequence[Any], out: Any
    ) -> None:
        for i, j, low, high in pairs:
            if low < addresses[j] - addresses[i] < high:
                how = i, j, addresses[j] - addresses[i]
                if how not in self._apart:
                    self._check(out, dict(zip(self._names, inputs, strict=True)))
                    if len(self._apart) >= _MAX_SEEN:
                        self._apart.clear()
                    self._apart.add(how)


_Pair = tuple[int, int, int, int]
"""Arrays i and j, and the differences of their addresses between which their ranges meet."""


def _pairs(arrays_: list[Any], written: Sequence[int]) -> list[_Pair]:
    """Each array that is written, with each other one. Those that are None or empty meet nobody."""
    spans = {}
    for i, x in enumerate(arrays_):
        if x is not None and x.size:
            low, high = arrays.byte_range(x)
            spans[i] = low - arrays.address(x), high - arrays.address(x)
    found = {}
    for i in written:
        for j in spans:
            if i in spans and i != j and (j, i) not in found:
                found[i, j] = (i, j, spans[i][0] - spans[j][1], spans[i][1] - spans[j][0])
    return list(found.values())


def signature(inputs: Sequence[Any], out: Any, *options: Any) -> tuple[Any, ...] | None:
    """What decides plan, code and strides of a call on CuPy arrays, or None where one was left out (not the
    first); None for a call on anything else."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(inputs[0]) is not cupy.ndarray:
        return None
    ndarray = cupy.ndarray
    low_bits = 0
    key: list[Any] = [options]
    for x in inputs:
        if type(x) is ndarray:
            memory = x.data
            low_bits |= memory.ptr
            key += (x.shape, x.strides, x.dtype, memory.device_id)
        elif x is None:
            key.append(None)
        else:
            return None
    if out is not None:
        if type(out) is not ndarray:
            return None
        low_bits |= out.data.ptr
        key.append((out.shape, out.strides, out.dtype, out.data.device_id))
    tf32 = os.environ.get("CUPY_TF32") if key[3].char == "f" else None
    key += (low_bits & 15, tf32)
    try:
        hash(result := tuple(key))
    except TypeError:  # an unhashable option: the checks will say what is wrong with it
        return None
    return result
