"""The page Decode: the planner's splits for a batch, and other numbers of splits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import streamlit as st

from cufa.calls.shapes import MAX_TOKENS
from cufa.commands.common import seconds_text
from cufa.dashboard import engine, page, sentences
from cufa.dashboard.charts import splits as charts
from cufa.dashboard.model import split_time, splits
from cufa.dashboard.model.asked import Asked, figures, unlike
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.devices import is_card
from cufa.dashboard.model.measurements import Measurement, in_words
from cufa.dashboard.model.split_time import Reading
from cufa.dashboard.model.splits import Batch, Split
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.dashboard.views import mask_control, rates_view
from cufa.dashboard.views.shape_controls import HEAD_DIMS, card_key, choose_card, choose_kv_heads
from cufa.dashboard.worker.jobs import Job
from cufa.gpu.architectures import Device
from cufa.kernels import TileConfig
from cufa.measure.cases import READ, Case, Contender, contenders
from cufa.measure.decode_cases import OURS, make_decode
from cufa.measure.regimes import Regime
from cufa.plan.planner import Plan, fitting_configs, make_plan
from cufa.problem.problem import Problem

_MOST_SPLITS = 512
_SPLITS_TIMED = 12
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "bfloat16.float8_e4m3": "bfloat16, e4m3 cache"}
_PLANNER = "planner"
_AS_PLANNED = (OURS, _PLANNER, Contender().label)
"""Contenders with the planner's splits."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The problem, the card and the tile config."""

    problem: Problem
    device: Device
    config: TileConfig | None
    """The user's choice; None: the planner's."""
    overhead: int

    @property
    def subject(self) -> Subject:
        plan = self.plan()
        return Subject(self.problem, plan.spec.name, plan.config, card_key(self.device))

    def plan(self, schedule: str = "auto", problem: Problem | None = None) -> Plan:
        """The planner's choice for this problem or another one."""
        return make_plan(problem or self.problem, self.device, schedule, self.config)

    def is_of_card(self, m: Measurement) -> bool:
        """Whether the measurement is from the chosen card."""
        return is_card(m.machine, self.device.name)


def choose(controls: Controls) -> Choice | None:
    """The controls of the page; None and a message if no kernel serves the problem."""
    with page.control_box():
        columns = page.fields(1, 1, 1, 1.2, 1, 1.4)
        batch = controls.integer("batch", "Sequences", 1, 1, 512, at=columns[0])
        heads = controls.integer("heads", "Heads", 32, 1, 256, at=columns[1])
        kv_heads = choose_kv_heads(controls, heads, 8, at=columns[2])
        cached = controls.integer("cached", "Cached tokens", 8192, 1, 1 << 20, step=1024, at=columns[3])
        head_dim = int(controls.choice("d", "Head dim", HEAD_DIMS, "128", at=columns[4]))
        dtype, _, cache = controls.choice("dtype", "Type", _DTYPES, at=columns[5]).partition(".")
        mask, softcap = mask_control.choose(controls, cached=True)
        columns = page.fields(1, 1.5, 2.9, 1.3)
        help_text = "Query tokens per sequence: more than one for speculative decoding."
        tokens = controls.integer("tokens", "New tokens", 1, 1, MAX_TOKENS, at=columns[0], help=help_text)
        device = choose_card(controls, columns[1])
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
        configs = fitting_configs(planned.spec, head_dim, device)
        words = {config_key(c): config_words(c) for c in configs}
        key = controls.choice(
            "tiles", "Tiles (rows × keys)", words, config_key(planned.config), at=columns[2]
        )
        config = next((c for c in configs if config_key(c) == key and c != planned.config), None)
        help_text = "Assumed cost of each thread block besides its tiles: start, partial result, merge."
        overhead = controls.integer(
            "overhead", "Extra tiles per block", 1, 0, 64, at=columns[3], help=help_text
        )
    return Choice(problem, device, config, overhead)


def show_splits(choice: Choice, controls: Controls, rows: Sequence[Measurement], palette: Palette) -> None:
    """The curve for sequences of one length, the planner's choice, and measurements."""
    plan, problem = choice.plan(), choice.problem
    batch = Batch.of(plan, (problem.seqlen_k,) * problem.batch, choice.overhead)
    curve = splits.split_curve(batch, splits.candidates(min(_MOST_SPLITS, max(batch.tiles))))
    chosen = _planned_split(plan, batch)
    reading = reading_of(plan)
    times = None if reading is None else _times(choice, reading, curve)
    page.verdict(verdict(plan, curve, times), tag="predicted")
    st.caption(f"**{in_words(problem)}**.  \n{_floor(plan)}{_fitted(reading)}")
    st.caption("**Why:** " + "; ".join(plan.reasons) + ".")
    start = chosen.splits if kind(plan) == "fixed" else splits.best(curve).splits
    most = max(2, curve[-1].splits)
    number = controls.integer("splits", "Splits to look at", start, 1, most, slider=True)
    here = splits.fixed(batch, number)
    if times is not None:
        assert reading is not None
        times = dataclasses.replace(times, here=reading.seconds(_load(choice, number)))
    figure = charts.split_figure(curve, (kind(plan), chosen), here, palette, _measured(rows, choice), times)
    page.figure(figure, "decode.curve", _describe(plan, curve, chosen, times))
    st.caption(
        f"At {sentences.count(number, 'split')}: {sentences.count(here.blocks, 'thread block')} on "
        f"{sentences.count(batch.places, 'place')} ({choice.device.num_sms} SMs × {batch.config.blocks_per_sm}), "
        f"{here.waves:.2f} waves, {here.fill:.0%} of the places' time on tiles{_without_extra(batch, here)}."
    )
    _show_here(rows, choice)
    _offer_curve(problem, [s.splits for s in curve], choice.config is None)
    with st.expander("The plan, and its reasons", icon=":material/route:"):
        page.listing(str(plan))


def reading_of(plan: Plan) -> Reading | None:
    """The card's read rate with the plan's tiles; None if too few records exist."""
    assert plan.device is not None
    return split_time.reading(plan.device, plan.config.block_q, engine.recorded())


def _load(choice: Choice, number: int) -> split_time.Load:
    plan = make_plan(choice.problem, choice.device, "fixed", choice.config, num_splits=number)
    return split_time.load_of(plan)


def _times(choice: Choice, reading: Reading, curve: Sequence[Split]) -> charts.Times:
    planned = split_time.load_of(choice.plan())
    seconds = tuple(reading.seconds(_load(choice, s.splits)) for s in curve)
    return charts.Times(seconds, reading.seconds(planned), seconds[0], reading.floor(planned))


def _fitted(reading: Reading | None) -> str:
    """The basis of the predicted times."""
    if reading is None:
        return ""
    return (
        f"  \nTimes are predicted from bytes: a thread block reads {reading.block / 1e9:.0f} GB/s, each call takes "
        f"{reading.start * 1e6:.1f} µs more, and merges cost what the planner assumes. The model is fitted to "
        f"{sentences.count(reading.fitted, 'time')} recorded on {reading.where}: median error "
        f"{reading.typical:.0%}, maximum {reading.error:.0%}."
    )


def kind(plan: Plan) -> str:
    """ "fixed" or "balanced"."""
    assert plan.split is not None
    return plan.split.kind


def _measured(rows: Sequence[Measurement], choice: Choice) -> dict[int, float]:
    """Seconds in turns of fixed splits of this problem on the chosen card, by number of splits."""
    same = figures(rows, Asked(choice.problem, regime=Regime.IN_TURNS))
    here = [m for m in same if choice.is_of_card(m) and m.lengths is None]
    return {m.split.count: m.seconds for m in reversed(here) if m.split and m.split.kind == "fixed"}


def _show_here(rows: Sequence[Measurement], choice: Choice) -> None:
    """The measurement of this problem with the planner's splits, preferably on the chosen card."""
    card = choice.device.name
    same = figures(rows, Asked(choice.problem, card=card))
    m = next((m for m in same if m.label in _AS_PLANNED and m.lengths is None), None)
    if m is not None:
        read = "" if m.of_read is None else f", {m.of_read:.0%} of a plain read"
        text = f"{seconds_text(m.seconds)}, {m.speed}{read} ({m.regime}; {m.where})"
        text = f"Measured for this problem: {text}."
        other = unlike(card, m.machine, m.recorded)
        text = f"{other}. {text}" if other else text
        page.verdict(text, "warn" if other else "", page.origin_tag(m.origin), small=True)


def _offer_curve(problem: Problem, counts: Sequence[int], is_planned: bool) -> None:
    """Time the planner's choice, equal shares and fixed splits side by side, on a GPU."""
    some = [n for n in (1 << n for n in range(_SPLITS_TIMED)) if n <= counts[-1]]
    fixed = [Contender("fixed", name=sentences.count(n, "split"), num_splits=n) for n in some]
    entrants = (Contender(name=_PLANNER), Contender("balanced"), *fixed, *contenders(READ))
    job = Job(str(problem), rates_view.first_device(), (Case(problem, entrants, str(problem)),), 1.0)
    rates_view.offer("Measure this curve on the GPU", "decode.measure", job, is_planned)
    engine.show_problems()


def _without_extra(batch: Batch, here: Split) -> str:
    """The fill by the planner's criterion, which counts tiles only."""
    if not batch.overhead:
        return ""
    alone = splits.fixed(dataclasses.replace(batch, overhead=0), here.splits)
    return f" ({alone.fill:.0%} without the extra tiles)"


def _planned_split(plan: Plan, batch: Batch) -> Split:
    if kind(plan) == "fixed":
        return splits.fixed(batch, plan.num_splits)
    return splits.evaluate(batch, splits.balanced_blocks(batch, plan.num_splits), plan.num_splits)


def verdict(plan: Plan, curve: Sequence[Split], times: charts.Times | None) -> str:
    """Bytes read, and the time if the card's read rate is known."""
    moved = charts.megabytes(plan.problem.kv_bytes())
    cut = _cut_words(plan)
    blocks, unsplit = math.prod(plan.launches[0].grid), curve[0].blocks
    if times is None:
        assert plan.device is not None
        alone = f", {unsplit:,} unsplit" if blocks != unsplit else ""
        return (
            f"{moved} to read, by {sentences.count(blocks, 'thread block')} {cut}{alone}. The time of tiles of "
            f"{plan.config.block_q} rows on {plan.device.name} is not recorded."
        )
    planned = f"{moved} in {seconds_text(times.planned)} {cut}"
    if blocks == unsplit and plan.num_splits <= 1:
        return f"{planned}: no split is needed."
    return f"{planned}; {seconds_text(times.curve[0])} unsplit, {seconds_text(times.floor)} at best."


def _cut_words(plan: Plan) -> str:
    if kind(plan) == "balanced":
        return f"in {sentences.count(plan.num_splits, 'share')} of all tiles"
    if plan.num_splits == 1:
        return "unsplit"
    return f"with the planner's {sentences.count(plan.num_splits, 'split')}"


def _floor(plan: Plan) -> str:
    """The bound of memory alone, if the card's read rate is recorded."""
    text = f"Visible keys and values: {charts.megabytes(plan.problem.kv_bytes())}"
    assert plan.device is not None
    name, arch = plan.device.name, plan.device.arch.name
    cards = [e for e in engine.recorded() if e.read_bytes and e.arch == arch and is_card(e.device, name)]
    if not cards:
        return f"{text}; the read rate of {name} is not recorded."
    best = max(cards, key=lambda e: e.read_bytes)
    seconds = plan.problem.kv_bytes() / best.read_bytes
    rate = f"{best.read_bytes / 1e12:.2f} TB/s, the fastest recorded read on {best.device}"
    return f"{text}: at least {seconds_text(seconds)} at {rate}."


def _describe(plan: Plan, curve: Sequence[Split], chosen: Split, times: charts.Times | None) -> str:
    single, last = curve[0], curve[-1]
    text = f"Two panels by number of splits, 1 to {last.splits}. "
    text += f"SM fill goes from {single.fill:.0%} to {last.fill:.0%}."
    if times is not None:
        best = min(range(len(curve)), key=lambda n: times.curve[n])
        text += (
            f" Predicted time is {seconds_text(times.curve[0])} at 1 split and least at {curve[best].splits}, "
            f"{seconds_text(times.curve[best])}; as planned it is {seconds_text(times.planned)}."
        )
    return f"{text} The planner's choice, {kind(plan)} with {chosen.splits}, fills {chosen.fill:.0%}."
