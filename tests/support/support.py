"""What tests share: inputs, the naive computation that errors are compared with, the error bound."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from cufa import attention_reference
from cufa.calls import shapes
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig
from cufa.plan.planner import Plan, make_plan
from cufa.problem.mask import Mask
from cufa.problem.options import Options, resolve_mask
from cufa.problem.problem import Problem
from cufa.problem.scores import softcapped

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

#: Distance between 1 and the next number: one rounding is half of it.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}

#: tf32 keeps float16's mantissa; its products are as rough as that.
TF32_EPSILON = 2.0**-10


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computed once for arguments of the same contents: tests hold many kernels and tiles to one result."""
    kept: dict[Any, Any] = {}

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        key = _contents(arguments), _contents(options)
        if key not in kept:
            if len(kept) == 32:
                kept.pop(next(iter(kept)))
            kept[key] = found = function(*arguments, **options)
            for x in found if isinstance(found, tuple) else (found,):
                if isinstance(x, np.ndarray):
                    x.flags.writeable = False
        return kept[key]

    return call


def _contents(x: Any) -> Any:
    """What tells arguments apart: of an array its shape, dtype and a digest of its bytes."""
    if isinstance(x, np.ndarray):
        return x.shape, str(x.dtype), hashlib.blake2b(x.tobytes()).digest()
    if isinstance(x, tuple | list):
        return tuple(map(_contents, x))
    if isinstance(x, dict):
        return tuple((name, _contents(y)) for name, y in x.items())
    if dataclasses.is_dataclass(x) and not isinstance(x, Mask):
        return type(x), tuple(_contents(getattr(x, field.name)) for field in dataclasses.fields(x))
    return x


reference = once(attention_reference)


def make_inputs(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int,
    dtype: str = "float16", *, layout: str = "bhsd", seed: int = 0, spread: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Normal q, k, v in the layout asked for; ``spread`` multiplies q, so it widens the scores."""
    rng = np.random.default_rng(seed)

    def draw(heads: int, seqlen: int, factor: float) -> np.ndarray:
        shape = (batch, heads, seqlen, head_dim) if layout == "bhsd" else (batch, seqlen, heads, head_dim)
        return (factor * rng.standard_normal(shape)).astype(DTYPES[dtype])

    return draw(heads, seqlen_q, spread), draw(kv_heads, seqlen_k, 1.0), draw(kv_heads, seqlen_k, 1.0)


def seen(
    q: np.ndarray, k: np.ndarray, causal: bool = False, window: Any = None, mask: Mask | None = None
) -> np.ndarray:
    """Every score that the mask lets through, (seqlen_q, seqlen_k); where it differs, of each sequence and head."""
    mask, lengths = resolve_mask(causal, window, mask), (q.shape[2], k.shape[2])
    if mask.spread == (1, 1):
        return mask.dense(*lengths)
    batch, heads = q.shape[:2]
    own = [mask.head_of(head, heads) for head in range(heads)]
    return np.array([[mask.dense(*lengths, b, head) for head in own] for b in range(batch)])


def rounded_to(dtype: np.dtype) -> tuple[Callable[..., np.ndarray], Callable[[np.ndarray], np.ndarray], type]:
    """Arithmetic of a framework's own operations: products, accumulated in float32 (float64 for float64), the rounding
    of each array to the dtype, and the type of the accumulator. Products of float32 are in order; for others that is
    not what rounds."""
    wide = np.float64 if dtype == np.float64 else np.float32
    return in_order if dtype == np.float32 else np.matmul, lambda x: x.astype(dtype).astype(wide), wide


def weights_same_dtype(
    q: np.ndarray, k: np.ndarray, softcap: float | None, scale: float | None, **mask: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities, scores under their cap), each array rounded to the dtype."""
    product, rounded, wide = rounded_to(q.dtype)
    scale = wide(q.shape[-1] ** -0.5 if scale is None else scale)
    keys = np.repeat(k, q.shape[1] // k.shape[1], axis=1).astype(wide)
    s = rounded(product(q.astype(wide), keys.swapaxes(-1, -2)) * scale)
    s = s if softcap is None else rounded(softcapped(s, softcap))
    shown = np.where(seen(q, k, **mask), s, wide(-np.inf))
    m = shown.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(shown - np.where(np.isneginf(m), 0, m))
    total = p.sum(-1, keepdims=True)
    return rounded(p / np.where(total == 0, 1, total)), s


@once
def naive_same_dtype(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softcap: float | None = None, scale: float | None = None,
    **mask: Any,
) -> np.ndarray:  # fmt: skip
    """What three array expressions give. Arrays in "bhsd"; ``mask``: causal, window or mask."""
    product, _, wide = rounded_to(q.dtype)
    with np.errstate(all="ignore"):
        p, _ = weights_same_dtype(q, k, softcap, scale, **mask)
        return product(p, np.repeat(v, q.shape[1] // k.shape[1], axis=1).astype(wide)).astype(q.dtype)


def written_out(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, seen: Any = True, scale: float | None = None, bias: Any = 0.0,
    cap: float | None = None, slopes: Any = 0.0, shift: int = 0, sink: Any = -np.inf,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out, lse) in float64, score by score, as an array program says it: scale, bias, cap, ALiBi, mask, and the sink
    as one more column. Independent of the reference, which is tested by it. Arrays in "bhsd"."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    s = s if cap is None else cap * np.tanh(s / cap)
    distance = np.abs(np.arange(q.shape[2])[:, None] + shift - np.arange(k.shape[2]))
    s = s - np.broadcast_to(slopes, s.shape[:2])[..., None, None] * distance
    logit = np.broadcast_to(np.reshape(sink, (-1, 1, 1)), (*s.shape[:3], 1))
    s = np.concatenate([np.where(seen, s, -np.inf), logit], axis=-1)
    p = np.exp(s)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p[..., :-1] / np.where(total == 0, 1, total) @ v, np.log(total)[..., 0]


def in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in float32 summed in order, as one thread would. BLAS sums pairwise over vector lanes, which on short
    vectors is luckier than any single accumulator, a tensor core's included."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for i in range(a.shape[-1]):
        total += a[..., :, i : i + 1] * b[..., i : i + 1, :]
    return total


def assert_attention(
    out: np.ndarray, lse: np.ndarray | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, *,
    scale: float | None = None, layout: str = "bhsd", precision: str | None = None, **scores: Any,
) -> float:  # fmt: skip
    """Max error against float64 at most twice the naive computation's, plus one rounding; returns it.
    ``scores``: causal, window, mask and softcap, as for the call."""
    if layout == "bshd":
        q, k, v, out = (x.transpose(0, 2, 1, 3) for x in (q, k, v, out))
    dtype = str(q.dtype)
    expected, expected_lse = reference(q, k, v, scale=scale, return_lse=True, **scores)
    naive = naive_same_dtype(q, k, v, scale=scale, **scores).astype(np.float64)
    finite = np.isfinite(expected)
    got = out.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg="where NaN is")
    largest = np.abs(expected[finite]).max(initial=0.0)
    naive_error = np.abs(naive - expected)[finite & np.isfinite(naive)].max(initial=0.0)
    bound = 2 * naive_error + EPSILON[dtype] * largest
    # Where values cancel, what rounds is as large as they are, not as the result; naive may be lucky there.
    values = np.nan_to_num(v.astype(np.float64), nan=0, posinf=0, neginf=0)
    bound += 4 * EPSILON["float64" if dtype == "float64" else "float32"] * np.abs(values).max(initial=0.0)
    if precision == "tf32":
        spread = np.abs(expected_lse[np.isfinite(expected_lse)]).max(initial=1.0)
        bound += TF32_EPSILON * largest * max(1.0, spread)
    error = float(np.abs(got - expected)[finite].max(initial=0.0))
    assert error <= bound, f"max error {error:.3e} over the bound {bound:.3e} (naive {naive_error:.3e})"
    if lse is not None:
        _assert_lse(lse, expected_lse, dtype, _tf32_score_error(q, k, scale) if precision == "tf32" else 0.0)
    return error


def _tf32_score_error(q: np.ndarray, k: np.ndarray, scale: float | None) -> float:
    """Most that rounding q and k to tf32 can change a score: each product by one part in 2^10."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    with np.errstate(invalid="ignore"):
        sums = np.matmul(np.abs(q), np.abs(np.swapaxes(k, -1, -2)))
    sums = sums[np.isfinite(sums)].max(initial=0.0)
    return TF32_EPSILON * float(sums) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _assert_lse(lse: np.ndarray, expected: np.ndarray, dtype: str, score_error: float) -> None:
    """In float32 or better whatever the inputs: products of 16-bit inputs are exact in its accumulator."""
    assert lse.dtype in (np.float32, dtype)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(
            lse.astype(np.float64), expected, rtol=2.0**-18, atol=2.0**-15 + score_error
        )


def uneven_rows(dtype: str = "float32", head_dim: int = 64, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k and v whose neighbouring rows differ in size by up to 50,000, as outliers among tokens do."""
    q, k, v = make_inputs(1, 2, 2, 130, 130, head_dim, dtype, seed=seed)
    rng = np.random.default_rng(seed)
    for x in (q, k):
        x *= (10.0 ** rng.uniform(-4, 0, (*x.shape[:3], 1))).astype(x.dtype)
    v *= np.where(rng.random((*v.shape[:3], 1)) < 0.125, 10, 2e-4).astype(v.dtype)
    return q, k, v


def assert_every_row(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> None:
    """Each row as good as its own size asks, be others as large as they like: at most twice the naive
    computation's error, relative to the row, plus a few roundings."""
    expected = reference(q, k, v, causal=causal)
    sizes = np.abs(expected).max(-1)

    def worst(x: np.ndarray) -> float:
        return float((np.abs(x.astype(np.float64) - expected).max(-1) / sizes).max())

    bound = 2 * worst(naive_same_dtype(q, k, v, causal=causal)) + 4 * EPSILON[str(q.dtype)]
    assert worst(out) <= bound, f"a row is off by {worst(out):.1e} of its size, over {bound:.1e}"


def poisoned_like(x: Any, xp: Any = np) -> Any:
    """An output buffer full of NaN: what is never written shows."""
    out = xp.empty(x.shape, x.dtype)
    out[...] = np.nan
    return out


def make_problem(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False, *, mask: Mask | None = None,
    softcap: float | None = None,
) -> Problem:  # fmt: skip
    """Of arrays in "bhsd", with the default scale."""
    return shapes.make_problem(
        [x.shape for x in (q, k, v)], str(q.dtype), Options(resolve_mask(causal, None, mask), softcap)
    )


def forward_operands(q: Any, k: Any, v: Any, xp: Any = np, lse: bool = True) -> dict[str, Any]:
    """Of a forward call in "bhsd", as plans are run with them; what is never written shows as NaN."""
    empty = xp.full(q.shape[:3], xp.nan, xp.float32) if lse else None
    return {"q": q, "k": k, "v": v, "out": poisoned_like(q, xp), "lse": empty}


def assert_tiles(plan: Plan, records: np.ndarray) -> None:
    """One record per block of each sequence and head: it visits as many tiles, and as many clear ones, as the schedule
    says, the first of each where it says. (naive has no tiles to count.)"""
    if plan.spec.name == "naive":
        assert len(records) == 0
        return
    found = {(int(x["batch"]), int(x["head"]), int(x["q_block"])): x for x in records}
    blocks = 0
    for part in plan.problem.parts:
        schedule = plan.schedule_of(part.problem)
        by_keys, problem = schedule.by_keys, plan.problem
        heads = range(problem.kv_heads)[part.kv_heads] if by_keys else range(problem.heads)[part.heads]
        sequences = range(part.sequence, part.sequence + part.problem.batch)
        for place in itertools.product(sequences, heads, range(len(schedule.classes))):
            record, classes = found[place], schedule.classes[place[2]]
            visited, clear = np.flatnonzero(classes > 0), np.flatnonzero(classes == 2)
            expected = {"tiles_visited": len(visited), "tiles_clear": len(clear)}
            expected |= {"tiles_skipped": len(classes) - len(visited)}
            expected |= {"first_tile": visited[0]} if len(visited) else {}
            expected |= {"first_clear": clear[0]} if len(clear) else {}
            assert {name: record[name] for name in expected} == expected, place
            blocks += 1
    assert blocks == len(records) == len(found)


def on_blocks(plan: Plan, blocks: int) -> Plan:
    """The plan of a persistent kernel on this number of thread blocks, none of them idle. With few blocks, the pipeline
    runs on from item to item even in small problems."""
    *before, launch = plan.launches
    assert launch.persistent
    launch = dataclasses.replace(launch, grid=(min(blocks, launch.grid[0]), 1, 1))
    return dataclasses.replace(plan, launches=(*before, launch))


def plan_with_blocks(problem: Problem, config: TileConfig, blocks: int) -> Plan:
    """Of FA3's forward."""
    return on_blocks(make_plan(problem, Device.typical("sm_90"), "fa3", config, num_splits=1), blocks)


def stalling_lengths(config: TileConfig) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) that FA3's pipeline once waited on for ever, and their neighbours: the last query
    block hangs over the end by one warpgroup or more, about one key tile more than there are buffers."""
    past_the_end = [64, config.block_q - 64, config.block_q + 1, 2 * config.block_q - 64]
    keys = [(config.num_stages + n) * config.block_kv + 1 for n in (-1, 0, 1)]
    return [(q, k) for q in dict.fromkeys(past_the_end) if q > 0 for k in keys]


def changed(instance: Any, **attributes: Any) -> Any:
    """A kernel or an operation that differs from ``instance`` in these attributes; a function replaces a method, and
    is called without ``self``."""
    cached = {
        name
        for kind in type(instance).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, functools.cached_property)
    }
    other = object.__new__(type(instance))
    other.__dict__.update({k: v for k, v in vars(instance).items() if k not in cached} | attributes)
    return other


class OnlyDLPack:
    """An array that offers nothing but DLPack."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._x.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


def in_threads(work: Callable[[int], None], count: int) -> None:
    """work(0), …, work(count - 1) in threads, at once. Raises the first of their errors."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, i) for i in range(count)]:
            done.result()
