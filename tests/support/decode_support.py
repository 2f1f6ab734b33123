"""What the tests of decoding share: calls whose unused memory is poisoned, and the error they may have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from support import DTYPES, EPSILON, naive_same_dtype

from cufa import decode_reference
from cufa.calls import dispatch
from cufa.calls.decode_checks import DecodeCall
from cufa.calls.maximum import option_and_array
from cufa.plan.operation import OPERATIONS, SCORE_ARRAYS
from cufa.problem.float8 import cache_scale_shapes
from cufa.problem.options import Options, decode_mask
from cufa.problem.problem import Problem
from cufa.problem.score_function import resolve_score
from cufa.run.cpu.cache import append, tokens_a_scale

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
NAN_BITS = 0x7F
"""NaN in e4m3."""
_OF_KERNELS = ("softmax_max", "key_norms", "invariant")
"""Options that change a result by rounding only."""
WILD_PAGES = (-(2**31), -1, 10**6, 2**31 - 1)


@dataclasses.dataclass
class Case:
    """One call: arrays in "bhsd" and options. Whatever no sequence uses is NaN, or a wild page number."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    options: dict[str, Any]
    lengths: list[int]
    """Valid keys of each sequence, those that are appended included."""

    def arguments(self, layout: str = "bhsd", **changes: Any) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of flash_decode and decode_reference."""
        arrays = [self.q, self.k_cache, self.v_cache]
        options = {**self.options, "layout": layout, **changes}
        if layout == "bshd":
            arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
            for name in ("k_new", "v_new"):
                if options.get(name) is not None:
                    options[name] = np.ascontiguousarray(options[name].swapaxes(1, 2))
        return arrays, options

    @functools.cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        arrays, options = self.arguments()
        if self.fine:
            arrays = [self.q, *(self.stored[f"{x}_cache"] for x in "kv")]
            options |= {f"{x}_scale": self.stored[f"{x}_scale"] for x in "kv"}
            options |= {"k_new": None, "v_new": None}
            options["cache_seqlens"] = np.array(self.lengths, np.int32)
        options = {name: x for name, x in options.items() if name not in _OF_KERNELS}
        return decode_reference(*arrays, **options, return_lse=True)

    @property
    def fine(self) -> bool:
        """Tokens, or blocks of tokens, have scales; new tokens have q's dtype."""
        return np.ndim(self.options.get("k_scale")) > 1

    @functools.cached_property
    def stored(self) -> dict[str, np.ndarray]:
        """Fine scales: caches and scales after the CPU path has appended the new tokens."""
        names = [f"{x}_{what}" for x in "kv" for what in ("cache", "scale", "new")]
        given = {"k_cache": self.k_cache, "v_cache": self.v_cache, "block_table": None, **self.options}
        given |= {name: None if given.get(name) is None else given[name].copy() for name in names}
        if given["k_new"] is not None:
            append(given)
        return given

    def scale_of_keys(self, b: int, name: str) -> np.ndarray:
        """Fine scales, (kv_heads, keys of the sequence, 1)."""
        scale, paged = self.stored[f"{name}_scale"], "block_table" in self.options
        block = tokens_a_scale(scale, self.k_cache, paged)
        scale = scale.reshape(*scale.shape[:2], -1)
        of_keys = [scale[at, :, slot // block] for at, slot in self.places(b, range(self.lengths[b]))]
        return np.array(of_keys).reshape(len(of_keys), scale.shape[1]).T[..., None]

    @property
    def scored(self) -> bool:
        """What changes scores, beyond a cap: the naive computation knows nothing of most of it."""
        changes = {"alibi_slopes", "sink", "mask", "window"} & self.options.keys()
        return bool(changes) and self.q.dtype != np.float64

    @functools.cached_property
    def bound(self) -> float:
        """Twice the error of the naive computation in the dtype, sequence by sequence, plus a rounding. Where scores
        are changed: P and O are rounded to the dtype, once each."""
        dtype = str(self.q.dtype)
        if self.scored:
            values = (np.abs(self.sequence(b, "v")).max(initial=0) for b in range(len(self.lengths)))
            return 1.5 * EPSILON[dtype] * float(max(values, default=0)) + 1e-6
        expected, _ = self.expected
        largest = np.abs(expected).max(initial=0.0)
        error = 0.0
        for b in range(len(self.q)):
            k, v = (self.sequence(b, name) for name in ("k", "v"))
            if k.shape[2]:
                scores = {name: self.options.get(name) for name in ("window", "softcap", "scale")}
                naive = naive_same_dtype(self.q[b : b + 1], k, v, causal=True, **scores)
                error = max(error, np.abs(naive.astype(np.float64) - expected[b]).max())
        values = np.nan_to_num(self._values(self.v_cache)).max(initial=0.0)
        wide = EPSILON["float64" if dtype == "float64" else "float32"]
        return 2 * float(error) + EPSILON[dtype] * float(largest) + 4 * wide * float(np.abs(values))

    @functools.cached_property
    def score_error(self) -> float:
        """What rounding in float32 can change a score: products up to this large may cancel."""
        scale = self.options.get("scale")
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        queries = np.abs(self.q.astype(np.float64)).sum(axis=-1).max(initial=0.0)
        keys = [np.abs(self.sequence(b, "k")).max(initial=0.0) for b in range(len(self.q))]
        return EPSILON["float32"] / 4 * scale * float(queries) * float(max(keys, default=0.0))

    def sequence(self, b: int, name: str) -> np.ndarray:
        """Keys or values of one sequence, (1, kv_heads, length, head_dim), in a dtype wide enough."""
        cache, new = (self.k_cache, self.options.get("k_new")), (self.v_cache, self.options.get("v_new"))
        cache, new = cache if name == "k" else new
        if self.fine:
            cache, new = self.stored[f"{name}_cache"], None
        table = self.options.get("block_table")
        length = self.lengths[b] - (0 if new is None else new.shape[2])
        if table is None:
            tokens = cache[b]
        else:
            pages = cache[table[b, : -(-length // cache.shape[2])]]
            tokens = pages.swapaxes(0, 1).reshape(cache.shape[1], -1, cache.shape[3])
        tokens = tokens[:, :length]
        if new is not None:
            tokens = np.concatenate([tokens, new[b]], axis=1)
        if self.fine:
            return self._values(tokens)[None] * self.scale_of_keys(b, name)
        return self._values(tokens, self.options.get(f"{name}_scale"))[None]

    @staticmethod
    def _values(x: np.ndarray, scale: Any = None) -> np.ndarray:
        x = x.view(FLOAT8) if x.dtype == np.uint8 else x
        wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
        return wide if scale is None else wide * np.asarray(scale)[:, None, None]

    def check(self, out: np.ndarray, lse: np.ndarray | None = None, layout: str = "bhsd") -> None:
        out = out.swapaxes(1, 2) if layout == "bshd" else out
        expected, expected_lse = self.expected
        assert out.dtype == self.q.dtype and out.shape == (*self.q.shape[:-1], self.v_cache.shape[-1])
        got = out.astype(np.float64)
        assert not np.isnan(got).any(), "something unused was read"
        error = np.abs(got - expected).max(initial=0.0)
        assert error <= self.bound, f"max error {error:.3e} over the bound {self.bound:.3e}"
        assert (got[np.isneginf(expected_lse)] == 0).all(), "rows that see no key are zeros"
        if lse is not None:
            assert lse.dtype in (np.float32, str(self.q.dtype))
            atol = (2.0**-14 if self.scored else 2.0**-15) + self.score_error
            np.testing.assert_allclose(lse, expected_lse, rtol=2.0**-18, atol=atol)

    def places(self, b: int, positions: Iterable[int]) -> list[tuple[int, int]]:
        """(batch or page, position in it) of keys of a sequence."""
        table, size = self.options.get("block_table"), self.k_cache.shape[2]
        return [(b, n) if table is None else (int(table[b, n // size]), n % size) for n in positions]

    def assert_stored(self, caches: Mapping[str, np.ndarray]) -> None:
        """New tokens are in the caches, and nothing else has changed."""
        for name in ("k", "v"):
            new, expected = self.options.get(f"{name}_new"), getattr(self, f"{name}_cache").copy()
            if self.fine:
                new, expected = None, self.stored[f"{name}_cache"]
                scales = (x.view(np.uint32) for x in (caches[f"{name}_scale"], self.stored[f"{name}_scale"]))
                np.testing.assert_array_equal(*scales)
            for b, n in enumerate(self.lengths if new is not None else ()):
                for i, at in enumerate(self.places(b, range(n - new.shape[2], n))):
                    expected[at[0], :, at[1]] = new[b, :, i]
            bits = f"u{expected.itemsize}"
            np.testing.assert_array_equal(caches[f"{name}_cache"].view(bits), expected.view(bits))

    def hidden(self) -> Case:
        """The same with NaN in place of the cached keys that no token sees; pages before a window are given back."""
        mask = decode_mask(self.options.get("window"), self.options.get("mask"))
        caches = [self.k_cache.copy(), self.v_cache.copy()]
        tokens, size = self.q.shape[2], self.k_cache.shape[2]
        options, new, scales = dict(self.options), self.options.get("k_new"), []
        if self.fine:
            options |= {f"{x}_scale": options[f"{x}_scale"].copy() for x in "kv"}
            scales = [options[f"{x}_scale"] for x in "kv"]
            scales = [x for x in scales if x.shape == self.k_cache.shape[:3]]
        for b, n in enumerate(self.lengths):
            seen = mask.dense(tokens, n, b).any(axis=0) if n else np.zeros(0, bool)
            for at in self.places(b, np.flatnonzero(~seen[: n - (0 if new is None else new.shape[2])])):
                for cache in (*caches, *scales):
                    cache[at[0], :, at[1]] = NAN_BITS if cache.dtype == np.uint8 else np.nan
            if "block_table" in options and "window" in options:
                first = int(np.flatnonzero(seen)[0]) if seen.any() else 0
                first = first if new is None else min(first, n - new.shape[2])
                options["block_table"] = options["block_table"].copy()
                options["block_table"][b, : first // size] = WILD_PAGES[0]
        return Case(self.q, *caches, options, self.lengths)


def numbers_of_heads(few: str, batch: int, heads: int) -> dict[str, np.ndarray]:
    """ "sink", "alibi" (slopes of each head), "alibi_of_batch" (of each sequence's) or "both". No two heads have the
    same; one sink is none, one outweighs all keys. Slopes are small enough for far keys to matter."""
    rng, found = np.random.default_rng(5), {}
    if few in ("sink", "both"):
        sink = rng.permutation(np.linspace(-2, 6, heads)).astype(np.float32)
        sink[:2] = -np.inf, 12
        found["sink"] = sink
    if few != "sink":
        slopes = rng.permutation(np.linspace(0.004, 0.25, batch * heads)).astype(np.float32)
        slopes = slopes.reshape(batch, heads)
        found["alibi_slopes"] = slopes if few == "alibi_of_batch" else slopes[0].copy()
    return found


def poison(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """NaN; bytes are e4m3."""
    return np.full(shape, NAN_BITS if dtype == np.uint8 else np.nan, dtype)


def in_cache(
    sequences: Sequence[Sequence[np.ndarray]], rooms: Sequence[int], size: int, order: Any, table: np.ndarray
) -> list[np.ndarray]:
    """Caches in pages of ``size`` slots, one for each array of a sequence, (kv_heads, tokens, head_dim).

    Unused slots are NaN. ``rooms``: slots that the sequences need; ``order``: all pages, in the order of use; ``table``
    gets them.
    """
    caches = [poison((len(order), x.shape[0], size, x.shape[2]), x.dtype) for x in sequences[0]]
    taken = iter(np.asarray(order).tolist())
    for row, arrays, room in zip(table, sequences, rooms, strict=True):
        row[: -(-room // size)] = [next(taken) for _ in range(-(-room // size))]
        for cache, x in zip(caches, arrays, strict=True):
            for i in range(0, x.shape[1], size):
                cache[row[i // size], :, : x.shape[1] - i] = x[:, i : i + size]
    return caches


def make_case(
    lengths: Sequence[int], *, heads: int = 4, kv_heads: int = 2, tokens: int = 1, head_dim: int = 16,
    dtype: str = "float16", fp8: bool | str = False, page_size: int = 0, capacity: int | None = None,
    new: int = 0, spread: float = 1.0, seed: int = 0, v_dim: int = 0, **scores: Any,
) -> Case:  # fmt: skip
    """``lengths`` count what is appended, ``new`` tokens of each sequence. ``capacity`` defaults to a
    little more than the longest; None of ``lengths`` may be below ``new``. ``fp8``: also "block" or "token", which have
    scales, and new tokens of q's dtype. ``v_dim``: head dim of values; 0: ``head_dim``. ``scores``: window, softcap and
    scale, as for the call; None is left out."""
    rng, dims = np.random.default_rng(seed), (head_dim, v_dim or head_dim)
    batch, longest = len(lengths), max(lengths, default=0)
    capacity = longest + 5 if capacity is None else capacity
    options: dict[str, Any] = {"cache_seqlens": np.array([n - new for n in lengths], np.int32)}
    options |= {name: value for name, value in scores.items() if value is not None}

    def draw(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return x.astype(FLOAT8).view(np.uint8) if fp8 else x.astype(DTYPES[dtype])

    q = (spread * rng.standard_normal((batch, heads, tokens, head_dim))).astype(DTYPES[dtype])
    if fp8:
        options |= {f"{x}_scale": rng.uniform(0.3, 2, kv_heads).astype(np.float32) for x in "kv"}
    if new:
        options |= {f"{x}_new": draw(batch, kv_heads, new, n) for x, n in zip("kv", dims, strict=True)}
    tokens_of = [[draw(kv_heads, n - new, d) for d in dims] for n in lengths]
    if page_size:
        table = rng.choice(WILD_PAGES, (batch, -(-capacity // page_size))).astype(np.int32)
        order = rng.permutation(sum(-(-n // page_size) for n in lengths) + 3)
        caches = in_cache(tokens_of, lengths, page_size, order, table)
        options["block_table"] = table
    else:
        one_each = np.zeros((batch, 1), np.int32)
        caches = in_cache(tokens_of, [capacity] * batch, capacity, range(batch), one_each)
    case = Case(q, *caches, options, list(lengths))
    if isinstance(fp8, str):
        shape, block = cache_scale_shapes(caches[0].shape, page_size > 0, head_dim)[fp8]
        for name in ("k_scale", "v_scale"):
            options[name] = np.full(shape, np.nan, np.float32)
            flat = options[name].reshape(*shape[:2], -1)
            for b, n in enumerate(lengths):
                for at, slot in case.places(b, range(n - new)):
                    flat[at, :, slot // block] = rng.uniform(0.3, 2, kv_heads) ** 2
        if new:
            drawn = rng.standard_normal((2, batch, kv_heads, new, head_dim)).astype(DTYPES[dtype])
            options |= {"k_new": drawn[0], "v_new": drawn[1]}
    return case


def prepare(
    case: Case, layout: str = "bhsd", *, on_gpu: bool = False, place: Callable[[Any], Any] = np.asarray
) -> tuple[Problem, dict[str, Any]]:
    """The problem of the call, and the operands by name as plans are run with them: copies of the caches, results of
    NaN. ``place`` puts each array where it is computed."""
    (q, *caches), options = case.arguments(layout)
    given = {"q": q, **dict(zip(("k_cache", "v_cache"), (x.copy() for x in caches), strict=True)), **options}
    given = {name: place(x.copy()) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    scores = {name: options.get(name) for name in ("softcap", "scale")}
    fixed, given["softmax_max"] = option_and_array(given.get("softmax_max"))
    more = {"softmax_max": "" if fixed is None else fixed, "invariant": options.get("invariant", False)}
    score = resolve_score(options.get("score"), options.get("bias"))
    mask = decode_mask(options.get("window"), options.get("mask"))
    asked = Options(mask, layout=layout, score=score, **scores, **more)
    arrays = score.arrays.values() if score is not None else ()
    given |= {x.name: place(array) for x, array in zip(SCORE_ARRAYS, arrays, strict=False)}
    in_order = [given.get(x.name) for x in OPERATIONS["decode"].all_operands]
    call, problem = DecodeCall.read(in_order, ("out", "lse"), asked).check(on_gpu)
    operands = call.arrays(call.allocate(problem, lambda shape, dtype: place(np.full(shape, np.nan, dtype))))
    return (dispatch.with_memory(problem, operands) if on_gpu else problem), operands


def on_gpu(cp, case, layout="bhsd", **changes):
    """(arrays, options) with every array on the GPU."""
    arrays, options = case.arguments(layout, **changes)
    options = {n: cp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    return [cp.asarray(x) for x in arrays], options
