"""How one checked call of any operation is carried out: on the CPU, on a GPU, or from the host on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .. import tuning
from ..core.architectures import Device
from ..core.operation import OPERATIONS, Operation
from ..core.problem import Problem
from ..planner import Plan, make_plan
from . import arrays
from .seen import SeenCall, remember


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, read but not yet checked. Every operation has a subclass that checks them."""

    name: ClassVar[str]
    """Of the operation."""

    inputs: dict[str, Any]
    """Arrays by operand name, NumPy or CuPy; None for what was left out."""
    out: Any
    return_lse: bool
    layout: str
    options: dict[str, Any]
    """What else the problem is made of: mask, softcap, scale, ..."""
    request: dict[str, Any]
    """What is asked of the planner."""

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    def check(self, on_gpu: bool) -> tuple[Call, Problem]:
        """Everything that can be wrong with a call, found before anything runs: the call with arrays as kernels
        read them, and the problem that it is."""
        raise NotImplementedError

    @staticmethod
    def check_memory(out: Any, inputs: Mapping[str, Any]) -> None:
        """Nothing that is written is read or written through another argument."""
        raise NotImplementedError

    @property
    def written(self) -> tuple[str, ...]:
        """Inputs that the call writes to."""
        return ()

    def finish_on_host(self, problem: Problem) -> None:
        """Brings back to NumPy arrays what a call on the GPU wrote beside its result."""

    def arrays(self, out: Any, lse: Any) -> dict[str, Any]:
        """All operands in launch order, axes in canonical order, over the same memory."""
        axes = arrays.LAYOUTS[self.layout]
        given = {**self.inputs, "out": out, "lse": lse}
        return {
            x.name: given[x.name].transpose(axes) if x.stride and given[x.name] is not None else given[x.name]
            for x in self.operation.operands
        }


def run(call: Call, device: str | None, key: tuple[Any, ...] | None, gpu_serves: bool) -> Any:
    """Where the arrays are, or where ``device`` says. ``gpu_serves``: NumPy inputs could go there."""
    if arrays.is_device_array(call.inputs["q"]):
        if device not in (None, "cuda"):
            raise ValueError(f"device={device!r} but q is on a GPU; use device=None, or move it with q.get()")
        return run_on_gpu(call, key)
    return run_on_gpu_from_host(call) if use_gpu(device, gpu_serves) else run_on_cpu(call)


def run_on_cpu(call: Call) -> Any:
    call, problem = call.check(on_gpu=False)
    plan = plan_for(problem, None, **call.request)
    q = call.inputs["q"]
    out = np.empty(q.shape, q.dtype) if call.out is None else call.out
    lse = np.empty(_lse_shape(problem), np.float32) if call.return_lse else None
    if problem.empty:
        _fill_empty(out, lse)
    else:
        call.operation.run_on_cpu(plan, call.arrays(out, lse))
    return (out, lse) if call.return_lse else out


def run_on_gpu_from_host(call: Call) -> Any:
    """NumPy arrays: there and back again, synchronously. What the call writes beside its result is brought back
    once the result is: launches are asynchronous, and what fails there shows when it is waited for."""
    call, problem = call.check(on_gpu=True)
    check_not_capturing("q")
    # What cannot be planned is refused before anything is copied.
    plan_for(problem, cuda_module().current_device(), **call.request)
    import cupy

    there = {name: x if x is None else cupy.asarray(x) for name, x in call.inputs.items()}
    result, lse = run_on_gpu(dataclasses.replace(call, inputs=there, out=None, return_lse=True), None)
    out = call.out
    if out is None:
        out = cupy.asnumpy(result)
    else:
        out[...] = cupy.asnumpy(result)
    call.finish_on_host(problem)
    return (out, cupy.asnumpy(lse)) if call.return_lse else out


def run_on_gpu(call: Call, key: tuple[Any, ...] | None) -> Any:
    """CuPy arrays, asynchronously; remembered under ``key`` for :func:`~cufa.ops.seen.seen_before`."""
    call, problem = call.check(on_gpu=True)
    import cupy

    cuda, q = cuda_module(), call.inputs["q"]
    device_id = q.data.device_id
    with cupy.cuda.Device(device_id):
        out = cupy.ndarray(q.shape, q.dtype) if call.out is None else call.out
        lse = cupy.ndarray(_lse_shape(problem), np.float32) if call.return_lse else None
        if problem.empty:
            _fill_empty(out, lse)
            return (out, lse) if call.return_lse else out
        call = dataclasses.replace(call, inputs=_on_device(call.inputs))
        given = call.arrays(out, lse)
        plan = plan_for(with_memory(problem, given), cuda.device(device_id), **call.request)
        binding = cuda.Binding(cuda.prepare(plan, device_id), given)
        binding.launch(*cuda.addresses(given))
    if key is not None:
        shape = _lse_shape(problem)
        seen = SeenCall(binding.launch, call.inputs, out, shape, call.check_memory, call.written)
        remember(key, seen)
    return (out, lse) if call.return_lse else out


def with_memory(problem: Problem, given: Mapping[str, Any]) -> Problem:
    """The problem, knowing how its operands lie in memory."""
    operands = [x for x in OPERATIONS[problem.operation].operands if x.stride and given[x.name] is not None]
    return dataclasses.replace(
        problem,
        alignment=arrays.alignment(*(given[x.name] for x in operands)),
        positive_strides=arrays.positive_strides(*(given[x.name] for x in operands if x.mapped)),
    )


def _on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    """Small arrays that are on the host while the rest is on the GPU go there."""
    import cupy

    moved = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, np.ndarray):
            check_not_capturing(name)
            moved[name] = cupy.asarray(x)
    return moved


def plan_for(problem: Problem, device: Device | None, **request: Any) -> Plan:
    """The plan for this machine: with the kernels and tiles that were measured fastest on it, if any were."""
    if device is None:
        return make_plan(problem, None, **request)
    tiles, kernels = tuning.load(device.name), tuning.fastest_kernels(device.name)
    return make_plan(problem, device, tuned=tiles, fastest=kernels, **request)


def check_not_capturing(name: str) -> None:
    """``name`` is on the host: what a CUDA graph replays cannot copy it from there again."""
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise ValueError(
            f"{name} is a NumPy array, but the current stream is being captured: every replay would use the "
            f"values of the capture; put {name} on the GPU with cupy.asarray before"
        )


def cuda_module() -> Any:
    """The CUDA backend, imported late: it needs CuPy."""
    from ..backends import cuda

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


def use_gpu(device: str | None, served: bool) -> bool:
    """Whether NumPy inputs are computed on a GPU. ``served``: the kernels take them."""
    arrays.check_choice("device", device, {None: "None", "cpu": "'cpu'", "cuda": "'cuda'"})
    if device == "cuda" and not gpu_available():
        raise ValueError(
            "device='cuda' but no usable GPU was found; `cufa doctor` says why, device='cpu' runs here"
        )
    return device == "cuda" or (device is None and served and gpu_available())


def planning_device(name: str | None, served: bool) -> Device | None:
    """What a plan is for: None is the CPU path."""
    if name == "cpu":
        return None
    if name in (None, "cuda"):
        usable = gpu_available() and served
        if name == "cuda" and not usable:
            raise ValueError(
                "device='cuda' but no usable GPU was found; name an architecture such as 'sm_90' instead"
            )
        return cuda_module().current_device() if usable else None
    assert name is not None
    return Device.typical(name)


def _lse_shape(problem: Problem) -> tuple[int, int, int]:
    return problem.batch, problem.heads, problem.seqlen_q


def _fill_empty(out: Any, lse: Any) -> None:
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
