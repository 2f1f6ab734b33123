"""The public calls. Checks live in :mod:`cufa.ops.arrays`, choices in :mod:`cufa.planner`, and how a checked
call is carried out in :mod:`cufa.ops.calls`."""

from __future__ import annotations

from typing import Any

from ..core.problem import ITEMSIZE
from ..planner import Plan
from . import arrays, calls
from .seen import seen_before, signature


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

    FlashAttention-3 (Shah et al., 2024, Algorithms 1 and 2) on Hopper, FlashAttention-2 (Dao, 2023, Algorithm
    1) on other GPUs from sm_80 on, and the same schedule in NumPy elsewhere.

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
    algorithm : "auto", "fa3", "fa2", "fa2_noskip", "fa1" or "naive"
        "auto" takes the fastest kernel that serves the call: FA3 on Hopper, else FA2. The others are there
        to compare.
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

    On a GPU, keys and values that the causal mask hides from a query must still be finite: a tile that holds
    some that it sees is multiplied as a whole, and 0 · inf is NaN.

    Scores are float32. On a GPU those of scale * q kᵀ must stay within ±2e7 (where float32 is coarser than 1,
    so that softmax is a guess anyway): the exponentials of larger ones overflow, and rows come out as NaN.
    ``algorithm="naive"`` and the CPU take what float32 holds.
    """
    if type(causal) is not bool:  # before a call that was seen: to it 1.0 would be True
        causal = arrays.check_causal(causal)  # type: ignore[unreachable]
    key = signature((q, k, v), out, causal, scale, type(scale), layout, algorithm, precision, device)
    seen = seen_before(key)
    if seen is not None:
        return seen((q, k, v), out, return_lse)
    inputs = {name: arrays.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    arrays.same_place(inputs)
    call = calls.Call(
        **inputs,
        out=None if out is None else arrays.as_array("out", out),
        return_lse=return_lse,
        algorithm=algorithm,
        layout=layout,
        options={"causal": causal, "scale": scale, "precision": precision},
    )
    if arrays.is_device_array(call.q):
        if device not in (None, "cuda"):
            raise ValueError(f"device={device!r} but q is on a GPU; use device=None, or move it with q.get()")
        return calls.run_on_gpu(call, key)
    on_gpu = calls.use_gpu(device, served=str(call.q.dtype) != "float64")
    return calls.run_on_gpu_from_host(call) if on_gpu else calls.run_on_cpu(call)


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
    """What :func:`flash_attention` would run, and why; needs no GPU and runs nothing. For
    :func:`flash_decode` there is :func:`plan_decode`.

    q, k and v are arrays or just shapes; k and v default to q. ``dtype`` is a name such as "bfloat16"
    (default: the arrays', or float16 for shapes). ``device`` is None (what a call here would use), "cpu",
    "cuda", or an architecture such as "sm_90", planned for its typical card.

    >>> print(cufa.plan((1, 8, 4096, 128), causal=True, device="sm_90"))  # doctest: +SKIP
    """
    k = q if k is None else k
    v = k if v is None else v
    shapes = [
        x if isinstance(x, tuple) else arrays.as_array(name, x).shape
        for name, x in (("q", q), ("k", k), ("v", v))
    ]
    name = dtype or ("float16" if isinstance(q, tuple) else str(arrays.as_array("q", q).dtype))
    if name not in ITEMSIZE:
        raise ValueError(f"dtype={name!r} is not served; use one of {', '.join(ITEMSIZE)}")
    if device is None and arrays.is_device_array(q):  # the call could not move to the CPU
        arrays.dtype_name({"q": q}, on_gpu=True)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "layout": layout, "precision": precision}
    problem = arrays.make_problem(shapes, name, **options)
    return calls.plan_for(problem, calls.planning_device(device, served=name != "float64"), algorithm)
