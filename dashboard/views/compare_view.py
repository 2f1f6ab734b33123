"""The page Compare, first part: kernels against sequence length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import streamlit as st

from cufa.commands.common import rate_text, seconds_text
from cufa.dashboard import page
from cufa.dashboard.charts import compare as charts
from cufa.dashboard.charts.compare import Point
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model.asked import Asked, figures, where
from cufa.dashboard.model.many import grouped, machines, said_most, speedup
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import links
from cufa.dashboard.views.shape_controls import choose_regime
from cufa.measure.quantized import BASELINE

_METRICS = {"tflops": "TFLOP/s", "time": "time", "gbytes": "GB/s", "joules": "energy"}


def choose_machine(controls: Controls, measured: Sequence[Measurement]) -> list[Measurement]:
    """The measurements of one machine."""
    words = machines(measured)
    chosen = controls.choice(
        "machine", "Measured on", words, said_most(measured, lambda m: m.machine_key), local=True
    )
    return [m for m in measured if m.machine_key == chosen]


def show_lengths(controls: Controls, known: Sequence[Measurement], palette: Palette) -> None:
    """FLOP, time or bytes by length, and the speed-up over a baseline, within one regime."""
    known = [m for m in known if m.label != BASELINE]  # a kernel that other suites time under its own name
    left, right = page.fields(1.6, 3)
    regime = choose_regime(controls, list(dict.fromkeys(m.regime for m in known)), left, local=True)
    families = grouped(figures(known, Asked(regime=regime)), lambda m: m.family)
    ranked = sorted(families, key=lambda name: _interest(families[name]), reverse=True)
    family = controls.choice("shapes", "Shapes", ranked, local=True, at=right)
    rows = families[family]
    labels = list(dict.fromkeys(m.label for m in rows))
    names = list(dict.fromkeys(m.label for m in known if m.family == family))  # one look in all regimes
    with_joules = figures((m for m in known if m.family == family and _joules(m)), Asked(regime=regime))
    metrics = {name: words for name, words in _METRICS.items() if name != "joules" or with_joules}
    columns = page.fields(2.4, 1.4, 1.2)
    usual = "gbytes" if rows[0].operation.memory_bound else "tflops"
    metric = controls.choice("metric", "Figure", metrics, usual, segmented=True, at=columns[0])
    base = controls.choice("base", "Baseline", labels, _slowest(rows), local=True, at=columns[1])
    shown = controls.several("show", "Kernels", labels, labels, local=True)
    rows = [m for m in (with_joules if metric == "joules" else rows) if m.label in shown]
    if not rows:
        page.verdict("No kernel is chosen: choose at least one kernel.", "warn", small=True)
        return
    _show_metric(rows, metric, names, palette)
    _show_speedup(families[family], [x for x in shown if x != base], base, names, palette)


def _interest(rows: Sequence[Measurement]) -> tuple[bool | int, ...]:
    """Rank of a curve, in this order: another library, compute-bound, 16-bit elements, as many queries as keys, many
    lengths, head dim 128, masked."""
    lengths, first = {m.problem.seqlen_k for m in rows}, rows[0]
    has_peer = any(m.row.is_peer for m in rows) and len(lengths) > 1
    computes, p = not first.operation.memory_bound, first.problem
    usual = p.itemsize == 2, p.seqlen_q == p.seqlen_k
    return has_peer, computes, *usual, len(lengths), p.head_dim == 128, p.mask_kind != "full"


def _joules(m: Measurement) -> float:
    """Joules per call; 0 if not measured."""
    return float(m.load.get("joules") or 0.0)


def _per_joule(m: Measurement) -> float:
    return float(m.load.get("tflop_per_joule") or 0.0)


def _rate(m: Measurement) -> float:
    return m.gbytes if m.operation.memory_bound else m.tflops


def _slowest(rows: Sequence[Measurement]) -> str:
    longest = max(m.problem.seqlen_k for m in rows)
    return min((m for m in rows if m.problem.seqlen_k == longest), key=lambda m: m.tflops).label


def _show_metric(rows: Sequence[Measurement], metric: str, names: Sequence[str], palette: Palette) -> None:
    best = max(rows, key=_per_joule if metric == "joules" else _rate)
    text = f"{best.label} is the fastest {best.regime}: {best.speed} at {best.problem.seqlen_k:,} keys, "
    text += f"{min(best.of_ceiling, 1):.0%} of the limit by {best.ceiling}"
    if metric == "joules":
        text = f"{best.label} takes the fewest joules {best.regime}: {_per_joule(best):.3g} TFLOP per joule, "
        text += f"{_joules(best):.3g} J per call, at {best.problem.seqlen_k:,} keys"
    page.verdict(f"{text}.", tag=_tag(best))
    factor, unit = unit_for(max(m.seconds for m in rows))
    if metric == "tflops":
        factor, unit = (1e3, "GFLOP/s") if best.tflops < 1 else (1.0, "TFLOP/s")
    series: dict[str, list[Point]] = {}
    for m in rows:
        series.setdefault(m.label, []).append(_point(m, metric, factor))
    title = {
        "time": f"time ({unit})",
        "tflops": f"{unit} (useful)",
        "gbytes": "GB/s (every operand once)",
        "joules": "TFLOP per joule",
    }[metric]
    figure = charts.by_length(series, palette, title, names=names)
    page.figure(figure, "compare.lengths", describe(series, title))
    bars = "" if metric == "joules" else " Bars are p10 to p90."
    kind = "" if best.origin == "recorded" else " The newest run of each kernel and shape."
    st.caption(f"Measured {best.regime} on **{where(rows)}**: {best.how}{bars}{kind}")
    links.show("compare", best.subject, f"{best.label} at {best.problem.seqlen_k:,}")
    if lines := load_lines(rows):
        with st.expander("Clock, power and energy of each kernel", icon=":material/bolt:"):
            st.dataframe(lines, hide_index=True)


def load_lines(rows: Iterable[Measurement]) -> list[dict[str, str]]:
    """Each sustained time with its bound, clock, power and energy; rows nearest to their bound first."""
    return [
        {
            "kernel": m.label,
            "problem": m.case,
            "time": seconds_text(m.seconds),
            "speed": m.speed,
            "bound": f"{seconds_text(m.bound[0])}, {m.ceiling}",
            "of the bound": f"{m.of_ceiling:.0%}",
            **load_cells(m),
        }
        for m in sorted(rows, key=lambda m: -m.of_ceiling)
        if m.load
    ]


def load_cells(m: Measurement) -> dict[str, str]:
    """Cells of a table; dashes for contenders in turns or missing figures."""
    load = m.load
    columns = (
        ("clock", "clock_mhz", "{:,.0f} MHz"),
        ("power", "watts", "{:,.0f} W"),
        ("energy per call", "joules", "{:.3g} J"),
        ("TFLOP per joule", "tflop_per_joule", "{:.3g}"),
    )
    cells = {name: "–" if load.get(key) is None else text.format(load[key]) for name, key, text in columns}
    reasons = (f"{name} {share:.0%}" for name, share in (load.get("throttled") or {}).items())
    return cells | {"throttled by": ", ".join(reasons) or "–"}


def _point(m: Measurement, metric: str, factor: float) -> Point:
    t = m.timing
    load = f"<br>{m.load_text}" if m.load_text else ""
    text = (
        f"{m.case}<br>{seconds_text(t.p50)}, {rate_text(m.tflops)}, {m.gbytes:.3g} GB/s<br>"
        f"{m.of_ceiling:.0%} of the limit by {m.ceiling}{load}<br>{m.regime}; {m.where}"
    )
    if metric == "time":
        return Point(m.problem.seqlen_k, factor * t.p50, factor * t.p10, factor * t.p90, text)
    if metric == "joules":
        value = _per_joule(m)
        return Point(m.problem.seqlen_k, value, value, value, text)
    value = factor * m.tflops if metric == "tflops" else m.gbytes
    return Point(m.problem.seqlen_k, value, value * t.p50 / t.p90, value * t.p50 / t.p10, text)


def _show_speedup(
    rows: Sequence[Measurement], shown: Sequence[str], base: str, names: Sequence[str], palette: Palette
) -> None:
    page.header(f"Speed-up over {base}")
    series = speedups(rows, shown, base)
    if not series:
        text = f"No shape has measurements of both {base} and another chosen kernel."
        page.verdict(text, "warn", small=True)
        return
    named = ((name, p) for name, points in series.items() for p in points)
    name, point = max(named, key=lambda pair: pair[1].value)
    best = f"{point.value:.2f}× ({point.low:.2f}–{point.high:.2f}), {name} at {point.length:,} keys"
    text = f"At most {best}." if point.low > 1 else f"No kernel is significantly faster: at best {best}."
    page.verdict(text, tag=_tag(rows[0]), small=True)
    title = f"time of {base} ÷ time"
    figure = charts.by_length(series, palette, title, line=(1.0, f"1×: {base}"), ratio=True, names=names)
    page.figure(figure, "compare.speedup", describe(series, title))
    st.caption(f"Ratio of median times, measured {rows[0].regime}. Bars are 95% bootstrap intervals.")


def speedups(rows: Sequence[Measurement], shown: Sequence[str], base: str) -> dict[str, list[Point]]:
    """Speed-up of each kernel over the baseline, on shapes that were measured with both."""
    by_key = {m.key: m for m in rows}
    series: dict[str, list[Point]] = {}
    for (label, *same), m in by_key.items():
        slow = by_key.get((base, *same))
        if label in shown and slow is not None:
            ratio = speedup(slow, m)
            text = f"{m.case}<br>{ratio} over {base}, {m.regime}<br>{m.where}"
            point = Point(m.problem.seqlen_k, ratio.value, ratio.low, ratio.high, text)
            series.setdefault(m.label, []).append(point)
    return series


def describe(series: dict[str, list[Point]], title: str) -> str:
    """A figure by sequence length in words."""
    ordered = {name: sorted(points, key=lambda p: p.length) for name, points in series.items()}
    parts = (
        f"{name}: {', '.join(f'{p.length:,} keys {p.value:.3g}' for p in x)}" for name, x in ordered.items()
    )
    return f"{title} by sequence length. {'; '.join(parts)}."


def _tag(m: Measurement) -> str:
    tag = page.origin_tag(m.origin)
    return tag if m.origin == "recorded" else f"{tag} on {'GPU' if m.is_gpu else 'CPU'}"
