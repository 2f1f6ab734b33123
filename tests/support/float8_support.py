"""What tests of e4m3 share: inputs, and arrays of 8 and 16 bits on a GPU by their bits."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import GPU

import cufa
from cufa.calls import quantize as calls
from cufa.calls.quantize import QuantizedValues
from cufa.kernels.quantize import NUM_MEMBERS, PARAMETER, SOURCE, Quantizer
from cufa.run.emulate import build
from cufa.run.emulate.launch import Execution, execute
from cufa.run.emulate.memory import GlobalArray

ROLES = ("q", "k", "v")
HEADS, KV_HEADS = 4, 2


def inputs(
    head_dim: int = 64, seqlen_q: int = 200, seqlen_k: int = 500, batch: int = 2, *, uneven: bool = False
) -> list[Any]:
    """Normal q, k and v in float32. ``uneven``: heads of all and tokens of q and k differ in size, and so their
    scales do."""
    rng = np.random.default_rng(head_dim + seqlen_q)
    heads = (HEADS, seqlen_q), (KV_HEADS, seqlen_k), (KV_HEADS, seqlen_k)
    found = [rng.standard_normal((batch, h, n, head_dim)).astype(np.float32) for h, n in heads]
    for x, tokens in zip(found, (seqlen_q, seqlen_k, 1), strict=True) if uneven else ():
        x *= rng.uniform(0.5, 1.5, (batch, x.shape[1], 1, 1)) * rng.uniform(
            0.5, 1.5, (batch, x.shape[1], tokens, 1)
        )
    return found


def quantized(x: list[Any], per: tuple[str, ...] = ("head",) * 3, **of_keys: Any) -> dict[str, Any]:
    """The arguments of a call. ``of_keys``: ``rotate`` goes to q and k, ``smooth`` to k."""
    found: dict[str, Any] = {}
    for role, array, mode in zip(ROLES, x, per, strict=True):
        takes = {"q": ("rotate",), "k": ("rotate", "smooth"), "v": ()}[role]
        chosen = {name: y for name, y in of_keys.items() if name in takes}
        found[role], found[f"{role}_scale"] = cufa.quantize(array, role=role, per=mode, **chosen)
    return found


def packed(x: list[Any], per: tuple[str, ...], cu_q: list[int], cu_k: list[int]) -> dict[str, Any]:
    """The arguments of a packed call, but for the offsets, from the first sequence of x."""
    found: dict[str, Any] = {}
    for role, array, cu, mode in zip(ROLES, x, (cu_q, cu_k, cu_k), per, strict=True):
        tokens = array[0].swapaxes(0, 1)
        found[role], found[f"{role}_scale"] = cufa.quantize(tokens, role=role, per=mode, cu_seqlens=cu)
    return found


def error(found: Any, right: Any) -> float:
    """Of the norm of what is right."""
    return float(np.linalg.norm(found.astype(np.float64) - right) / np.linalg.norm(right))


def device_array(cp: Any, x: np.ndarray) -> Any:
    """CuPy's copy, by bits, as bfloat16 may have no arithmetic."""
    return cp.asarray(x.view(f"i{x.itemsize}")).view(x.dtype)


def bits(x: Any) -> np.ndarray:
    x = x.data if isinstance(x, QuantizedValues) else x
    return np.asarray(x if isinstance(x, np.ndarray) else x.get()).view(np.uint8)


def quantize(
    backend: Any,
    x: np.ndarray,
    *,
    role: str,
    per: str = "head",
    rotate: int | None = None,
    smooth: bool = False,
    layout: str = "bhsd",
    **lengths: Any,
) -> tuple[Any, Any]:
    """``cufa.quantize`` where the backend computes: (e4m3 or values, scale)."""
    how = {"role": role, "per": per, "smooth": smooth, "layout": layout}
    if backend is GPU:
        import cupy

        return cufa.quantize(device_array(cupy, x), rotate=rotate, **how, **lengths)
    of_x, given = calls._lengths(x, layout, lengths.get("seqlens"), lengths.get("cu_seqlens"))
    signs = None if rotate is None else calls._signs(rotate, role, x.shape[-1])
    executor = SimpleNamespace(Quantizer=Quantizer, quantize=_executed)
    arrays = SimpleNamespace(empty=lambda shape, dtype: np.full(shape, 0x55, dtype), asarray=np.asarray)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_device", lambda: executor)
        return calls._quantized(x, role, per, signs, smooth, layout, of_x, given, arrays)


def _executed(
    quantizer: Quantizer,
    x: Any,
    out: Any,
    scale_shape: tuple[int, ...],
    lengths: Any,
    sequences: int,
    signs: bytes,
) -> Any:
    """As :func:`cufa.run.cuda.quantize.quantize`, by kernels executed in checked mode."""
    sizes, count, num_sms = (sequences, *x.shape[1:3]), math.prod(scale_shape), 1
    words = np.zeros(count + quantizer.zeros(*sizes), np.float32)
    words[:count] = np.nan if quantizer.lengths == "dense" else 1
    of_sums, of_means = quantizer.workspace(*sizes)
    root = lambda y: y if y.base is None else root(y.base)  # noqa: E731 - the executor knows whole arrays
    memory = [
        GlobalArray("x", root(x), False), GlobalArray("out", root(out), True), GlobalArray("words", words, True),
        GlobalArray("sums", np.full(max(of_sums, 1) // 8 + 1, np.nan), True),
        GlobalArray("mean", np.full(max(of_means, 1) // 4 + 1, np.nan, np.float32), True),
        GlobalArray("lengths", np.zeros(1, np.int32) if lengths is None else lengths, False),
    ]  # fmt: skip
    pointers = [x.ctypes.data, out.ctypes.data, *(y.address for y in memory[2:])]
    numbers = quantizer.numbers(pointers, signs, x, out, sequences, count, num_sms)
    launches = quantizer.launches(*sizes, num_sms)
    entries = build.kernel(SOURCE, quantizer.constants, [y.entry for y in launches], True, (PARAMETER,))
    argument = (ctypes.c_int64 * NUM_MEMBERS)(*numbers)
    for launch in launches:
        _, findings = execute(entries[launch.entry], launch, [argument], memory, Execution("checked"))
        assert not findings
    return words[:count].reshape(scale_shape)
