"""Named sets of shapes and contenders: what `cufa bench --suite` and the recorded evidence run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from ..core.architectures import Device
from ..core.problem import Problem, default_scale
from ..kernels import KERNELS
from ..planner import fitting_configs, make_plan
from .ladder import ladder
from .runner import Contender

#: (problem, contenders), timed side by side.
Case = tuple[Problem, tuple[Contender, ...]]


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    title: str
    cases: Callable[[Device | None], Iterator[Case]]
    """Cases for a GPU, or for the CPU (None)."""
    gpu_only: bool = False
    """Too much work for a CPU, or about something that only a GPU has."""


def make(
    batch: int, heads: int, seqlen: int, head_dim: int, dtype: str, causal: bool, *,
    kv_heads: int | None = None, seqlen_k: int | None = None, precision: str | None = None,
) -> Problem:  # fmt: skip
    """A benchmark problem with the default scale."""
    native = "float32" if dtype == "float32" else "native"
    return Problem(
        batch, heads, kv_heads or heads, seqlen, seqlen_k or seqlen, head_dim, dtype,
        causal=causal, scale=default_scale(head_dim), precision=precision or native,
    )  # fmt: skip


def contenders(*names: str) -> tuple[Contender, ...]:
    return tuple(Contender(name) for name in names)


def _best(problem: Problem, device: Device | None) -> list[str]:
    """Algorithms meant to be fast (those that skip what is masked) that serve a problem, preferred first."""
    capability = device.arch.capability if device else None
    serving = [
        spec.algorithm
        for spec in KERNELS.values()
        if spec.skip_masked_tiles
        and problem.dtype in spec.dtypes
        and problem.precision in spec.precisions
        and (capability is None or spec.runs_on(capability))
    ]
    return list(dict.fromkeys(serving))


def _published_shapes() -> Iterator[Problem]:
    """Those of the FlashAttention-2 paper, 16k tokens and 2048 hidden, to 16k long."""
    for head_dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for causal in (False, True):
                yield make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "bfloat16", causal)


def _forward(device: Device | None) -> Iterator[Case]:
    for problem in _published_shapes():
        yield problem, contenders(*_best(problem, device), "torch flash", "torch cudnn")


def _fa3(device: Device | None) -> Iterator[Case]:
    """The same shapes, only what the planner prefers: half the time of "forward", for work on one kernel."""
    for problem in _published_shapes():
        yield problem, contenders(_best(problem, device)[0], "torch flash", "torch cudnn")


def _awkward(device: Device | None) -> Iterator[Case]:
    """Few heads and short sequences, few queries, grouped heads, lengths off the tile by one, head dims
    between the round ones. Causal with Sq ≠ Sk is aligned bottom-right for all: torch's flash backend takes
    that as a bias, its cuDNN backend does not serve it."""
    masks = (False, True)
    short = [(1, 8, 8, n, n, d) for d in (64, 128) for n in (512, 1024, 2048)]
    shapes = [
        *short,
        (4, 16, 16, 128, 8192, 128),
        (2, 32, 4, 4096, 4096, 128),
        (16, 16, 16, 1023, 1023, 128),
        (4, 16, 16, 4097, 4097, 128),
        *((2, 16, 16, 4096, 4096, d) for d in (80, 96, 192)),
    ]
    for (batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim), causal in itertools.product(shapes, masks):
        problem = make(
            batch, heads, seqlen_q, head_dim, "bfloat16", causal, kv_heads=kv_heads, seqlen_k=seqlen_k
        )
        yield problem, contenders(*_best(problem, device), "torch flash", "torch cudnn")


def _ladder(device: Device | None) -> Iterator[Case]:
    """FA3's techniques one after the other, on the planner's tiles for each shape."""
    assert device is not None, "FA3 is Hopper's"
    for head_dim, seqlen in ((64, 4096), (128, 1024), (128, 4096), (256, 4096)):
        for causal in (False, True):
            problem = make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "bfloat16", causal)
            try:
                plan = make_plan(problem, device, "fa3")
            except ValueError:  # another architecture
                return
            yield problem, ladder("fa3", plan.config)


def _versions(device: Device | None) -> Iterator[Case]:
    """FA1 → FA2: batch 2, 4 heads, d64, causal; the causal skip alone is fa2_noskip → fa2."""
    for seqlen in (512, 1024, 2048, 4096):
        problem = make(2, 4, seqlen, 64, "float16" if device else "float32", True)
        yield problem, contenders("naive", "fa1", "fa2_noskip", "fa2")
    if device is None:
        return
    for seqlen in (512, 1024, 2048, 4096):
        yield make(2, 4, seqlen, 64, "float32", True), contenders("fa2_noskip", "fa2")
    # The same where the GPU is full: 8 heads leave most SMs of a large card idle.
    for seqlen in (1024, 4096):
        problem = make(16384 // seqlen, 32, seqlen, 64, "float16", True)
        yield problem, contenders("fa1", "fa2_noskip", "fa2")


def _float32(device: Device | None) -> Iterator[Case]:
    for head_dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for causal in (False, True):
                problem = make(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, "float32", causal)
                # The scores of 16k rows would take tens of GiB.
                math = ("torch math",) if seqlen < 16384 else ()
                yield problem, contenders(*_best(problem, device), "torch efficient", *math)
    for causal in (False, True):
        problem = make(2, 32, 4096, 64, "float32", causal, precision="tf32")
        yield problem, contenders(*_best(problem, device))


def _fa1_blocks(device: Device | None) -> Iterator[Case]:
    """Every tiling of FA1 that fits: the block sweep."""
    spec = next(s for s in KERNELS.values() if s.algorithm == "fa1")
    assert device is not None, "which tilings fit depends on the GPU"
    for batch, seqlen in ((2, 1024), (16, 1024)):
        configs = fitting_configs(spec, 64, device)
        problem = make(batch, 8, seqlen, 64, "float16", False)
        yield problem, tuple(Contender("fa1", config) for config in configs)


def _memory(device: Device | None) -> Iterator[Case]:
    """What not storing the score matrix is worth: naive against FA2, growing length."""
    for seqlen in (1024, 2048, 4096, 8192) if device else (1024, 2048, 4096):
        problem = make(1, 16 if device else 8, seqlen, 64, "float16" if device else "float32", False)
        yield problem, contenders("naive", "fa2")


def _quick(device: Device | None) -> Iterator[Case]:
    """The default of `cufa bench`: a few seconds anywhere."""
    if device is None:
        # One GPU's own algorithm has no loop nest of its own in NumPy.
        names = dict.fromkeys(s.algorithm for s in KERNELS.values() if not s.uses_copy_engine)
        for seqlen, causal in ((512, False), (512, True), (1024, True)):
            yield make(1, 4, seqlen, 64, "float32", causal), contenders(*names)
        return
    names = dict.fromkeys(s.algorithm for s in KERNELS.values() if s.runs_on(device.arch.capability))
    for head_dim, seqlen, causal in ((64, 4096, True), (128, 4096, False), (128, 4096, True)):
        yield make(2, 2048 // head_dim, seqlen, head_dim, "float16", causal), contenders(*names)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("quick", "every algorithm, a few shapes", _quick),
        Suite("forward", "forward, 16k tokens × 2048 hidden, bfloat16", _forward, gpu_only=True),
        Suite("fa3", "forward, the preferred kernel only", _fa3, gpu_only=True),
        Suite("awkward", "short, ragged and uneven shapes, bfloat16", _awkward, gpu_only=True),
        Suite("ladder", "FA3, its techniques one after the other", _ladder, gpu_only=True),
        Suite("versions", "FA1 → FA2, batch 2 × 4 heads, d64, causal", _versions),
        Suite(
            "float32",
            "float32 that keeps float32 accuracy, 16k tokens × 2048 hidden",
            _float32,
            gpu_only=True,
        ),
        Suite("fa1-blocks", "FA1 block sizes and warps", _fa1_blocks, gpu_only=True),
        Suite("memory", "naive against FA2, growing length", _memory),
    )
}

#: What evidence is recorded of, in this order.
EVIDENCE = ("forward", "awkward", "ladder", "versions", "float32", "fa1-blocks", "memory")
