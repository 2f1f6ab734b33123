"""The page Decode."""

from __future__ import annotations

import dataclasses

import streamlit as st

from cufa.architectures import ARCHITECTURES, Device
from cufa.dashboard import page
from cufa.dashboard.charts import decode as charts
from cufa.dashboard.charts import timeline as timeline_charts
from cufa.dashboard.model import decode
from cufa.dashboard.model.decode import Batch
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views.shape_controls import choose_kv_heads

_MOST_SPLITS = 512


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is decoded, and where."""

    batch: int
    heads: int
    kv_heads: int
    cached: int
    block_kv: int
    blocks_per_sm: int
    overhead: int
    device: Device

    @property
    def places(self) -> int:
        return self.device.num_sms * self.blocks_per_sm

    def of(self, lengths: tuple[int, ...]) -> Batch:
        return Batch(lengths, self.kv_heads, self.block_kv, self.places, self.overhead)


def say_what_is_missing() -> None:
    """Before anything else: nothing on this page was run."""
    st.info(
        "**The decode kernels have not landed in this version.** Nothing here is measured: it is "
        "arithmetic on thread blocks, tiles and SMs. Every tile counts as equally long, and memory "
        "bandwidth, which limits decoding once the SMs are full, is not in it.",
        icon=":material/construction:",
    )


def choose(controls: Controls) -> Choice:
    """The controls of the page."""
    with st.container(border=True):
        columns = st.columns([1, 1, 1, 1.3, 1.9])
        with columns[0]:
            batch = controls.integer("batch", "Sequences", 1, 1, 512)
        with columns[1]:
            heads = controls.integer("heads", "Heads", 32, 1, 256)
        with columns[2]:
            kv_heads = choose_kv_heads(controls, heads, 8)
        with columns[3]:
            cached = controls.integer("cached", "Cached tokens", 8192, 1, 1 << 20, step=1024)
        with columns[4]:
            cards = {str(c): f"{a.typical_card} · {a.typical_sms} SMs" for c, a in ARCHITECTURES.items()}
            device = Device.typical(controls.choice("card", "Card", cards, "90"))
        columns = st.columns([1, 1, 2])
        with columns[0]:
            block_kv = int(controls.choice("bkv", "Keys a tile", ["32", "64", "128", "256"], "64"))
        with columns[1]:
            blocks = controls.integer("per_sm", "Blocks an SM", 2, 1, 16)
        with columns[2]:
            words = "Cost of a thread block beside its tiles (tiles)"
            help_text = "Assumed: starting, writing its part, and merging the parts."
            overhead = controls.integer("overhead", words, 1, 0, 64, help=help_text)
    return Choice(batch, heads, kv_heads, cached, block_kv, blocks, overhead, device)


def show_splits(choice: Choice, controls: Controls, palette: Palette) -> None:
    """The whole curve, for sequences of one length."""
    batch = choice.of((choice.cached,) * choice.batch)
    curve = decode.split_curve(batch, decode.candidates(min(_MOST_SPLITS, batch.tiles[0])))
    best, single = decode.best(curve), curve[0]
    page.verdict(_splits_verdict(choice, best, single), tag="predicted")
    splits = controls.integer(
        "splits", "Splits to look at", best.splits, 1, max(2, curve[-1].splits), slider=True
    )
    here = decode.evaluate(batch, decode.launch(batch, splits), splits)
    st.caption(
        f"{splits} splits: {here.blocks:,} thread blocks on {choice.places:,} places "
        f"({choice.device.num_sms} SMs × {choice.blocks_per_sm}), {here.waves:.2f} waves, {here.fill:.0%} "
        f"of the places' time on tiles. A block serves the {choice.heads // choice.kv_heads} query heads "
        "of one K/V head."
    )
    alt = (
        f"Two panels by number of splits, 1 to {curve[-1].splits}. Predicted time falls from 100% at 1 "
        f"split to {best.span / max(s.span for s in curve):.0%} at {best.splits}; SM fill rises from "
        f"{single.fill:.0%} to {best.fill:.0%}."
    )
    page.figure(charts.split_figure(curve, best, here, palette), "decode.curve", alt)


def _splits_verdict(choice: Choice, best: decode.Split, single: decode.Split) -> str:
    if best.splits == 1:
        busy = f"{single.blocks:,} thread blocks fill {single.fill:.0%} of the card"
        return f"No split needed: {busy}."
    return (
        f"Unsplit, {single.blocks:,} thread blocks fill {single.fill:.0%} of the card; {best.splits} "
        f"splits fill {best.fill:.0%} and are {single.span / best.span:.1f}× faster."
    )


def show_ragged(choice: Choice, controls: Controls, palette: Palette) -> None:
    """Sequences of different lengths: the same split for all, or the same work for all."""
    st.header("A ragged batch", anchor=False)
    left, right, _ = st.columns([1, 1, 2])
    with left:
        size = controls.integer("ragged", "Sequences of different length", max(8, choice.batch), 2, 512)
    with right:
        spread = controls.integer("spread", "Longest ÷ shortest", 16, 1, 1024)
    batch = choice.of(decode.ragged(size, choice.cached, spread))
    curve = decode.split_curve(batch, decode.candidates(min(64, max(batch.tiles))))
    fixed = decode.best(curve)
    fixed_blocks = decode.launch(batch, fixed.splits)
    chunk = decode.balanced_chunk(batch)
    balanced_blocks = decode.balanced_launch(batch, chunk)
    balanced = decode.evaluate(batch, balanced_blocks, 0)
    gain = fixed.span / balanced.span
    if gain > 1.02:
        best = f"the best fixed split ({fixed.splits})"
        text = f"Balanced parts of {chunk:,} tiles are {gain:.2f}× faster than {best}."
    elif gain < 0.98:
        text = (
            f"The best fixed split ({fixed.splits}) is {1 / gain:.2f}× faster than parts of {chunk:,} tiles."
        )
    else:
        text = f"Balanced parts and the best fixed split ({fixed.splits}) take equally long here."
    page.verdict(text, tag="predicted", small=True)
    st.caption(
        f"{size} sequences of {min(batch.lengths):,} to {max(batch.lengths):,} cached tokens, lengths drawn "
        "log-uniformly with a fixed seed."
    )
    columns = st.columns(2)
    for column, name, blocks, split in (
        (columns[0], f"Fixed: {fixed.splits} splits a sequence", fixed_blocks, fixed),
        (columns[1], f"Balanced: {chunk:,} tiles a part", balanced_blocks, balanced),
    ):
        with column:
            st.subheader(name, anchor=False)
            line = decode.timeline(batch, blocks, choice.device.num_sms)
            key = f"decode.{name.split(':')[0].lower()}"
            alt = timeline_charts.describe_timeline(line)
            page.figure(timeline_charts.timeline_figure(line, palette, 320), key, alt)
            st.caption(f"{split.blocks:,} thread blocks, {split.fill:.0%} of the places' time on tiles.")
