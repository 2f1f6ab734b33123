"""The page Machine code: source beside PTX and SASS of one build."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import streamlit as st

from cufa.build.machine_code import KINDS, Code, LineCost, LoopCost
from cufa.build.variants import Variant
from cufa.dashboard import page, sentences
from cufa.dashboard.charts import machine_code as charts
from cufa.dashboard.model.listed import Listed, Lister, slots_per_tile, source_lines
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import machine_code_stalls
from cufa.dashboard.views.occupancy_choice import Choice, begin
from cufa.run.cpu.blas import usable_cores

_WORDS = {"sass": "SASS", "ptx": "PTX"}
_TABLE = "code.table"
_COLUMNS = {
    "line": st.column_config.NumberColumn(width=44),
    "source": st.column_config.TextColumn(width=250),
    **{name: st.column_config.NumberColumn(width=50) for name in ("count", "live", *KINDS)},
}
"""Widths of the table of lines: most room for the source."""
_SINCE = "code.since"
_MOST_SHOWN = 400
"""Listed instructions of one line."""


@st.cache_resource(show_spinner=False)
def lister() -> Lister:
    """One for the whole server."""
    return Lister(jobs=max(1, min(2, usable_cores() - 1)))


def list_first() -> None:
    """Start listing the default build."""
    lister().want([begin()])


def show(choice: Choice, controls: Controls, palette: Palette) -> None:
    """The whole page; until the build is complete, a progress bar."""
    if choice.config is None:
        return
    variant = choice.variant(choice.config, choice.arch)
    if lister().missing:
        page.verdict("There is no compiler here: machine code is not available.", "warn")
        st.info(str(lister().missing))
        return
    lister().want([variant])
    listed = lister().known(variant)
    if listed is None:
        st.session_state.setdefault(_SINCE, time.monotonic())
        controls.hold("as", "file", "line", "entry", "all")
        st.fragment(_wait, run_every=0.5)(variant)
        return
    st.session_state.pop(_SINCE, None)
    _show_listed(listed, choice, controls, palette)


def _wait(variant: Variant) -> None:
    if lister().known(variant) is not None:
        st.rerun()
    seconds = time.monotonic() - st.session_state.get(_SINCE, time.monotonic())
    page.verdict("The build is being compiled and disassembled; the result is cached.", tag="compiled")
    st.progress(min(0.95, seconds / (seconds + 10)), f"{seconds:.0f} s; some builds take 20 s")


def _show_listed(entry: Listed, choice: Choice, controls: Controls, palette: Palette) -> None:
    listing = entry.listing
    if listing is None:
        page.verdict("This build does not compile.", "alarm")
        st.code(entry.error, language=None)
        return
    columns = page.fields(1.1, 2, 2)
    words = {name: text for name, text in _WORDS.items() if name == "ptx" or listing.sass}
    language = controls.choice("as", "Machine code", words, segmented=True, local=True, at=columns[0])
    entries = listing.sass if language == "sass" else listing.ptx
    name = next(iter(entries))
    if len(entries) > 1:
        name = controls.choice("entry", "Launch", list(entries), at=columns[2])
    code = entries[name]
    own = choice.spec.source_of(choice.config)
    counts = {f: sentences.count(n, "instruction") for f, n in code.files.items() if source_lines(f)}
    files = {f: f"{f} ({text})" for f, text in counts.items()}
    file = controls.choice("file", "Source file", files or [own], own, at=columns[1])
    loops = code.tile_loops(own)
    page.verdict(_verdict(code, loops, choice), tag="compiled")
    if listing.missing:
        st.info(f"Only PTX is shown: {listing.missing}", icon=":material/info:")
    _show_mix(code, loops, choice, palette)
    if code.live is not None:
        alt = f"Line of live registers over {len(code.instructions):,} instructions, at most {code.live}."
        page.figure(charts.live_figure(code, own, palette), "code.live", alt)
        st.caption("Live general registers at each instruction; loops over tiles are shaded.")
    _show_source(code, file, controls)
    if language == "sass":
        machine_code_stalls.show(code, name, file)


def _verdict(code: Code, loops: list[LoopCost], choice: Choice) -> str:
    """Issue slots per tile, spills and live registers."""
    total = f"{sentences.count(len(code.instructions), 'instruction')}"
    spills = code.kinds().get("spill", 0)
    text = f"{total}, {sentences.count(spills, 'access') + ' to spilled registers' if spills else 'no spill'}"
    if code.live is not None:
        text += f", at most {code.live} registers live"
    if not loops:
        return f"{text}; no loop has matrix products."
    per_tile = [(slots, loop) for loop in loops if (slots := _per_tile(loop, choice)) is not None]
    if not per_tile:
        loop = max(loops, key=lambda loop: loop.slots)
        return f"{text}; the longest loop with matrix products takes {loop.slots:,} issue slots per warp."
    (least, loop), (most, _) = (f(per_tile, key=lambda x: x[0]) for f in (min, max))
    masked = f", up to {most:,.0f} for partial tiles" if most > least else ""
    return f"{text}; a tile takes {least:,.0f} issue slots of an SM, {loop.slots:,} per warp{masked}."


def _per_tile(loop: LoopCost, choice: Choice) -> float | None:
    assert choice.config is not None
    return slots_per_tile(loop, choice.spec, choice.config, choice.head_dim)


def _show_mix(code: Code, loops: list[LoopCost], choice: Choice, palette: Palette) -> None:
    parts = {"whole kernel": code.kinds()}
    for number, loop in enumerate(loops, 1):
        line = f", line {loop.place.line}" if loop.place else ""
        parts[f"loop {number}{line}"] = dict(loop.kinds)
    counts = {name: ", ".join(f"{n:,} {kind}" for kind, n in part.items()) for name, part in parts.items()}
    alt = f"Bars of instructions by kind. {'; '.join(f'{name}: {kinds}' for name, kinds in counts.items())}."
    page.figure(charts.mix_figure(parts, palette), "code.mix", alt)
    costs = []
    for number, loop in enumerate(loops, 1):
        slots = _per_tile(loop, choice)
        if slots is not None:
            costs.append(f"loop {number}: {slots:,.0f} ({slots / 4:,.0f} clocks at four slots per clock)")
    per_tile = f" Issue slots per tile, all consumer warps: {sentences.listed(costs)}." if costs else ""
    st.caption(
        f"Loops with matrix products, one pass of one warp; each instruction takes one issue slot.{per_tile}"
    )


def _show_source(code: Code, file: str, controls: Controls) -> None:
    """A table of all lines, and the instructions of the chosen line."""
    page.header("Source, line by line")
    lines, costs = source_lines(file), code.lines(file)
    busiest = max(costs.values(), key=lambda c: c.count, default=None)
    start = busiest.line if busiest else 1
    left, right = page.fields(1, 4)
    is_all = controls.flag("all", "Lines without code too", at=right)
    shown = [n for n in range(1, len(lines) + 1) if is_all or n in costs]
    _take_line(controls, shown)
    line = controls.integer("line", "Line", start, 1, max(1, len(lines)), at=left)
    st.dataframe(
        [_row(n, lines[n - 1], costs.get(n)) for n in shown],
        hide_index=True,
        height=min(38 + 35 * max(1, len(shown)), 460),
        key=_TABLE,
        on_select="rerun",
        selection_mode="single-row",
        placeholder="",
        column_config=_COLUMNS,
    )
    cost, instructions = costs.get(line), code.of_line(file, line)
    text = lines[line - 1].strip() if line <= len(lines) else ""
    if cost is None:
        page.verdict(f"Line {line} has no instructions: {text}", small=True)
        return
    live = "" if cost.live is None else f", {cost.live} registers live"
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in cost.kinds.items())
    number = sentences.count(cost.count, "instruction")
    page.verdict(f"Line {line} compiles to {number}{live}: {kinds}.", small=True)
    page.listing(text)
    listing = [f"{'' if i.live is None else f'{i.live:4} '}{i.text}" for i in instructions[:_MOST_SHOWN]]
    more = len(instructions) - len(listing)
    page.listing("\n".join(listing + ([f"… and {more:,} more"] if more else [])))
    if cost.live is not None:
        st.caption("The number before each instruction: live registers.")


def _take_line(controls: Controls, shown: Sequence[int]) -> None:
    """Take a selected row, which Streamlit put in the session before this run."""
    event: Any = st.session_state.get(_TABLE)
    rows = event["selection"]["rows"] if event else []
    picked = shown[int(rows[0])] if rows and int(rows[0]) < len(shown) else None
    if picked is not None and picked != st.session_state.get("code.picked"):
        controls.set("line", picked)
    st.session_state["code.picked"] = picked


def _row(number: int, text: str, cost: LineCost | None) -> dict[str, Any]:
    counts = {} if cost is None else {"count": cost.count, "live": cost.live, **cost.kinds}
    return {"line": number, "source": text, **{name: counts.get(name) for name in ("count", "live", *KINDS)}}
