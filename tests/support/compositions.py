"""Random compositions: mask × lengths × score changes × dtype × widths × order × dropout, and their comparison with
float64. A number draws a build (what kernels are compiled for), ``DRAWS`` numbers share it; each draws its own data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import cufa
from cufa import masks
from cufa.problem.element import ELEMENTS

DRAWS = 8

Rng = np.random.Generator


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, np.clip(j - i, -20, 19) + 20]


def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 3 * np.tanh(s / 3)


def scaled(s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, delta: Any) -> Any:
    return s * slopes[h] - 0.05 * np.abs(i + delta - j)


def woven(b: Any, h: Any, i: Any, j: Any, ids: Any, delta: Any) -> Any:
    return ((ids[b, i % 7] + j + h) % 3 != 0) & (j <= i + delta + 40)


@dataclasses.dataclass(frozen=True)
class Build:
    """What is compiled for."""

    dtype: str
    precision: str | None
    head_dim: int
    v_dim: int
    heads: tuple[int, int]
    lengths: str
    mask: str
    softcap: bool
    alibi: bool
    sink: bool
    score: str
    dropout: bool
    deterministic: bool

    @classmethod
    def draw(cls, rng: Rng, head_dims: list[int]) -> Build:
        def some(share: float) -> bool:
            return bool(rng.random() < share)

        def one(choices: Any) -> Any:
            return choices[rng.integers(len(choices))]

        dtype, head_dim, score = one(["float16", "bfloat16", "bfloat16", "float32"]), one(head_dims), ""
        mask = one([
            "full", "causal", "window", "prefix", "streaming", "global", "chunks", "either", "function", "columns",
            "columns2", "bits",
        ])  # fmt: skip
        if some(0.3):
            score = one(["relative", "capped", "scaled", "bias"])
        lengths = one(["dense", "padded", "packed"])
        return cls(
            dtype, one(["float32", "tf32"]) if dtype == "float32" else None, head_dim,
            one(head_dims) if some(0.25) else head_dim, one([(1, 1), (2, 1), (4, 2), (3, 3)]), lengths, mask,
            some(0.3), some(0.25), some(0.25), score, some(0.5), some(0.4),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Composition:
    """A call: arrays, and the keywords of forward, backward and reference."""

    build: Build
    q: Any
    k: Any
    v: Any
    dout: Any
    options: dict[str, Any]
    gradients: tuple[str, ...]

    def __str__(self) -> str:
        shapes = f"q {self.q.shape} k {self.k.shape} v {self.v.shape}"
        return f"{self.build} {shapes} {', '.join(self.options)}"


def composition(number: int, head_dims: list[int], longest: int) -> Composition:
    build = Build.draw(np.random.default_rng([number // DRAWS, 49]), head_dims)
    rng = np.random.default_rng([number, 7])
    heads, kv_heads = build.heads
    batch, seqlen_q, seqlen_k = int(rng.integers(1, 4)), *(int(x) for x in rng.integers(1, longest, 2))
    dtype = ELEMENTS[build.dtype].dtype
    options: dict[str, Any] = {}
    of_mask = [seqlen_q, seqlen_k]
    if build.lengths == "packed":
        queries, keys = (rng.integers(0, n + 1, batch) for n in (seqlen_q, seqlen_k))
        keys[0] = max(keys[0], 1)
        queries[0] = max(queries[0], 1)
        options |= {
            f"cu_seqlens_{x}": np.cumsum([0, *n]).astype(np.int32)
            for x, n in zip("qk", (queries, keys), strict=True)
        }
        of_mask = [int(n.max() + rng.integers(0, 40)) for n in (queries, keys)]  # its arrays may be longer
        seqlen_q, seqlen_k = (int(n.sum() + rng.integers(0, 9)) for n in (queries, keys))
    elif build.lengths == "padded":
        options |= {
            f"seqlens_{x}": rng.integers(0, n + 1, batch).astype(np.int32)
            for x, n in zip("qk", (seqlen_q, seqlen_k), strict=True)
        }

    def array(count: int, seqlen: int, width: int) -> Any:
        shape = (seqlen, count, width) if build.lengths == "packed" else (batch, count, seqlen, width)
        return rng.standard_normal(shape).astype(dtype)

    q, k = array(heads, seqlen_q, build.head_dim), array(kv_heads, seqlen_k, build.head_dim)
    v, dout = array(kv_heads, seqlen_k, build.v_dim), array(heads, seqlen_q, build.v_dim)
    for b in range(batch) if build.lengths == "padded" else ():  # padding may hold NaN
        for x, name in ((q, "q"), (k, "k"), (v, "k"), (dout, "q")):
            x[b, :, options[f"seqlens_{name}"][b] :] = np.nan
    if build.lengths == "packed" and build.mask != "function":
        for x, name in ((q, "q"), (k, "k"), (v, "k"), (dout, "q")):
            x[options[f"cu_seqlens_{name}"][-1] :] = np.nan
    options |= _mask(build.mask, rng, batch, kv_heads, *of_mask)
    if build.softcap:
        options["softcap"] = float(rng.uniform(2, 30))
    if build.alibi:
        options["alibi_slopes"] = rng.uniform(-0.1, 0.3, heads).astype(np.float32)
    if build.sink:
        options["sink"] = rng.standard_normal(heads).astype(np.float32)
    if build.dropout:
        options |= {
            "dropout": float(rng.uniform(0.01, 0.9)),
            "seed": rng.integers(0, 2**63, 2).astype(np.uint64),
        }
    gradients = _score(build, rng, options, batch, heads, seqlen_q, seqlen_k)
    return Composition(build, q, k, v, dout, options, gradients)


def _mask(kind: str, rng: Rng, batch: int, kv_heads: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    def up_to(n: int, size: Any = None) -> Any:
        found = rng.integers(0, n + 1, size)
        return int(found) if size is None else found

    if kind == "full":
        return {}
    if kind == "causal":
        return {"causal": True}
    if kind == "window":
        return {"window": (up_to(seqlen_k), up_to(30))}
    if kind == "prefix":
        return {"mask": masks.prefix(up_to(seqlen_k) if rng.random() < 0.5 else up_to(seqlen_k, batch))}
    if kind == "streaming":
        return {"mask": masks.streaming(up_to(20), up_to(seqlen_k))}
    if kind == "global":
        return {"mask": masks.global_window(up_to(20), up_to(50), up_to(50))}
    if kind == "chunks":
        return {"mask": masks.chunks(1 + up_to(60))}
    if kind == "function":
        return {"mask": masks.where(woven, ids=rng.integers(0, 99, (batch, 7)).astype(np.int32))}
    if kind == "either":
        return {"mask": masks.window(up_to(40), up_to(9)) | masks.prefix(up_to(seqlen_k, batch))}
    spread = (batch if rng.random() < 0.5 else 1, kv_heads if rng.random() < 0.5 else 1)
    if kind == "bits":
        seqlen_q = 1 if rng.random() < 0.2 else seqlen_q  # which all queries share
        return {"mask": rng.random((*spread, seqlen_q, seqlen_k)) < rng.uniform(0.02, 0.9)}
    runs = np.sort(
        rng.integers(0, seqlen_q + 1, (*spread, seqlen_k, 2 * (1 + (kind == "columns2")))), axis=-1
    )
    causal = kind == "columns"
    return {"mask": masks.from_flashmask(runs.astype(np.int32), causal=causal)}


def _score(
    build: Build, rng: Rng, options: dict[str, Any], batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> tuple[str, ...]:
    """Adds the score function to the options; returns the arrays whose gradients are asked for."""
    ask = rng.random() < 0.5
    if build.score == "relative":
        options["score"] = cufa.score(relative, table=rng.standard_normal((heads, 40)).astype(np.float32))
        return ("table",) * ask
    if build.score == "capped":
        options["score"] = cufa.score(capped)
    if build.score == "scaled":
        options["score"] = cufa.score(scaled, slopes=rng.uniform(0.5, 1.5, heads).astype(np.float32))
    if build.score == "bias":
        options["bias"] = rng.standard_normal((1, heads, 1, 2000)).astype(np.float32)[..., :seqlen_k]
        if build.lengths == "packed":
            del options["bias"]
    return ()


def compare(it: Composition, forward: Callable[..., Any], backward: Callable[..., Any]) -> str:
    """ "" if the results are those of float64, else what is wrong. ``forward`` and ``backward`` take a composition, the
    second also out and lse."""
    packed = "cu_seqlens_q" in it.options
    reference = cufa.attention_varlen_reference if packed else cufa.attention_reference
    of_backward = cufa.attention_varlen_reference_backward if packed else cufa.attention_reference_backward
    lengths = [it.options[f"cu_seqlens_{x}"] for x in "qk"] if packed else []
    options = {x: y for x, y in it.options.items() if not x.startswith("cu_")}
    exact = reference(it.q, it.k, it.v, *lengths, return_lse=True, **options)
    more = {"gradients": it.gradients} if it.gradients else {}
    expected = of_backward(it.dout, it.q, it.k, it.v, *lengths, **options, **more)
    out, lse = forward(it)
    wrong = _far(it, "out", out, exact[0]) or _far(it, "lse", lse, exact[1], 0.2)
    names = ("dq", "dk", "dv", *["dsink"] * it.build.sink, *it.gradients)
    for name, x, y in zip(names, backward(it, out, lse), expected, strict=True):
        # Sums over all scores: those of a row, whose exact sum is 0, may meet in one element.
        wrong = wrong or _far(it, name, x, y, 1.0 if name in ("dq", "dk", "dv") else 16.0)
    return wrong


def _errors_in_a_key(it: Composition) -> float:
    """Standard deviation of a sum of P over the queries of a key, each with a random sign: above 1 only where many
    queries see few keys."""

    def lengths(axis: str, x: Any) -> Any:
        packed = it.options.get(f"cu_seqlens_{axis}")
        return it.options.get(f"seqlens_{axis}", x.shape[2]) if packed is None else np.diff(packed)

    heads, kv_heads = it.build.heads
    rows, keys = lengths("q", it.q) * heads / kv_heads, lengths("k", it.k)
    return float(max(1, np.max(rows**0.5 / np.maximum(keys, 1))))


def _far(it: Composition, name: str, found: Any, exact: Any, factor: float = 1.0) -> str:
    found = np.asarray(found, np.float64)
    if found.shape != exact.shape:
        return f"{name} has shape {found.shape}, not {exact.shape}"
    if not (np.isneginf(found) == np.isneginf(exact)).all() or np.isnan(found).any():
        return f"{name} is infinite or NaN in other places"
    rounding = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 3e-5, "float64": 1e-11}[it.build.dtype]
    rounding = 4e-3 if it.build.precision == "tf32" else rounding
    kept = 1 / (1 - it.options.get("dropout", 0))
    there = np.isfinite(exact)
    error = np.abs(np.where(there, found, 0) - np.where(there, exact, 0)).max(initial=0)
    # rowsum(dO ∘ O) rounds as large sums do. Of a row that sees one key it equals dP: O's rounding is all of the error.
    natural = kept * max(1, it.build.v_dim / 32) ** 0.5
    natural *= _errors_in_a_key(it) if name == "dk" else 1
    bound = factor * rounding * max(np.abs(exact[there]).max(initial=0), natural)
    return "" if error <= bound else f"{name} is off by {error:.3g}, bound {bound:.3g}"
