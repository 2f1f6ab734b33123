"""What tests of e4m3 share: inputs, and arrays of 8 and 16 bits on a GPU by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

import cufa
from cufa.calls.quantize import QuantizedValues

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
