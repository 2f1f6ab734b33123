"""Attention for JAX: with gradients, under ``jit``, ``grad`` and ``vmap``, on the memory of its arrays.

Importing this module imports JAX; ``import cufa`` does not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..calls import operators
from ..calls.backward import flash_attention_backward
from ..calls.forward import flash_attention, plan
from ..calls.keywords import unknown_keyword
from ..problem.dropout import resolve_dropout
from ..problem.kept_masks import kept
from ..problem.options import resolve_mask
from ..problem.score_function import operator_score
from ..problem.typing import Algorithm, AnyMask, Layout, Off, On, OperatorOptions, Place, Precision
from . import ffi

__all__ = ["attention"]

_OPTIONAL = ("alibi_slopes", "sink", "seqlens_q", "seqlens_k", "seed")
_SINK = 3 + _OPTIONAL.index("sink")  # its place among the arguments of the operator


# fmt: off
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    deterministic: bool = ..., return_lse: Off = ..., **options: Unpack[OperatorOptions],
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    deterministic: bool = ..., return_lse: On, **options: Unpack[OperatorOptions],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *,
    deterministic: bool = ..., return_lse: bool = ..., **options: Unpack[OperatorOptions],
) -> Any: ...
# fmt: on
def attention(
    q: Array, k: Array, v: Array, *, layout: Layout = "bshd",
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Array | None = None,
    sink: Array | None = None, seqlens_q: Array | None = None, seqlens_k: Array | None = None,
    score: Callable[..., Any] | None = None, arrays: Mapping[str, Array] | None = None, bias: Array | None = None,
    dropout: float | None = None, seed: int | Array | None = None,
    algorithm: Algorithm = "auto", num_splits: int | None = None, precision: Precision | None = None,
    deterministic: bool = False, return_lse: bool = False, **unknown: Never,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention` with gradients for q, k, v, sink, bias and arrays of a score function
    (FlashAttention-2, Dao, 2023, Algorithms 1, 2).

    Parameters
    ----------
    q : Array, (batch, seqlen_q, heads, head_dim), JAX's order; with ``layout="bhsd"`` heads before seqlen
        float16, bfloat16 or float32; float64 on the CPU.
    k, v : Array, (batch, seqlen_k, kv_heads, head_dim)
        q's dtype.
    causal : bool
        Aligned bottom-right. ``jax.nn.dot_product_attention``'s ``is_causal`` is aligned top-left:
        ``mask=cufa.masks.causal("top-left")``.
    deterministic : bool
        The gradients have the same bits in every run.
    score, arrays : callable, and dict of Array, optional
        ``score(s, b, h, i, j, **arrays)`` in NumPy, as for :func:`cufa.score`, and the arrays that it reads. The
        function is static under ``jit``.
    seed : int or Array, optional
        The seed of ``dropout``: an int, or uint32 (2,) from ``jax.random.key_data``. Each call needs another seed.
    others
        As for :func:`cufa.flash_attention`. Options other than arrays are static under ``jit``.

    Returns
    -------
    out, or (out, lse)
        out: q's shape, with v's head_dim, and dtype. lse: float32 (batch, heads, seqlen_q), float64 if q is.

    Raises
    ------
    TypeError, ValueError
        As :func:`cufa.flash_attention`, while JAX traces: shapes, dtypes, options. Sequence lengths, and whether a GPU
        serves the call, are checked when it runs: JAX raises its own error with the message.

    Notes
    -----
    ``vmap`` runs the mapped calls one after another. ALiBi slopes are constants: their gradient is 0.
    """
    if unknown:
        raise unknown_keyword(attention, unknown)
    options: dict[str, Any] = {
        "layout": layout, "causal": causal, "window": window, "softcap": softcap, "scale": scale,
        "algorithm": algorithm, "num_splits": num_splits, "precision": precision, "dropout": dropout,
    }  # fmt: skip
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but q is {q.dtype}: convert with {name}.astype(q.dtype)")
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dtypes = (wide, wide, jnp.int32, jnp.int32, jnp.uint32)
    listed = (alibi_slopes, sink, seqlens_q, seqlens_k, _seed(dropout, seed))
    optional = [None if x is None else jnp.asarray(x, dtype) for x, dtype in zip(listed, dtypes, strict=True)]
    function, read = operators.score_of(score, arrays, bias)
    read = {name: jnp.asarray(x) for name, x in read.items()}
    given: dict[str, Any] = {
        name: True for name, x in zip(_OPTIONAL[:2], optional, strict=False) if x is not None
    }
    mask = None if mask is None else resolve_mask(False, None, mask)
    stand_ins = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in read.items()}
    given |= stand_ins if function is None else {"score": operator_score(function, stand_ins)}
    plan(q.shape, k.shape, v.shape, dtype=q.dtype, mask=mask, device="cpu", **options, **given)
    value = q
    while hasattr(value, "primal"):  # gradients outside of jit wrap the value
        value = value.primal
    compiled = isinstance(value, jax.core.Tracer)
    options |= {
        "mask": None if mask is None else mask.name_for_operators(compiled),
        "deterministic": deterministic, "score": operators.name_of(function, compiled), "arrays": [*read],
    }  # fmt: skip
    options |= {"return_lse": return_lse, "given": [x is not None for x in optional]}
    text = json.dumps(options, default=lambda x: x.item())  # NumPy's scalars
    out, lse = _attention(text, q, k, v, *optional, *read.values())
    return (out, lse) if return_lse else out


def _seed(dropout: float | None, seed: int | Array | None) -> Any:
    """Four 32-bit words: the 64-bit seed, and a 64-bit number that is 0."""
    if isinstance(seed, jax.Array):
        if seed.shape != (2,) or seed.dtype != jnp.uint32:
            raise TypeError(f"seed is {seed.dtype}{seed.shape}: it takes an int, or uint32 (2,)")
        return jnp.concatenate([seed, jnp.zeros_like(seed)])
    _, words = resolve_dropout(dropout, seed)
    return None if words is None else words.view(np.uint32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: str, *arrays: Array | None) -> tuple[Array, Array]:
    q, _, v, *_ = arrays
    assert q is not None and v is not None
    batch, *middle, _ = q.shape
    seqlen, heads = middle if json.loads(options)["layout"] == "bshd" else middle[::-1]
    lse = jax.ShapeDtypeStruct((batch, heads, seqlen), jnp.promote_types(q.dtype, jnp.float32))
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    call = jax.ffi.ffi_call("cufa_attention", (out, lse), vmap_method="sequential")
    out, lse = call(*(x for x in arrays if x is not None), options=options)
    return out, lse


def _forward(options: str, *primals: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    """Of each argument the value, and whether a gradient flows into it. The places of such arguments are saved as keys,
    which JAX keeps out of compiled code."""
    arrays = [None if x is None else x.value for x in primals]
    wanted = {place: () for place, x in enumerate(primals) if x is not None and x.perturbed}
    out, lse = _attention(options, *arrays)
    return (out, lse), (arrays, out, lse, wanted)


def _backward(options: str, saved: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    arrays, out, lse, wanted = saved
    first = 3 + len(_OPTIONAL)  # of the score function's arrays
    names = json.loads(options)["arrays"]
    places = [n for n in range(first, len(arrays)) if n in wanted]
    text = json.dumps({**json.loads(options), "gradients": [names[n - first] for n in places]})
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3]]
    if arrays[_SINK] is not None:
        places.insert(0, _SINK)
    shapes += [jax.ShapeDtypeStruct(arrays[n].shape, lse.dtype) for n in places]
    call = jax.ffi.ffi_call("cufa_attention_backward", shapes, vmap_method="sequential")
    dout, dlse = (
        jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.custom_derivatives.SymbolicZero) else x
        for x in cotangents
    )
    found = call(dout, dlse, out, lse, *(x for x in arrays if x is not None), options=text)
    gradients = dict(zip(places, found[3:], strict=True))
    return *found[:3], *(
        gradients[n].astype(arrays[n].dtype) if n in gradients else None for n in range(3, len(arrays))
    )


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.lru_cache(1024)
def _options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(text)
    options["window"] = None if options["window"] is None else tuple(options["window"])
    return options


def _keywords(text: str, leave_out: tuple[str, ...], optional: list[Any]) -> dict[str, Any]:
    options = _options(text)
    given = [name for name, is_given in zip(_OPTIONAL, options["given"], strict=True) if is_given]
    inside = (*leave_out, "given", "return_lse", "score", "arrays", "gradients")
    keywords = {name: x for name, x in options.items() if name not in inside}
    keywords["mask"] = None if keywords["mask"] is None else kept(keywords["mask"])
    read = zip(options["arrays"], optional[len(given) :], strict=True)
    return keywords | dict(zip(given, optional, strict=False)) | operators.arguments(options["score"], read)


def _place(q: Any) -> Place | None:
    """Host arrays of XLA belong to its CPU backend: they are computed on the CPU."""
    return "cpu" if isinstance(q, np.ndarray) else None


def _run_forward(text: str, arguments: list[Any], results: list[Any]) -> None:
    q, k, v, *optional = arguments
    out, lse = results
    keywords = _keywords(text, ("deterministic",), optional)
    flash_attention(q, k, v, out=out, lse=lse, return_lse=True, device=_place(q), **keywords)


def _run_backward(text: str, arguments: list[Any], results: list[Any]) -> None:
    dout, dlse, out, lse, q, k, v, *optional = arguments
    keywords = _keywords(text, ("num_splits",), optional)
    keywords |= {"dlse": dlse} if _options(text)["return_lse"] else {}
    dsink = {"dsink": results[3]} if keywords.get("sink") is not None else {}
    gradients = dict(zip(_options(text)["gradients"], results[3 + len(dsink) :], strict=True))
    keywords |= {**dict(zip(("dq", "dk", "dv"), results, strict=False)), **dsink, "device": _place(q)}
    keywords |= {"gradients": gradients} if gradients else {}
    flash_attention_backward(dout, q, k, v, out, lse, **keywords)


ffi.register("cufa_attention", _run_forward)
ffi.register("cufa_attention_backward", _run_backward)
