"""What each tile config of a kernel would take, from the measured ceilings of a card, and how far off that is."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable

from cufa.dashboard.model import evidence
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
"""The busiest thread block is what binds where it takes this much longer than the busiest resource; power, where
products take this much longer at the clock that it leaves."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One tile config on one problem."""

    config: TileConfig
    seconds: float
    """Predicted."""
    binds: str
    """The resource that decides, or "busiest block"."""
    measured: Measurement | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.measured is None else self.seconds / self.measured.seconds - 1


def of_card(device: Device, recorded: Iterable[Evidence]) -> Evidence | None:
    """What was recorded on such a card, with ceilings."""
    return next(iter(of_cards(device, recorded).values()), None)


def of_cards(device: Device, recorded: Iterable[Evidence]) -> dict[str, Evidence]:
    """What was recorded on such a card, with ceilings, and on others of its architecture with as many SMs, by their
    names; nothing where there is none of such a card."""
    alike = (e for e in recorded if e.limits and (e.arch, e.num_sms) == (device.arch.name, device.num_sms))
    found = sorted(alike, key=lambda e: not is_card(e.device, device.name))
    return {e.device: e for e in found} if found and is_card(found[0].device, device.name) else {}


def tilings(problem: Problem, spec: Kernel, device: Device, found: Evidence) -> list[Tiling]:
    """Every config that fits, the shortest predicted time first; none where times of the kernel are not derived."""
    assert found.limits is not None
    same = [
        m
        for m in found.rows
        if m.problem == problem and m.kernel == spec.name and m.regime is Regime.IN_TURNS
    ]
    told = []
    for config in serving_configs(spec, problem, device):
        try:
            plan = make_plan(problem, device, config=config, kernel=spec.name, num_splits=_whole(spec))
        except ValueError:  # not of this mask, lengths or element
            continue
        if not bounds.covers(plan, found.limits):
            return []
        named = bounds.bounds_of(plan, found.limits).named()
        waiting = named.pop("busiest block")
        named.pop("no overlap")
        if named.get("power", 0.0) <= _WAITS * named["products"]:
            named.pop("power", None)
        binds = max(named, key=lambda name: named[name])
        if waiting > _WAITS * named[binds]:
            binds = "busiest block"
        measured = next((m for m in same if is_of(config, m.row.json.get("config"))), None)
        told.append(Tiling(config, bounds.predict(plan, found.limits), binds, measured))
    return sorted(told, key=lambda x: x.seconds)


def why_none(problem: Problem, spec: Kernel, device: Device, found: Evidence) -> str:
    """Why no times of the kernel are predicted from what was recorded of its card."""
    assert found.limits is not None
    try:
        plan = make_plan(problem, device, kernel=spec.name, num_splits=_whole(spec))
    except ValueError as error:
        return str(error)
    return bounds.why_not(plan, found.limits)


def left_out(problem: Problem, spec: Kernel, device: Device) -> str:
    """What predicted times of the kernel do not know of the card, as a sentence; "" where nothing is missing."""
    return predictions.left_out(make_plan(problem, device, kernel=spec.name, num_splits=_whole(spec)))


def _whole(spec: Kernel) -> int | None:
    """Times of split keys are not derived."""
    return 1 if spec.split_configs else None


def is_of(config: TileConfig, recorded: object) -> bool:
    """Whether a record names this config; it may leave out what the config has of an older or newer version."""
    if not isinstance(recorded, dict):
        return False
    here = json.loads(json.dumps(dataclasses.asdict(config)))
    return all(here[name] == value for name, value in recorded.items() if name in here)


def prepare() -> None:
    """Find the errors of all cards that have records, which takes a second."""
    found = evidence.load()
    for name in {e.arch for e in found if e.arch}:
        device = Device.typical(name)
        for of_card in of_cards(device, found).values():
            errors_of(of_card, device)


@functools.lru_cache(8)
def errors_of(found: Evidence, device: Device) -> dict[str, Error]:
    """By kernel, of predictions of every time that was taken in turns on such a card."""
    assert found.limits is not None
    return errors((m.row for m in found.rows), device, found.limits)
