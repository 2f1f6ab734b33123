"""Recorded measurements as Markdown: the README's tables, and the page of all tables next to the measurements. A test
compares both with the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from cufa.measure import cards, predictions
from cufa.measure.cards import Card
from cufa.measure.measured import Measured
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES

from . import overview, tables
from .overview import other_days, tests_in_words, when_else
from .tables import table

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


#: The page of all tables, next to the measurements.
PAGE = cards.RECORDS_DIR / "README.md"

_ABOUT = """# What was measured

Written by `make readme` from the measurements of this folder, which `make gpu-evidence` takes on a machine with a GPU:
medians and their intervals, with the digest of each kernel's machine code, versions, clocks and the error against
float64. Ratios are medians of runs in one process on one card, with a 95% interval. FLOPs count those of the scores
that the mask lets through, never the work that an algorithm happens to do.

- *In turns*: {in_turns}
- *Sustained*: {sustained}
"""


def update(text: str, found: dict[str, Card]) -> str:
    """``text``, with the README's tables between its markers. Raises ValueError if there are no markers."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"no lines {BEGIN} and {END} to write between")
    return "\n".join([f"{before}{BEGIN}", *overview.speed(found), f"{END}{after}"])


def page(found: dict[str, Card]) -> str:
    """The page of all tables: every table of every recorded GPU."""
    about = _ABOUT.format(in_turns=Regime.IN_TURNS.how, sustained=Regime.SUSTAINED.how)
    rows = "\n".join(overview.overview(found)).strip()
    return f"{about}\n## In short\n\n{rows}\n\n{markdown(found).strip()}\n"


def write(readme: Path) -> None:
    """Both pages, from the measurements that ship with the package."""
    found = cards.load_all()
    readme.write_text(update(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


def markdown(found: dict[str, Card]) -> str:
    """All tables of all recorded GPUs, in the order of the overview."""
    if not found:
        return "Nothing has been recorded yet.\n"
    return "\n".join("\n".join(_device_section(card)) for card in overview.widest_first(found))


def _device_section(card: Card) -> Iterator[str]:
    environment, limits = card.environment, card.others["ceilings"]
    versions = environment["versions"]
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    flops, by_mma = (
        ", ".join(f"{kind} {rate * 1e-12:.0f} TFLOP/s" for kind, rate in limits.get(name, {}).items())
        for name in ("flops", "mma_flops")
    )
    yield f"## {environment['device']}\n"
    yield (
        f"{environment['recorded'][:10]}: NVRTC {environment['nvrtc']}{torch}; "
        "medians, cold L2, FLOPs of visible scores only. Measured ceilings: copy "
        f"{limits['copy_bytes'] * 1e-12:.2f} TB/s; tensor cores {flops}{f'; by mma.sync {by_mma}' if by_mma else ''}"
        f"{when_else(card, limits)}."
    )
    yield f"{tests_in_words(card)}."
    if card.changed:
        yield f"\n**{card.changed}** Rows of these kernels are of the sources of that day."
    device, ceilings = card.device, card.limits
    assert ceilings is not None
    rows = [predictions.with_needs(row, device, ceilings) for row in card.rows]
    if off := predictions.in_words(predictions.errors(rows, device, ceilings)):
        yield f"\n{off}"
    for name, build in _OPEN.items():
        yield from _suite(card, rows, name, build)
    for name, build in _FOLDED.items():
        yield from _folded(_suite(card, rows, name, build))
    for suite in ("forward", "backward"):
        in_turns = [row for row in rows if (row.suite, row.regime) == (suite, Regime.IN_TURNS)]
        yield from _folded(tables.needs(in_turns, device.name))
    yield from _folded(_host_calls(card))
    yield from _folded(_first_results(card))


def _folded(lines: Iterator[str]) -> Iterator[str]:
    """A folded section; before a click, only its first line, the title, is visible."""
    title = next(lines, None)
    if title is not None:
        yield f"\n<details><summary>{title.strip().strip('*')}</summary>\n"
        yield from lines
        yield "\n</details>"


Build = Callable[[list[Measured]], Iterator[str]]


def _suite(card: Card, rows: list[Measured], name: str, build: Build) -> Iterator[str]:
    """The tables of one suite: contenders in alternation, then each contender alone if that was measured."""
    in_turns, alone = ([row for row in rows if (row.suite, row.regime) == (name, x)] for x in Regime)
    if not (in_turns or alone):
        return
    title = SUITES[name].title
    first = title[0].upper() if title[:2].isalpha() else title[0]  # e4m3 stays
    yield f"\n**{first}{title[1:]}**\n"
    if days := other_days(card, (name,)):
        yield f"{days}\n"
    if in_turns:
        yield from build(in_turns)
    if alone:
        yield f"\n{Regime.SUSTAINED.how} TFLOP/s · TFLOP per joule · SM clock in MHz:\n"
        yield from tables.sustained(alone, in_turns)


def _host_calls(card: Card) -> Iterator[str]:
    host = card.others["host"]
    yield f"\n**Host time of one call, µs{when_else(card, host)}**\n"
    keys = ("p50_us", "p10_us", "p90_us")
    lines = ([f"`{c['call']}`", *(f"{c[key]:.1f}" for key in keys)] for c in host["calls"])
    yield from table(["call", "median", "p10", "p90"], lines)


def _first_results(card: Card) -> Iterator[str]:
    """Time to the first result of a new process, and the compilation time of each kernel."""
    yield "\n**First result of a new process, and compile of one variant, s**\n"
    first = card.others["host"]["first_result"]
    found = {
        "first result, nothing compiled yet": first["cold"],
        "first result, kernel cached on disk": first["warm"],
    }
    for what, line in card.others.items():
        if what.startswith("compile "):
            found[f"{line['kernel']}{when_else(card, line)}"] = line["seconds"]
    yield from table(["", "seconds"], ([name, f"{seconds:.1f}"] for name, seconds in found.items()))


#: Tables by suite, in the order of the page: first visible ones, then folded ones.
_OPEN: dict[str, Build] = {
    "forward": tables.forward,
    "masks": tables.masks,
    "scores": tables.masks,
    "widths": tables.awkward,
    "backward-widths": tables.awkward,
    "decode": tables.decode,
    "backward": tables.forward,
    "energy": tables.forward,
    "backward-energy": tables.forward,
    "fp8": tables.accuracy,
    "fp8-speed": tables.float8_speed,
    "fp8-energy": tables.float8_speed,
}
_FOLDED: dict[str, Build] = {
    "awkward": tables.awkward, "chunks": tables.awkward, "ladder": tables.ladder,
    "backward-ladder": tables.ladder, "versions": tables.versions, "float32": tables.forward,
    "fa1-blocks": tables.blocks, "memory": tables.memory, "backward-beside": tables.awkward,
}  # fmt: skip
