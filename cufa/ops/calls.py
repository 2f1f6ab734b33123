"""How one checked call is carried out: on the CPU, on a GPU, or from the host on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from .. import tuning
from ..core.architectures import Device
from ..core.problem import Problem
from ..planner import Plan, make_plan
from . import arrays
from .seen import SeenCall, remember


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
            arrays.check_address(name, x)
        if self.out is not None:
            arrays.same_place({"q": self.q, "out": self.out})
            arrays.check_out(self.out, self.inputs)
        return problem

    def views(self, out: Any) -> list[Any]:
        """q, k, v and out with axes in the order (batch, heads, seqlen, head_dim), over the same memory."""
        return [x.transpose(arrays.LAYOUTS[self.layout]) for x in (*self.inputs.values(), out)]


def run_on_cpu(call: Call) -> Any:
    from ..backends import cpu

    problem = call.check(on_gpu=False)
    plan = plan_for(problem, None, call.algorithm)
    out = np.empty(call.q.shape, call.q.dtype) if call.out is None else call.out
    lse = np.empty(_lse_shape(problem), np.float32) if call.return_lse else None
    if problem.empty:
        fill_empty(out, lse)
    else:
        q, k, v, o = call.views(out)
        cpu.run(plan, q, k, v, o, lse)
    return (out, lse) if call.return_lse else out


def run_on_gpu_from_host(call: Call) -> Any:
    """NumPy arrays: there and back again, synchronously."""
    call.check(on_gpu=True)
    check_not_capturing("q")
    import cupy

    on_device = {name: cupy.asarray(x) for name, x in call.inputs.items()}
    result, lse = run_on_gpu(dataclasses.replace(call, **on_device, out=None, return_lse=True), None)
    return bring_back(result, lse, call.out, call.return_lse)


def bring_back(result: Any, lse: Any, out: Any, return_lse: bool) -> Any:
    """Results of the GPU as NumPy arrays, the first into ``out`` if there is one."""
    import cupy

    if out is None:
        out = cupy.asnumpy(result)
    else:
        out[...] = cupy.asnumpy(result)
    return (out, cupy.asnumpy(lse)) if return_lse else out


def run_on_gpu(call: Call, key: tuple[Any, ...] | None) -> Any:
    """CuPy arrays, asynchronously; remembered under ``key`` for :func:`~cufa.ops.seen.seen_before`."""
    problem = call.check(on_gpu=True)
    import cupy

    cuda = cuda_module()
    device_id = call.q.data.device_id
    with cupy.cuda.Device(device_id):
        out = cupy.ndarray(call.q.shape, call.q.dtype) if call.out is None else call.out
        lse = cupy.ndarray(_lse_shape(problem), np.float32) if call.return_lse else None
        if problem.empty:
            fill_empty(out, lse)
            return (out, lse) if call.return_lse else out
        problem = dataclasses.replace(
            problem,
            alignment=arrays.alignment(*call.inputs.values(), out),
            positive_strides=arrays.positive_strides(*call.inputs.values(), out),
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
    """Whether NumPy inputs are computed on a GPU. ``served``: the kernels take their dtype."""
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


def fill_empty(out: Any, lse: Any) -> None:
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
