"""The page Decode: what the planner does with a batch whose keys may be split, and what else could be done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import streamlit as st

from cufa.bench.cases import READ, Case, Contender, contenders
from cufa.bench.decode_cases import OURS, make_decode
from cufa.bench.regimes import Regime
from cufa.commands.common import seconds_text
from cufa.core.architectures import Device
from cufa.core.problem import Problem
from cufa.dashboard import engine, page
from cufa.dashboard.charts import splits as charts
from cufa.dashboard.model import evidence, splits
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.model.splits import Batch, Split
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import mask_control, rates_view
from cufa.dashboard.views.shape_controls import choose_card, choose_kv_heads
from cufa.dashboard.worker.jobs import Job
from cufa.decode.shapes import MAX_TOKENS
from cufa.kernels import TileConfig
from cufa.planner import Plan, fitting_configs, make_plan

_MOST_SPLITS = 512
_SPLITS_TIMED = 12
_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "bfloat16.float8_e4m3": "bfloat16, e4m3 cache",
}
_PLANNER = "planner"
_AS_PLANNED = (OURS, _PLANNER, Contender().label)
"""What contenders are called that the planner cuts."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is computed, where, and with which tiles."""

    problem: Problem
    device: Device
    config: TileConfig | None
    """That was asked for; None: the planner's choice."""
    overhead: int

    def plan(self, schedule: str = "auto", problem: Problem | None = None) -> Plan:
        """The planner's, of this problem or another one."""
        return make_plan(problem or self.problem, self.device, schedule, self.config)


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
        mask, softcap = mask_control.choose(controls, cached=True)
        columns = st.columns([0.9, 1.4, 3.0, 1.1])
        with columns[0]:
            help_text = "Query tokens of each sequence: more than one when a draft is checked."
            tokens = controls.integer("tokens", "New tokens", 1, 1, MAX_TOKENS, help=help_text)
        with columns[1]:
            device = choose_card(controls)
        problem = make_decode(
            batch, heads, kv_heads, cached, tokens=tokens, head_dim=head_dim, dtype=dtype,
            cache_dtype=cache or None, mask=mask, softcap=softcap,
        )  # fmt: skip
        try:
            planned = make_plan(problem, device)
        except ValueError as error:
            page.verdict(f"No kernel decodes this on {device.arch.name}.", "warn")
            st.info(str(error))
            return None
        with columns[2]:
            configs = fitting_configs(planned.spec, head_dim, device)
            words = {config_key(c): config_words(c) for c in configs}
            key = controls.choice("tiles", "Tiles (rows × keys)", words, config_key(planned.config))
            config = next((c for c in configs if config_key(c) == key and c != planned.config), None)
        with columns[3]:
            help_text = "Assumed for every thread block beside its tiles: start, partial result, merge."
            overhead = controls.integer("overhead", "Extra tiles per block", 1, 0, 64, help=help_text)
    return Choice(problem, device, config, overhead)


def show_splits(choice: Choice, controls: Controls, found: Sequence[Measurement], palette: Palette) -> None:
    """The whole curve for sequences of one length, where on it the planner stands, and what was measured."""
    plan, problem = choice.plan(), choice.problem
    batch = Batch.of(plan, (problem.seqlen_k,) * problem.batch, choice.overhead)
    curve = splits.split_curve(batch, splits.candidates(min(_MOST_SPLITS, max(batch.tiles))))
    chosen = _as_planned(plan, batch)
    page.verdict(_verdict(plan, chosen, curve), tag="predicted")
    st.caption(f"**{in_words(problem)}**.  \n{_floor(plan)}")
    st.caption("**Why:** " + "; ".join(plan.reasons) + ".")
    start = chosen.splits if kind(plan) == "fixed" else splits.best(curve).splits
    number = controls.integer("splits", "Splits to look at", start, 1, max(2, curve[-1].splits), slider=True)
    here = splits.fixed(batch, number)
    figure = charts.split_figure(curve, (kind(plan), chosen), here, palette, _measured(found, problem))
    page.figure(figure, "decode.curve", _describe(plan, curve, chosen))
    st.caption(
        f"At {_count(number, 'split')}: {_count(here.blocks, 'thread block')} on {batch.places:,} places "
        f"({choice.device.num_sms} SMs × {batch.config.blocks_per_sm}), {here.waves:.2f} waves, "
        f"{here.fill:.0%} of the places' time on tiles{_without_extra(batch, here)}. Every tile counts as "
        "equally long; of what a merge costs, which the planner weighs, this knows the extra tiles alone."
        + _clusters(plan)
    )
    _show_here(found, problem)
    _offer_curve(problem, [s.splits for s in curve], choice.config is None)
    with st.expander("The plan, and its reasons", icon=":material/route:"):
        st.code(str(plan), language=None)


def kind(plan: Plan) -> str:
    """ "fixed" or "balanced"."""
    assert plan.split is not None
    return plan.split.kind


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _measured(found: Sequence[Measurement], problem: Problem) -> dict[int, float]:
    """Seconds of fixed splits of this problem by their number, as measured last in turns."""
    same = [m for m in found if m.problem == problem and m.regime is Regime.IN_TURNS and m.lengths is None]
    return {m.split.count: m.seconds for m in reversed(same) if m.split and m.split.kind == "fixed"}


def _show_here(found: Sequence[Measurement], problem: Problem) -> None:
    """What the chosen problem took where it was measured, as the planner cuts it."""
    same = (m for m in found if m.problem == problem and m.label in _AS_PLANNED and m.lengths is None)
    m = next(same, None)
    if m is not None:
        read = "" if m.of_read is None else f", {m.of_read:.0%} of a plain read"
        text = f"This very problem: {seconds_text(m.seconds)}, {m.speed}{read} ({m.regime}; {m.where})."
        page.verdict(text, tag="recorded" if m.origin == "recorded" else "measured", small=True)


def _offer_curve(problem: Problem, counts: Sequence[int], is_planned: bool) -> None:
    """On a GPU: the planner's choice, equal shares and some fixed splits, side by side."""
    some = [n for n in (1 << n for n in range(_SPLITS_TIMED)) if n <= counts[-1]]
    fixed = [Contender("fixed", name=_count(n, "split"), num_splits=n) for n in some]
    entrants = (Contender(name=_PLANNER), Contender("balanced"), *fixed, *contenders(READ))
    job = Job(str(problem), rates_view.first_device(), (Case(problem, entrants, str(problem)),), 1.0)
    rates_view.offer("Measure this curve on the GPU", "decode.measure", job, is_planned)
    engine.show_problems()


def _clusters(plan: Plan) -> str:
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
    alone = splits.fixed(dataclasses.replace(batch, overhead=0), here.splits)
    return f" ({alone.fill:.0%} if nothing but tiles took time)"


def _as_planned(plan: Plan, batch: Batch) -> Split:
    if kind(plan) == "fixed":
        return splits.fixed(batch, plan.num_splits)
    return splits.evaluate(batch, splits.balanced_blocks(batch, plan.num_splits), plan.num_splits)


def _verdict(plan: Plan, chosen: Split, curve: list[Split]) -> str:
    single = curve[0]
    unsplit = f"Unsplit, {_count(single.blocks, 'thread block')} fill {single.fill:.0%} of the card"
    gain = f"{chosen.fill:.0%} full and {single.span / chosen.span:.1f}× faster"
    if kind(plan) == "balanced":
        return f"{unsplit}; the planner's {chosen.splits:,} shares of all tiles: {gain}."
    if chosen.splits == 1:
        return (
            f"No split is needed: {_count(single.blocks, 'thread block')} fill {single.fill:.0%} of the card."
        )
    return f"{unsplit}; the planner's {chosen.splits} splits: {gain}."


def _floor(plan: Plan) -> str:
    """What memory alone allows, where the card's bandwidth is recorded."""
    text = f"Keys and values that some query sees are {charts.megabytes(plan.problem.kv_bytes())}"
    assert plan.device is not None
    try:
        found = [e for e in evidence.load() if e.limits and e.arch == plan.device.arch.name]
    except ValueError:
        found = []
    if not found:
        return f"{text}; how fast this card reads is not recorded."
    rate = max(max(e.limits.copy_bytes, e.limits.read_bytes) for e in found if e.limits)
    seconds = plan.problem.kv_bytes() / rate
    where = f"the {rate / 1e12:.2f} TB/s recorded on {found[0].where}"
    return f"{text}: at least {seconds * 1e6:,.1f} µs at {where}."


def _describe(plan: Plan, curve: list[Split], chosen: Split) -> str:
    best, single = splits.best(curve), curve[0]
    shortest = min(chosen.span, *(s.span for s in curve))
    return (
        f"Two panels by number of splits, 1 to {curve[-1].splits}. Predicted time falls from "
        f"{single.span / shortest:.1f} times the shortest at 1 split to {best.span / shortest:.2f} times at "
        f"{best.splits}; SM fill rises from {single.fill:.0%} to {best.fill:.0%}. The planner's choice, "
        f"{kind(plan)} with {chosen.splits}, takes {chosen.span / shortest:.2f} times the shortest and "
        f"fills {chosen.fill:.0%}."
    )
