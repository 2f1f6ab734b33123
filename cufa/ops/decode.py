"""The public calls of decoding. Checks live in :mod:`~cufa.decode.checks`, choices in
:mod:`~cufa.decode.plan`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..core.architectures import Device
from ..decode.checks import CACHES, INPUTS, DecodeCall, check_gpu_serves, check_memory, dtypes
from ..decode.plan import DecodePlan, make_decode_plan
from ..decode.problem import DecodeProblem
from ..decode.shapes import make_problem
from . import arrays, calls
from .seen import SeenCall, remember, seen_before, signature


def flash_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any = None,
    block_table: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale: float | None = None,
    layout: str = "bhsd",
    num_splits: int | None = None,
    schedule: str = "auto",
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
) -> Any:
    """Attention of a few new query tokens over a key/value cache, each cached byte read once.

    Flash-Decoding (Dao et al., 2023): the cache of a sequence is split over the whole GPU, and the parts
    are merged by their log-sum-exp. Ragged batches are cut into shares of all work instead (stream-K, as
    LeanAttention). The caches are read in place; nothing past a sequence's length is read into the result,
    so unused slots and unused entries of the block table may hold anything.

    Parameters
    ----------
    q : array, (batch, heads, tokens, head_dim)
        1 to 16 query tokens a sequence, causal among themselves: they are the last tokens of the sequence,
        and token i of T sees the keys up to ``length - T + i``. float16 or bfloat16
        (``ml_dtypes.bfloat16``); float32 and float64 on the CPU only. NumPy, CuPy, or anything with DLPack
        or ``__cuda_array_interface__``, any strides with a contiguous last axis. head_dim is a multiple of
        8 (16 with an 8-bit cache on a GPU), at most 256 (64, 128 and 256 are fast).
    k_cache, v_cache : array, (batch, kv_heads, capacity, head_dim)
        With ``block_table``: pages, (num_pages, kv_heads, page_size, head_dim), page_size from 1 up (16,
        64, 128 and 256 are fast). q's dtype, or uint8 that holds float8_e4m3. heads must be a multiple of
        kv_heads (GQA, MQA): query head h uses key/value head ``h // (heads // kv_heads)``.
    cache_seqlens : int32 array, (batch,), optional
        Tokens that are valid before this call. None: the whole capacity. On a GPU the kernel reads it,
        never the host, so that a CUDA graph can be replayed while lengths grow; one that is too large there
        is taken as the capacity. A list, an int or a NumPy array is checked first, and copied to the GPU by
        each call.
    block_table : int32 array, (batch, max_pages), optional
        Page that holds tokens ``i * page_size`` and on of sequence b. Entries past a sequence's length are
        never used. As for lengths, a NumPy array beside device arrays is copied by each call.
    k_new, v_new : array, (batch, kv_heads, new_tokens, head_dim), optional
        Of the cache's dtype. Written into the caches from ``cache_seqlens`` on, then attended to: the
        length is ``cache_seqlens + new_tokens``. ``cache_seqlens`` itself is left as it is.
    k_scale, v_scale : float32 array, (kv_heads,), or one number on the host
        With a cache of uint8: a key is ``k_scale[kv_head]`` times its float8_e4m3 number. Finite, and
        k_scale not negative.
    scale : float, optional
        Softmax scale, finite and ≥ 0. Default 1/√head_dim.
    layout : "bhsd" or "bshd"
        Axis order of all arrays of four axes and of the result; "bshd" has the tokens before the heads:
        (batch, capacity, kv_heads, head_dim), (num_pages, page_size, kv_heads, head_dim).
    num_splits : int, optional
        Into how many parts each sequence is cut; :func:`plan_decode` prints what None comes to, and why.
    schedule : "auto", "fixed" or "balanced"
        The same number of splits for each sequence, or shares of all of them. With "balanced",
        ``num_splits`` is the largest number of shares: fewer are used where tiles are few. The result does
        not depend on either beyond rounding.
    return_lse : bool
        Also return log-sum-exp of the scaled scores: natural log, float32, (batch, heads, tokens).
    out : array, optional
        Where to write the result: q's shape, dtype and kind; must not overlap an input.
    device : None, "cpu" or "cuda"
        Where NumPy inputs are computed: the GPU when there is one that takes their dtype (None), or as
        forced.

    Returns
    -------
    out, or (out, lse)
        NumPy for NumPy inputs, CuPy for device arrays. A query that sees no key gives zeros and lse = -inf.
        For a fixed plan, repeated calls give the same bits.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what to do; nothing has been launched or appended. Lengths and
        block tables on a GPU are not looked at.

    Notes
    -----
    Launches on CuPy's current stream and does not synchronise (NumPy inputs on a GPU do, to bring the
    result back). With ``out=``, all arrays on the GPU, and after one warm-up call it can be captured in a
    CUDA graph. Each capture keeps a workspace of its own (:func:`plan_decode` prints its size) for as long as
    the process lives.

    ``cache_seqlens`` and ``block_table`` on a GPU must not change while the call runs: several blocks read
    them, each for itself. Change them on the same stream, or between replays. Lengths that change while a
    call runs may leave later calls on that stream wrong, not only this one.

    On a GPU, keys and values that a query does not see must still be finite where another query of the same
    sequence sees them: a tile is multiplied as a whole, and 0 · inf is NaN. This concerns new tokens among
    several query tokens. What lies past a sequence's length may hold anything. Scaled scores must stay within
    ±2e7 there, as in :func:`flash_attention`.

    >>> k = v = np.zeros((1, 8, 4096, 128), np.float16)
    >>> q = np.ones((1, 32, 1, 128), np.float16)
    >>> flash_decode(q, k, v, cache_seqlens=[1000]).shape
    (1, 32, 1, 128)
    """
    if num_splits is not None and type(num_splits) is not int:
        # Before a call that was seen: to it 2.0 would be 2.
        num_splits = _check_num_splits(num_splits)
    given = (q, k_cache, v_cache, cache_seqlens, block_table, k_new, v_new, k_scale, v_scale)
    options = ("decode", scale, type(scale), layout, num_splits, schedule, device)
    key = signature(
        (q, k_cache, v_cache, k_new, v_new),
        out,
        options,
        small=(cache_seqlens, block_table, k_scale, v_scale),
    )
    seen = seen_before(key)
    if seen is not None:
        return seen(given, out, return_lse)
    _check_num_splits(num_splits)
    _check_schedule(schedule)
    call = DecodeCall.read(dict(zip(INPUTS, given, strict=True)), out, return_lse, scale, layout)
    how = {"num_splits": num_splits, "schedule": schedule}
    if arrays.is_device_array(call.inputs["q"]):
        if device is not None and device != "cuda":
            raise ValueError(f"device={device!r} but q is on a GPU; use device=None, or move it with q.get()")
        # What came through DLPack may have been seen before as CuPy arrays.
        read = tuple(call.inputs.values())
        key = signature(read[:3] + read[5:7], call.out, options, small=read[3:5] + read[7:])
        seen = seen_before(key)
        return _run_on_gpu(call, how, key) if seen is None else seen(read, call.out, return_lse)
    on_gpu = calls.use_gpu(device, served=_gpu_serves(call, how) if device is None else True)
    return _run_on_gpu_from_host(call, how) if on_gpu else _run_on_cpu(call, how)


def plan_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any = None,
    *,
    cache_seqlens: Any = None,
    block_table: Any = None,
    k_new: Any = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    num_splits: int | None = None,
    schedule: str = "auto",
    device: str | None = None,
) -> DecodePlan:
    """What :func:`flash_decode` would run, in how many splits, and why; needs no GPU and runs nothing.

    Arrays may be given as shapes. Of ``cache_seqlens`` it only matters whether it is given: lengths are the
    kernels' business, so ``cache_seqlens=True`` will do. ``dtype`` and ``cache_dtype`` are names such as
    "bfloat16" and "uint8" (default: the arrays'; for shapes float16, and the same for the cache).
    ``device`` is None (what a call here would use), "cpu", "cuda", or an architecture such as "sm_90",
    planned for its typical card.

    >>> print(cufa.plan_decode((1, 32, 1, 128), (1, 8, 131072, 128), device="sm_90"))  # doctest: +SKIP
    """
    num_splits = _check_num_splits(num_splits)
    _check_schedule(schedule)
    given = {"q": q, "k_cache": k_cache, "block_table": block_table, "k_new": k_new}
    given["v_cache"] = k_cache if v_cache is None else v_cache
    given = {
        name: x if x is None or isinstance(x, tuple) else arrays.as_array(name, x)
        for name, x in given.items()
    }
    shapes = {name: getattr(x, "shape", x) for name, x in given.items()}
    shapes["v_new"] = shapes["k_new"]
    shapes["cache_seqlens"] = None if cache_seqlens is None else ()
    dtype = dtype or str(getattr(given["q"], "dtype", "float16"))
    cache_dtype = cache_dtype or str(getattr(given["k_cache"], "dtype", dtype))

    # Where a call could not move to the CPU.
    stays = any(arrays.is_device_array(x) for x in given.values())

    def planned(found: Device | None) -> DecodePlan:
        module = "cupy" if stays else "numpy"
        names = dtypes(dtype, {"k_cache": cache_dtype}, on_gpu=found is not None, module=module)
        problem = make_problem(shapes, *names, scale=scale, layout=layout)
        if found is not None:
            check_gpu_serves(problem)
        return make_decode_plan(problem, found, num_splits, schedule)

    found = calls.planning_device(device, served=True)
    try:
        return planned(found)
    except (TypeError, ValueError):
        if device is not None or found is None or stays:
            raise
        return planned(None)  # as a call with NumPy arrays would do


def _check_num_splits(num_splits: Any) -> int | None:
    if num_splits is None:
        return None
    if not isinstance(num_splits, (int, np.integer)):
        raise TypeError(f"num_splits must be an int or None, not {type(num_splits).__qualname__}")
    if num_splits < 1:
        raise ValueError(
            f"num_splits={num_splits} is not possible; use 1 or more, or None for the planner's choice"
        )
    return int(num_splits)


def _check_schedule(schedule: Any) -> None:
    arrays.check_choice("schedule", schedule, {x: repr(x) for x in ("auto", "fixed", "balanced")})


def _gpu_serves(call: DecodeCall, how: dict[str, Any]) -> bool:
    """Whether a call on NumPy arrays can be planned for the current GPU. What is wrong with it anywhere, the
    CPU says."""
    if not calls.gpu_available():
        return False
    try:
        _, problem = call.check(on_gpu=True)
        make_decode_plan(problem, calls.cuda_module().current_device(), **how)
    except (TypeError, ValueError):
        return False
    return True


def _run_on_cpu(call: DecodeCall, how: dict[str, Any]) -> Any:
    from ..backends import cpu_decode

    call, problem = call.check(on_gpu=False)
    out = np.empty(call.inputs["q"].shape, call.inputs["q"].dtype) if call.out is None else call.out
    lse = np.empty(_lse_shape(problem), np.float32) if call.return_lse else None
    if problem.empty:
        calls.fill_empty(out, lse)
    else:
        cpu_decode.run(make_decode_plan(problem, None, **how), call.operands(out, lse))
    return (out, lse) if call.return_lse else out


def _run_on_gpu_from_host(call: DecodeCall, how: dict[str, Any]) -> Any:
    """NumPy arrays: there and back again, synchronously. New tokens are appended to the GPU's copy of the
    caches and, once the result is back, to the caches themselves: launches are asynchronous, and what fails
    there shows when it is waited for."""
    call, problem = call.check(on_gpu=True)
    calls.check_not_capturing("q")
    # What cannot be planned is refused before anything is copied.
    make_decode_plan(problem, calls.cuda_module().current_device(), **how)
    import cupy

    from ..backends import cpu_decode

    on_device = {name: x if x is None else cupy.asarray(x) for name, x in call.inputs.items()}
    there = dataclasses.replace(call, inputs=on_device, out=None, return_lse=True)
    result, lse = _run_on_gpu(there, how, None)
    answer = calls.bring_back(result, lse, call.out, call.return_lse)
    if problem.new_tokens and not problem.empty:
        cpu_decode.append(call.operands(call.inputs["q"], None))
    return answer


def _run_on_gpu(call: DecodeCall, how: dict[str, Any], key: tuple[Any, ...] | None) -> Any:
    """CuPy arrays, asynchronously; remembered under ``key`` when all of them are on the GPU."""
    call, problem = call.check(on_gpu=True)
    import cupy

    from ..backends import cuda_decode

    q = call.inputs["q"]
    device_id = q.data.device_id
    with cupy.cuda.Device(device_id):
        out = cupy.ndarray(q.shape, q.dtype) if call.out is None else call.out
        lse = cupy.ndarray(_lse_shape(problem), np.float32) if call.return_lse else None
        if problem.empty:
            calls.fill_empty(out, lse)
            return (out, lse) if call.return_lse else out
        inputs = dict(call.inputs)
        for name, x in inputs.items():
            if isinstance(x, np.ndarray):
                calls.check_not_capturing(name)
                inputs[name] = cupy.asarray(x)
        call = dataclasses.replace(call, inputs=inputs)
        big = [inputs[name] for name in ("q", *CACHES, "k_new", "v_new") if inputs[name] is not None]
        problem = dataclasses.replace(
            problem,
            alignment=arrays.alignment(*big, out),
            positive_strides=arrays.positive_strides(*(inputs[name] for name in CACHES)),
        )
        plan = make_decode_plan(problem, calls.cuda_module().device(device_id), **how)
        operands = call.operands(out, lse)
        binding = cuda_decode.bind(plan, operands, device_id)
        binding.launch(*cuda_decode.addresses(operands))
    if key is not None:
        written = CACHES if problem.new_tokens else ()
        remember(key, SeenCall(binding.launch, inputs, out, _lse_shape(problem), check_memory, written))
    return (out, lse) if call.return_lse else out


def _lse_shape(problem: DecodeProblem) -> tuple[int, int, int]:
    return problem.batch, problem.heads, problem.tokens
