"""From a problem and its contenders to rows: all timed in one run, errors beside times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.architectures import Device
from ..core.problem import Problem
from ..kernels import TileConfig
from ..ops.reference import attention_reference
from ..planner import Plan, make_plan
from . import bounds, peers, sustained
from .limits import Limits
from .power import Power, open_meter
from .regimes import Regime
from .timing import Run, Timing, Watch, measure

#: Query rows compared with float64 in each run; all of them when there are no more than this.
CHECKED_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Contender:
    """One kernel of ours under one tiling, or one peer."""

    algorithm: str
    """What ``flash_attention(algorithm=…)`` calls it, or a name of :data:`cufa.bench.peers.PEERS`."""
    config: TileConfig | None = None
    """None: what the planner picks."""
    name: str = ""
    """What its rows are called; "" names algorithm and tiles."""
    one_item_a_block: bool = False
    """For persistent kernels: launched with as many thread blocks as there are items, to show what running on
    from item to item is worth."""

    @property
    def is_peer(self) -> bool:
        return self.algorithm in peers.PEERS

    @property
    def label(self) -> str:
        if self.name or self.config is None:
            return self.name or self.algorithm
        return f"{self.algorithm} {self.config}, {self.config.blocks_per_sm} an SM"


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender on one problem, measured."""

    label: str
    problem: Problem
    timing: Timing
    error: float
    """Largest absolute difference from float64 over the rows checked; inputs are standard normal."""
    plan: Plan | None
    """None for a peer."""
    floor: float
    """Seconds below which this machine cannot go (:meth:`Limits.floor`)."""
    bound: str
    """What sets the floor."""
    needs: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that each resource needs by itself (:meth:`cufa.bench.bounds.Bounds.named`), where derived."""
    predicted: float | None = None
    """Seconds predicted from them."""
    load: sustained.Load | None = None
    """How it was measured alone; None where contenders took turns."""

    @property
    def regime(self) -> Regime:
        return self.timing.regime

    @property
    def power(self) -> Power | None:
        return self.load.power if self.load else None

    @property
    def tflop_per_joule(self) -> float | None:
        joules = self.power.joules if self.power else None
        return self.problem.flops / joules * 1e-12 if joules else None

    @property
    def seconds(self) -> float:
        """Median."""
        return self.timing.p50

    @property
    def tflops(self) -> float:
        return self.problem.flops / self.timing.p50 * 1e-12

    @property
    def gbytes(self) -> float:
        """Effective traffic in GB/s: q, k, v and o once, over time."""
        return self.problem.io_bytes / self.timing.p50 * 1e-9

    @property
    def of_ceiling(self) -> float:
        """1.0: as fast as this machine's measured ceilings allow."""
        return self.floor / self.timing.p50


def one_item_a_block(plan: Plan) -> Plan:
    """The same kernel on so many thread blocks that each finds a single query block of one head."""
    items = plan.schedule.num_q_blocks * plan.problem.batch * plan.problem.heads
    launches = (dataclasses.replace(x, grid=(items, 1, 1)) if x.persistent else x for x in plan.launches)
    return dataclasses.replace(plan, launches=tuple(launches))


def predicted_speedup(slow: Plan, fast: Plan) -> float:
    """What tile counts alone predict: scores computed by one over scores computed by the other."""
    scores = [p.schedule.visited * p.config.block_q * p.config.block_kv for p in (slow, fast)]
    return scores[0] / scores[1] if scores[1] else float("inf")


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A contender that does not serve the problem here, and why."""

    label: str
    problem: Problem
    reason: str


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A contender that runs here."""

    label: str
    plan: Plan | None
    runs: tuple[Run, ...]
    """One for each set of inputs."""
    result: Callable[[], Any]
    """Fills the output of the first set with NaN, computes once more and returns it."""


def run_problem(
    problem: Problem,
    contenders: Sequence[Contender],
    device: Device | None,
    limits: Limits,
    *,
    regime: Regime = Regime.IN_TURNS,
    seconds: float | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[list[Row], list[Skipped]]:
    """Time all contenders on the same fresh random inputs and check each against float64.

    ``device`` is the current GPU, or None for the CPU. ``seconds`` is the time spent measuring: in total
    where they take turns, for each contender otherwise; None: as the regime has it. ``watch`` sees the
    samples as they are taken (:func:`~cufa.bench.timing.measure`).
    """
    on_gpu = device is not None
    sets = _sets(problem, on_gpu) if regime is Regime.SUSTAINED else 1
    inputs = [random_inputs(problem, on_gpu=on_gpu, seed=seed + _SEEDS_APART * n) for n in range(sets)]
    entries: list[_Entry] = []
    skipped: list[Skipped] = []
    for contender in contenders:
        try:
            entries.append(_prepare(contender, problem, device, inputs))
        except (ValueError, NotImplementedError, MemoryError) as error:
            skipped.append(Skipped(contender.label, problem, str(error)))
    if not entries:
        return [], skipped
    timings = _measure(entries, regime, on_gpu, regime.seconds if seconds is None else seconds, watch)
    expected = sampled_reference(problem, *inputs[0], seed)
    floor, bound = limits.floor(problem)
    rows = []
    for entry in entries:
        timing, load = timings[entry.label]
        off = max_error(entry.result(), expected)
        row = Row(entry.label, problem, timing, off, entry.plan, floor, bound, load=load)
        rows.append(with_bounds(row, limits))
    return rows, skipped


#: Seeds of the sets of inputs of one case; cases count from 0.
_SEEDS_APART = 1 << 20


def _sets(problem: Problem, on_gpu: bool) -> int:
    """Sets of inputs that calls in a row go round, for L2 to be cold."""
    if not on_gpu:
        return 1
    import cupy

    runtime = cupy.cuda.runtime
    l2_bytes = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
    return sustained.sets_wanted(problem.io_bytes, l2_bytes)


def _measure(
    entries: Sequence[_Entry], regime: Regime, on_gpu: bool, seconds: float, watch: Watch | None
) -> dict[str, tuple[Timing, sustained.Load | None]]:
    if regime is Regime.IN_TURNS:
        runs = {entry.label: entry.runs[0] for entry in entries}
        taken = measure(runs, on_gpu=on_gpu, seconds=seconds, watch=watch)
        return {label: (timing, None) for label, timing in taken.items()}
    lane: sustained.Lane = sustained.GpuLane() if on_gpu else sustained.CpuLane()
    all_runs = {entry.label: entry.runs for entry in entries}
    return {**sustained.measure_alone(all_runs, lane, open_meter(on_gpu), seconds, watch=watch)}


def with_bounds(row: Row, limits: Limits) -> Row:
    """The row with what can be derived for its kernel."""
    if row.plan is None or not bounds.covers(row.plan):
        return row
    needs = bounds.bounds_of(row.plan, limits).named()
    return dataclasses.replace(row, needs=needs, predicted=bounds.predict(row.plan, limits))


def _prepare(
    contender: Contender, problem: Problem, device: Device | None, inputs: Sequence[tuple[Any, Any, Any]]
) -> _Entry:
    """Raises ValueError or NotImplementedError, with a reason, when it does not serve the problem here."""
    if contender.is_peer:
        if device is None:
            raise NotImplementedError("peers are timed on a GPU")
        pairs = [peers.make(contender.algorithm, problem, *arrays) for arrays in inputs]
        return _Entry(contender.label, None, tuple(run for run, _ in pairs), pairs[0][1])
    plan = make_plan(problem, device, contender.algorithm, config=contender.config)
    if contender.one_item_a_block:
        plan = one_item_a_block(plan)
    prepared = [_bind(plan, arrays) for arrays in inputs]
    run, out = prepared[0]

    def result() -> Any:
        poison(out)
        run()
        return out

    return _Entry(contender.label, plan, tuple(run for run, _ in prepared), result)


def _bind(plan: Plan, arrays: tuple[Any, Any, Any]) -> tuple[Run, Any]:
    """(run, output) of one set of inputs."""
    if plan.device is None:
        from ..backends import cpu

        out = np.empty_like(arrays[0])
        return functools.partial(cpu.run, plan, *arrays, out, None), out
    import cupy

    from ..backends import cuda

    out = cupy.empty_like(arrays[0])
    operands = (*arrays, out)
    binding = cuda.Binding(cuda.prepare(plan), [x.strides for x in operands])
    return functools.partial(binding.launch, *(x.data.ptr for x in operands)), out


def poison(x: Any) -> None:
    """Fill an array with NaN by its bits, all but the sign: no arithmetic in its type is needed."""
    bits = 8 * x.itemsize
    x.view(f"uint{bits}")[...] = 2 ** (bits - 1) - 1


def random_inputs(problem: Problem, *, on_gpu: bool, seed: int) -> tuple[Any, Any, Any]:
    """q, k, v: standard normal in the problem's dtype, (batch, heads, seqlen, head_dim), contiguous."""
    p = problem
    shapes = [(p.batch, p.heads, p.seqlen_q, p.head_dim)] + 2 * [
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
    ]
    make = normal_on_gpu if on_gpu else _normal_on_cpu
    q, k, v = (make(shape, p.dtype, 3 * seed + i) for i, shape in enumerate(shapes))
    return q, k, v


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    return np.dtype(name)


def _normal_on_cpu(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def normal_on_gpu(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Box-Muller over a hash of the index: cuRAND is not among the packages that cufa asks for."""
    import cupy

    bfloat16 = dtype == "bfloat16"
    store = """
        const unsigned bits = __float_as_uint(normal);  // to nearest, ties to even
        x = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;"""
    fill = cupy.ElementwiseKernel(
        "uint32 seed",
        "uint16 x" if bfloat16 else f"{dtype} x",
        """
        unsigned long long h = (static_cast<unsigned long long>(seed) << 40) + i;  // SplitMix64
        h = (h + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
        h ^= h >> 31;
        const float u = ((h >> 40) + 1) * 0x1p-24f, w = (h & 0xffffff) * 0x1p-24f;
        const float normal = sqrtf(-2 * logf(u)) * cospif(2 * w);
        """
        + (store if bfloat16 else "x = normal;"),
        f"cufa_bench_normal_{dtype}",
    )
    x = cupy.empty(shape, np.uint16 if bfloat16 else dtype)
    fill(np.uint32(seed), x)
    return x.view(numpy_dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Expected:
    """Some rows of the result, in float64."""

    rows: tuple[tuple[int, int, int], ...]
    """(batch, head, query)"""
    values: np.ndarray[Any, np.dtype[np.float64]]
    """(len(rows), head_dim)"""


def sampled_reference(problem: Problem, q: Any, k: Any, v: Any, seed: int = 0) -> Expected:
    """Exact results for :data:`CHECKED_ROWS` queries: the first, the last and others at random.

    In at most four heads, so that few keys and values travel from the GPU.
    """
    p = problem
    rng = np.random.default_rng(seed)
    heads = [divmod(int(n), p.heads) for n in rng.permutation(p.batch * p.heads)[:4]]
    total = len(heads) * p.seqlen_q
    between = 1 + rng.permutation(max(total - 2, 0))[: CHECKED_ROWS - 2]
    picked = np.unique(np.append(between, [0, total - 1]))
    rows, values = [], []
    for index, (batch, head) in enumerate(heads):
        queries = picked[picked // p.seqlen_q == index] % p.seqlen_q
        if not len(queries):
            continue
        Q, K, V = (
            _to_numpy(x)
            for x in (q[batch, head], k[batch, head // p.group_size], v[batch, head // p.group_size])
        )
        for query in queries:
            visible = min(max(int(query) + 1 + p.causal_offset, 0), p.seqlen_k) if p.causal else p.seqlen_k
            # One query that sees all the keys it is given: the mask is in the slice.
            value = attention_reference(
                Q[None, None, query : query + 1],
                K[None, None, :visible],
                V[None, None, :visible],
                scale=p.scale,
            )
            rows.append((batch, head, int(query)))
            values.append(np.asarray(value).reshape(-1))
    return Expected(tuple(rows), np.stack(values))


def max_error(out: Any, expected: Expected) -> float:
    """Largest absolute difference over the expected rows; NaN when the output has one there."""
    got = np.stack([_to_numpy(out[row]) for row in expected.rows])
    return float(np.max(np.abs(got - expected.values)))


def _to_numpy(x: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    host = x if isinstance(x, np.ndarray) else x.get()
    return np.asarray(host).astype(np.float64)
