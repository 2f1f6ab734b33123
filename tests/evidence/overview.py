"""Summary of recorded measurements, wins and losses alike: five rows in the README, all rows on the page of tables.

Both regimes (:mod:`cufa.measure.regimes`) are columns. The project claims the lower of the two means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cufa.measure.cards import Card
from cufa.measure.measured import Measured, by_case, geometric_mean
from cufa.measure.peers import family_of
from cufa.measure.regimes import Regime
from cufa.problem.mask import CAUSAL
from cufa.problem.problem import Problem

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


def _is(operation: str) -> Callable[[Problem], bool]:
    return lambda problem: problem.operation == operation


def _mla(problem: Problem) -> bool:
    return (problem.head_dim, problem.v_dim) == (192, 128)


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
    _Row("masks", "FlexAttention on FA4", "masks", "fa3", "flex flash", _is("forward"), in_readme=True),
    _Row("their backward", "FlexAttention on FA4", "masks", "fa3", "flex flash", _is("backward")),
    _Row("score functions", "FlexAttention on FA4", "scores", "fa3", "flex flash", _is("forward")),
    _Row("their backward", "FlexAttention on FA4", "scores", "fa3", "flex flash", _is("backward")),
    _Row("keys of 192, values of 128 columns", "", "widths", wanted=_mla),
    _Row("their backward", "", "backward-widths", wanted=_mla),
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
        yield f"**{environment['device']}**, {environment['recorded'][:10]}, {tests_in_words(card)}:\n"
        for note in filter(None, (card.changed, other_days(card, dict.fromkeys(x.suite for x in _ROWS)))):
            yield f"{note}\n"
        yield from table(["speed of", "over", *map(str, Regime), "claimed"], _lines(card.rows))
        yield ""


def speed(found: dict[str, Card]) -> Iterator[str]:
    """The README's table: geometric mean, minimum and maximum of the ratios, per card and regime."""
    rows = [row for row in _ROWS if row.in_readme]
    named = [(card.device.name.removeprefix("NVIDIA ").split()[0], card) for card in widest_first(found)]
    header = [f"{name}, {regime}" for name, _ in named for regime in Regime]
    lines = (
        [
            row.words,
            row.peer_words,
            *(_range(x) for _, card in named for x in _speedups(card.rows, row).values()),
        ]
        for row in rows
    )
    yield from table(["speed of", "over", *header], lines)
    yield ""
    days = (f"{name} {card.environment['recorded'][:10]}" for name, card in named)
    words = [f"bfloat16, measured on the {', '.join(days)}."]
    for name, card in named:
        notes = [x for x in (card.changed, other_days(card, dict.fromkeys(x.suite for x in rows))) if x]
        words += [f"{name}: {' '.join(notes)}"] if notes else []
    yield " ".join(words)


def _speedups(rows: Iterable[Measured], row: _Row) -> dict[Regime, list[float]]:
    """By regime: how many times faster ours is, in each case that both were timed on. Host-bound times are left out."""
    found: dict[Regime, list[float]] = {regime: [] for regime in Regime}
    chosen = [x for x in rows if x.suite == row.suite and not x.host_bound and row.wanted(x.problem)]
    for case in by_case(chosen):
        fast = row.ours or next((label for label, x in case.items() if x.is_ours), "")
        slow = row.peer or best_peer(case)
        if {fast, slow} <= case.keys():
            found[case[fast].regime].append(case[slow].p50_ns / case[fast].p50_ns)
    return found


def _lines(rows: Sequence[Measured]) -> Iterator[list[str]]:
    for row in _ROWS:
        by_regime = _speedups(rows, row)
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


# --- Days ---------------------------------------------------------------------------------------------------


def other_days(card: Card, suites: Iterable[str] = ()) -> str:
    """One sentence per other day or driver, naming the suites measured then (default: of all suites). "": all were
    measured on the day, and with the driver, of the newest rows."""
    wanted, found = list(suites), dict[str, dict[str, None]]()
    for row in card.rows:
        when = _apart(card, row.recorded)
        if when and (not wanted or row.suite in wanted):
            found.setdefault(when, {})[f"{row.suite} ({row.regime})"] = None
    return " ".join(f"Measured {when}: {', '.join(names)}." for when, names in found.items())


def when_else(card: Card, line: dict[str, Any]) -> str:
    """Day or driver of a line that holds no measurement, with a leading space. "": those of the newest rows."""
    when = _apart(card, line["recorded"])
    return f" {when}" if when else ""


def tests_in_words(card: Card) -> str:
    tests = card.others.get("tests")
    if tests is None:
        return "GPU tests not run"
    counts = f"{tests['passed']:,} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
    sample = "" if tests.get("every_case", True) else " (of tests with many cases the day's sample)"
    return f"{counts}{when_else(card, tests)}{sample}"


def _apart(card: Card, recorded: str) -> str:
    here, newest = card.sessions[recorded], card.environment
    words = [f"on {recorded[:10]}"] if recorded[:10] != newest["recorded"][:10] else []
    words += [f"with driver {_driver(here)}"] if _driver(here) != _driver(newest) else []
    return " ".join(words)


def _driver(session: dict[str, Any]) -> str:
    return str((session.get("gpu") or {}).get("driver_version", ""))
