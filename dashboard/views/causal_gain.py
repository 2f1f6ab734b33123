"""Causal work, last part: arithmetic done and wanted, and what skipping gains."""

from __future__ import annotations

import dataclasses

import streamlit as st

from cufa.core.problem import Problem
from cufa.core.schedule import Schedule
from cufa.dashboard import page
from cufa.dashboard.charts import work as charts
from cufa.dashboard.model import evidence, launch, published, work
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.causal_view import View
from cufa.kernels import KERNELS, KernelSpec

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_MOST_SIMULATED = 40_000  # thread blocks of one launch


def show_flops(view: View, palette: Palette) -> None:
    """Done, useful, dense."""
    st.header("Arithmetic", anchor=False)
    done = work.work(view.problem, view.schedule)
    flop = {name: charts.si(getattr(done, name), "FLOP") for name in ("useful", "done", "dense", "waste")}
    text = f"{done.waste_share:.1%} of the arithmetic is thrown away: {flop['waste']} of {flop['done']}."
    page.verdict(text, "warn" if done.waste_share > 0.2 else "", small=True)
    alt = (
        f"Three bars: useful {flop['useful']}; done {flop['done']}, of which {flop['waste']} is thrown "
        f"away; without a mask {flop['dense']}."
    )
    page.figure(charts.flops_figure(done, palette), "causal.flops", alt)
    st.caption(
        "4 · head dim for each score. Done counts whole tiles; useful counts the scores that the mask lets "
        "through; the difference is masked corners of partial tiles, tile edges past the ends, and tiles "
        "not skipped."
    )


def show_speedup(view: View, palette: Palette) -> None:
    """What causal skipping gains, by length."""
    st.header("From v1 to v2: what skipping gains", anchor=False)
    tiling = dataclasses.replace(view.schedule, causal=True, skip_masked_tiles=True)
    here = work.skip_speedup(tiling)
    from_tiles = work.skip_speedups(tiling, _LENGTHS)
    # Without the lengths of this view, so that another length finds the curve ready.
    anywhere = dataclasses.replace(view.problem, seqlen_q=1, seqlen_k=1)
    tiles = dataclasses.replace(tiling, seqlen_q=1, seqlen_k=1)
    lengths, from_launch = simulated(anywhere, tiles, view.device.num_sms, view.blocks_per_sm)
    measured, notes = _measured()
    page.verdict(
        f"Skipping alone can gain {here:.2f}× here. Tile counts never reach 2×: the last query block sees "
        "every key block.",
        tag="predicted",
        small=True,
    )
    figure = charts.speedup_figure(
        (lengths, from_launch), (_LENGTHS, from_tiles), (view.problem.seqlen_k, here), measured, palette
    )
    seen = "; ".join(
        f"{name}: " + ", ".join(f"{n:,} {v:.2f}×" for n, v in values.items())
        for name, values in measured.items()
    )
    alt = (
        "Time without skipping over time with it, by sequence length. Predicted from tile counts: "
        + ", ".join(f"{n:,} {v:.2f}×" for n, v in zip(_LENGTHS, from_tiles, strict=True))
        + f". A dashed line at 2 is the limit. {seen or 'No measured series is recorded.'}"
    )
    page.figure(figure, "causal.speedup", alt)
    if notes:
        with st.expander("Recorded gains in figures", icon=":material/table_rows:"):
            st.caption("  \n".join(notes))
    st.caption(
        f"Published: FlashAttention-1 → 2, {published.TRITON_A10G}, head dim 64. On this card's SMs: both "
        "launches simulated as above, for these heads and this batch."
    )


@st.cache_data(max_entries=128, show_spinner=False)
def simulated(
    problem: Problem, tiling: Schedule, num_sms: int, blocks_per_sm: int
) -> tuple[list[int], list[float]]:
    """Speed-up of skipping by length in simulated launches; too large launches are left out."""
    lengths, ratios = [], []
    for n in _LENGTHS:
        here = dataclasses.replace(problem, seqlen_q=n, seqlen_k=n, causal=True)
        with_skip = dataclasses.replace(tiling, seqlen_q=n, seqlen_k=n)
        if with_skip.num_q_blocks * problem.batch * problem.heads > _MOST_SIMULATED:
            break
        spans = [
            launch.predict(launch.thread_blocks(here, s, "fa2", num_sms), num_sms, blocks_per_sm).span
            for s in (dataclasses.replace(with_skip, skip_masked_tiles=False), with_skip)
        ]
        lengths.append(n)
        ratios.append(spans[0] / spans[1])
    return lengths, ratios


def _measured() -> tuple[dict[str, dict[int, float]], list[str]]:
    """Recorded gains of skipping alone by name of the series, and what else there is to say."""
    try:
        found = evidence.load()
    except ValueError as error:
        return {}, [f"**Recorded evidence cannot be read:** {error}"]
    series: dict[str, dict[int, float]] = {}
    notes = []
    for e in found:
        for slow, fast in _ablations().items():
            for shape, values in evidence.speedups(e.rows, slow, fast).items():
                series[f"recorded, {shape}"] = values
                gains = ", ".join(f"{v:.2f}× at {n:,}" for n, v in values.items())
                notes.append(f"**Recorded** on {e.where}, skip alone, {shape}: {gains}.")
        for shape, values in evidence.speedups(e.rows, "fa1_forward", "fa2_forward").items():
            gains = ", ".join(f"{v:.2f}× at {n:,}" for n, v in values.items())
            notes.append(f"**Recorded** on {e.where}, FA1→FA2 with all that changed, {shape}: {gains}.")
    if not series:
        notes.append("**Measured:** no evidence with and without skipping is recorded in this version yet.")
    return series, notes


def _ablations() -> dict[str, str]:
    """Kernels without skipping, by name, and the same source with it."""

    def build(spec: KernelSpec) -> tuple[object, ...]:
        return spec.source, spec.dtypes, spec.precisions

    skipping = {build(spec): name for name, spec in KERNELS.items() if spec.skip_masked_tiles}
    others = {name: build(spec) for name, spec in KERNELS.items() if not spec.skip_masked_tiles}
    return {name: skipping[key] for name, key in others.items() if key in skipping}
