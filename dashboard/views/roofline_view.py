"""The page Roofline."""

from __future__ import annotations

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.charts import roofline as charts
from cufa.dashboard.charts.roofline import Here
from cufa.dashboard.charts.work import si
from cufa.dashboard.model import devices, evidence, work
from cufa.dashboard.model.asked import Asked, figures, where
from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.model.subject import Subject, problem_of
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import links, mask_control, roofline_levels, roofline_needs, roofline_why
from cufa.dashboard.views.compare_view import load_lines
from cufa.dashboard.views.shape_controls import choose_regime
from cufa.kernels import KERNELS, TileConfig
from cufa.measure.cases import Work
from cufa.measure.suites import SUITES
from cufa.problem.problem import Problem


def show(controls: Controls, palette: Palette) -> None:
    """The whole page; without measurements, instructions to make some."""
    known = _load()
    wanted = _subject(controls)
    if not known:
        return
    by_name = {e.name: e for e in known}
    with page.control_box():
        left, middle, right = page.fields(1.8, 2.2, 1.6)
        words = {e.name: f"{where(e.rows)}{', run here' * (e.rows[0].origin == 'run')}" for e in known}
        here = _own_card(known)
        chosen = by_name[controls.choice("machine", "Measured on", words, here, local=True, at=left)]
        suites = dict.fromkeys(r.suite for r in chosen.rows)
        words = {name: SUITES[name].title if name in SUITES else name for name in suites}
        suite = controls.choice("suite", "Shapes", words, local=True, at=middle)
        rows = [r for r in chosen.rows if r.suite == suite]
        regime = choose_regime(controls, list(dict.fromkeys(r.regime for r in rows)), right, local=True)
        rows = [r for r in rows if r.regime == regime]
        mask = mask_control.choose_among(controls, (r.problem for r in rows))
        rows = [r for r in rows if mask in ("", r.mask)]
        labels = list(dict.fromkeys(r.label for r in rows))
        shown = controls.several("show", "Kernels", labels, labels, local=True)
    rows = [r for r in rows if r.label in shown]
    if not rows:
        page.verdict("No kernel is chosen: choose at least one kernel.", "warn")
        return
    star = None if wanted is None else _show_asked(wanted, chosen, suite)
    _show_roofline(chosen, rows, palette, star)
    row = roofline_needs.show(controls, rows, wanted, chosen, palette)
    roofline_why.show(row, chosen)
    if wanted is None:
        links.show("roofline", row.subject)
        roofline_levels.show(row.subject, row, chosen, _top(row.problem, chosen), palette)
        return
    same = Asked(wanted.problem, wanted.kernel, wanted.config, regime, suite=suite)
    mine = next((m for m in figures(chosen.rows, same) if m.kernel == wanted.kernel), None)
    roofline_levels.show(wanted, mine, chosen, _top(wanted.problem, chosen), palette)


def _own_card(known: list[Evidence]) -> str | None:
    """The record of this machine's card, if there is one."""
    if not devices.gpu_count():
        return None
    try:
        here = devices.gpu(0).name
    except ValueError:  # older than sm_80
        return None
    return next((e.name for e in known if e.device == here), None)


def _top(problem: Problem, chosen: Evidence) -> float:
    """Ceiling of products, FLOP/s."""
    assert chosen.limits is not None
    flops = chosen.limits.flops
    return flops.get(_product(problem)) or max(flops.values())


def _subject(controls: Controls) -> Subject | None:
    """The problem, kernel and tiles that the page's address names."""
    problem = controls.carried("of", problem_of, "a shape")
    kernel = controls.carried("kernel", lambda text: KERNELS[text].name, "a kernel")
    config = controls.carried("tiles", lambda text: _config(kernel, text), "tiles of the kernel")
    return None if problem is None else Subject(problem, kernel, config)


def _config(kernel: str | None, text: str) -> TileConfig:
    return {config_key(c): c for c in KERNELS[kernel or ""].configs}[text]


def _show_asked(wanted: Subject, chosen: Evidence, suite: str) -> Here:
    """The shape at the roof, and its recorded times."""
    assert chosen.limits is not None
    p = wanted.problem
    least, binds = chosen.limits.floor(p, Work.of(p))
    page.verdict(
        f"{in_words(p)}: {si(p.flops, 'FLOP')} for {si(p.io_bytes, 'B')}, {p.flops / p.io_bytes:,.0f} FLOP per byte; "
        f"at best {seconds_text(least)}, by {binds}.",
        "",
        "predicted",
    )
    links.show("roofline", wanted)
    if rows := figures(chosen.rows, Asked(p, suite=suite)):
        times = (f"{m.label} {seconds_text(m.seconds)} ({m.of_ceiling:.0%}, {m.regime})" for m in rows)
        text = f"Recorded for this shape on {where(rows)}: {sentences.listed(times, 8)}."
        page.verdict(text, "", page.origin_tag(rows[0].origin), small=True)
    else:
        st.caption(f"No time of this shape is recorded on {chosen.device}. The star marks the roof.")
    return Here(p.flops / p.io_bytes, p.flops / least / 1e12)


def _load() -> list[Evidence]:
    """Evidence with ceilings, and runs of this machine; a message if there is none."""
    try:
        loaded = [e for e in evidence.load() if e.limits is not None and e.rows]
    except ValueError as error:
        page.verdict("The recorded measurements cannot be read.", "alarm")
        st.error(str(error), icon=":material/broken_image:")
        return engine.own_evidence()
    loaded += engine.own_evidence()
    if not loaded:
        page.verdict("No GPU measurement is recorded yet.", "warn")
        st.markdown(
            "A roofline needs ceilings and times from one machine. On a machine with a GPU, from a "
            "checkout:\n\n```\nmake gpu-evidence\n```\n\n"
            "The command measures the ceilings (memory, tensor cores, exponentials) and every kernel, and writes "
            "`cufa/records/<gpu>.jsonl` for this page. A run on the page Run also measures ceilings."
        )
    return loaded


def _show_roofline(chosen: Evidence, rows: list[Measurement], palette: Palette, here: Here | None) -> None:
    assert chosen.limits is not None
    best = charts.closest([r for r in rows if r.kernel] or rows)
    page.verdict(
        f"{best.label} comes closest: {best.speed}, {best.of_ceiling:.0%} of the limit "
        f"by {best.ceiling} ({best.problem}; {best.regime}).",
        "",
        page.origin_tag(best.origin),
        small=here is not None,
    )
    kinds = list(chosen.limits.flops)
    products = [p for p in kinds if any(_product(r.problem) == p for r in rows)] or kinds[:1]
    texts = (
        f"{r.label}, {r.problem}: {r.speed}, {r.of_ceiling:.0%} of the limit by {r.ceiling}"
        for r in rows[:40]
    )
    alt = f"Roofline of {where(rows)}, {len(rows)} points. {'; '.join(texts)}."
    names = [r.label for r in chosen.rows if r.suite == rows[0].suite]
    roofline = charts.roofline(rows, chosen.limits, products, palette, here=here, names=names)
    page.figure(roofline, "roofline", alt)
    st.caption(
        f"{page.origin_tag(best.origin).capitalize()} on **{where(rows)}**, {rows[0].regime}: "
        f"{rows[0].how} The ceilings are the card's own: the fastest recorded read or copy, products from registers, "
        f"and exponentials. Traffic is every operand once; {work.flop_words(r.problem for r in rows)}."
        + (" Open marks: masked problems." if len({r.problem.mask_kind == "full" for r in rows}) > 1 else "")
    )
    if lines := load_lines(r for r in rows if r.load.get("clock_mhz")):
        st.dataframe(lines, hide_index=True, height="content" if len(lines) < 10 else 300)
        st.caption(
            "At the recorded clock, an SM multiplies at most 4,096 FLOP per cycle (wgmma, 16-bit operands)."
        )


def _product(problem: Problem) -> str:
    return problem.dtype if problem.dtype in ("float16", "bfloat16") else "tf32"
