"""Measured rows as tables on the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..measure import additions
from ..measure.measured import Json, Measured, Skipped
from ..measure.regimes import Regime
from .common import rate_text, seconds_text, stderr, stdout, table


def print_rows(rows: Sequence[Measured]) -> None:
    """The tables of `cufa bench`: one per case, one line per contender."""
    for (title, regime), group in itertools.groupby(rows, key=lambda row: (row.title, row.regime)):
        printed = list(group)
        if any(row.accuracy for row in printed):
            _print_accuracy(f"{title}; {regime}", printed)
        else:
            _print_case(f"{title}; {regime}", printed, regime)
    _print_remarks(rows)


def _print_case(title: str, rows: list[Measured], regime: Regime) -> None:
    alone = regime is Regime.SUSTAINED
    how = ("TFLOP/J", "J/call", "clock", "power") if alone else ("p10", "p90")
    splits = ("splits",) if any(row.plan and row.plan.split for row in rows) else ()
    figures = ("p50", *how, "speed", "GB/s", "% of ceiling", "max error", *splits)
    shown = table(["kernel"], figures, title)
    for row in rows:
        split = row.plan.split if row.plan else None
        shown.add_row(
            row.label,
            seconds_text(row.timing.p50),
            *(_power_cells(row.load) if alone else map(seconds_text, (row.timing.p10, row.timing.p90))),
            rate_text(row.tflops),
            f"{row.gbytes:.3g}" if row.gbytes < 100 else f"{row.gbytes:.0f}",
            f"{100 * row.json['of_ceiling']:.0f}% {row.json['ceiling']}",
            "" if row.error is None else f"{row.error:.1e}",
            *(f"{split.count} {split.kind}" if split else "" for _ in splits),
        )
    stdout().print(shown)


def _print_accuracy(title: str, rows: list[Measured]) -> None:
    """Errors beside times, of a case with a named distribution."""
    on_cpu = any(row.plan and row.plan.device is None for row in rows)
    needles = any(row.accuracy and row.accuracy.found is not None for row in rows)
    figures = ("CPU p50" if on_cpu else "p50", "speed", "RMSE", "max error", "Σ|o|")
    shown = table(["kernel"], (*figures, *["needles found"] * needles), title)
    for row in rows:
        errors, cells = row.accuracy, list[str]()
        if errors is not None:
            cells = [f"{errors.rmse:.2e}", f"{errors.largest:.1e}", f"{errors.bias:+.3%}"]
            cells += [f"{errors.found:.0%} of {errors.exact_found:.0%}"] if errors.found is not None else []
        shown.add_row(row.label, seconds_text(row.timing.p50), rate_text(row.tflops), *cells)
    shown.caption = "errors against float64" + "; needles: of float64's" * needles
    stdout().print(shown)


def _power_cells(load: Json) -> list[str]:
    """In the order of the columns; "–": not measured."""
    words = {"tflop_per_joule": "{:.2f}", "joules": "{:.3g}", "clock_mhz": "{:.0f} MHz", "watts": "{:.0f} W"}
    return ["–" if load.get(name) is None else text.format(load[name]) for name, text in words.items()]


def _print_remarks(rows: Sequence[Measured]) -> None:
    """Figures that could not be measured, and times that are not the kernel's."""
    console = stderr()
    for reason in dict.fromkeys(filter(None, (row.load.get("missing") for row in rows))):
        console.print(f"not measured: {reason}", style="yellow", markup=False)
    for row in rows:
        if row.host_bound:
            what = f"{row.label} on {row.title}: the GPU waited for the host, the time is not the kernel's"
            console.print(what, style="yellow", markup=False)


def print_needs(rows: Sequence[Measured]) -> None:
    """For rows with bounds: the share of the measured time that each resource needs, and the predicted time."""
    derived = [row for row in rows if row.predicted is not None]
    if not derived:
        return
    shown = table(["kernel"], [], "share of the measured time that each resource needs alone")
    shown.add_column("head dim, seq, mask", no_wrap=True)
    most_first = sorted(derived, key=lambda row: -len(row.needs))
    names = list(dict.fromkeys(name for row in most_first for name in row.needs))
    for name in ("predicted", *names):
        shown.add_column(name, justify="right", min_width=len(name.split()[-1]))
    for row in derived:
        p = row.problem
        shape = f"{p.head_dim}, {p.seqlen_q}×{p.seqlen_k}, {p.scores_text}"
        shares = (f"{row.needs[name] / row.seconds:.0%}" if name in row.needs else "" for name in names)
        shown.add_row(row.label, shape, seconds_text(row.predicted or 0.0), *shares)
    devices = {row.plan.device.name for row in derived if row.plan and row.plan.device}
    if additions.NAME in names:
        shown.caption = "; ".join(f"{additions.NAME}: at {additions.of_card(x)}" for x in devices)
    stdout().print(shown)


def print_skipped(skipped: Sequence[Skipped]) -> None:
    console = stderr()
    for label, reason in dict.fromkeys((s.label, s.reason) for s in skipped):
        console.print(f"not run: {label}: {reason}", style="yellow", markup=False)
