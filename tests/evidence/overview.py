"""Summary of recorded measurements, wins and losses alike: five rows in the README, all rows on the page of tables.

Both regimes (:mod:`cufa.measure.regimes`) are columns. The project claims the lower of the two means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from cufa.measure.cards import Card
from cufa.measure.measured import Measured, by_case, geometric_mean
from cufa.measure.peers import family_of
from cufa.measure.regimes import Regime
from cufa.problem.mask import CAUSAL
from cufa.problem.problem import Problem

from .days import other_days, tests_in_words
from .tables import NONE, best_peer, table


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row: a selection of one suite's cases, one of our kernels, and one peer."""

    words: str
    peer_words: str
    """"": the names of the peers that were timed."""
    suite: str
    ours: str = ""
    """"": our first of each case."""
    peer: str = ""
    """"": the fastest of each case."""
    wanted: Callable[[Problem], bool] = lambda problem: True
    in_readme: bool = False


def _float32(problem: Problem) -> bool:
    return problem.precision == "float32"


def _of(operation: str, kind: str) -> Callable[[Problem], bool]:
    return lambda problem: (problem.operation, problem.mask_kind) == (operation, kind)


_ROWS = (
    _Row("FA3, 1k to 16k", "cuDNN", "forward", "fa3", "torch cudnn", in_readme=True),
    _Row("FA3, short, ragged and uneven shapes", "cuDNN", "awkward", "fa3", "torch cudnn"),
    _Row("few queries over many keys", "", "chunks"),
    _Row("FA3, 1k to 16k", "FlashAttention-4", "forward", "fa3", "fa4", in_readme=True),
    _Row("FA3 at the power limit", "FlashAttention-4", "energy", "fa3", "fa4"),
    _Row("FA2, 1k to 16k", "PyTorch's FA2", "forward", "fa2", "torch flash"),
    _Row("FA2, short, ragged and uneven shapes", "PyTorch's FA2", "awkward", "fa2", "torch flash"),
    _Row("float32 with float32 accuracy", "PyTorch's memory-efficient", "float32", "fa2", "torch efficient", _float32),
    _Row("a window of 1024 keys", "", "masks", wanted=_of("forward", "band")),
    _Row("causal documents in columns", "", "masks", wanted=_of("forward", "columns")),
    _Row("their backward", "", "masks", wanted=_of("backward", "columns")),
    _Row(f"softcap 30, {CAUSAL}", "", "masks", wanted=lambda p: p.softcap is not None),
    _Row("FA3's backward, 1k to 16k", "cuDNN", "backward", "fa3", "torch cudnn"),
    _Row("FA3's backward, 1k to 16k", "PyTorch's FA2", "backward", "fa3", "torch flash"),
    _Row("FA3's backward, 1k to 16k", "FlashAttention-4", "backward", "fa3", "fa4", in_readme=True),
    _Row("FA3's backward at the power limit", "FlashAttention-4", "backward-energy", "fa3", "fa4"),
    _Row("FA2's backward, 1k to 16k", "PyTorch's FA2", "backward", "fa2", "torch flash"),
    _Row("FA2's backward, 1k to 16k", "cuDNN", "backward", "fa2", "torch cudnn", in_readme=True),
    _Row("the backward in float32", "PyTorch's memory-efficient", "backward-beside", "fa2", "torch efficient",
         _float32),
    _Row("decoding, one token", "the faster of PyTorch's two", "decode", in_readme=True),
)  # fmt: skip


def widest_first(found: dict[str, Card]) -> list[Card]:
    """Cards in the order in which pages show them: the one that copies most bytes per second first."""
    return sorted(found.values(), key=lambda card: -(card.limits.copy_bytes if card.limits else 0.0))


def overview(found: dict[str, Card]) -> Iterator[str]:
    """One table per GPU, with sentences about stale kernels and about suites measured on other days."""
    for card in widest_first(found):
        environment = card.environment
        yield f"**{environment['device']}**, {environment['recorded'][:10]}, {_tests(card)}\n"
        for note in filter(None, (card.changed, other_days(card, dict.fromkeys(x.suite for x in _ROWS)))):
            yield f"{note}\n"
        yield from table(["speed of", "over", *map(str, Regime), "claimed"], _lines(list(card.rows)))
        yield ""


def speed(found: dict[str, Card]) -> Iterator[str]:
    """The README's table: geometric mean, minimum and maximum of the ratios, per card and regime."""
    found_here = widest_first(found)
    names = [card.device.name.removeprefix("NVIDIA ").split()[0] for card in found_here]
    rows = [row for row in _ROWS if row.in_readme]
    columns = [_ratios(list(card.rows), rows) for card in found_here]
    header = [f"{name}, {regime}" for name in names for regime in Regime]
    cells = ([x for column in columns for x in column[row]] for row in rows)
    lines = ([row.words, row.peer_words, *more] for row, more in zip(rows, cells, strict=True))
    yield from table(["speed of", "over", *header], lines)
    yield ""
    days = (
        f"{name} {card.environment['recorded'][:10]}" for name, card in zip(names, found_here, strict=True)
    )
    words = [f"bfloat16, measured on the {', '.join(days)}."]
    for name, card in zip(names, found_here, strict=True):
        notes = [x for x in (card.changed, other_days(card, dict.fromkeys(x.suite for x in rows))) if x]
        words += [f"{name}: {' '.join(notes)}"] if notes else []
    yield " ".join(words)


def _ratios(rows: list[Measured], wanted: Iterable[_Row]) -> dict[_Row, list[str]]:
    """One cell per regime."""
    return {row: [_range(found) for found in _by_regime(rows, row).values()] for row in wanted}


def _by_regime(rows: list[Measured], row: _Row) -> dict[Regime, list[float]]:
    of_suite = [x for x in rows if x.suite == row.suite]
    return {
        regime: [x for _, x in _speedups(of_suite, row.ours, row.peer, regime, row.wanted)]
        for regime in Regime
    }


def _speedups(
    rows: Iterable[Measured], ours: str, peer: str, regime: Regime, wanted: Callable[[Problem], bool]
) -> Iterator[tuple[Problem, float]]:
    """Each wanted problem that ``ours`` was timed on beside ``peer``, and how many times faster ``ours`` was. "" is our
    first, or the fastest peer, of each case. Host-bound times are left out."""
    chosen = [row for row in rows if row.regime is regime and not row.host_bound and wanted(row.problem)]
    for found in by_case(chosen):
        fast = ours or next((label for label, row in found.items() if row.is_ours), "")
        slow = peer or best_peer(found)
        if {fast, slow} <= found.keys():
            yield found[fast].problem, found[slow].p50_ns / found[fast].p50_ns


def _tests(card: Card) -> str:
    tests = card.others.get("tests")
    if tests is None:
        return "GPU tests not run"
    sample = "" if tests.get("every_case", True) else " (of tests with many cases the day's sample)"
    return f"{tests_in_words(card, tests)}{sample}:"


def _lines(rows: list[Measured]) -> Iterator[list[str]]:
    for row in _ROWS:
        by_regime = _by_regime(rows, row)
        means = [geometric_mean(found) for found in by_regime.values() if found]
        if means:
            peer = row.peer_words or _peers(
                x.label for x in rows if x.suite == row.suite and x.is_peer and row.wanted(x.problem)
            )
            yield [row.words, peer, *map(_range, by_regime.values()), f"{min(means):.2f}×"]


def _peers(labels: Iterable[str]) -> str:
    """The peers with the fastest times. They may differ between cards, because libraries differ between machines."""
    titles = dict.fromkeys(family_of(label).title for label in labels)
    return ("the faster of " if len(titles) > 1 else "") + " and ".join(titles)


def _range(ratios: list[float]) -> str:
    """Text: geometric mean, minimum and maximum."""
    if not ratios:
        return NONE
    mean = f"{geometric_mean(ratios):.2f}×"
    return f"{mean} ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else mean
