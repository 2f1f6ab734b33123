"""The page Run: the result of one run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import glossary, page
from cufa.dashboard.charts import samples as charts
from cufa.dashboard.model import measured_rows, measurements, work
from cufa.dashboard.model.many import speedup
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import rates_view, repro, run_profile
from cufa.dashboard.views.compare_view import load_cells
from cufa.dashboard.worker.run import Run
from cufa.measure.regimes import Regime


def choose_shape(controls: Controls, run: Run | None) -> list[Measurement]:
    """Measurements of one shape of the run; the default is the first shape."""
    measured = measured_rows.of_run(run) if run is not None else []
    if not measured:
        return []
    groups = [list(group) for _, group in itertools.groupby(measured, key=lambda m: m.group)]
    if len(groups) == 1:
        return groups[0]
    words = {str(n): group[0].case for n, group in enumerate(groups)}
    return groups[int(controls.choice("shape", "Shape", words))]


def show(measured: Sequence[Measurement], run: Run, zoomed: bool, palette: Palette) -> None:
    """Verdict, distribution, table, plans."""
    if not measured:
        _show_skipped(run)
        return
    first = measured[0]
    page.verdict(verdict(measured), "", "measured on " + ("GPU" if first.is_gpu else "CPU"))
    _show_headline(measured)
    lanes = [(m.label, m.timing) for m in measured]
    page.figure(charts.samples_figure(lanes, palette, zoomed=zoomed), "run.samples", charts.describe(lanes))
    dot = "one call" if first.regime is Regime.IN_TURNS else "the average call of one batch"
    st.caption(
        f"{measurements.in_words(first.problem)}. Measured **{first.regime}** on **{first.where}**: "
        f"{first.how} Each dot is {dot}, from top to bottom in measuring order. The band is p10 to p90, the line is "
        "the median. "
        + (f"{charts.beyond(lanes)} slower calls are beyond the right edge. " if zoomed else "")
        + f"{work.flop_words(m.problem for m in measured)}."
    )
    show_table(measured)
    repro.show(measured, "run")
    _show_power(measured)
    _show_all_rates(run, palette)
    if max(m.of_ceiling for m in measured) > 1:
        text = "Over 100% of the limit: other work on this machine slowed down the measurement of the ceilings. Repeat "
        st.info(f"{text}the run when the machine is idle.", icon=":material/speed:")
    for m in measured:
        if m.plan:
            with st.expander(f"The plan of {m.label}, and its reasons", icon=":material/route:"):
                st.code(m.plan, language=None)
    run_profile.show(run, measured)
    _show_skipped(run)


def _show_power(measured: Sequence[Measurement]) -> None:
    """Power and clock while each kernel ran alone, if NVML reports them."""
    powered = [m for m in measured if m.load.get("watts") is not None]
    if not powered:
        return
    thriftiest = max(powered, key=lambda m: float(m.load.get("tflop_per_joule") or 0.0))
    slowest = min(powered, key=lambda m: float(m.load["clock_mhz"]))
    joules = thriftiest.load.get("joules")
    text = f"{thriftiest.label} takes {joules:.3g} J per call. " if joules else ""
    limit = f" of at most {slowest.clock_limit}" if slowest.clock_limit else ""
    load = slowest.load
    text += f"{slowest.label} runs at {load['clock_mhz']:,.0f} MHz{limit}, drawing {load['watts']:,.0f} W"
    reasons = load.get("throttled") or {}
    if reasons:
        name = max(reasons, key=lambda reason: reasons[reason])
        text += f": the {name} lowers the clock {reasons[name]:.0%} of the time"
    page.verdict(f"{text}.", "", "measured", small=True)


def _show_all_rates(run: Run, palette: Palette) -> None:
    """All shapes of a memory-bound operation against a plain read."""
    rows = [m for m in measured_rows.of_run(run) if m.operation.memory_bound and m.of_read is not None]
    if rows:
        page.header("Compared with a plain read")
        rates_view.show(rows, "run.rates", palette)


def verdict(measured: Sequence[Measurement]) -> str:
    """The result in one sentence."""
    fastest = min(measured, key=lambda m: m.timing.p50)
    limit = f", {fastest.of_ceiling:.0%} of the limit by {fastest.ceiling}"
    if fastest.of_ceiling > 1:
        limit = ""  # impossible; a note explains the reason
    rate = f"{fastest.speed} {fastest.regime}"
    if len(measured) == 1:
        return f"{fastest.label} takes {seconds_text(fastest.timing.p50)}: {rate}{limit}."
    slowest = max(measured, key=lambda m: m.timing.p50)
    ratio = speedup(slowest, fastest)
    if ratio.low <= 1:
        return f"No significant difference between {fastest.label} and {slowest.label}: {rate}{limit}."
    return f"{fastest.label} is {ratio} faster than {slowest.label}: {rate}{limit}."


def _show_headline(measured: Sequence[Measurement]) -> None:
    """The four main figures of the fastest kernel."""
    fastest = min(measured, key=lambda m: m.timing.p50)
    values = {
        f"{fastest.label}, median": seconds_text(fastest.timing.p50),
        f"Speed, {fastest.regime}": fastest.speed,
        f"Of the limit by {fastest.ceiling}": f"{fastest.of_ceiling:.0%}",
        "Largest error against float64": error_text(fastest),
    }
    for column, (name, value) in zip(st.columns(4), values.items(), strict=True):
        column.metric(name, value, help=glossary.help_text(name))


def error_text(m: Measurement) -> str:
    return "not a number" if m.error is None else f"{m.error:.1e}"


def show_table(measured: Sequence[Measurement]) -> None:
    """Speed and error side by side."""
    lines = [
        {
            "kernel": m.label,
            "tiles": m.tiles or "–",
            "p50": seconds_text(m.timing.p50),
            "p10": seconds_text(m.timing.p10),
            "p90": seconds_text(m.timing.p90),
            "calls": m.timing.count,
            "regime": str(m.regime),
            "speed": m.speed,
            "GB/s": f"{m.gbytes:.3g}",
            "% of limit": f"{m.of_ceiling:.0%}",
            "limit": m.ceiling,
            "error": error_text(m),
            **(load_cells(m) if any(x.load for x in measured) else {}),
            "compile": "–" if m.prepare_seconds is None else seconds_text(m.prepare_seconds),
        }
        for m in measured
    ]
    if not any(m.is_gpu for m in measured):  # nothing is compiled for a CPU
        lines = [{name: x for name, x in line.items() if name != "compile"} for line in lines]
    helps = {
        "compile": "Compilation, or a lookup in the cache on disk.",
        "error": "Largest absolute difference from float64; inputs are standard normal.",
        "GB/s": "Every operand once, over the median time.",
        "energy per call": "From NVML's energy counter, over the whole time of this kernel.",
        "% of limit": "Share of the speed that this machine's measured ceilings allow.",
    }
    columns = {name: st.column_config.TextColumn(help=text) for name, text in helps.items()}
    st.dataframe(lines, hide_index=True, column_config=columns)


def _show_skipped(run: Run) -> None:
    for label, reason in dict.fromkeys((s["label"], s["reason"]) for s in run.record.get("skipped", [])):
        st.info(f"Not run: **{label}**: {reason}", icon=":material/block:")
