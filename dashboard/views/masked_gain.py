"""Masked work: arithmetic done and useful, and the speed-up by skipping."""

from __future__ import annotations

import dataclasses
import functools

import streamlit as st

from cufa.dashboard import page
from cufa.dashboard.charts import work as charts
from cufa.dashboard.model import evidence, launch, published, tilings, work
from cufa.dashboard.model.asked import where
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.masked_controls import View
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, Kernel
from cufa.problem.problem import Problem
from cufa.schedule.schedule import Schedule

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_MOST_SIMULATED = 40_000  # thread blocks of one launch


def show_flops(view: View, palette: Palette) -> None:
    """Floating-point operations: done, useful, dense."""
    page.header("Arithmetic")
    done = work.work(view.problem, view.schedule)
    flop = {name: charts.si(getattr(done, name), "FLOP") for name in ("useful", "done", "dense", "waste")}
    text = f"{done.waste_share:.1%} of the arithmetic is wasted: {flop['waste']} of {flop['done']}."
    page.verdict(text, "warn" if done.waste_share > 0.2 else "", small=True)
    alt = (
        f"Three bars: useful {flop['useful']}; done {flop['done']}, of which {flop['waste']} is wasted; "
        f"without a mask {flop['dense']}."
    )
    page.figure(charts.flops_figure(done, palette, view.problem.operation), "masked.flops", alt)
    per_score = work.flops_per_score(view.problem) // view.problem.head_dim
    st.caption(
        f"Mask: {view.problem.mask}. {per_score} · head dim FLOP per score. **Done** counts whole tiles, **useful** "
        "counts visible scores. The difference: masked scores of partial tiles, padding, and tiles not skipped."
    )


def show_speedup(view: View, palette: Palette) -> None:
    """Speed-up by skipping masked tiles, by length."""
    page.header("Gain of skipping")
    tiling = dataclasses.replace(view.schedule, skip_masked_tiles=True)
    here = work.skip_speedup(tiling)
    if not view.schedule.visited:
        page.verdict("No key is visible to any query: skipping leaves no work.", small=True)
        return
    if tiling.mask.misfit(1, 1, tiling.seqlen_q, tiling.seqlen_k + 1) is not None:
        text = f"Skipping alone can gain {here:.2f}× here. This mask is given key by key: only this length is shown."
        page.verdict(text, tag="predicted", small=True)
        return
    limit = work.skip_limit(tiling.mask)
    if limit == 1:
        page.verdict(f"Skipping gains nothing: the mask ({tiling.mask}) hides no score.", small=True)
        return
    from_tiles = work.skip_speedups(tiling, _LENGTHS)
    # The curve is the same for all lengths: lengths of 1 give the cache one key.
    anywhere = dataclasses.replace(view.problem, seqlen_q=1, seqlen_k=1)
    tiles = dataclasses.replace(tiling, seqlen_q=1, seqlen_k=1)
    lengths, from_launch = simulated(anywhere, tiles, view.spec.name, view.device, view.blocks_per_sm)
    # Kernels with and without skipping are recorded and published for the forward only.
    is_forward = not view.schedule.by_keys
    measured, notes = _measured(view) if is_forward else ({}, [])
    more = "The mask hides a larger share of longer sequences."
    if limit < float("inf"):
        more = f"The ratio of the tile counts stays below {limit:g}×, as boundary tiles are computed whole."
    page.verdict(f"Skipping alone can gain {here:.2f}× here. {more}", tag="predicted", small=True)
    is_published = is_forward and view.problem.mask == published.VERSIONS_MASK
    figure = charts.speedup_figure(
        (lengths, from_launch), (_LENGTHS, from_tiles), (view.problem.seqlen_k, here), measured, palette,
        limit=limit, with_published=is_published,
    )  # fmt: skip
    texts = "; ".join(
        f"{name}: " + ", ".join(f"{n:,} {v:.2f}×" for n, v in values.items())
        for name, values in measured.items()
    )
    alt = (
        f"Time without skipping over time with it under {tiling.mask}, by sequence length. Predicted from tile counts: "
        + ", ".join(f"{n:,} {v:.2f}×" for n, v in zip(_LENGTHS, from_tiles, strict=True))
        + (f". A dashed line at {limit:g} is the limit." if limit < float("inf") else ".")
        + f" {texts or 'No measured series is recorded.'}"
    )
    page.figure(figure, "masked.speedup", alt)
    if notes:
        with st.expander("Recorded gains in figures", icon=":material/table_rows:"):
            st.caption("  \n".join(notes))
    source = f"Published: FlashAttention-1 → 2, {published.TRITON_A10G}, head dim 64. " * is_published
    st.caption(
        f"{source}**On this card's SMs**: both launches are simulated as above, for these heads and this batch. If "
        "skipping also fills the last wave better, the gain is larger than the ratio of the tiles, and may lie above "
        f"the line. Mask: {tiling.mask}; as many queries as keys at every length."
    )


@functools.lru_cache(128)
def simulated(
    problem: Problem, tiling: Schedule, kernel: str, device: Device, blocks_per_sm: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Lengths and speed-ups by skipping in simulated launches; too large launches are omitted."""
    lengths, ratios = [], []
    for n in _LENGTHS:
        here = dataclasses.replace(problem, seqlen_q=n, seqlen_k=n)
        with_skip = dataclasses.replace(tiling, seqlen_q=n, seqlen_k=n)
        if with_skip.num_blocks * problem.batch * problem.heads > _MOST_SIMULATED:
            break
        both = dataclasses.replace(with_skip, skip_masked_tiles=False), with_skip
        blocks = [launch.thread_blocks(here, s, _drawn(kernel), device) for s in both]
        slow, fast = (launch.predict(x, device.num_sms, blocks_per_sm).span for x in blocks)
        if fast:  # a far diagonal hides all of a short sequence
            lengths.append(n)
            ratios.append(slow / fast)
    return tuple(lengths), tuple(ratios)


def _drawn(kernel: str) -> Kernel:
    """The kernel whose order is simulated: FlashAttention-2, which exists with and without skipping."""
    kernels = launch.algorithms(KERNELS[kernel].operation)
    return kernels.get("fa2", KERNELS[kernel])


def _measured(view: View) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Recorded gains of skipping under the mask, by name of the series, and notes: of this card, or of all recorded
    cards."""
    mask = view.problem.mask
    try:
        sources = evidence.load()
    except ValueError as error:
        return {}, [f"**Recorded measurements cannot be read:** {error}"]
    of_card = tilings.of_card(view.device, sources)
    sources = [of_card] if of_card else sources
    series: dict[str, dict[int, float]] = {}
    notes = []
    alone = _ablations()
    changes = alone | {"fa1_forward": "fa2_forward", "fa1_forward_f32": "fa2_forward_f32"}
    for e in sources:
        for slow, fast in changes.items():
            change = "skipping alone" if slow in alone else "FA1→FA2 with all changes"
            for shape, times in evidence.pairs(e.rows, slow, fast, mask).items():
                values = {a.problem.seqlen_k: a.seconds / b.seconds for a, b in times}
                gains = ", ".join(f"{v:.2f}× at {n:,}" for n, v in values.items())
                origin = where([m for pair in times for m in pair])
                notes.append(f"**Recorded** on {origin}, {change}, {shape}: {gains}.")
                if slow in alone:
                    series[f"recorded, {shape}" if of_card else f"{e.device}, {shape}"] = values
    if not series:
        notes.append(f"**Measured:** no measurement with and without skipping under {mask} is recorded yet.")
    return series, notes


def _ablations() -> dict[str, str]:
    """Each kernel without skipping, and the kernel of the same source with skipping, by name."""

    def build(spec: Kernel) -> tuple[object, ...]:
        return spec.source, spec.dtypes, spec.precisions

    skipping = {build(spec): name for name, spec in KERNELS.items() if spec.skip_masked_tiles}
    others = {name: build(spec) for name, spec in KERNELS.items() if not spec.skip_masked_tiles}
    return {name: skipping[key] for name, key in others.items() if key in skipping}
