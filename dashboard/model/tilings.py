"""Predicted time of each tile config of a kernel, from the measured ceilings of a card, and the prediction error."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from cufa.dashboard.model import evidence
from cufa.dashboard.model.asked import Asked, figures, is_of
from cufa.dashboard.model.devices import is_card
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.measure import bounds, predictions
from cufa.measure.predictions import Error, errors
from cufa.measure.regimes import Regime
from cufa.plan.candidates import serving_configs
from cufa.plan.planner import make_plan
from cufa.problem.problem import Problem

_WAITS = 1.02
"""The busiest thread block is the limit if it takes this factor longer than the busiest resource; power, if products
take this factor longer at the reduced clock."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One tile config on one problem."""

    config: TileConfig
    seconds: float
    """Predicted."""
    binds: str
    """The limiting resource, or "busiest block"."""
    measured: Measurement | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.measured is None else self.seconds / self.measured.seconds - 1


def of_card(device: Device, recorded: Iterable[Evidence]) -> Evidence | None:
    """Evidence with ceilings from this model of card."""
    return next(iter(of_cards(device, recorded).values()), None)


def of_cards(device: Device, recorded: Iterable[Evidence]) -> dict[str, Evidence]:
    """Evidence with ceilings from this model of card, then from cards of its architecture and SM count, by name.
    Empty without evidence from this model."""
    alike = (e for e in recorded if e.limits and (e.arch, e.num_sms) == (device.arch.name, device.num_sms))
    cards = sorted(alike, key=lambda e: not is_card(e.device, device.name))
    return {e.device: e for e in cards} if cards and is_card(cards[0].device, device.name) else {}


def tilings(problem: Problem, spec: Kernel, device: Device, card: Evidence) -> list[Tiling]:
    """All configs that fit, sorted by predicted time; empty if times of the kernel cannot be predicted."""
    assert card.limits is not None
    same = figures(card.rows, Asked(problem, spec.name, regime=Regime.IN_TURNS))
    predicted = []
    for config in serving_configs(spec, problem, device):
        try:
            plan = make_plan(problem, device, config=config, kernel=spec.name, num_splits=1)
        except ValueError:  # does not serve this mask, lengths or element type
            continue
        if bounds.why_not(plan, card.limits):
            return []
        named = bounds.bounds_of(plan, card.limits).named()
        waiting = named.pop("busiest block")
        named.pop("no overlap")
        if named.get("power", 0.0) <= _WAITS * named["products"]:
            named.pop("power", None)
        binds = max(named, key=lambda name: named[name])
        if waiting > _WAITS * named[binds]:
            binds = "busiest block"
        measured = next((m for m in same if is_of(config, m.row.json.get("config"))), None)
        predicted.append(Tiling(config, bounds.predict(plan, card.limits), binds, measured))
    return sorted(predicted, key=lambda x: x.seconds)


def why_none(problem: Problem, spec: Kernel, device: Device, card: Evidence) -> str:
    """Why times of the kernel cannot be predicted from the card's records."""
    assert card.limits is not None
    try:
        plan = make_plan(problem, device, kernel=spec.name, num_splits=1)
    except ValueError as error:
        return str(error)
    return bounds.why_not(plan, card.limits)


def left_out(problem: Problem, spec: Kernel, device: Device) -> str:
    """Properties of the card that the predicted times ignore, as a sentence; "" if there are none."""
    return predictions.left_out(make_plan(problem, device, kernel=spec.name, num_splits=1))


def prepare() -> None:
    """Compute the prediction errors of all recorded cards, which takes a second."""
    cards = evidence.load()
    for name in {e.arch for e in cards if e.arch}:
        device = Device.typical(name)
        for of_card in of_cards(device, cards).values():
            errors_of(of_card, device)


@functools.lru_cache(8)
def errors_of(card: Evidence, device: Device) -> dict[str, Error]:
    """Prediction errors by kernel, over all times in turns of the card."""
    assert card.limits is not None
    return errors((m.row for m in card.rows), device, card.limits)
