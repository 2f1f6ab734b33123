"""The page Machine code: which bytes and banks of shared memory a warp touches."""

from __future__ import annotations

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.charts import banks as charts
from cufa.dashboard.model import banks
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.occupancy_choice import Choice

_LAYOUT = {
    True: "The copy engine swizzles each 128-byte row: 16-byte unit u of row r lies at u ⊕ (r mod 8).",
    False: "Each row of a tile is padded by 16 bytes, so that rows begin on different banks.",
}


def show(choice: Choice, controls: Controls, palette: Palette) -> None:
    """An access of the kernel to shared memory, from executing its source for one tile; on demand."""
    page.header("Which bytes and banks")
    if choice.config is None:
        return
    help = "Needs a C++ compiler, no GPU; some seconds."
    if not controls.flag("banks", "Execute one tile on this CPU", help=help):
        st.caption(
            "Shared memory has 32 banks of 4 bytes; a bank serves one word at a time. Executing one query tile of the "
            "kernel's source shows which bytes each lane touches, and whether lanes collide on a bank."
        )
        return
    with st.spinner("Compiling and executing the kernel's source…"):
        result = banks.accesses(choice.spec, choice.config, choice.problem)
    if isinstance(result, str):
        st.error(result, icon=":material/error:")
        return
    if not result:
        page.verdict(f"{choice.spec.name} does not access shared memory through its threads.", small=True)
        return
    words = {f"{x.kind} {x.file} {x.line}".replace(",", ""): f"{x.kind} · {x.file}:{x.line}" for x in result}
    by_key = dict(zip(words, result, strict=True))
    first = next((name for name, x in by_key.items() if x.kind in banks.MATRICES), next(iter(words)))
    chosen = by_key[controls.choice("access", "Access", words, first, local=True)]
    swizzled, passes = banks.is_swizzled(choice.spec), chosen.passes
    layout = "swizzle" if swizzled else "padding"
    if chosen.kind in banks.MATRICES:
        kinds = {"on": f"{layout} on", "off": f"{layout} off"}
        if controls.choice("layout", "Tile in shared memory", kinds, segmented=True) == "off":
            passes = tuple(banks.in_plain_rows(x, swizzled) for x in passes)
    text = banks.sentence(passes)
    page.verdict(f"{chosen.kind}: {text}.", "good" if "no bank" in text else "warn", "executed", small=True)
    waves = banks.wavefronts(passes)
    who = "row" if chosen.kind.startswith("wgmma") else "lane"
    used = ((wave.pass_number, sum(x is not None for x in wave.words)) for wave in waves[: charts.MOST_WAVES])
    alt = f"Banks of {chosen.kind} at {chosen.file}, line {chosen.line}: {text}. "
    alt += " ".join(f"Pass {n}: {number} of 32 banks." for n, number in used)
    page.figure(charts.banks_figure(waves, who, palette), "code.banks.figure", alt)
    st.caption(
        f"The first time that a warp executes {chosen.file}, line {chosen.line}; {chosen.times:,} times for one query "
        f"tile and two key tiles of one head, {choice.config}. Numbers are {who}s. A pass moves up to 128 bytes: 8 "
        "rows of 16 bytes of a matrix, or as many lanes as fit. " + _LAYOUT[swizzled]
    )
    if len(waves) > charts.MOST_WAVES:
        st.caption(f"The first {charts.MOST_WAVES} of {len(waves)} wavefronts are drawn.")
