"""How one checked call of any operation is carried out: on the CPU, on a GPU, or from the host on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..gpu.architectures import Device
from ..plan.candidates import any_serves
from ..plan.operation import CACHE, OPERATIONS
from ..plan.planner import Plan, make_plan
from ..problem import float8
from ..problem.bits import Bits
from ..problem.checks import as_array, check_choice, is_device_array
from ..problem.element import ELEMENTS
from ..problem.options import Options
from ..problem.problem import Problem
from . import arrays, optional_operands, tuning
from .call import Call
from .shapes import FORWARD_DTYPES, asked_dtype, dtype_name, make_problem
from .warm import WarmCall, find, forget, remember


def run(call: Call, device: str | None, options: tuple[Any, ...]) -> Any:
    """Compute where the arrays are, or where ``device`` says. ``options`` is the part of the warm lookup's key
    (:func:`~cufa.calls.warm.find`) that is not about arrays."""
    name, x = call.first
    if is_device_array(x):
        if device not in (None, "cuda"):
            raise ValueError(
                f"device={device!r} but {name} is on a GPU; use device=None, or move it with {name}.get()"
            )
        # Arrays that came through DLPack are CuPy arrays by now: look the call up again.
        read = {**call.inputs, **call.results}
        given = call.operation.in_order(read)
        seen, key, addresses = find(call.operation, given, options)
        return returned(run_on_gpu(call, key, options)) if seen is None else seen(given, addresses)
    return returned(run_on_gpu_from_host(call) if use_gpu(device, call) else run_on_cpu(call))


def returned(results: Mapping[str, Any]) -> Any:
    """The return value of a call: the result, or a tuple of several."""
    found = tuple(results.values())
    return found if len(found) > 1 else found[0]


def run_on_cpu(call: Call) -> dict[str, Any]:
    call, problem = call.check(on_gpu=False)
    if not problem.known:
        raise ValueError(
            f"the values of mask, {problem.mask}, are on a GPU or were not stored, but {call.first[0]} is computed on "
            "the CPU: pass mask.on_host(), or make the mask anew"
        )
    plan = plan_for(problem, None, call.options)
    results = call.allocate(problem, np.empty)
    if problem.empty and not problem.sink:
        call.fill_empty(results)
    else:
        cpu_module().run_on_cpu(plan, call.arrays(results))
    return results


def run_on_gpu_from_host(call: Call) -> dict[str, Any]:
    """NumPy arrays: copy to the GPU, compute, copy back; synchronous. Inputs that the call writes are updated last:
    copying the results raises errors of asynchronous launches first."""
    check_not_capturing(call.first[0])
    call, problem = call.check(on_gpu=True)
    # Plan first: a call that no kernel serves is refused before anything is copied.
    plan_for(problem, cuda_module().current_device(), call.options)
    import cupy

    def moved(name: str, x: Any) -> Any:
        """Lengths stay: the check of the call on the GPU reads them."""
        return x if x is None or name.startswith(("seqlens", "cu_seqlens")) else cupy.asarray(x)

    there = {name: moved(name, x) for name, x in call.inputs.items()}
    wanted = dict.fromkeys(call.results)
    results = run_on_gpu(dataclasses.replace(call, inputs=there, results=wanted), None)
    for name, x in results.items():
        given = call.results[name]
        if given is None:
            results[name] = cupy.asnumpy(x)
        else:
            given[...] = cupy.asnumpy(x)
            results[name] = given
    call.finish_on_host(problem)
    return results


def run_on_gpu(
    call: Call, key: tuple[Any, ...] | None, options: tuple[Any, ...] | None = None
) -> dict[str, Any]:
    """Launch a call with CuPy arrays, without waiting for it, and remember the call under ``key``
    (:func:`~cufa.calls.warm.find`). A call with small host arrays has no key: its ``options`` and problem are the key,
    so that later calls are checked but not planned."""
    call, problem = call.check(on_gpu=True)
    # The bits were made from lengths on the GPU, which may change: later calls make new ones.
    if call.options.mask.reads_lengths and isinstance(problem.mask, Bits):
        key = options = None
    for name, x in call.inputs.items():
        if isinstance(x, np.ndarray):
            check_not_capturing(name)
    import cupy

    global _gpu_process
    cuda, device_id = cuda_module(), call.first[1].data.device_id
    _gpu_process = os.getpid()
    with cupy.cuda.Device(device_id):
        call = dataclasses.replace(call, inputs=_copied_to_gpu(call.inputs))
        if key is None and options is not None and not problem.empty:
            there = call.operation.in_order({**call.inputs, **call.results})
            seen, key, places = find(call.operation, there, (options, problem))
            if seen is not None:
                found = seen(there, places)
                return dict(zip(call.results, found if len(call.results) > 1 else (found,), strict=True))
        results = call.allocate(problem, cupy.ndarray)
        if problem.empty:
            call.fill_empty(results)
            if problem.sink:
                optional_operands.fill_sink_alone(call.inputs, results, cupy)
            return results
        given = call.arrays(results)
        plan = plan_for(with_memory(problem, given), cuda.device(device_id), call.options)
        binding = cuda.Binding(cuda.prepare(plan, device_id), given)
        binding.launch(cuda.addresses(given))
    if key is not None:
        remember(key, WarmCall(binding.launch_here, call, results))
    return results


def with_memory(problem: Problem, given: Mapping[str, Any]) -> Problem:
    """The problem with alignment and strides of its operands."""
    operands = [
        x for x in OPERATIONS[problem.operation].all_operands if x.stride and given.get(x.name) is not None
    ]
    return dataclasses.replace(
        problem,
        alignment=arrays.alignment(*(given[x.name] for x in operands)),
        positive_strides=arrays.positive_strides(*(given[x.name] for x in operands if x.mapped)),
    )


def _copied_to_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copy small host arrays to the GPU of the other inputs."""
    import cupy

    return {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in inputs.items()}


def plan_for(problem: Problem, device: Device | None, options: Options) -> Plan:
    """The plan for ``device``, with the kernels and tiles that were measured fastest on it. None: the CPU path."""
    if device is None:
        return make_plan(problem, None, options.algorithm, num_splits=options.num_splits)
    tiles, kernels = tuning.load(device.name), tuning.fastest_kernels(device.name)
    return make_plan(
        problem, device, options.algorithm, tuned=tiles, num_splits=options.num_splits, fastest=kernels
    )


def check_not_capturing(name: str) -> None:
    """Refuse the host array ``name`` during a capture: replays of the graph would not copy it again."""
    import cupy

    try:
        capturing, which = cupy.cuda.get_current_stream().is_capturing(), "the current stream"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # The legacy stream waits for every other stream: it cannot be used while any stream is captured.
        if error.status != _CAPTURE_IMPLICIT:
            raise
        capturing, which = True, "another stream, which the current one (the legacy stream) waits for,"
    if capturing:
        raise ValueError(
            f"{name} is a NumPy array, but {which} is being captured: every replay would use the values of the "
            f"capture; put {name} on the GPU with cupy.asarray before"
        )


_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def cpu_module() -> Any:
    """The CPU path, imported on first use: a call on a GPU does not need it."""
    from ..run.cpu import run as cpu

    return cpu


_gpu_process: int | None = None
"""The process that used a GPU first: CUDA does not work in its forks."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


def cuda_module() -> Any:
    """The CUDA backend, imported on first use: it needs CuPy. Raises RuntimeError in a fork of a process that has used
    a GPU."""
    from ..run.cuda import backend as cuda

    if _gpu_process not in (None, os.getpid()):
        raise RuntimeError(
            f"this process is a fork of process {_gpu_process}, which has used the GPU: CUDA does not work in forks. "
            "Start processes by multiprocessing.get_context('spawn'), or pass device='cpu'"
        )
    return cuda


@functools.cache
def gpu_available() -> bool:
    """Whether there are a driver, CuPy and a GPU that the kernels run on."""
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
    global _gpu_process
    _gpu_process = os.getpid()
    return True


def use_gpu(device: str | None, call: Call) -> bool:
    """Whether a call with NumPy inputs is computed on a GPU."""
    check_choice("device", device, {None: "None", "cpu": "'cpu'", "cuda": "'cuda'"})
    if device == "cuda" and not gpu_available():
        raise ValueError(
            "device='cuda' but no usable GPU was found; `cufa doctor` says why, device='cpu' runs here"
        )
    return device == "cuda" or (
        device is None and gpu_available() and call.gpu_serves(cuda_module().current_device())
    )


def planning_device(name: str | None, served: bool) -> Device | None:
    """The device of a plan; None: the CPU path. Raises TypeError or ValueError for an unknown name."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"device must be 'cpu', 'cuda', the name of an architecture or None, not {name!r}")
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


def plan_shapes(
    q: Any, k: Any, v: Any, dtype: npt.DTypeLike | None, device: str | None, options: Options,
    optional: dict[str, Any], operation: str = "forward",
) -> Plan:  # fmt: skip
    """The plan for q, k and v, which are arrays or just shapes; k defaults to q and v to k. ``optional`` are the
    operands of :mod:`cufa.calls.optional_operands`."""
    k = q if k is None else k
    v = k if v is None else v
    shapes = [
        x if isinstance(x, tuple) else as_array(name, x).shape for name, x in (("q", q), ("k", k), ("v", v))
    ]
    if dtype is None:
        dtype = "bfloat16" if isinstance(q, tuple) else as_array("q", q).dtype
    name = asked_dtype(dtype)
    in_8_bits = name in (float8.NAME, *float8.DTYPES)
    if name not in FORWARD_DTYPES and not in_8_bits:
        served = ", ".join((*FORWARD_DTYPES, float8.NAME))
        raise ValueError(f"dtype={name!r} is not served; use one of {served}")
    if device is None and is_device_array(q) and not in_8_bits:  # the call could not move to the CPU
        dtype_name({"q": q}, on_gpu=True)
    in_cache = {x.name for x in CACHE}.intersection(optional)
    if in_cache and in_8_bits:
        raise no_scaled_cache()
    if in_cache:
        given = {"q": q, "k": k, "v": v, **optional}
        per_head = {name: given.pop(name, None) for name in ("alibi_slopes", "sink")}
        problem, optional = _planned_cache(given, name, options), per_head
    else:
        problem = make_problem(shapes, float8.NAME if in_8_bits else name, options)
    problem = dataclasses.replace(problem, operation=operation)
    if in_8_bits:
        problem = dataclasses.replace(problem, scales=("head",) * 3, out_dtype="bfloat16")
    given = {name: x for name, x in optional.items() if x is not None}
    if given or problem.score is not None:
        problem = optional_operands.planned(given, problem)
    could_move = device is None and not is_device_array(q)
    target = planning_device(device, any_serves(problem) if could_move else name != "float64")
    return plan_for(problem, target, options)


def no_scaled_cache() -> TypeError:
    return TypeError(
        "cache_seqlens and block_table go with q, k and v of one dtype of 16 bits or more; caches of float8_e4m3 are "
        "for cufa.flash_decode"
    )


def _planned_cache(given: dict[str, Any], dtype: str, options: Options) -> Problem:
    """The problem of a plan with keys in a cache. A shape stands for an array."""
    from .cached import cached_problem

    there = {name: _stand_in(name, x, dtype) if isinstance(x, tuple) else x for name, x in given.items()}
    known = not isinstance(given.get("block_table"), tuple)
    return cached_problem(optional_operands.read(there, None), dtype, options, table_is_known=known)[1]


def _stand_in(name: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """An array for planning in place of a shape: a tree of roots, a table without pages, or an array that nothing
    reads."""
    if name == "tree" and len(shape) == 3:
        return np.broadcast_to(np.eye(*shape[1:], dtype=bool), shape)
    if name in ("block_table", "tree"):
        return np.full(shape, -1, np.int32)
    return np.empty(shape, ELEMENTS[dtype].dtype)
