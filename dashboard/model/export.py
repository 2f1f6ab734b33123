"""Downloads of measurements: CSV, JSON Lines, and an HTML report in one file."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Iterator, Sequence

from cufa import __version__
from cufa.commands.common import seconds_text
from cufa.dashboard.charts import compare, samples
from cufa.dashboard.charts.compare import Point
from cufa.dashboard.model.many import grouped
from cufa.dashboard.model.measurements import COLUMNS, Measurement
from cufa.dashboard.theme import LIGHT
from cufa.measure.measured import FLOP_CONVENTION
from cufa.measure.timing import as_nanoseconds

_MOST_FIGURES = 24


def csv_text(rows: Sequence[Measurement]) -> str:
    """One line per measurement, in SI units."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    writer.writerows(m.as_dict() for m in rows)
    return out.getvalue()


def json_lines(rows: Sequence[Measurement]) -> str:
    """One object per measurement, with all samples of runs."""

    def line(m: Measurement) -> str:
        samples = {"samples_ns": as_nanoseconds(m.timing)} if m.timing.samples else {}
        return json.dumps({**m.as_dict(), **samples}, ensure_ascii=False) + "\n"

    return "".join(map(line, rows))


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1B2330; background: #FCFBF9;
  margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #E4E2DB; }
th:first-child, td:first-child { text-align: left; }
.note { color: #5C6675; }
"""


def html_report(rows: Sequence[Measurement]) -> str:
    """A self-contained page with figures and Plotly's script."""
    return "\n".join(_report(rows))


def _report(rows: Sequence[Measurement]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cufa measurements</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>cufa measurements</h1>"
    machines = "; ".join(dict.fromkeys(m.where for m in rows))
    yield f'<p>{len(rows)} measurements: {html.escape(machines)}.</p><p class="note">cufa {__version__}. '
    yield f"Medians and percentiles of every call. FLOP convention: {html.escape(FLOP_CONVENTION)}.</p>"
    script: bool | str = True  # once, inside the file
    curves = _curves(rows)
    for family, (title, series) in curves.items():
        figure = compare.by_length(series, LIGHT, title)
        yield f"<h2>{html.escape(family)}</h2>"
        yield figure.to_html(full_html=False, include_plotlyjs=script, config={"displaylogo": False})
        script = False
    for number, group in enumerate(grouped(rows, lambda m: m.group).values()):
        first = group[0]
        when = f"{html.escape(first.where)}, {first.recorded[11:16]} UTC, measured {first.regime}"
        yield f'<h2>{html.escape(first.case)}</h2><p class="note">{when}</p>'
        if number < _MOST_FIGURES:
            lanes = [(m.label, m.timing) for m in group]
            figure = samples.samples_figure(lanes, LIGHT)
            yield figure.to_html(full_html=False, include_plotlyjs=script, config={"displaylogo": False})
            script = False
        yield from _table(group)
    yield "</body></html>"


def _curves(rows: Sequence[Measurement]) -> dict[str, tuple[str, dict[str, list[Point]]]]:
    """{machine, family and regime: (axis title, {kernel: points})} for families with three or more lengths."""
    curves: dict[str, tuple[str, dict[str, list[Point]]]] = {}
    for m in rows:
        title = "TB/s" if m.operation.memory_bound else "TFLOP/s (useful)"
        name = f"{m.family}, {m.regime}: {m.where}"
        series = curves.setdefault(name, (title, {}))[1].setdefault(m.label, [])
        if all(p.length != m.problem.seqlen_k for p in series):  # rows come newest first
            series.append(compare.rate_point(m))
    return {name: curve for name, curve in curves.items() if max(map(len, curve[1].values())) >= 3}


def _table(rows: Sequence[Measurement]) -> Iterator[str]:
    header = ["kernel", "tiles", "p50", "p10", "p90", "calls", "speed", "GB/s", "of the limit", "error"]
    header += ["clock, power and energy"] * any(m.load for m in rows)
    yield "<table><thead><tr>" + "".join(f"<th>{h}</th>" for h in header) + "</tr></thead><tbody>"
    for m in rows:
        times = (seconds_text(t) for t in (m.timing.p50, m.timing.p10, m.timing.p90))
        error = "not a number" if m.error is None else f"{m.error:.1e}"
        cells = [
            m.label, m.tiles, *times, str(m.timing.count), m.speed, f"{m.gbytes:.3g}",
            f"{m.of_ceiling:.0%} ({m.ceiling})", error,
        ]  # fmt: skip
        cells += [m.load_text] * (len(header) - len(cells))
        yield "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"
    yield "</tbody></table>"
