"""Why a measured kernel is not faster, and what to try: one small rule for each cause.

A rule reads facts that pages show and returns an :class:`Advice`, or None if its cause costs less than
:data:`LEAST`. Gains are upper bounds: the time saved if the cause disappears and nothing takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from cufa.commands.common import seconds_text
from cufa.dashboard import sentences
from cufa.dashboard.model import counters, needs, tilings
from cufa.dashboard.model.asked import Asked, figures, is_of
from cufa.dashboard.model.compiled import Entry
from cufa.dashboard.model.devices import is_same_card
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.tilings import Tiling
from cufa.dashboard.sentences import share
from cufa.gpu.architectures import Architecture
from cufa.kernels import KERNELS
from cufa.measure import costs, memory_rates, predictions
from cufa.measure.inside import InsideTrace
from cufa.measure.inside_sums import Sums, sums
from cufa.measure.regimes import Regime
from cufa.plan.planner import Plan

LEAST = 0.01
"""Share of the time: causes that cost less are not named."""
_BUSY = 0.5
"""A resource that needs less than this share of the time is not the limit."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about one measured row. A rule whose fact is missing gives no advice."""

    row: Measurement
    """The row, with the time that each resource needs (:mod:`cufa.dashboard.model.needs`)."""
    plan: Plan | None = None
    launch_seconds: float = 0.0
    others: Sequence[Measurement] = ()
    """The same kernel with other tiles, on the same problem, card and regime."""
    tilings: Sequence[Tiling] = ()
    """Predicted times, the fastest first."""
    error: float = 0.0
    """Median error of these predictions."""
    shared_per_product: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bytes of shared memory per multiply-add, by tiles."""
    l2_seconds: float | None = None
    """Seconds for the L2 cache's traffic at the measured rate."""
    inside: tuple[InsideTrace, Sums, float] | None = None
    """A trace from inside a block of the same source on the same card, its sums, and the share of their time that
    consumer warps wait for data."""
    entry: Entry | None = None
    arch: Architecture | None = None

    @property
    def units(self) -> dict[str, float]:
        """Seconds that each resource needs alone. Only lasting load lowers the clock to what the power limit allows."""
        left_out = {"busiest block", "no overlap", "passes"}
        left_out |= {"products"} if self.is_sustained and "power" in self.row.needs else {"power"}
        seconds = {name: x for name, x in self.row.needs.items() if name not in left_out}
        return seconds | ({} if self.l2_seconds is None else {"L2 cache": self.l2_seconds})

    @property
    def is_sustained(self) -> bool:
        return self.row.regime is Regime.SUSTAINED


@dataclasses.dataclass(frozen=True)
class Advice:
    """One cause, and what to try."""

    cause: str
    gain: float | None
    """Share of the measured time, 0 to 1; None: not known."""
    figure: str
    """The numbers that show the cause."""
    attempt: str
    """What to try."""
    origin: str = "predicted"
    """Origin of the numbers: a tag of :func:`cufa.dashboard.page.verdict`."""


# --- The rules ----------------------------------------------------------------------------------------------

_ATTEMPTS = {
    "products": "Fewer hidden scores in visited tiles (smaller key tiles under a mask), or 8-bit inputs.",
    "power": "Fewer joules per product: larger tiles move fewer bytes of shared memory per product.",
    "exponentials": "Compute a part of the exponentials by a polynomial on the FMA units (FlashAttention-4).",
    "shared memory": "Keep an operand in registers, or use larger query tiles: fewer bytes per product.",
    "memory": "Fewer bytes: fewer key/value heads, an 8-bit cache, or heads of a query group in one tile.",
    "L2 additions": "Give each block more queries per key block, so that dQ is added less often.",
    "L2 cache": "Larger query tiles, or clusters whose blocks share each key/value tile by multicast.",
}


def binding_resource(f: Facts) -> Advice | None:
    if len(f.units) < 2:
        return None
    (second, next_seconds), (first, seconds) = sorted(f.units.items(), key=lambda x: x[1])[-2:]
    if seconds < _BUSY * f.row.seconds:  # the next limit is far away
        return None
    return Advice(
        f"Limit: {first}",
        (seconds - next_seconds) / f.row.seconds,
        f"{first} alone: {seconds_text(seconds)}, {share(seconds / f.row.seconds)} of the time; the next limit is "
        f"{second}: {seconds_text(next_seconds)}",
        _ATTEMPTS[first],
    )


def idle_sms(f: Facts) -> Advice | None:
    if f.plan is None or f.plan.device is None:
        return None
    blocks, sms = math.prod(costs.main_launch(f.plan).grid), f.plan.device.num_sms
    if blocks >= sms:
        return None
    return Advice(
        "Idle SMs",
        1 - blocks / sms,
        f"{blocks} thread blocks on {sms} SMs",
        "Smaller query tiles, split keys (`num_splits`), or more heads or sequences per call.",
        "computed",
    )


def last_wave(f: Facts) -> Advice | None:
    busiest = f.row.needs.get("busiest block")
    if busiest is None or idle_sms(f) is not None:
        return None
    most = max(
        f.row.needs[name] for name in f.row.needs if name not in ("busiest block", "no overlap", "power")
    )
    return Advice(
        "Last wave",
        (busiest - most) / f.row.seconds,
        f"the busiest SM works {seconds_text(busiest)}, an even load would take {seconds_text(most)}",
        "Smaller query tiles, more heads or sequences per call, or split keys.",
    )


def waits(f: Facts) -> Advice | None:
    explained = max([*f.units.values(), f.row.needs.get("busiest block", 0.0)], default=0.0)
    if not f.row.needs or f.inside is not None or f.row.row.host_bound:  # a trace says which waits
        return None
    return Advice(
        "Waits that no resource explains",
        1 - explained / f.row.seconds,
        f"the busiest resource of the busiest SM needs {seconds_text(explained)} of {seconds_text(f.row.seconds)}",
        "Record a trace from inside a block (`cufa inside`): it separates exposed softmax, loads and barriers.",
    )


def exposed_softmax(f: Facts) -> Advice | None:
    if f.inside is None:
        return None
    trace, of_sm, _ = f.inside
    return Advice(
        "Exposed softmax",
        of_sm.exposed / of_sm.span,
        f"{of_sm.exposed:,.1f} of {of_sm.span:,.1f} µs are softmax without a product: inside a block, {trace.problem}",
        "Ping-pong of two consumer warpgroups, or issue the next tile's Q Kᵀ before this tile's softmax.",
        "recorded",
    )


def exposed_loads(f: Facts) -> Advice | None:
    if f.inside is None:
        return None
    trace, _, waiting = f.inside
    return Advice(
        "Exposed loads",
        waiting,
        f"consumer warps wait {share(waiting)} of their time for data: inside a block, {trace.problem}",
        f"More than {trace.config.num_stages} stages, or smaller key tiles with more stages.",
        "recorded",
    )


def tiles_measured(f: Facts) -> Advice | None:
    best = min(f.others, key=lambda m: m.seconds, default=None)
    if best is None:
        return None
    return Advice(
        "Tiles",
        1 - best.seconds / f.row.seconds,
        f"{best.label}, {best.tiles}: {seconds_text(best.seconds)}, {best.regime}, {best.recorded[:10]}",
        f"{best.tiles} instead of {f.row.tiles}.",
        "recorded",
    )


def tiles_predicted(f: Facts) -> Advice | None:
    own = next((x for x in f.tilings if is_of(x.config, f.row.row.json.get("config"))), None)
    if own is None or f.is_sustained or f.tilings[0].seconds >= own.seconds * (1 - f.error):
        return None  # a difference below the prediction's own error proves nothing
    best = f.tilings[0]
    return Advice(
        "Tiles",
        1 - best.seconds / own.seconds,
        f"{best.config} is predicted to take {seconds_text(best.seconds)}, these tiles {seconds_text(own.seconds)}; "
        f"median error of such predictions {share(f.error)}",
        f"{best.config} instead of {own.config}.",
    )


def power_limit(f: Facts) -> Advice | None:
    load, most = f.row.load, f.row.clock_limit.partition(" ")[0]
    if not load.get("clock_mhz") or not most:
        return None
    own = f.shared_per_product.get(str(f.plan.config)) if f.plan else None
    least = min(f.shared_per_product, key=lambda x: f.shared_per_product[x], default="")
    attempt = "Fewer joules per call: larger tiles, fewer hidden scores."
    if own and f.shared_per_product[least] < own:
        fewer = 1 - f.shared_per_product[least] / own
        attempt = f"{least}: {share(fewer)} fewer bytes of shared memory per product than these tiles."
    return Advice(
        "Power limit",
        1 - load["clock_mhz"] / float(most),
        f"{load['clock_mhz']:,.0f} of {float(most):,.0f} MHz at {load.get('watts') or 0:,.0f} W",
        attempt,
        f.row.origin if f.row.origin == "recorded" else "measured",
    )


def occupancy_limiter(f: Facts) -> Advice | None:
    if f.entry is None or f.arch is None or f.row.predicted is None:
        return None
    resident = f.entry.occupancy(f.arch)
    whole_sm = f.plan is not None and f.plan.spec.uses_copy_engine  # Hopper's kernels take one by design
    if not resident.advice or whole_sm:
        return None
    unhidden = f.row.predicted - max([*f.units.values(), f.row.needs.get("busiest block", 0.0)])
    return Advice(
        f"Occupancy: limited by {resident.limiters[0]}",
        unhidden / (resident.blocks + 1) / f.row.seconds,
        f"{sentences.count(resident.blocks, 'block')} per SM, {share(resident.fraction)} of the warps; "
        f"{seconds_text(unhidden)} are predicted not to overlap",
        f"One more block: {resident.advice}.",
        "computed",
    )


def spills(f: Facts) -> Advice | None:
    if f.entry is None or not f.entry.spill_bytes:
        return None
    return Advice(
        "Spills",
        None,
        f"{f.entry.spill_bytes:,} B per thread go to local memory at {f.entry.registers} registers",
        "Smaller tiles, fewer values alive across the loop (Machine code shows where), or fewer blocks per SM.",
        "computed",
    )


def launches(f: Facts) -> Advice | None:
    if f.plan is None or not f.launch_seconds:
        return None
    number = sentences.count(len(f.plan.launches), "launch")
    seconds = f.launch_seconds * len(f.plan.launches)
    figure = f"{number} per call, {seconds_text(seconds)}"
    if f.row.row.host_bound:
        figure = f"{number} per call; the GPU waited for the host: this is launch time, not kernel time"
    return Advice(
        "Launch overhead",
        None if f.row.row.host_bound else seconds / f.row.seconds,
        figure,
        "Record the calls in a CUDA graph, or give a call more work.",
        "recorded",
    )


RULES: tuple[Callable[[Facts], Advice | None], ...] = (
    binding_resource, idle_sms, last_wave, waits, exposed_softmax, exposed_loads, tiles_measured, tiles_predicted,
    power_limit, occupancy_limiter, spills, launches,
)  # fmt: skip


def advice(f: Facts) -> list[Advice]:
    """The largest gains first, then causes whose gain is not known."""
    named = [x for x in (rule(f) for rule in RULES) if x is not None and (x.gain is None or x.gain >= LEAST)]
    return sorted(named, key=lambda x: -1.0 if x.gain is None else x.gain, reverse=True)


# --- The facts ----------------------------------------------------------------------------------------------


def facts_of(m: Measurement, machine: Evidence, entry: Entry | None = None) -> Facts:
    """``entry``: the main launch as compiled, if that is known already."""
    m, device = needs.with_needs(m, machine), needs.device_of(machine)
    spec = KERNELS.get(m.kernel or "")
    if device is None or spec is None or machine.limits is None:
        return Facts(m)
    plan = predictions.plan_of(m.row, device)
    cost, rates = needs.cost_of(m, machine), None
    with contextlib.suppress(ValueError):  # damaged: the figure of the levels says so
        rates = memory_rates.load(machine.device)
    same = figures(machine.rows, Asked(m.problem, m.kernel, regime=m.regime, suite=m.suite))
    predicted = tilings.tilings(m.problem, spec, device, machine) if m.row.json.get("needs_ns") else []
    shared = ((str(x.config), needs.shared_per_product(m.problem, spec, x.config)) for x in predicted)
    errors = tilings.errors_of(machine, device)
    return Facts(
        m,
        plan,
        machine.limits.launch_seconds,
        [x for x in same if x.tiles != m.tiles and not x.is_stale],
        predicted,
        errors[m.kernel].median if m.kernel in errors else 0.0,
        {name: x for name, x in shared if x is not None},
        cost.l2 / rates.l2_bytes if cost is not None and rates is not None else None,
        _inside(m, plan),
        entry,
        device.arch,
    )


def _inside(m: Measurement, plan: Plan | None) -> tuple[InsideTrace, Sums, float] | None:
    if plan is None or plan.device is None:
        return None
    trace = counters.matching_inside(m.problem, plan.spec, plan.config, plan.device)
    if trace is None or trace.digest != m.row.json.get("digest"):
        return None
    if not is_same_card(str(trace.environment["device"]), plan.device.name):
        return None
    times = trace.intervals()
    of_sm = sums(trace, times)
    if not of_sm.products:
        return None
    return trace, of_sm, counters.waits_for_data(trace, times, of_sm.sm)
