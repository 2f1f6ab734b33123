"""Padded, packed and dense calls with lengths, sinks and slopes: the padding behind a sequence is NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from backward_support import near
from support import DTYPES

import cufa
from cufa import masks
from cufa.kernels import Kernel

SINK = np.array([0.5, -1.0, 9.0, -np.inf], np.float32)
SLOPES = np.linspace(0.1, 0.7, 12).reshape(3, 4).astype(np.float32)

#: Of queries and of keys: empty sequences, lengths around a tile, more queries than keys and the other way round.
LENGTHS = {
    "empty ones": ((33, 0, 20), (40, 7, 0)),
    "one query": ((1, 133, 17), (240, 1, 30)),
    "one row in all": ((0, 0, 1), (1, 2, 3)),
    "equal": ((65, 6, 200), (65, 6, 200)),
    "whole tiles": ((130, 64, 7), (64, 129, 128)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window, softcap": {"window": (4, 2), "softcap": 3.0},
    "causal, sink": {"causal": True, "sink": SINK},
    "top-left, ALiBi": {"mask": masks.causal("top-left"), "alibi_slopes": SLOPES},
    "all": {"window": (20, 5), "sink": SINK, "alibi_slopes": SLOPES[0], "softcap": 5.0},
    "diagonal, negative slopes": {"mask": masks.window(30, 9, -3), "alibi_slopes": -SLOPES / 8},
    "prefix, sink": {"mask": masks.prefix([3, 0, 20]), "sink": SINK},
    "global tokens": {"mask": masks.global_window(4, 9, 3)},
    "a band or a prefix": {"mask": masks.window(9, 3) | masks.prefix([3, 0, 20])},
    "chunks, ALiBi": {"mask": masks.chunks(7), "alibi_slopes": SLOPES},
    "streaming, all": {
        "mask": masks.streaming(2, 5),
        "sink": SINK,
        "alibi_slopes": SLOPES[0],
        "softcap": 5.0,
    },
}


def of_whole_arrays(kind: str, queries: int, keys: int) -> dict[str, Any]:
    """The options of a call whose mask has values for each of ``keys`` keys, or also for each query."""
    rng = np.random.default_rng(5)
    if kind == "bits":
        return {"mask": rng.random((3, 4, queries, keys)) < 0.3, "sink": SINK}
    runs = np.sort(rng.integers(0, queries + 1, (3, 2, keys, 4)), axis=-1).astype(np.int32)
    if kind == "one run":
        return {"mask": masks.from_flashmask(runs[:1, ..., :1], causal=True), "alibi_slopes": SLOPES}
    return {"mask": masks.from_flashmask(runs, causal=False), "softcap": 5.0}


OF_WHOLE_ARRAYS = "one run", "two runs", "bits"


def takes(spec: Kernel, options: str) -> bool:
    """Whether a kernel serves the mask of these options, and what they change of scores."""
    changes, kind = {"alibi_slopes": "alibi", "sink": "sink"}, ""
    if "mask" in OPTIONS[options]:
        kind = OPTIONS[options]["mask"].irregular_kind
    served = not kind or kind in spec.masks
    return served and {changes[x] for x in OPTIONS[options] if x in changes} <= set(spec.options)


def head_dim_near(spec: Kernel, head_dim: int, options: str, deterministic: bool) -> int:
    """The head dim that the kernel serves nearest to this one with these options, all of whose caps are in windows."""
    capped = deterministic and "softcap" in OPTIONS[options]
    return near(spec, min(head_dim, 248) if capped and spec.uses_copy_engine else head_dim)


#: Rounding of a result of size 1, several times over.
TOLERANCE = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 2.0**-18}


@dataclasses.dataclass(frozen=True)
class Ragged:
    """One call: inputs, and what the reference makes of them."""

    inputs: tuple[np.ndarray, ...]
    """dout, q, k, v, out, lse."""
    lengths: dict[str, np.ndarray]
    """seqlens_q and seqlens_k, or cu_seqlens_q and cu_seqlens_k, or none."""
    options: dict[str, Any]
    dlse: np.ndarray | None
    expected: dict[str, np.ndarray]
    """out, lse, dq, dk, dv and, where there is a sink, dsink."""

    @property
    def forward(self) -> tuple[np.ndarray, ...]:
        return self.inputs[1:4]

    def check(self, name: str, got: np.ndarray) -> None:
        expected = self.expected[name]
        assert got.shape == expected.shape, name
        if name == "lse":
            np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-6)
            return
        size = np.abs(expected).max(initial=1)
        tolerance = TOLERANCE[str(self.inputs[0].dtype)] * (1 + size)
        tolerance *= 2 if name == "dsink" else 1  # a sum over the rows of all sequences
        np.testing.assert_allclose(got.astype(np.float64), expected, atol=tolerance, rtol=0, err_msg=name)
        assert not got[expected == 0].astype(np.float64).any() or name == "dsink", f"{name}: zeros are exact"


Options = str | dict[str, Any]
"""A name in OPTIONS, or the options of a call."""


def packed(
    lengths: str, options: Options, head_dim: int, dtype: str, tail: int = 70, seed: int = 0, v_dim: int = 0
) -> Ragged:
    cu_q, cu_k = (np.append(0, np.cumsum(n)).astype(np.int32) for n in LENGTHS[lengths])
    q, k = (cu_q[-1] + tail, 4, head_dim), (cu_k[-1] + tail, 2, head_dim)
    there = np.arange(len(range(q[0]))) < cu_q[-1], np.arange(k[0]) < cu_k[-1]
    return _case(
        q, k, (q[1], q[0]), there, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, options, dtype, seed, v_dim
    )


def padded(
    lengths: str, options: Options, head_dim: int, dtype: str, seed: int = 0, v_dim: int = 0
) -> Ragged:
    queries, keys = (np.array(n, np.int32) for n in LENGTHS[lengths])
    q, k = (3, 4, queries.max() + 3, head_dim), (3, 2, keys.max() + 5, head_dim)
    there = tuple(np.arange(x[2]) < n[:, None, None] for x, n in ((q, queries), (k, keys)))
    return _case(q, k, q[:3], there, {"seqlens_q": queries, "seqlens_k": keys}, options, dtype, seed, v_dim)


def dense(
    lengths: tuple[int, int], options: Options, head_dim: int, dtype: str, seed: int = 0, v_dim: int = 0
) -> Ragged:
    """Sequences that are all as long as the arrays."""
    rows, keys = lengths
    q, k = (3, 4, rows, head_dim), (3, 2, keys, head_dim)
    return _case(q, k, q[:3], (np.True_, np.True_), {}, options, dtype, seed, v_dim)


def _case(q_shape, k_shape, lse_shape, there, lengths, options, dtype, seed, v_dim) -> Ragged:
    """``v_dim``: head dim of v, out and dout; 0: that of q and k."""
    rng = np.random.default_rng(seed)
    dim = v_dim or q_shape[-1]
    q, dout = (rng.standard_normal((*q_shape[:-1], n)).astype(DTYPES[dtype]) for n in (q_shape[-1], dim))
    k, v = (rng.standard_normal((*k_shape[:-1], n)).astype(DTYPES[dtype]) for n in (k_shape[-1], dim))
    dlse = rng.standard_normal(lse_shape).astype(np.float32)
    if isinstance(options, str) and options in OF_WHOLE_ARRAYS:
        # Where a GPU has the lengths, a packed sequence may be as long as the arrays.
        axis = 0 if "cu_seqlens_q" in lengths else 2
        options = of_whole_arrays(options, q_shape[axis], k_shape[axis])
    given = OPTIONS[options] if isinstance(options, str) else options
    is_packed = "cu_seqlens_q" in lengths
    if is_packed:
        positional = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
        out, lse = cufa.attention_varlen_reference(q, k, v, *positional, return_lse=True, **given)
        gradients = cufa.attention_varlen_reference_backward(dout, q, k, v, *positional, dlse=dlse, **given)
    else:
        out, lse = cufa.attention_reference(q, k, v, return_lse=True, **lengths, **given)
        gradients = cufa.attention_reference_backward(dout, q, k, v, dlse=dlse, **lengths, **given)
    names = ("dq", "dk", "dv", "dsink")
    expected = {"out": out, "lse": lse, **dict(zip(names, gradients, strict=False))}
    rows, keys = (np.broadcast_to(x, y) for x, y in zip(there, _rows_of(q_shape, k_shape), strict=True))
    of_out, of_lse = out.astype(q.dtype), lse.astype(np.float32)
    for x in (q, dout, of_out):
        x[~rows] = np.nan
    for x in (k, v):
        x[~keys] = np.nan
    behind = ~np.broadcast_to(there[0], lse_shape)
    of_lse[behind] = dlse[behind] = np.nan
    return Ragged((dout, q, k, v, of_out, of_lse), lengths, given, dlse, expected)


MAKE = {"packed": packed, "padded": padded, "dense": dense}


def _rows_of(q_shape, k_shape):
    """Shapes without the last axis; of packed arrays without heads, which follow it."""
    return (q_shape[:1], k_shape[:1]) if len(q_shape) == 3 else (q_shape[:3], k_shape[:3])
