"""The public calls. Checks live in :mod:`cufa.arrays`, choices in :mod:`cufa.planner`."""

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
from .problem import ITEMSIZE, Problem

if TYPE_CHECKING:
    from .backends import cuda as cuda_backend

_MAX_BINDINGS = 1024
_bindings: dict[tuple[Any, ...], _Fast] = {}


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    algorithm: str = "auto",
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
) -> Any:
    """Exact attention, ``softmax(scale * q kᵀ) v``, without ever storing the score matrix.

    FlashAttention-2 (Dao, 2023, Algorithm 1) on GPUs from sm_80 on; the same schedule in NumPy elsewhere.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
        NumPy, CuPy, or anything with DLPack or ``__cuda_array_interface__``. float16, bfloat16
        (``ml_dtypes.bfloat16``), float32; float64 on the CPU only. Any strides with a contiguous last
        axis; read in place. head_dim is a multiple of 8, at most 256.
    k, v : array, (batch, kv_heads, seqlen_k, head_dim)
        Same dtype and place as q. heads must be a multiple of kv_heads: query head h uses key/value
        head ``h // (heads // kv_heads)`` (GQA, MQA), never copied.
    causal : bool
        Query i sees keys up to ``i + seqlen_k - seqlen_q``: aligned bottom-right, so that the last query
        sees the last key, as decoding with a cache needs. (PyTorch's ``is_causal`` is aligned top-left:
        the two agree when seqlen_q == seqlen_k.)
    scale : float, optional
        Softmax scale, finite and ≥ 0. Default 1/√head_dim.
    layout : "bhsd" or "bshd"
        Axis order of q, k, v and the result: (batch, heads, seqlen, head_dim), or with seqlen before heads.
    algorithm : "auto", "fa2", "fa2_noskip", "fa1" or "naive"
        "auto" takes the fastest kernel; the others are there to compare.
    precision : None, "float32" or "tf32"
        For float32 inputs on a GPU. None keeps float32 accuracy, unless ``CUPY_TF32=1`` is set.
    return_lse : bool
        Also return log-sum-exp of the scaled scores: natural log, float32, (batch, heads, seqlen_q).
    out : array, optional
        Where to write the result: q's shape, dtype and kind; must not overlap an input.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed: the GPU when there is one (None), or as forced. Device arrays
        are always computed where they are.

    Returns
    -------
    out, or (out, lse)
        NumPy for NumPy inputs, CuPy for device arrays. A query that sees no key gives zeros and lse = -inf.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what to do; nothing has been launched.

    Notes
    -----
    Launches on CuPy's current stream and does not synchronise (NumPy inputs on a GPU do, to bring the
    result back). With ``out=`` and after one warm-up call it can be captured in a CUDA graph.
    """
    key = _signature(q, k, v, out, causal, scale, layout, algorithm, precision, device)
    fast = _bindings.get(key) if key is not None else None
    if fast is not None:
        return fast(q, k, v, out, return_lse)
    inputs = {name: arrays.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    arrays.same_place(inputs)
    if arrays.is_device_array(inputs["q"]):
        if device not in (None, "cuda"):
            raise ValueError(
                f"device={device!r} but q is on a GPU; use device=None, or pass q.get(), k.get(), v.get()"
            )
        call = _on_gpu
    else:
        call = _on_gpu_from_host if _use_gpu(device, inputs["q"]) else _on_cpu
    options = {"causal": causal, "scale": scale, "layout": layout, "precision": precision}
    return call(inputs, out, return_lse, algorithm, options, key)


def plan(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    algorithm: str = "auto",
    precision: str | None = None,
    device: str | None = None,
) -> Plan:
    """What :func:`flash_attention` would run, and why; needs no GPU and runs nothing.

    q, k and v are arrays or just shapes; k and v default to q. ``dtype`` is a name such as "bfloat16"
    (default: the arrays', or float16 for shapes). ``device`` is None (what a call here would use), "cpu",
    "cuda", or an architecture such as "sm_90", planned for its typical card.

    >>> print(cufa.plan((1, 8, 4096, 128), causal=True, device="sm_90"))  # doctest: +SKIP
    """
    k = q if k is None else k
    v = k if v is None else v
    shapes = [x if isinstance(x, tuple) else arrays.as_array("q", x).shape for x in (q, k, v)]
    name = dtype or ("float16" if isinstance(q, tuple) else str(arrays.as_array("q", q).dtype))
    if name not in ITEMSIZE:
        raise ValueError(f"dtype={name!r} is not served; use one of {', '.join(ITEMSIZE)}")
    options: dict[str, Any] = {"causal": causal, "scale": scale, "layout": layout, "precision": precision}
    problem = arrays.make_problem(shapes, name, **options)
    return _plan(problem, _planning_device(device, name), algorithm)


def _planning_device(name: str | None, dtype: str) -> Device | None:
    if name == "cpu":
        return None
    if name in (None, "cuda"):
        usable = _gpu_available() and dtype != "float64"
        if name == "cuda" and not usable:
            raise ValueError(
                "device='cuda' but no usable GPU was found; name an architecture such as 'sm_90' instead"
            )
        return _cuda().current_device() if usable else None
    assert name is not None
    return Device.typical(name)


def _plan(problem: Problem, device: Device | None, algorithm: str) -> Plan:
    return make_plan(problem, device, algorithm, tuned=tuning.load(device.name) if device else None)


def _cuda() -> Any:
    """The CUDA backend, imported late: it needs CuPy."""
    from .backends import cuda

    return cuda


@functools.cache
def _gpu_available() -> bool:
    """A driver, CuPy and a GPU that the kernels run on."""
    try:
        cuda = _cuda()
    except ImportError:
        return False
    if cuda.device_count() == 0:
        return False
    try:
        cuda.current_device()
    except ValueError:  # older than sm_80
        return False
    return True


def _use_gpu(device: str | None, q: np.ndarray) -> bool:
    if device == "cpu":
        return False
    if device == "cuda":
        if not _gpu_available():
            raise ValueError(
                "device='cuda' but no usable GPU was found; `cufa doctor` says why, device='cpu' runs here"
            )
        return True
    if device is not None:
        raise ValueError(f"device={device!r} is not known; use None, 'cpu' or 'cuda'")
    return str(q.dtype) != "float64" and _gpu_available()


def _check(inputs: dict[str, Any], out: Any, options: dict[str, Any], on_gpu: bool) -> Problem:
    """Everything that can be wrong with a call, found before anything runs."""
    dtype = arrays.dtype_name(inputs, on_gpu)
    problem = arrays.make_problem([x.shape for x in inputs.values()], dtype, **options)
    for name, x in inputs.items():
        arrays.check_last_axis(name, x)
    if out is not None:
        arrays.same_place({"q": inputs["q"], "out": out})
        arrays.check_out(out, inputs)
    return problem


def _views(layout: str, *xs: Any) -> list[Any]:
    """The same memory with axes in the order (batch, heads, seqlen, head_dim)."""
    return [x.transpose(arrays.LAYOUTS[layout]) for x in xs]


def _on_cpu(
    inputs: dict[str, Any],
    out: Any,
    return_lse: bool,
    algorithm: str,
    options: dict[str, Any],
    key: Any,
) -> Any:
    from .backends import cpu

    out = arrays.as_array("out", out) if out is not None else None
    problem = _check(inputs, out, options, on_gpu=False)
    plan = _plan(problem, None, algorithm)
    if out is None:
        out = np.empty(inputs["q"].shape, inputs["q"].dtype)
    lse = np.empty(_lse_shape(problem), np.float32) if return_lse else None
    views = _views(options["layout"], *inputs.values(), out)
    if _nothing_to_do(problem):
        _fill_empty(out, lse)
    else:
        q, k, v, o = views
        cpu.run(plan, q, k, v, o, lse)
    return (out, lse) if return_lse else out


def _on_gpu_from_host(
    inputs: dict[str, Any],
    out: Any,
    return_lse: bool,
    algorithm: str,
    options: dict[str, Any],
    key: Any,
) -> Any:
    out = arrays.as_array("out", out) if out is not None else None
    _check(inputs, out, options, on_gpu=True)
    import cupy

    on_device = {name: cupy.asarray(x) for name, x in inputs.items()}
    result, lse = _on_gpu(on_device, None, True, algorithm, options, None)
    if out is None:
        out = cupy.asnumpy(result)
    else:
        out[...] = cupy.asnumpy(result)
    return (out, cupy.asnumpy(lse)) if return_lse else out


def _on_gpu(
    inputs: dict[str, Any], out: Any, return_lse: bool, algorithm: str, options: dict[str, Any], key: Any
) -> Any:
    import cupy

    out = arrays.as_array("out", out) if out is not None else None
    problem = _check(inputs, out, options, on_gpu=True)
    q = inputs["q"]
    cuda = _cuda()
    with cupy.cuda.Device(q.data.device_id):
        result = cupy.ndarray(q.shape, q.dtype) if out is None else out
        lse = cupy.ndarray(_lse_shape(problem), np.float32) if return_lse else None
        if _nothing_to_do(problem):
            _fill_empty(result, lse)
            return (result, lse) if return_lse else result
        device = cuda.device(q.data.device_id)
        problem = dataclasses.replace(
            problem,
            alignment=arrays.alignment(*inputs.values(), result),
            positive_strides=arrays.positive_strides(*inputs.values()),
        )
        plan = _plan(problem, device, algorithm)
        views = _views(options["layout"], *inputs.values(), result)
        binding = cuda.Binding(cuda.prepare(plan, q.data.device_id), [x.strides for x in views])
        binding.launch(*(x.data.ptr for x in views), lse.data.ptr if lse is not None else 0)
    if key is not None:
        if len(_bindings) >= _MAX_BINDINGS:
            _bindings.clear()
        _bindings[key] = _Fast(binding, [*inputs.values(), result])
    return (result, lse) if return_lse else result


def _lse_shape(problem: Problem) -> tuple[int, int, int]:
    return problem.batch, problem.heads, problem.seqlen_q


def _nothing_to_do(problem: Problem) -> bool:
    """No query, or queries that have no key at all: not worth a launch, and grids cannot be empty."""
    return 0 in (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)


def _fill_empty(out: Any, lse: Any) -> None:
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf


class _Fast:
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


def _signature(q: Any, k: Any, v: Any, out: Any, *options: Any) -> tuple[Any, ...] | None:
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
