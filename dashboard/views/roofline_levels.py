"""The page Roofline: bytes of one shape at each level of memory."""

from __future__ import annotations

import streamlit as st

from cufa.commands.common import seconds_text
from cufa.dashboard import page
from cufa.dashboard.charts import roofline as charts
from cufa.dashboard.charts.work import si
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.levels import Level, levels_of
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.theme import Palette
from cufa.measure import memory_rates


def show(subject: Subject, row: Measurement | None, chosen: Evidence, top: float, palette: Palette) -> None:
    """Table and figure. ``row``: a measurement of the subject; ``top``: the ceiling of FLOP/s."""
    if row is not None and subject.config is None:
        subject = row.subject
    page.header("Bytes per memory level")
    assert chosen.limits is not None
    p = subject.problem
    try:
        levels = levels_of(subject, chosen.limits, chosen.device)
        rates = memory_rates.load(chosen.device)
    except ValueError as error:
        st.error(str(error), icon=":material/broken_image:")
        return
    page.verdict(_verdict(subject, levels, row), tag="predicted", small=True)
    st.dataframe([_line(level, subject, row) for level in levels], hide_index=True, height="content")
    reached = None if row is None else p.flops / row.seconds
    alt = f"Roofs of {', '.join(x.name for x in levels)}. " + " ".join(
        f"{x.name}: {x.intensity(p):,.3g} FLOP per byte." for x in levels
    )
    page.figure(charts.levels_figure(p, levels, top, reached, palette), "roofline.levels", alt)
    measured = "no ceiling of its caches is recorded"
    if rates is not None:
        measured = f"ceilings of its caches: {rates.device}, {rates.recorded[:10]}, reads of 16 bytes a lane"
    kernel_text = f"; {subject.kernel}, {subject.config}" if subject.kernel and subject.config else ""
    st.caption(
        f"{in_words(p)}{kernel_text}. Marks: one speed{'' if row is None else f' ({row.where})'}, over the bytes of "
        f"each level. Bytes are counted by executing the kernel's source on a CPU, tile by tile; {measured}."
    )


def _verdict(subject: Subject, levels: list[Level], row: Measurement | None) -> str:
    if len(levels) == 1:
        return "Only the compulsory bytes of device memory are known for this kernel."
    l2 = levels[1]
    text = f"The tiles request {si(l2.bytes, 'B')} from L2, {l2.bytes / levels[0].bytes:.1f}× the compulsory bytes"
    timed = [level for level in levels if level.seconds is not None]
    slowest = max(timed, key=lambda level: level.seconds or 0.0)
    seconds = slowest.seconds or 0.0
    which = "is the slowest level," if len(timed) == len(levels) else "takes"
    text += f"; {slowest.name} {which} {seconds_text(seconds)} at its ceiling"
    return f"{text}." if row is None else f"{text}, {seconds / row.seconds:.0%} of the time."


def _line(level: Level, subject: Subject, row: Measurement | None) -> dict[str, str]:
    share = "–"
    if row is not None and level.seconds is not None:
        share = f"{level.seconds / row.seconds:.0%}"
    return {
        "level": level.name,
        "bytes": si(level.bytes, "B"),
        "FLOP per byte": f"{level.intensity(subject.problem):,.4g}",
        "ceiling": "not measured" if level.ceiling is None else f"{level.ceiling / 1e12:,.2f} TB/s",
        "minimum time": "–" if level.seconds is None else seconds_text(level.seconds),
        "of the time": share,
        "counted as": level.source,
    }
