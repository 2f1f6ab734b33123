"""The page Decode: what the planner does with a batch, and what else could be done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import streamlit as st

from cufa.core.architectures import Device
from cufa.core.problem import default_scale
from cufa.dashboard import page
from cufa.dashboard.charts import decode as charts
from cufa.dashboard.model import decode, evidence
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.decode import Batch, Split
from cufa.dashboard.model.decode_rows import DecodeRow, splits_measured
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import decode_measured
from cufa.dashboard.views.shape_controls import choose_card, choose_kv_heads
from cufa.decode.plan import DecodePlan, make_decode_plan
from cufa.decode.problem import MAX_TOKENS, DecodeProblem
from cufa.kernels import DECODE_KERNELS, TileConfig
from cufa.planner import fitting_configs

_MOST_SPLITS = 512
_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "bfloat16.float8_e4m3": "bfloat16, e4m3 cache",
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is decoded, where, and with which tiles."""

    problem: DecodeProblem
    device: Device
    config: TileConfig | None
    """That was asked for; None: the planner's choice."""
    overhead: int

    def plan(self, schedule: str = "auto", **changes: object) -> DecodePlan:
        """The planner's, of this problem or one that differs in some fields."""
        problem = dataclasses.replace(self.problem, **changes)  # type: ignore[arg-type]
        return make_decode_plan(problem, self.device, schedule=schedule, config=self.config)


def choose(controls: Controls) -> Choice | None:
    """The controls of the page; None where no kernel serves what they ask for, which is said."""
    with page.control_box():
        columns = st.columns([1, 1, 1, 1.3, 1, 1.5])
        with columns[0]:
            batch = controls.integer("batch", "Sequences", 1, 1, 512)
        with columns[1]:
            heads = controls.integer("heads", "Heads", 32, 1, 256)
        with columns[2]:
            kv_heads = choose_kv_heads(controls, heads, 8)
        with columns[3]:
            cached = controls.integer("cached", "Cached tokens", 8192, 1, 1 << 20, step=1024)
        with columns[4]:
            sizes = [str(d) for d in (64, 80, 96, 128, 192, 256)]
            head_dim = int(controls.choice("d", "Head dim", sizes, "128"))
        with columns[5]:
            dtype, _, cache = controls.choice("dtype", "Type", _DTYPES).partition(".")
        columns = st.columns([0.9, 1.4, 3.0, 1.1])
        with columns[0]:
            help_text = "Query tokens of each sequence: more than one when a draft is checked."
            tokens = controls.integer("tokens", "New tokens", 1, 1, MAX_TOKENS, help=help_text)
        with columns[1]:
            device = choose_card(controls)
        problem = DecodeProblem(
            batch, heads, kv_heads, tokens, cached, head_dim, dtype, cache or dtype, default_scale(head_dim)
        )
        try:
            planned = make_decode_plan(problem, device)
        except ValueError as error:
            page.verdict(f"No kernel decodes this on {device.arch.name}.", "warn")
            st.info(str(error))
            return None
        with columns[2]:
            configs = fitting_configs(DECODE_KERNELS[planned.spec.name], head_dim, device)
            words = {config_key(c): config_words(c) for c in configs}
            key = controls.choice("tiles", "Tiles (rows × keys)", words, config_key(planned.config))
            config = next((c for c in configs if config_key(c) == key and c != planned.config), None)
        with columns[3]:
            help_text = "Assumed for every thread block beside its tiles: start, partial result, merge."
            overhead = controls.integer("overhead", "Extra tiles a block", 1, 0, 64, help=help_text)
    return Choice(problem, device, config, overhead)


def show_splits(
    choice: Choice, controls: Controls, found: Mapping[str, Sequence[DecodeRow]], palette: Palette
) -> None:
    """The whole curve for sequences of one length, where on it the planner stands, and what was measured."""
    plan = choice.plan()
    batch = Batch.of(plan, (choice.problem.capacity,) * choice.problem.batch, choice.overhead)
    curve = decode.split_curve(batch, decode.candidates(min(_MOST_SPLITS, batch.tiles[0])))
    chosen = _as_planned(plan, batch)
    page.verdict(_verdict(plan, chosen, curve), tag="predicted")
    st.caption("**Why:** " + "; ".join(plan.reasons) + ".  \n" + _floor(plan, batch))
    start = chosen.splits if plan.schedule == "fixed" else decode.best(curve).splits
    splits = controls.integer("splits", "Splits to look at", start, 1, max(2, curve[-1].splits), slider=True)
    here = decode.fixed(batch, splits)
    rows = [row for measured in found.values() for row in measured]
    times = {n: row.timing.p50 for n, row in splits_measured(rows, choice.problem).items()}
    figure = charts.split_figure(curve, (plan.schedule, chosen), here, palette, times)
    page.figure(figure, "decode.curve", _describe(plan, curve, chosen))
    st.caption(
        f"At {splits} splits: {here.blocks:,} thread blocks on {batch.places:,} places "
        f"({choice.device.num_sms} SMs × {batch.config.blocks_per_sm}), {here.waves:.2f} waves, "
        f"{here.fill:.0%} of the places' time on tiles{_without_extra(batch, here)}. Every tile counts as "
        "equally long; of what a merge costs, which the planner weighs, this knows the extra tiles alone."
        + _clusters(plan)
    )
    decode_measured.show_here(found, choice.problem)
    decode_measured.offer_curve(choice.problem, [s.splits for s in curve], choice.config is None)
    with st.expander("The plan, and its reasons", icon=":material/route:"):
        st.code(str(plan), language=None)


def _clusters(plan: DecodePlan) -> str:
    """Why the planner takes fewer splits than this prediction would."""
    if all(launch.cluster == 1 for launch in plan.launches):
        return ""
    return (
        " Nor does it know that SMs share the memory: half of them read a small cache as fast as all, and "
        "the blocks of a cluster merge sooner than more splits would."
    )


def _without_extra(batch: Batch, here: Split) -> str:
    """What the planner goes by, which reckons with tiles alone."""
    if not batch.overhead:
        return ""
    alone = decode.fixed(dataclasses.replace(batch, overhead=0), here.splits)
    return f" ({alone.fill:.0%} if nothing but tiles took time)"


def _as_planned(plan: DecodePlan, batch: Batch) -> Split:
    if plan.schedule == "fixed":
        return decode.fixed(batch, plan.num_splits)
    return decode.evaluate(batch, decode.balanced_blocks(batch, plan.num_splits), plan.num_splits)


def _verdict(plan: DecodePlan, chosen: Split, curve: list[Split]) -> str:
    single = curve[0]
    unsplit = f"Unsplit, {single.blocks:,} thread blocks fill {single.fill:.0%} of the card"
    gain = f"{chosen.fill:.0%} full and {single.span / chosen.span:.1f}× faster"
    if plan.schedule == "balanced":
        return f"{unsplit}; the planner's {chosen.splits:,} shares of all tiles: {gain}."
    if chosen.splits == 1:
        return f"No split needed: {single.blocks:,} thread blocks fill {single.fill:.0%} of the card."
    return f"{unsplit}; the planner's {chosen.splits} splits: {gain}."


def _floor(plan: DecodePlan, batch: Batch) -> str:
    """What memory alone allows, where the card's bandwidth is recorded."""
    size = plan.problem.kv_bytes(batch.lengths)
    text = f"Keys and values are {charts.megabytes(size)}"
    assert plan.device is not None
    try:
        found = [e for e in evidence.load() if e.limits and e.arch == plan.device.arch.name]
    except ValueError:
        found = []
    if not found:
        return f"{text}; how fast this card reads is not recorded."
    rate = max(e.limits.copy_bytes for e in found if e.limits)
    seconds = decode.floor_seconds(plan, batch.lengths, rate)
    where = f"the {rate / 1e12:.2f} TB/s recorded on {found[0].where}"
    return f"{text}: at least {seconds * 1e6:,.1f} µs at {where}."


def _describe(plan: DecodePlan, curve: list[Split], chosen: Split) -> str:
    best, single = decode.best(curve), curve[0]
    shortest = min(chosen.span, *(s.span for s in curve))
    return (
        f"Two panels by number of splits, 1 to {curve[-1].splits}. Predicted time falls from "
        f"{single.span / shortest:.1f} times the shortest at 1 split to {best.span / shortest:.2f} times at "
        f"{best.splits}; SM fill rises from {single.fill:.0%} to {best.fill:.0%}. The planner's choice, "
        f"{plan.schedule} with {chosen.splits}, takes {chosen.span / shortest:.2f} times the shortest and "
        f"fills {chosen.fill:.0%}."
    )
