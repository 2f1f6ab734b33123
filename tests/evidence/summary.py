"""Recorded measurements in a few lines: the first table of the README.

Where both regimes were recorded they stand side by side, and the sentence below claims the lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cufa.measure.cards import Card, widest_first
from cufa.measure.measured import Measured, geometric_mean, speedups
from cufa.measure.regimes import Regime
from cufa.problem.problem import MASK_KINDS, Problem

from .days import days_of, other_days

BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"

_LENGTHS = (1024, 4096, 16384)
_HEAD_DIMS = (64, 128, 256)
#: (suite, ours, peer, how a row begins)
_COMPARED = (
    ("forward", "fa3", "torch cudnn", "FA3 over cuDNN"),
    ("backward", "fa3", "torch cudnn", "FA3's backward over cuDNN"),
    ("forward", "fa2", "torch flash", "FA2 over PyTorch's FA2"),
)


def summary(found: dict[str, Card]) -> str:
    """Speed over the peers that were timed side by side, on the GPU that moves most bytes per second; the others
    have their rows further down."""
    if not found:
        return "Nothing has been recorded yet.\n"
    return "\n".join(_device(widest_first(found)[0])) + "\n"


def _device(card: Card) -> Iterator[str]:
    environment, rows = card.environment, list(card.rows)
    yield (
        f"On an {environment['device'].removeprefix('NVIDIA ')} ({days_of(card, 'forward')}, bfloat16, "
        "16k tokens × 2048 hidden, cold L2), speed over PyTorch's in the same run at 1k · 4k · 16k; every "
        "row [below](#measured):\n"
    )
    yield "| | " + " | ".join(f"head dim {d}" for d in _HEAD_DIMS) + " |"
    yield "|---" * (1 + len(_HEAD_DIMS)) + "|"
    regimes = list(dict.fromkeys(row.regime for row in rows if row.suite == "forward"))
    for suite, ours, peer, words in _COMPARED:
        of_suite = [row for row in rows if row.suite == suite]
        for kind in MASK_KINDS:
            for regime in regimes:
                cells = [_cell(of_suite, ours, peer, regime, d, kind) for d in _HEAD_DIMS]
                named = f", {regime}" if len(regimes) > 1 else ""
                if any(cells):
                    yield f"| {words}, {kind}{named} | " + " | ".join(cells) + " |"
    yield "\n" + "\n".join([*_claims(rows, regimes), *_further(card, rows)])


def _cell(rows: list[Measured], ours: str, peer: str, regime: Regime, head_dim: int, kind: str) -> str:
    def this(p: Problem) -> bool:
        return p.head_dim == head_dim and p.mask_kind == kind

    found = {p.seqlen_q: value for p, value in speedups(rows, ours, peer, regime, this)}
    return " · ".join(f"{found[n]:.2f}×" for n in _LENGTHS if n in found)


def _claims(rows: list[Measured], regimes: list[Regime]) -> Iterator[str]:
    """The geometric mean over all shapes, of the lower regime; nothing where there is only one."""
    if len(regimes) < 2:
        return
    for suite, ours, peer, words in _COMPARED:
        of_suite = [row for row in rows if row.suite == suite]
        means = {
            regime: geometric_mean(x for _, x in speedups(of_suite, ours, peer, regime, lambda p: True))
            for regime in regimes
        }
        found = {regime: mean for regime, mean in means.items() if mean}
        if found:
            lower = min(found, key=lambda regime: found[regime])
            others = [f"{mean:.2f}× {regime}" for regime, mean in found.items() if regime is not lower]
            beside = f" ({', '.join(others)})" if others else ""
            yield f"{words}, geometric mean over these shapes: {found[lower]:.2f}× {lower}{beside}."


def _further(card: Card, rows: list[Measured]) -> Iterator[str]:
    float32 = _range(rows, "float32", "fa2", "torch efficient", lambda p: p.precision == "float32")
    if float32:
        yield f"float32 with float32 accuracy: {float32} PyTorch's memory-efficient backend."
    awkward = _range(rows, "awkward", "fa3", "torch cudnn", lambda p: True)
    if awkward:
        yield f"Short, ragged and uneven shapes: {awkward} cuDNN."
    decoding = _range(rows, "decode", "", "", lambda p: True)
    if decoding:
        yield f"Decoding, a token against 1k to 512k: {decoding} the faster of PyTorch's two."
    days = other_days(card, ("float32", "awkward", "decode"))
    if days:
        yield days
    if card.changed:
        yield card.changed
    host = card.others["host"]
    calls = {c["call"]: c["p50_us"] for c in host["calls"]}
    call = next((time for name, time in calls.items() if name.startswith("flash_attention(")), None)
    first = host["first_result"]
    if call and "torch flash" in calls:
        yield f"A call costs {call:.1f} µs of host time (PyTorch's flash backend: {calls['torch flash']:.1f});"
        yield (
            f"the first ever takes {first['cold']:.1f} s with compilation, {first['warm']:.1f} s once the "
            "kernel is on disk."
        )


def _range(
    rows: list[Measured], suite: str, ours: str, peer: str, wanted: Callable[[Problem], bool]
) -> str | None:
    of_suite = [row for row in rows if row.suite == suite]
    found = [value for _, value in speedups(of_suite, ours, peer, Regime.IN_TURNS, wanted)]
    return f"{min(found):.2f}–{max(found):.2f}×" if found else None
