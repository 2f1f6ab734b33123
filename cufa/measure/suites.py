"""Named sets of cases, for `cufa bench --suite` and the recorder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..gpu.architectures import Device
from ..kernels import kernels_of
from ..plan.planner import Plan, fitting_configs, make_plan
from ..problem.mask import CAUSAL, FULL, Band, Mask
from ..problem.problem import Problem, default_scale
from . import decode_cases, float8_cases, mask_cases, score_cases
from .cases import Case, Contender, best, contenders, of_forward
from .ladder import ladder, variations

Cases = Callable[[Device | None], Iterator[Case]]
"""Cases for a GPU, or for the CPU (None)."""


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    title: str
    cases: Cases
    gpu_only: bool
    """Too much work for a CPU, or about something that only a GPU has."""
    operation: str
    """Operation of its first case. The first suite of an operation is the default of `cufa bench`."""


SUITES: dict[str, Suite] = {}


def _suite(
    name: str, title: str, operation: str = "forward", *, gpu_only: bool = True
) -> Callable[[Cases], Cases]:
    """Registers a function that makes a suite's cases. Suites are offered in the order of their definition."""

    def add(cases: Cases) -> Cases:
        SUITES[name] = Suite(name, title, cases, gpu_only, operation)
        return cases

    return add


def make(
    batch: int, heads: int, seqlen: int, head_dim: int, dtype: str, mask: Mask | bool = FULL, *,
    kv_heads: int | None = None, seqlen_k: int | None = None, precision: str | None = None,
    softcap: float | None = None,
) -> Problem:  # fmt: skip
    """A forward problem with the default scale. ``mask``: True is causal, False is no mask."""
    native = "float32" if dtype == "float32" else "native"
    if isinstance(mask, bool):
        mask = CAUSAL if mask else FULL
    return Problem(
        batch, heads, kv_heads or heads, seqlen, seqlen_k or seqlen, head_dim, dtype,
        mask=mask, scale=default_scale(head_dim), softcap=softcap, precision=precision or native,
    )  # fmt: skip


_MASKS = (FULL, CAUSAL)
_TORCH = ("torch flash", "torch cudnn")


def _hidden(seqlen: int, head_dim: int, mask: Mask, dtype: str = "bfloat16") -> Problem:
    """16k tokens and heads × head_dim = 2048, as in the FlashAttention-2 paper."""
    return make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, dtype, mask)


def _published_shapes(dtype: str = "bfloat16") -> Iterator[Problem]:
    """Shapes of the FlashAttention-2 paper, up to 16k long."""
    for head_dim, seqlen, mask in itertools.product((64, 128, 256), (1024, 4096, 16384), _MASKS):
        yield _hidden(seqlen, head_dim, mask, dtype)


def _beside(
    problems: Iterable[Problem], device: Device | None, *peers: str, first: bool = False
) -> Iterator[Case]:
    """cufa's fast kernels, or only the preferred one (``first``), and peers on the same problems."""
    for problem in problems:
        ours = best(problem, device)
        yield Case(problem, contenders(*(ours[:1] if first else ours), *peers))


@_suite("quick", "every algorithm, a few shapes", gpu_only=False)
def _quick(device: Device | None) -> Iterator[Case]:
    """The default of `cufa bench`: a few seconds anywhere."""
    specs = kernels_of("forward").values()
    if device is None:
        # On a CPU, Hopper's algorithm runs the NumPy loops of another algorithm.
        names = dict.fromkeys(s.algorithm for s in specs if not s.uses_copy_engine)
        for seqlen, mask in ((512, FULL), (512, CAUSAL), (1024, CAUSAL)):
            yield Case(make(1, 4, seqlen, 64, "float32", mask), contenders(*names))
        return
    names = dict.fromkeys(s.algorithm for s in specs if s.runs_on(device.arch.capability))
    for head_dim, seqlen, mask in ((64, 4096, CAUSAL), (128, 4096, FULL), (128, 4096, CAUSAL)):
        yield Case(make(2, 2048 // head_dim, seqlen, head_dim, "float16", mask), contenders(*names))


@_suite("forward", "forward, 16k tokens × 2048 hidden, bfloat16")
def _forward(device: Device | None) -> Iterator[Case]:
    return _beside(_published_shapes(), device, *_TORCH, "fa4")


def _widths() -> Iterator[Problem]:
    """Keys of 192 and values of 128 columns, as in DeepSeek-V3's training and prefill; and of 128 and 64."""
    shapes = ((2048, 128, 192, 128), (4096, 128, 192, 128), (8192, 128, 192, 128), (8192, 32, 128, 64))
    for seqlen, heads, head_dim, v_dim in shapes:
        yield dataclasses.replace(make(1, heads, seqlen, head_dim, "bfloat16", CAUSAL), v_head_dim=v_dim)


@_suite("widths", "forward, values of another head dim, causal, bfloat16")
def _widths_forward(device: Device | None) -> Iterator[Case]:
    return _beside(_widths(), device, "torch cudnn", "fa4")


@_suite("fa3", "forward, the preferred kernel only")
def _fa3(device: Device | None) -> Iterator[Case]:
    """The shapes of "forward" with the planner's first choice only, in half the time: for work on one kernel."""
    return _beside(_published_shapes(), device, *_TORCH, "fa4", first=True)


@_suite("awkward", "short, ragged and uneven shapes, bfloat16")
def _awkward(device: Device | None) -> Iterator[Case]:
    """Few heads and short sequences, few queries, query groups, lengths one off a multiple of the tile, head dims
    between the round ones. Causal with Sq ≠ Sk is aligned bottom-right for all contenders: torch's flash backend
    takes this alignment as a bias, its cuDNN backend does not serve it."""
    short = [(1, 8, 8, n, n, d) for d in (64, 128) for n in (512, 1024, 2048)]
    shapes = [
        *short,
        (4, 16, 16, 128, 8192, 128),
        (2, 32, 4, 4096, 4096, 128),
        (16, 16, 16, 1023, 1023, 128),
        (4, 16, 16, 4097, 4097, 128),
        *((2, 16, 16, 4096, 4096, d) for d in (80, 96, 192)),
    ]
    problems = (
        make(batch, heads, q, head_dim, "bfloat16", mask, kv_heads=kv_heads, seqlen_k=k)
        for (batch, heads, kv_heads, q, k, head_dim), mask in itertools.product(shapes, _MASKS)
    )
    return _beside(problems, device, *_TORCH)


@_suite("chunks", "few queries over many keys, bfloat16")
def _chunks(device: Device | None) -> Iterator[Case]:
    """Chunks of a prompt against its cached part: few queries over many keys. Kernels split the keys."""
    shapes = itertools.product((16, 64, 128, 256), (2048, 8192, 32768, 131072), _MASKS)
    problems = (make(1, 32, q, 128, "bfloat16", mask, kv_heads=8, seqlen_k=k) for q, k, mask in shapes)
    return _beside(problems, device, *_TORCH, "fa4")


def _planned(problems: Iterable[Problem], device: Device | None) -> Iterator[Plan]:
    """FA3's plan of each problem; nothing on other architectures than Hopper."""
    for problem in problems:
        try:
            yield make_plan(problem, device, "fa3")
        except ValueError:  # another architecture
            return


@_suite("ladder", "FA3, its techniques one after the other")
def _ladder(device: Device | None) -> Iterator[Case]:
    """On the planner's tiles for each shape."""
    shapes = itertools.product(((64, 4096), (128, 1024), (128, 4096), (256, 4096)), _MASKS)
    for plan in _planned((_hidden(n, d, mask) for (d, n), mask in shapes), device):
        yield Case(plan.problem, ladder("fa3", plan.config))


@_suite("versions", f"FA1 → FA2, batch 2 × 4 heads, d64, {CAUSAL}", gpu_only=False)
def _versions(device: Device | None) -> Iterator[Case]:
    """FA1 → FA2: batch 2, 4 heads, d64. fa2_noskip and fa2 differ only in skipping masked tiles."""
    for seqlen in (512, 1024, 2048, 4096):
        problem = make(2, 4, seqlen, 64, "float16" if device else "float32", CAUSAL)
        yield Case(problem, contenders("naive", "fa1", "fa2_noskip", "fa2"))
    if device is None:
        return
    for seqlen in (512, 1024, 2048, 4096):
        yield Case(make(2, 4, seqlen, 64, "float32", CAUSAL), contenders("fa1", "fa2_noskip", "fa2"))
    # The same on a full GPU: the 8 heads above leave most SMs of a large card idle.
    for seqlen in (1024, 4096):
        problem = make(16384 // seqlen, 32, seqlen, 64, "float16", CAUSAL)
        yield Case(problem, contenders("fa1", "fa2_noskip", "fa2"))


@_suite("float32", "float32 that keeps float32 accuracy, 16k tokens × 2048 hidden")
def _float32(device: Device | None) -> Iterator[Case]:
    for problem in _published_shapes("float32"):
        # The scores of 16k rows would take tens of GiB.
        math = ("torch math",) if problem.seqlen_q < 16384 else ()
        yield Case(problem, contenders(*best(problem, device), "torch efficient", *math))
    for mask in _MASKS:
        problem = make(2, 32, 4096, 64, "float32", mask, precision="tf32")
        yield Case(problem, contenders(*best(problem, device)))


#: FlashAttention-1's tiles (queries, keys, warps) that others timed on an A10 and published: the fastest, the slower.
BLOCK_WINNER = (64, 64, 4)
BLOCK_LOSERS = ((128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8))


@_suite("fa1-blocks", "FA1 block sizes and warps")
def _fa1_blocks(device: Device | None) -> Iterator[Case]:
    """Every tile config of FA1 that fits the GPU. Others have published times for one of the float32 shapes."""
    assert device is not None, "the GPU decides which tiles fit"
    shapes = [(2, 8, 1024, "float16"), (16, 8, 1024, "float16")]
    shapes += [(2, 4, seqlen, "float32") for seqlen in (512, 1024, 2048, 4096)]
    for batch, heads, seqlen, dtype in shapes:
        problem = make(batch, heads, seqlen, 64, dtype)
        specs = (spec for spec in kernels_of("forward").values() if not spec.refuses(problem))
        spec = next(spec for spec in specs if spec.algorithm == "fa1")
        yield Case(problem, tuple(Contender("fa1", config) for config in fitting_configs(spec, 64, device)))


@_suite("memory", "naive against FA2, growing length", gpu_only=False)
def _memory(device: Device | None) -> Iterator[Case]:
    """The gain of not storing the score matrix: naive against FA2, growing length."""
    for seqlen in (1024, 2048, 4096, 8192) if device else (1024, 2048, 4096):
        problem = make(1, 16 if device else 8, seqlen, 64, "float16" if device else "float32")
        yield Case(problem, contenders("naive", "fa2"))


@_suite("masks", "masks and softcap, 2 × 32/8 heads × 8192, d128, bfloat16")
def _masks(device: Device | None) -> Iterator[Case]:
    """One shape under every mask; then windows in decoding."""
    shape = make(2, 32, 8192, 128, "bfloat16", kv_heads=8)
    yield from mask_cases.bands(shape, device)
    yield from mask_cases.irregular(shape, device)
    yield from decode_cases.windows(device)


@_suite("scores", "score functions, causal, and masks of bits, 2 × 32/8 heads × 8192 or 4096, d128, bfloat16")
def _scores(device: Device | None) -> Iterator[Case]:
    shape = make(2, 32, 8192, 128, "bfloat16", kv_heads=8)
    yield from score_cases.of_shape(shape, device)
    yield from score_cases.of_masks(dataclasses.replace(shape, seqlen_q=4096, seqlen_k=4096), device)


@_suite("energy", "shapes that meet the power limit, bfloat16")
def _energy(device: Device | None) -> Iterator[Case]:
    """The shapes whose joules are published, and two more head dims. The card's power limit sets their times."""
    shapes = ((64, 16384, CAUSAL), (128, 16384, CAUSAL), (128, 4096, FULL), (256, 16384, CAUSAL))
    problems = [_hidden(n, d, mask) for d, n, mask in shapes]
    problems += [make(2, 1920 // d, 4096, d, "bfloat16", mask) for d in (96, 192) for mask in _MASKS]
    return _beside(problems, device, "torch cudnn", "fa4", first=True)


@_suite("fp8", "e4m3: errors beside times on five distributions", gpu_only=False)
def _fp8(device: Device | None) -> Iterator[Case]:
    """The default of `cufa bench fp8`."""
    shape = make(2, 16, 4096, 128, "bfloat16") if device else make(1, 2, 1024, 128, "bfloat16")
    on_gpu = device is not None
    return float8_cases.accuracy(shape, float8_cases.NEEDLE_KEYS[on_gpu], on_gpu)


@_suite("fp8-speed", "e4m3 and bfloat16, 16k tokens × 2048 hidden")
def _fp8_speed(device: Device | None) -> Iterator[Case]:
    return float8_cases.speed(_published_shapes())


@_suite("fp8-energy", "e4m3 and bfloat16, shapes that meet the power limit")
def _fp8_energy(device: Device | None) -> Iterator[Case]:
    return float8_cases.speed(_hidden(16384, 128, mask) for mask in _MASKS)


_suite("decode", "decode: one query token, head dim 128, bfloat16", "decode")(decode_cases.decode)
_suite("decode-published", "decode: the published shapes only", "decode")(decode_cases.published)
_suite("decode-ladder", "decode: one idea at a time, one and 64 sequences", "decode")(decode_cases.ladder)
_suite("splits", "decode: splits of the keys, few to many", "decode")(decode_cases.sweep)


@_suite("backward-quick", "backward: a few shapes", "backward", gpu_only=False)
def _backward_quick(device: Device | None) -> Iterator[Case]:
    """The default of `cufa bench backward`: a few seconds anywhere."""
    dtype, lengths = ("float32", (512, 1024)) if device is None else ("float16", (1024, 4096))
    for seqlen, mask in itertools.product(lengths, _MASKS):
        problem = of_forward(make(1, 8, seqlen, 64, dtype, mask))
        yield Case(problem, contenders(*best(problem, device)))


@_suite("backward", "backward: 16k tokens × 2048 hidden, bfloat16", "backward")
def _backward(device: Device | None) -> Iterator[Case]:
    return _beside(map(of_forward, _published_shapes()), device, *_TORCH, "fa4")


@_suite("backward-widths", "backward: values of another head dim, causal, bfloat16", "backward")
def _widths_backward(device: Device | None) -> Iterator[Case]:
    return _beside(map(of_forward, _widths()), device, "torch cudnn", "fa4")


@_suite("backward-beside", "backward: determinism, groups, windows, odd shapes, float32", "backward")
def _backward_beside(device: Device | None) -> Iterator[Case]:
    """One change at a time from one shape; then float32."""
    shape = make(2, 32, 4096, 128, "bfloat16")
    for mask in (FULL, CAUSAL):
        problem = of_forward(dataclasses.replace(shape, mask=mask))
        ordered = dataclasses.replace(problem, deterministic=True)
        fixed = (
            Contender(name, name=f"{name} deterministic", problem=ordered) for name in best(ordered, device)
        )
        yield Case(problem, (*contenders(*best(problem, device)), *fixed, *contenders("torch flash")))
    changes: tuple[dict[str, Any], ...] = (
        {"mask": CAUSAL, "kv_heads": 8},
        {"mask": CAUSAL, "kv_heads": 8, "seqlen_q": 1024, "seqlen_k": 1024},
        {"mask": Band(1023, 0), "seqlen_q": 8192, "seqlen_k": 8192},
        {"mask": CAUSAL, "softcap": 30.0},
        {"mask": CAUSAL, "seqlen_q": 4097, "seqlen_k": 4097},
        {"mask": FULL, "seqlen_q": 1023, "seqlen_k": 1023, "batch": 8},
        *({"mask": CAUSAL, "head_dim": d, "scale": default_scale(d)} for d in (80, 96, 192)),
        {"mask": FULL, "head_dim": 96, "scale": default_scale(96)},
    )
    for change in changes:
        problem = of_forward(dataclasses.replace(shape, **change))
        yield Case(problem, contenders(*best(problem, device), *_TORCH, "fa4"))
    for head_dim, seqlen, mask in itertools.product((64, 128), (1024, 4096), _MASKS):
        problem = of_forward(_hidden(seqlen, head_dim, mask, "float32"))
        yield Case(problem, contenders(*best(problem, device), "torch efficient"))


@_suite("backward-energy", "backward: shapes that meet the power limit, bfloat16", "backward")
def _backward_energy(device: Device | None) -> Iterator[Case]:
    """Backwards whose time the power limit sets, long enough to measure joules."""
    shapes = ((64, 4096, FULL), (128, 4096, FULL), (128, 4096, CAUSAL), (128, 16384, CAUSAL))
    problems = (of_forward(_hidden(n, d, mask)) for d, n, mask in shapes)
    return _beside(problems, device, "torch flash", "fa4", first=True)


@_suite("backward-ladder", "FA3's backward, its techniques one after the other", "backward")
def _backward_ladder(device: Device | None) -> Iterator[Case]:
    """On the planner's tiles for each shape."""
    shapes = itertools.product(((64, 1024), (64, 4096), (128, 1024), (128, 4096), (256, 4096)), _MASKS)
    for plan in _planned((of_forward(_hidden(n, d, mask)) for (d, n), mask in shapes), device):
        yield Case(plan.problem, (*ladder("fa3", plan.config), *variations(plan)))


#: Operations in the order of their first suites, as the command line offers them.
OPERATION_NAMES = tuple(dict.fromkeys(suite.operation for suite in SUITES.values()))
