"""Named sets of cases: what `cufa bench --suite` and the recording tool run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

from ..gpu.architectures import Device
from ..kernels import kernels_of
from ..plan.planner import fitting_configs, make_plan
from ..problem.mask import CAUSAL, FULL, Mask
from ..problem.problem import Problem, default_scale
from . import backward_cases, decode_cases, mask_cases
from .cases import Case, Contender, contenders
from .ladder import ladder


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    title: str
    cases: Callable[[Device | None], Iterator[Case]]
    """Cases for a GPU, or for the CPU (None)."""
    gpu_only: bool = False
    """Too much work for a CPU, or about something that only a GPU has."""
    operation: str = "forward"
    """Of its first case: the first suite of an operation is what `cufa bench` runs when it is given no more."""


def make(
    batch: int, heads: int, seqlen: int, head_dim: int, dtype: str, mask: Mask | bool = FULL, *,
    kv_heads: int | None = None, seqlen_k: int | None = None, precision: str | None = None,
    softcap: float | None = None,
) -> Problem:  # fmt: skip
    """A forward problem with the default scale. ``mask`` may be a bool, as the public call's short form."""
    native = "float32" if dtype == "float32" else "native"
    if isinstance(mask, bool):
        mask = CAUSAL if mask else FULL
    return Problem(
        batch, heads, kv_heads or heads, seqlen, seqlen_k or seqlen, head_dim, dtype,
        mask=mask, scale=default_scale(head_dim), softcap=softcap, precision=precision or native,
    )  # fmt: skip


_MASKS = (FULL, CAUSAL)


def _best(problem: Problem, device: Device | None) -> list[str]:
    """Algorithms meant to be fast (those that skip what is masked) that serve a problem, preferred first."""
    capability = device.arch.capability if device else None
    specs = kernels_of(problem.operation).values()
    serving = [
        s.algorithm
        for s in specs
        if s.skip_masked_tiles
        and not s.refuses(problem, capability)
        and any(config.fits(problem.head_dim) for config in s.configs)
    ]
    return list(dict.fromkeys(serving))


def _published_shapes() -> Iterator[Problem]:
    """Those of the FlashAttention-2 paper, 16k tokens and 2048 hidden, to 16k long."""
    for head_dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for mask in _MASKS:
                yield make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "bfloat16", mask)


def _forward(device: Device | None) -> Iterator[Case]:
    for problem in _published_shapes():
        yield Case(problem, contenders(*_best(problem, device), "torch flash", "torch cudnn", "fa4"))


def _fa3(device: Device | None) -> Iterator[Case]:
    """The same shapes, only what the planner prefers: half the time of "forward", for work on one kernel."""
    for problem in _published_shapes():
        yield Case(problem, contenders(_best(problem, device)[0], "torch flash", "torch cudnn", "fa4"))


def _awkward(device: Device | None) -> Iterator[Case]:
    """Few heads and short sequences, few queries, grouped heads, lengths off the tile by one, head dims
    between the round ones. Causal with Sq ≠ Sk is aligned bottom-right for all: torch's flash backend takes
    that as a bias, its cuDNN backend does not serve it."""
    short = [(1, 8, 8, n, n, d) for d in (64, 128) for n in (512, 1024, 2048)]
    shapes = [
        *short,
        (4, 16, 16, 128, 8192, 128),
        (2, 32, 4, 4096, 4096, 128),
        (16, 16, 16, 1023, 1023, 128),
        (4, 16, 16, 4097, 4097, 128),
        *((2, 16, 16, 4096, 4096, d) for d in (80, 96, 192)),
    ]
    for (batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim), mask in itertools.product(shapes, _MASKS):
        problem = make(
            batch, heads, seqlen_q, head_dim, "bfloat16", mask, kv_heads=kv_heads, seqlen_k=seqlen_k
        )
        yield Case(problem, contenders(*_best(problem, device), "torch flash", "torch cudnn"))


def _chunks(device: Device | None) -> Iterator[Case]:
    """Chunks of a prompt against what a cache holds of it: few queries over many keys, which are split."""
    for seqlen_q, seqlen_k, mask in itertools.product(
        (16, 64, 128, 256), (2048, 8192, 32768, 131072), _MASKS
    ):
        problem = make(1, 32, seqlen_q, 128, "bfloat16", mask, kv_heads=8, seqlen_k=seqlen_k)
        yield Case(problem, contenders(*_best(problem, device), "torch flash", "torch cudnn", "fa4"))


def _ladder(device: Device | None) -> Iterator[Case]:
    """FA3's techniques one after the other, on the planner's tiles for each shape."""
    assert device is not None, "FA3 is Hopper's"
    for head_dim, seqlen in ((64, 4096), (128, 1024), (128, 4096), (256, 4096)):
        for mask in _MASKS:
            problem = make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "bfloat16", mask)
            try:
                plan = make_plan(problem, device, "fa3")
            except ValueError:  # another architecture
                return
            yield Case(problem, ladder("fa3", plan.config))


def _versions(device: Device | None) -> Iterator[Case]:
    """FA1 → FA2: batch 2, 4 heads, d64; what skipping tiles alone gives is fa2_noskip → fa2."""
    for seqlen in (512, 1024, 2048, 4096):
        problem = make(2, 4, seqlen, 64, "float16" if device else "float32", CAUSAL)
        yield Case(problem, contenders("naive", "fa1", "fa2_noskip", "fa2"))
    if device is None:
        return
    for seqlen in (512, 1024, 2048, 4096):
        yield Case(make(2, 4, seqlen, 64, "float32", CAUSAL), contenders("fa1", "fa2_noskip", "fa2"))
    # The same where the GPU is full: 8 heads leave most SMs of a large card idle.
    for seqlen in (1024, 4096):
        problem = make(16384 // seqlen, 32, seqlen, 64, "float16", CAUSAL)
        yield Case(problem, contenders("fa1", "fa2_noskip", "fa2"))


def _float32(device: Device | None) -> Iterator[Case]:
    for head_dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for mask in _MASKS:
                problem = make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "float32", mask)
                # The scores of 16k rows would take tens of GiB.
                math = ("torch math",) if seqlen < 16384 else ()
                yield Case(problem, contenders(*_best(problem, device), "torch efficient", *math))
    for mask in _MASKS:
        problem = make(2, 32, 4096, 64, "float32", mask, precision="tf32")
        yield Case(problem, contenders(*_best(problem, device)))


def _fa1_blocks(device: Device | None) -> Iterator[Case]:
    """Every tiling of FA1 that fits: the block sweep; in float32 on shapes of which one is published."""
    assert device is not None, "which tilings fit depends on the GPU"
    shapes = [(2, 8, 1024, "float16"), (16, 8, 1024, "float16")]
    shapes += [(2, 4, seqlen, "float32") for seqlen in (512, 1024, 2048, 4096)]
    for batch, heads, seqlen, dtype in shapes:
        problem = make(batch, heads, seqlen, 64, dtype)
        specs = (spec for spec in kernels_of("forward").values() if not spec.refuses(problem))
        spec = next(spec for spec in specs if spec.algorithm == "fa1")
        yield Case(problem, tuple(Contender("fa1", config) for config in fitting_configs(spec, 64, device)))


def _memory(device: Device | None) -> Iterator[Case]:
    """What not storing the score matrix is worth: naive against FA2, growing length."""
    for seqlen in (1024, 2048, 4096, 8192) if device else (1024, 2048, 4096):
        problem = make(1, 16 if device else 8, seqlen, 64, "float16" if device else "float32")
        yield Case(problem, contenders("naive", "fa2"))


def _quick(device: Device | None) -> Iterator[Case]:
    """The default of `cufa bench`: a few seconds anywhere."""
    specs = kernels_of("forward").values()
    if device is None:
        # One GPU's own algorithm has no loop nest of its own in NumPy.
        names = dict.fromkeys(s.algorithm for s in specs if not s.uses_copy_engine)
        for seqlen, mask in ((512, FULL), (512, CAUSAL), (1024, CAUSAL)):
            yield Case(make(1, 4, seqlen, 64, "float32", mask), contenders(*names))
        return
    names = dict.fromkeys(s.algorithm for s in specs if s.runs_on(device.arch.capability))
    for head_dim, seqlen, mask in ((64, 4096, CAUSAL), (128, 4096, FULL), (128, 4096, CAUSAL)):
        yield Case(make(2, 2048 // head_dim, seqlen, head_dim, "float16", mask), contenders(*names))


def _masks(device: Device | None) -> Iterator[Case]:
    """One shape under every mask; then windows in decoding."""
    shape, best = make(2, 32, 8192, 128, "bfloat16", kv_heads=8), functools.partial(_best, device=device)
    yield from mask_cases.bands(shape, best)
    yield from mask_cases.beyond(shape, best)
    yield from decode_cases.windows(device)


def _energy(device: Device | None) -> Iterator[Case]:
    """The shapes whose joules are published, and two further head dims: where a card's power limit decides."""
    shapes = ((64, 16384, CAUSAL), (128, 16384, CAUSAL), (128, 4096, FULL), (256, 16384, CAUSAL))
    problems = [make(16384 // n, 2048 // d, n, d, "bfloat16", mask) for d, n, mask in shapes]
    problems += [make(2, 1920 // d, 4096, d, "bfloat16", mask) for d in (96, 192) for mask in _MASKS]
    for problem in problems:
        yield Case(problem, contenders(_best(problem, device)[0], "torch cudnn", "fa4"))


def _backward_quick(device: Device | None) -> Iterator[Case]:
    """What `cufa bench backward` runs: a few seconds anywhere."""
    dtype, lengths = ("float32", (512, 1024)) if device is None else ("float16", (1024, 4096))
    for seqlen, mask in itertools.product(lengths, _MASKS):
        problem = backward_cases.of_forward(make(1, 8, seqlen, 64, dtype, mask))
        yield Case(problem, contenders(*_best(problem, device)))


def _backward(device: Device | None) -> Iterator[Case]:
    yield from backward_cases.published(_published_shapes(), functools.partial(_best, device=device))


def _backward_beside(device: Device | None) -> Iterator[Case]:
    best = functools.partial(_best, device=device)
    yield from backward_cases.beside(make(2, 32, 4096, 128, "bfloat16"), best)
    shapes = itertools.product((64, 128), (1024, 4096), _MASKS)
    problems = (make(16384 // n, 2048 // d, n, d, "float32", mask) for d, n, mask in shapes)
    yield from backward_cases.float32(problems, best)


def _backward_energy(device: Device | None) -> Iterator[Case]:
    """The backward where the power limit decides, long enough for joules."""
    for head_dim, seqlen, mask in (
        (64, 4096, FULL),
        (128, 4096, FULL),
        (128, 4096, CAUSAL),
        (128, 16384, CAUSAL),
    ):
        problem = backward_cases.of_forward(
            make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "bfloat16", mask)
        )
        yield Case(problem, contenders(_best(problem, device)[0], "torch flash", "fa4"))


def _backward_ladder(device: Device | None) -> Iterator[Case]:
    assert device is not None, "FA3 is Hopper's"
    shapes = itertools.product(((64, 1024), (64, 4096), (128, 1024), (128, 4096), (256, 4096)), _MASKS)
    problems = (make(16384 // n, 2048 // d, n, d, "bfloat16", mask) for (d, n), mask in shapes)
    yield from backward_cases.steps(problems, device)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("quick", "every algorithm, a few shapes", _quick),
        Suite("forward", "forward, 16k tokens × 2048 hidden, bfloat16", _forward, gpu_only=True),
        Suite("fa3", "forward, the preferred kernel only", _fa3, gpu_only=True),
        Suite("awkward", "short, ragged and uneven shapes, bfloat16", _awkward, gpu_only=True),
        Suite("chunks", "few queries over many keys, bfloat16", _chunks, gpu_only=True),
        Suite("ladder", "FA3, its techniques one after the other", _ladder, gpu_only=True),
        Suite("versions", f"FA1 → FA2, batch 2 × 4 heads, d64, {CAUSAL}", _versions),
        Suite(
            "float32",
            "float32 that keeps float32 accuracy, 16k tokens × 2048 hidden",
            _float32,
            gpu_only=True,
        ),
        Suite("fa1-blocks", "FA1 block sizes and warps", _fa1_blocks, gpu_only=True),
        Suite("memory", "naive against FA2, growing length", _memory),
        Suite("masks", "masks and softcap, 2 × 32/8 heads × 8192, d128, bfloat16", _masks, gpu_only=True),
        Suite("energy", "shapes that meet the power limit, bfloat16", _energy, gpu_only=True),
        Suite(
            "decode",
            "decode: one query token, head dim 128, bfloat16",
            decode_cases.decode,
            gpu_only=True,
            operation="decode",
        ),
        Suite(
            "decode-published",
            "decode: the published shapes only",
            decode_cases.published,
            gpu_only=True,
            operation="decode",
        ),
        Suite(
            "splits",
            "decode: splits of the keys, few to many",
            decode_cases.sweep,
            gpu_only=True,
            operation="decode",
        ),
        Suite("backward-quick", "backward: a few shapes", _backward_quick, operation="backward"),
        Suite(
            "backward",
            "backward: 16k tokens × 2048 hidden, bfloat16",
            _backward,
            gpu_only=True,
            operation="backward",
        ),
        Suite(
            "backward-beside",
            "backward: determinism, groups, windows, odd shapes, float32",
            _backward_beside,
            gpu_only=True,
            operation="backward",
        ),
        Suite(
            "backward-energy",
            "backward: shapes that meet the power limit, bfloat16",
            _backward_energy,
            gpu_only=True,
            operation="backward",
        ),
        Suite(
            "backward-ladder",
            "FA3's backward, its techniques one after the other",
            _backward_ladder,
            gpu_only=True,
            operation="backward",
        ),
    )
}


#: Operations in the order in which they are offered: that of their first suites.
OPERATION_NAMES = tuple(dict.fromkeys(suite.operation for suite in SUITES.values()))
