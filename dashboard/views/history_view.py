"""The page History: a table of all measurements, and the difference between two."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import difference as charts
from cufa.dashboard.charts import samples
from cufa.dashboard.model import export
from cufa.dashboard.model.asked import figures
from cufa.dashboard.model.many import days, grouped, said_most, speedup
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.state import Controls, Place
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import links, repro
from cufa.dashboard.views.compare_view import load_cells
from cufa.measure.timing import RESAMPLES, Ratio

_ORIGINS = {"all": "all", "run": "runs here", "recorded": "recorded"}
_ALL = "all"
_MOST_PAIRS = 24
_TABLE = "history.table"


def choose_rows(controls: Controls, known: Sequence[Measurement]) -> list[Measurement]:
    """Filtered measurements, the newest first."""
    with page.control_box():
        left, middle, right = page.fields(2.3, 1.9, 2)
        origin = controls.choice("from", "From", _ORIGINS, segmented=True, at=left)
        operations = {m.operation.name: m.operation.title for m in known}
        operation = _one_of(controls, "op", "Operation", operations, left)
        labels = list(dict.fromkeys(m.label.partition(" ")[0] if m.tiles else m.label for m in known))
        kernels = controls.several("kernels", "Kernels (empty: all)", labels, [], at=middle)
        regime = _one_of(controls, "regime", "Regime", {str(m.regime): str(m.regime) for m in known}, middle)
        machines = list(dict.fromkeys(m.machine for m in known))
        chosen = controls.several("machines", "Machines (empty: all)", machines, [], at=right)
        masks = controls.several(
            "masks", "Masks (empty: all)", {_mask_key(m): m.mask for m in known}, [], at=right
        )
    rows = [
        m
        for m in known
        if origin in ("all", m.origin)
        and (not kernels or m.label in kernels or m.label.partition(" ")[0] in kernels)
        and (not chosen or m.machine in chosen)
        and operation in (_ALL, m.operation.name)
        and regime in (_ALL, m.regime)
        and (not masks or _mask_key(m) in masks)
    ]
    return sorted(rows, key=lambda m: m.recorded, reverse=True)


def _mask_key(m: Measurement) -> str:
    """Mask in links, where a comma separates values."""
    return m.mask.replace(",", "")


def _one_of(controls: Controls, name: str, label: str, words: dict[str, str], at: Place) -> str:
    """One value or all; no control for a single value."""
    if len(words) < 2:
        return _ALL
    return controls.choice(name, label, {_ALL: _ALL, **words}, segmented=True, at=at)


def show_table(rows: Sequence[Measurement]) -> None:
    """One line per measurement."""
    kernels = len({m.kernel or m.label for m in rows})
    number = sentences.count(len(rows), "measurement")
    page.verdict(f"{number} of {sentences.count(kernels, 'kernel')}, {days(rows)}.")
    alone = any(m.load for m in rows)
    lines = [
        {
            "#": number,
            "kernel": m.label,
            "machine": f"{m.machine}{'' if m.is_gpu else ' (CPU)'}",
            "problem": m.case,
            "mask": m.mask,
            "regime": str(m.regime),
            "p50": seconds_text(m.timing.p50),
            "speed": m.speed,
            "% of limit": f"{m.of_ceiling:.0%}",
            "error": "NaN" if m.error is None else f"{m.error:.1e}",
            "p10–p90": f"{seconds_text(m.timing.p10)} – {seconds_text(m.timing.p90)}",
            "recorded": m.recorded[:16].replace("T", " "),
            **(load_cells(m) if alone else {}),
            "from": _ORIGINS[m.origin],
        }
        for number, m in enumerate(rows, 1)
    ]
    st.dataframe(
        lines,
        hide_index=True,
        height=min(38 + 35 * len(lines), 420),
        key=_TABLE,
        on_select=lambda: _take_picked([m.id for m in rows]),
        selection_mode="multi-row",
    )


def _take_picked(ids: Sequence[str]) -> None:
    """Two selected rows are A and B; a third row replaces B."""
    picked = [ids[n] for n in st.session_state[_TABLE]["selection"]["rows"]]
    for name, value in zip(("a", "b"), [*picked[:1], *picked[1:][-1:]], strict=False):
        Controls.put("history", name, value)


def show_difference(controls: Controls, rows: Sequence[Measurement], palette: Palette) -> None:
    """Two measurements, or two whole runs."""
    page.header("Difference of two measurements")
    st.caption("Select two rows of the table above, or choose here.")
    kinds = {"rows": "two measurements", "runs": "two whole runs"}
    kind = controls.choice("compare", "Compare", kinds, segmented=True)
    if kind == "runs":
        _show_runs(controls, rows, palette)
    else:
        _show_rows(controls, rows, palette)


def _show_rows(controls: Controls, rows: Sequence[Measurement], palette: Palette) -> None:
    words = {
        m.id: f"#{n} {m.label} · {in_words(m.problem, m.row.case)} · {m.regime} · {m.where}"
        for n, m in enumerate(rows, 1)
    }
    by_id = {m.id: m for m in rows}
    first, second = first_pair(rows)
    a = by_id[controls.choice("a", "A", words, first.id, local=True)]
    b = by_id[controls.choice("b", "B", words, second.id, local=True)]
    if a.id == b.id:
        page.verdict("A and B are the same measurement: choose a different one.", "warn", small=True)
        return
    links.show("history", a.subject, "A")
    links.show("history", b.subject, "B")
    lanes = [(f"A: {a.label}, {a.regime}", a.timing), (f"B: {b.label}, {b.regime}", b.timing)]
    if a.regime is not b.regime:
        page.verdict(
            f"A was measured {a.regime}, B {b.regime}. Times of different regimes are not compared: choose two "
            "measurements of one regime.",
            "warn",
        )
        page.figure(samples.samples_figure(lanes, palette), "history.samples", samples.describe(lanes))
        return
    ratio = speedup(a, b)
    name_a, name_b = (a.label, b.label) if a.label != b.label else ("A", "B")
    text, tone = charts.in_words(ratio, name_a, name_b)
    page.verdict(text, tone)
    for warning in comparability(a, b):
        st.warning(warning, icon=":material/balance:")
    page.figure(samples.samples_figure(lanes, palette), "history.samples", samples.describe(lanes))
    _show_ratios([(f"{a.label} ÷ {b.label}", ratio)], palette)
    for letter, m in (("A", a), ("B", b)):
        repro.show([m], letter)


def first_pair(rows: Sequence[Measurement]) -> tuple[Measurement, Measurement]:
    """Two measurements of one case from the largest source; else the first two."""
    source = said_most(rows, lambda m: m.source)
    groups = grouped((m for m in rows if m.source == source), lambda m: m.group)
    beside = next((group for group in groups.values() if len(group) > 1), None)
    a, b = (beside or [*rows, *rows])[:2]
    return a, b


def comparability(a: Measurement, b: Measurement) -> list[str]:
    """Other differences between two measurements."""
    parts = []
    if a.key[1:] != b.key[1:]:
        parts.append(f"Different problems: A is {_problem_words(a, b)}; B is {_problem_words(b, a)}.")
    if a.machine != b.machine:
        parts.append(f"Different machines: {a.machine} and {b.machine}.")
    elif a.source != b.source:
        parts.append(
            "Not timed side by side: clocks and other load may have changed in between. The interval does not include "
            "such changes."
        )
    return parts


def _problem_words(m: Measurement, other: Measurement) -> str:
    """The problem, after its case if the other measurement is of another case. Some cases name their problem."""
    case, problem = m.row.case, str(m.problem)
    if not case or case == other.row.case:
        return problem
    return case if problem in case else f"{case}: {problem}"


def _show_runs(controls: Controls, rows: Sequence[Measurement], palette: Palette) -> None:
    sources = grouped(rows, lambda m: m.source)
    if len(sources) < 2:
        page.verdict("There is only one run: a comparison needs two.", "warn", small=True)
        return
    words = {s: f"{x[0].recorded[:19].replace('T', ' ')} · {x[0].suite} · {x[0].where}"
             for s, x in sources.items()}  # fmt: skip
    alike = {b: [a for a in sources if a != b and _shared(sources[a], sources[b])] for b in sources}
    left, right = st.columns(2)
    # B is first: the options of A depend on B.
    default = next((b for b, others in alike.items() if others), None)
    b = controls.choice("rb", "Run B", words, default, local=True, at=right)
    others = dict.fromkeys([*alike[b], *(s for s in sources if s != b)])
    a = controls.choice("ra", "Run A", {s: words[s] for s in others}, local=True, at=left)
    pairs = pair_up(sources[a], sources[b])
    if not pairs:
        page.verdict(_nothing_shared(sources[a], sources[b], any(alike.values())), "warn", small=True)
        return
    page.verdict(_runs_verdict([ratio for _, ratio in pairs]))
    if len(pairs) > _MOST_PAIRS:
        st.caption(f"The {_MOST_PAIRS} largest differences of {len(pairs)}.")
    _show_ratios(pairs[:_MOST_PAIRS], palette)
    for warning in comparability(sources[a][0], sources[b][0])[-1:]:
        st.caption(warning)


def _shared(a: Sequence[Measurement], b: Sequence[Measurement]) -> set[tuple[object, ...]]:
    return {m.key for m in a} & {m.key for m in b}


def _nothing_shared(a: Sequence[Measurement], b: Sequence[Measurement], others_do: bool) -> str:
    """Contents of two runs without a common kernel, shape and regime."""
    timed = [
        f"{name} timed {sentences.listed(dict.fromkeys(m.label for m in rows))} on {rows[0].case}, {rows[0].regime}"
        for name, rows in (("A", a), ("B", b))
    ]
    cure = "Choose another pair." if others_do else "No two runs have one in common: repeat one of the runs."
    return f"No kernel, shape and regime in common: {'; '.join(timed)}. {cure}"


def pair_up(a: Sequence[Measurement], b: Sequence[Measurement]) -> list[tuple[str, Ratio]]:
    """Ratios of the common measurements, the largest differences first."""
    theirs = {m.key: m for m in figures(b)}
    pairs = [(_pair_words(m), speedup(m, theirs[m.key])) for m in figures(a) if m.key in theirs]
    return sorted(pairs, key=lambda pair: -max(pair[1].value, 1 / pair[1].value))


def _pair_words(m: Measurement) -> str:
    p = m.problem
    shape = m.row.case or f"{p.seqlen_q:,}×{p.seqlen_k:,}, d{p.head_dim}, {m.mask}"
    return f"{m.label}, {shape}, {m.regime}"


def _runs_verdict(ratios: Sequence[Ratio]) -> str:
    faster = sum(r.low > 1 for r in ratios)
    slower = sum(r.high < 1 for r in ratios)
    same = len(ratios) - faster - slower
    return f"B: {sentences.count(faster, 'timing')} faster, {slower} slower, {same} without a significant difference."


def _show_ratios(pairs: Sequence[tuple[str, Ratio]], palette: Palette) -> None:
    alt = (
        "Time of A over time of B with 95% intervals. " + "; ".join(f"{name}: {r}" for name, r in pairs) + "."
    )
    page.figure(charts.ratio_figure(pairs, palette), "history.ratio", alt)
    st.caption(
        f"Ratio of medians with its 95% interval: percentile bootstrap, {RESAMPLES:,} resamples; for recorded "
        "measurements of different days, from the interval of each median. Different regimes are never compared."
    )


def show_downloads(rows: Sequence[Measurement]) -> None:
    """Downloads of the table, with all samples of runs."""
    page.header("Download")
    columns = page.fields(1, 2, 1.2)
    offers = (
        ("CSV", export.csv_text, "cufa.csv", "text/csv", "table"),
        (
            "JSON Lines, all samples of runs",
            export.json_lines,
            "cufa.jsonl",
            "application/x-ndjson",
            "data_object",
        ),
        ("HTML report", export.html_report, "cufa-report.html", "text/html", "description"),
    )
    for column, (label, make, file, mime, icon) in zip(columns, offers, strict=True):
        with column:
            on_demand = functools.partial(make, rows)
            page.download(label, on_demand, file, mime, f"download.{file}", icon, width="stretch")
    st.caption(
        f"{sentences.count(len(rows), 'measurement')}, as filtered above. The report is one file and needs "
        "no network."
    )
