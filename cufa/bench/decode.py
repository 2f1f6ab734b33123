"""`cufa bench decode`: a query token against a long cache, beside other libraries and a plain streaming read.

A case is one cache in device memory; its contenders take turns on it. Rates are bytes of keys and values,
each once, over time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..core.architectures import Device
from ..core.problem import Problem, default_scale
from ..decode.operands import DecodeOperands
from ..decode.plan import DecodePlan, make_decode_plan
from ..decode.problem import DecodeProblem
from ..nvrtc.compiler import cupy_options, translation_unit
from ..ops.arrays import is_device_array
from . import peers
from .records import Json, digest
from .runner import normal_on_gpu, poison
from .timing import Timing, Watch, as_nanoseconds, measure

READ = "streaming read"
PEERS = ("torch flash", "torch cudnn")

#: (sequence, key/value head) pairs whose rows are compared with float64, if there are so many.
_CHECKED = 8


@dataclasses.dataclass(frozen=True)
class DecodeContender:
    """One way of ours to run a case. The cache's memory is the case's, whatever shape it is given."""

    label: str
    problem: DecodeProblem
    schedule: str = "auto"
    num_splits: int | None = None

    def plan(self, device: Device) -> DecodePlan:
        return make_decode_plan(self.problem, device, self.num_splits, self.schedule)


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    title: str
    contenders: tuple[DecodeContender, ...]
    lengths: tuple[int, ...] | None = None
    """Valid keys of each sequence; None: all are full."""
    with_peers: bool = False

    @property
    def problem(self) -> DecodeProblem:
        """Of the first contender, the one that the others are compared with."""
        return self.contenders[0].problem

    @property
    def kv_bytes(self) -> int:
        return self.problem.kv_bytes(self.lengths)


@dataclasses.dataclass(frozen=True)
class DecodeTiming:
    """One contender of a case, measured: what a record keeps of it."""

    case: str
    label: str
    problem: DecodeProblem
    timing: Timing
    kv_bytes: int
    error: float | None
    """Largest absolute difference from float64 over the rows checked; None for the streaming read."""

    @property
    def tbytes(self) -> float:
        """TB/s of keys and values, each read once."""
        return self.kv_bytes / self.timing.p50 * 1e-12


@dataclasses.dataclass(frozen=True)
class DecodeRow(DecodeTiming):
    """Measured in this process, so that its plan is there."""

    plan: DecodePlan | None
    """None for peers and the streaming read."""


def make(batch: int, heads: int, kv_heads: int, capacity: int, **options: Any) -> DecodeProblem:
    """One query token, head dim 128, bfloat16, as published figures have it."""
    dtype, cache = "bfloat16", options.pop("cache_dtype", "bfloat16")
    scale = default_scale(128)
    return DecodeProblem(batch, heads, kv_heads, 1, capacity, 128, dtype, cache, scale, **options)


#: batch, query and key/value heads, cached tokens.
PUBLISHED = (
    (1, 32, 8, 1 << 10),
    (1, 32, 8, 8 << 10),
    (1, 32, 8, 128 << 10),
    (8, 32, 8, 32 << 10),
    (64, 32, 8, 8 << 10),
    (1, 32, 32, 32 << 10),
    (16, 64, 1, 16 << 10),
    (1, 64, 8, 512 << 10),
)


def cases() -> Iterator[DecodeCase]:
    """Published shapes; then one thing at a time: ragged lengths, pages, groups, an 8-bit cache."""
    for batch, heads, kv_heads, capacity in PUBLISHED:
        title = f"{batch} × {heads}/{kv_heads} × {capacity >> 10}k"
        problem = make(batch, heads, kv_heads, capacity)
        yield DecodeCase(title, (DecodeContender("flash_decode", problem),), with_peers=True)
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(128), np.log(65536), 64)).astype(int)
    ragged = make(64, 32, 8, 64 << 10, ragged=True)
    yield DecodeCase(
        "64 ragged × 32/8, 128 to 64k",
        (
            DecodeContender("balanced", ragged, "balanced"),
            DecodeContender("fixed", ragged, "fixed"),
            # As a host would cut that knows the lengths, which ours never reads: the plan is for the longest.
            DecodeContender("fixed, 8 splits", ragged, "fixed", 8),
        ),
        tuple(int(n) for n in lengths),
    )
    capacity = 32 << 10
    contiguous = make(8, 32, 8, capacity)
    pages = [
        make(8, 32, 8, capacity, page_size=size, max_pages=capacity // size, num_pages=8 * capacity // size)
        for size in (16, 128)
    ]
    yield DecodeCase(
        "8 × 32/8 × 32k, pages",
        (
            DecodeContender("contiguous", contiguous),
            *(DecodeContender(f"pages of {p.page_size}", p) for p in pages),
        ),
    )
    yield DecodeCase(
        "8 × 32k, groups of query heads",
        tuple(DecodeContender(f"{h}/8 heads", make(8, h, 8, capacity)) for h in (8, 32, 64)),
    )
    fp8 = make(8, 32, 8, capacity, cache_dtype="float8_e4m3")
    yield DecodeCase("8 × 32/8 × 32k, e4m3 cache", (DecodeContender("flash_decode", fp8),))


def run_case(
    case: DecodeCase, device: Device, *, torch: bool, seconds: float = 0.5, watch: Watch | None = None
) -> list[DecodeRow]:
    """Time all contenders on one fresh random cache, taking turns, each checked against float64."""
    from ..backends import cuda_decode

    caches = _caches(case.problem)
    runs: dict[str, Callable[[], Any]] = {}
    plans: dict[str, DecodePlan] = {}
    outputs: dict[str, Callable[[], Any]] = {}
    operands: dict[str, DecodeOperands] = {}
    for contender in case.contenders:
        given = operands[contender.label] = _operands(contender.problem, case.lengths, caches)
        plan = plans[contender.label] = contender.plan(device)
        binding = cuda_decode.bind(plan, given)
        run = runs[contender.label] = functools.partial(binding.launch, *cuda_decode.addresses(given))
        outputs[contender.label] = functools.partial(_result, run, given.out)
    first = operands[case.contenders[0].label]
    for name in PEERS if torch and case.with_peers else ():
        p = case.problem
        as_forward = Problem(p.batch, p.heads, p.kv_heads, 1, p.capacity, p.head_dim, p.dtype, scale=p.scale)
        try:
            runs[name], outputs[name] = peers.make(name, as_forward, first.q, *caches)
        except NotImplementedError:
            continue
    runs[READ] = streaming_read(caches[0], caches[1], case.kv_bytes)
    timings = measure(runs, on_gpu=True, seconds=seconds, watch=watch)
    rows = []
    for label, timing in timings.items():
        error = None
        if label in outputs:
            error = _error(operands.get(label, first), outputs[label](), case)
        problem = next((c.problem for c in case.contenders if c.label == label), case.problem)
        rows.append(DecodeRow(case.title, label, problem, timing, case.kv_bytes, error, plans.get(label)))
    return rows


def streaming_read(first: Any, second: Any, num_bytes: int) -> Callable[[], None]:
    """``num_bytes``, half of each of two arrays, read once by a kernel that does nothing else."""
    import cupy

    blocks, threads = (
        2 * cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["multiProcessorCount"],
        1024,
    )
    unit = translation_unit("kernels/limits.cu", {"BFLOAT16": False, "TF32": False})
    kernel = cupy.RawModule(code=unit, options=cupy_options()).get_function("read_limit")
    sink = cupy.empty(blocks * threads, np.float32)
    whole = cupy.concatenate([x.reshape(-1).view(np.uint8)[: num_bytes // 2] for x in (first, second)])
    arguments = (whole, np.uint64(num_bytes // 16), sink)
    return functools.partial(kernel, (blocks,), (threads,), arguments)


def _caches(problem: DecodeProblem) -> tuple[Any, Any]:
    """(batch, kv_heads, capacity, head_dim), random normal."""
    shape = (problem.batch, problem.kv_heads, problem.capacity, problem.head_dim)
    if problem.cache_dtype != "float8_e4m3":
        return normal_on_gpu(shape, problem.dtype, 1), normal_on_gpu(shape, problem.dtype, 2)
    halves = (normal_on_gpu(shape, "float16", seed).view(np.uint16) for seed in (1, 2))
    # The upper byte of a float16, with the top bit of the exponent taken off: small e4m3 numbers.
    k, v = ((x >> 8).astype(np.uint8) & 0xBF for x in halves)
    return k, v


def _operands(
    problem: DecodeProblem, lengths: Sequence[int] | None, caches: tuple[Any, Any]
) -> DecodeOperands:
    import cupy

    q = normal_on_gpu((problem.batch, problem.heads, 1, problem.head_dim), problem.dtype, 0)
    operands = DecodeOperands(q, *caches, cupy.empty_like(q))
    if lengths is not None:
        operands.cache_seqlens = cupy.asarray(np.array(lengths, np.int32))
    if problem.paged:
        shape = (problem.num_pages, problem.kv_heads, problem.page_size, problem.head_dim)
        operands.k_cache, operands.v_cache = (x.reshape(shape) for x in caches)
        pages = np.random.default_rng(0).permutation(problem.num_pages).astype(np.int32)
        operands.block_table = cupy.asarray(pages.reshape(problem.batch, problem.max_pages))
    if problem.cache_dtype == "float8_e4m3":
        operands.k_scale = operands.v_scale = cupy.ones(problem.kv_heads, np.float32)
    return operands


def _result(run: Callable[[], Any], out: Any) -> Any:
    poison(out)
    run()
    return out


def _error(operands: DecodeOperands, out: Any, case: DecodeCase) -> float:
    """Over all query heads of some key/value heads of some sequences; NaN when the output has one there.
    Computed where the arrays are: half a million keys are long in coming to the host."""
    rng, worst = np.random.default_rng(0), 0.0
    batch, heads = operands.q.shape[:2]
    kv_heads = case.problem.kv_heads
    group = heads // kv_heads
    factors = operands.k_scale, operands.v_scale
    scale = case.problem.scale
    for index in rng.permutation(batch * kv_heads)[:_CHECKED]:
        b, h = divmod(int(index), kv_heads)
        length = case.problem.capacity if case.lengths is None else case.lengths[b]
        rows = slice(h * group, (h + 1) * group)
        kv = []
        for cache, factor in zip((operands.k_cache, operands.v_cache), factors, strict=True):
            if operands.block_table is None:
                tokens = cache[b, h]
            else:
                tokens = cache[operands.block_table[b, : -(-length // cache.shape[2])], h]
            wide = _float64(tokens.reshape(-1, cache.shape[-1])[:length])
            kv.append(wide if factor is None else wide * factor[h])
        expected = _attend(_float64(operands.q[b, rows, 0]), kv[0], kv[1], scale)
        error = float(abs(_float64(out[b, rows, 0]) - expected).max())
        worst = float(np.maximum(worst, error))  # NaN stays
    return worst


def _attend(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Of (rows, head_dim) over (keys, head_dim). NumPy's functions call CuPy's for its arrays."""
    s = scale * (q @ k.T)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return (p @ v) / p.sum(axis=1, keepdims=True)


def _float64(x: Any) -> Any:
    """By the bits, as CuPy knows neither bfloat16 nor e4m3 (bytes)."""
    if x.dtype == np.uint8:
        numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return _beside(x, numbers)[x.astype(np.int32)]
    if str(x.dtype) == "bfloat16":
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def _beside(x: Any, numbers: Any) -> Any:
    if not is_device_array(x):
        return numbers
    import cupy

    return cupy.asarray(numbers)


def row_record(row: DecodeRow) -> Json:
    """As :func:`cufa.bench.records.row_record`."""
    record: Json = {
        "case": row.case,
        "label": row.label,
        "problem": dataclasses.asdict(row.problem),
        "kv_bytes": row.kv_bytes,
        "samples_ns": as_nanoseconds(row.timing),
        **{f"p{q}_ns": round(row.timing.percentile(q) * 1e9) for q in (10, 50, 90)},
        "tbytes_per_s": round(row.tbytes, 3),
        "max_error": row.error if row.error == row.error else None,
    }
    if row.plan is not None:
        record |= {
            "kernel": row.plan.spec.name,
            "digest": digest(row.plan.spec),
            "config": dataclasses.asdict(row.plan.config),
            "schedule": row.plan.schedule,
            "num_splits": row.plan.num_splits,
        }
    return record
