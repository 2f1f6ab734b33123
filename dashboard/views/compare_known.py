"""The page Compare, second part: published tables, reproduced on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.charts import compare as charts
from cufa.dashboard.charts.compare import Point
from cufa.dashboard.charts.samples import unit_for
from cufa.dashboard.model import published
from cufa.dashboard.model.asked import Asked, figures
from cufa.dashboard.model.devices import device_of, run_devices
from cufa.dashboard.model.many import speedup
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import compare_view
from cufa.dashboard.worker.jobs import CPU, Job
from cufa.gpu.architectures import Device
from cufa.measure.cases import Case
from cufa.measure.regimes import Regime
from cufa.measure.suites import BLOCK_LOSERS
from cufa.problem.problem import Problem

_PUBLISHED = "published"

Sources = Sequence[Sequence[Measurement]]


def show(
    controls: Controls, measured: Sequence[Measurement], chosen: Sequence[Measurement], palette: Palette
) -> None:
    """One of three tables: from runs of this machine, else from the ``chosen`` machine, else from any machine."""
    of_runs = [m for m in measured if m.origin == "run"]
    sources = of_runs, chosen, measured
    page.header("Published results, reproduced")
    device = next(iter(run_devices()))
    table = controls.choice("table", "Table", {name: x[0] for name, x in _TABLES.items()}, segmented=True)
    _, title, cases_on, show_table = _TABLES[table]
    cases = cases_on(device_of(device))
    show_table(_on(sources, cases), device, palette)
    # A button measures the table on this machine; the page Run shows the progress.
    job = Job(f"known: {title}", device, cases, 0.5)
    where = "the CPU" if device == CPU else "the GPU"
    page.button(f"Measure on {where} of this machine", f"known.{table}", "play_arrow", engine.start, job)
    active = [r for r in engine.store().active() if r.job.title == job.title]
    if active:
        st.caption(f"{active[-1].status}: {active[-1].phase or 'waiting'}. The page Run shows the progress.")


def _on(sources: Sources, cases: tuple[Case, ...]) -> list[Measurement]:
    """Measurements in turns of these shapes, of any data type, from the first source that has some."""
    shapes = {_shape(case.problem) for case in cases}
    for source in sources:
        of_shapes = (m for m in source if _shape(m.problem) in shapes)
        if rows := figures(of_shapes, Asked(regime=Regime.IN_TURNS)):
            return rows
    return []


def _shape(p: Problem) -> tuple[object, ...]:
    return p.operation, p.shapes, p.mask


def _show_versions(rows: Sequence[Measurement], device: str, palette: Palette) -> None:
    times = {
        x: f"{x.fa1_ms} ms → {x.fa2_ms} ms: {x.speedup}×<br>{published.TRITON_A10G}"
        for x in published.VERSIONS
    }
    series = {
        _PUBLISHED: [Point(x.seqlen, x.speedup, x.speedup, x.speedup, text) for x, text in times.items()]
    }
    for fast in (m for m in rows if m.label == "fa2"):
        slow = next((m for m in rows if m.label == "fa1" and m.problem == fast.problem), None)
        if slow is not None:
            ratio = speedup(slow, fast)
            text = (
                f"{seconds_text(slow.timing.p50)} → {seconds_text(fast.timing.p50)}: {ratio}<br>"
                f"{fast.problem.dtype}, {fast.regime}, {fast.where}"
            )
            point = Point(fast.problem.seqlen_k, ratio.value, ratio.low, ratio.high, text)
            series.setdefault(f"{fast.problem.dtype}, {fast.where}", []).append(point)
    here = {name: points for name, points in series.items() if name != _PUBLISHED}
    text, tag = versions_verdict(here, rows)
    page.verdict(text, tag=tag, small=True)
    title, limit = "time of FA1 ÷ time of FA2", (2.0, "2×: limit of skipping alone")
    figure = charts.by_length(series, palette, title, line=limit, ratio=True, published=_PUBLISHED)
    page.figure(figure, "compare.versions", compare_view.describe(series, title))
    st.caption(
        f"Published: {published.TRITON_A10G}, {published.VERSIONS_MASK}, head dim 64, batch 2, 4 heads. The published "
        "gain combines skipping and better parallelism. FA1 runs one thread block per head, which leaves most of a "
        "large card idle. On a CPU, only the skipped tiles and the loop order differ."
    )


def versions_verdict(series: dict[str, list[Point]], rows: Sequence[Measurement]) -> tuple[str, str]:
    """Sentence and tag. Only rows of the published data type are set against the published figure."""
    alike = {name: x for name, x in series.items() if name.startswith(f"{published.VERSIONS_DTYPE}, ")}
    if not series:
        return "Published: 1.06× at 512 keys, 1.70× at 4,096. Not measured yet.", _PUBLISHED
    if not alike:
        types = sentences.listed(dict.fromkeys(name.partition(",")[0] for name in series))
        text = f"Only {types} is timed on {rows[0].machine}; the published table is {published.VERSIONS_DTYPE} on an "
        return f"{text}A10G. The two are not comparable.", page.origin_tag(rows[0].origin)
    name, points = max(alike.items(), key=lambda pair: len(pair[1]))
    last = max(points, key=lambda p: p.length)
    then = next(x for x in published.VERSIONS if x.seqlen == last.length)
    origin = next(m.origin for m in rows if name.endswith(m.where))
    return (
        f"In {published.VERSIONS_DTYPE} at {last.length:,} keys: {last.value:.2f}× from FA1 to FA2 on "
        f"{name.partition(', ')[2]}; published {then.speedup:.2f}× on an A10G.",
        page.origin_tag(origin),
    )


def _show_blocks(rows: Sequence[Measurement], device: str, palette: Palette) -> None:
    by_name = {m.label.removeprefix("fa1 "): m for m in rows if m.label.startswith("fa1 ")}
    losers = ", ".join(f"{q}×{kv} ({warps} warps)" for q, kv, warps in BLOCK_LOSERS)
    words = f"On an A10, 64×64 with 4 warps was faster than {losers}."
    if not by_name:
        page.verdict(words, tag=_PUBLISHED, small=True)
        return
    ordered = sorted(by_name.items(), key=lambda pair: pair[1].timing.p50)
    best, slowest = ordered[0][1], ordered[-1][1]
    text = f"{best.tiles} is the fastest on {best.machine}: {seconds_text(best.timing.p50)}, "
    text += f"{slowest.timing.p50 / best.timing.p50:.2f}× faster than {slowest.tiles}."
    page.verdict(text, tag=page.origin_tag(best.origin), small=True)
    factor, unit = unit_for(slowest.timing.p50)
    bars = {m.tiles if device == CPU else key: factor * m.timing.p50 for key, m in ordered}
    alt = f"Median time in {unit} by tiling: " + ", ".join(f"{n} {v:.3g}" for n, v in bars.items())
    figure = charts.bars({best.where: bars}, palette, f"median time ({unit})", marked=next(iter(bars)))
    page.figure(figure, "compare.blocks", alt)
    st.caption(f"{best.problem}. **{best.where}**. Published: {words}")


def _show_traffic(rows: Sequence[Measurement], device: str, palette: Palette) -> None:
    names = {(x.batch, x.heads, x.seqlen): f"{x.batch} × {x.heads} × {x.seqlen:,}" for x in published.TRAFFIC}
    groups = {_PUBLISHED: {names[(x.batch, x.heads, x.seqlen)]: x.gbytes for x in published.TRAFFIC}}
    for m in rows:
        if m.label in ("fa1", "fa2"):
            p = m.problem
            series = groups.setdefault(f"{m.label}, {p.dtype}, {m.where}", {})
            series[names[(p.batch, p.heads, p.seqlen_k)]] = m.gbytes
    best = max(published.TRAFFIC, key=lambda x: x.gbytes)
    words = f"At best {best.gbytes:.0f} of {published.TRAFFIC_PEAK:.0f} GB/s: device memory is not the limit."
    if len(groups) > 1:
        top = max(rows, key=lambda m: m.gbytes)
        text = f"{top.label} reaches {top.gbytes:.3g} GB/s at most on {top.machine}. Published: {best.gbytes:.0f} GB/s."
        page.verdict(text, tag=page.origin_tag(top.origin), small=True)
    else:
        page.verdict(words, tag=_PUBLISHED, small=True)
    alt = "Effective traffic in GB/s by batch × heads × length. " + "; ".join(
        f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in values.items()) for name, values in groups.items()
    )
    figure = charts.bars(groups, palette, "GB/s: q, k, v, o once, over time", published=_PUBLISHED)
    page.figure(figure, "compare.traffic", alt)
    st.caption(f"Published: {published.A10}, by batch × heads × length, head dim 64. {words}")


_TABLES: dict[str, tuple[str, str, Callable[[Device | None], tuple[Case, ...]], Callable[..., None]]] = {
    "versions": ("FA1 to FA2 by length", "FA1 to FA2", published.version_cases, _show_versions),
    "blocks": ("block sizes of FA1", "block sweep", published.block_cases, _show_blocks),
    "traffic": ("effective GB/s", "effective traffic", published.traffic_cases, _show_traffic),
}
"""Words, title of the run, cases on a device, and what shows the rows."""
