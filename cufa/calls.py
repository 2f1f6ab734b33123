"""How one checked call is carried out: on the CPU, on a GPU, or from the host on a GPU; and the short cut for
calls on CuPy arrays that were seen before."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arrays, tuning
from .architectures import Device
from .planner import Plan, make_plan
from .problem import Problem

if TYPE_CHECKING:
    from .backends import cuda as cuda_backend

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
        _fill_empty(out, lse)
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
            _fill_empty(out, lse)
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
        if len(_seen) >= _MAX_SEEN:
            _seen.clear()
        _seen[key] = SeenCall(binding, [*call.inputs.values(), out])
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


def _fill_empty(out: Any, lse: Any) -> None:
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf


def seen_before(key: tuple[Any, ...] | None) -> SeenCall | None:
    return _seen.get(key) if key is not None else None


class SeenCall:
    """A call like one that went through every check: only addresses are new. (Python time is the host
    cost of a call: this path is what keeps it under PyTorch's.)"""

    def __init__(self, binding: cuda_backend.Binding, arrays_: list[Any]) -> None:
        q, *_, out = arrays_
        self._launch = binding.launch
        self._out_shape, self._dtype = out.shape, out.dtype
        self._lse_shape = _lse_shape(binding.prepared.plan.problem)
        self._device_id = q.data.device_id
        self._spans = [
            (low - arrays.address(x), high - arrays.address(x))
            for x in arrays_
            for low, high in (arrays.byte_range(x),)
        ]

    def __call__(self, q: Any, k: Any, v: Any, out: Any, return_lse: bool) -> Any:
        import cupy

        if cupy.cuda.runtime.getDevice() != self._device_id:  # outputs are allocated on the current device
            with cupy.cuda.Device(self._device_id):
                return self(q, k, v, out, return_lse)
        if out is None:
            out = cupy.ndarray(self._out_shape, self._dtype)
        elif self._may_overlap(q, k, v, out):
            arrays.check_out(out, {"q": q, "k": k, "v": v})
        if return_lse:
            lse = cupy.ndarray(self._lse_shape, np.float32)
            self._launch(q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, lse.data.ptr)
            return out, lse
        self._launch(q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr)
        return out

    def _may_overlap(self, q: Any, k: Any, v: Any, out: Any) -> bool:
        start = out.data.ptr
        first, last = start + self._spans[3][0], start + self._spans[3][1]
        for x, (low, high) in zip((q, k, v), self._spans, strict=False):
            address = x.data.ptr
            if address + low < last and first < address + high:
                return True
        return False


def signature(q: Any, k: Any, v: Any, out: Any, *options: Any) -> tuple[Any, ...] | None:
    """What decides plan, code and strides of a call on CuPy arrays; None for anything else."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    ndarray = cupy.ndarray
    if type(q) is not ndarray or type(k) is not ndarray or type(v) is not ndarray:
        return None
    low_bits = q.data.ptr | k.data.ptr | v.data.ptr
    out_key = None
    if out is not None:
        if type(out) is not ndarray:
            return None
        low_bits |= out.data.ptr
        out_key = (out.shape, out.strides, out.dtype, out.data.device_id)
    dtype = q.dtype
    tf32 = os.environ.get("CUPY_TF32") if dtype.char == "f" else None
    key = (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, dtype, k.dtype, v.dtype,
        q.data.device_id, k.data.device_id, v.data.device_id, low_bits & 15, out_key, tf32, options,
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:  # an unhashable option: the checks will say what is wrong with it
        return None
    return key
