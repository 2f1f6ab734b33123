"""Predicted time of a launch with split keys, from the bytes that the launch reads.

The read rates of the card and of a thread block limit the launch; each call has a fixed time; merges through device
memory cost what the planner assumes. The rate of a thread block and the fixed time are fitted to recorded times of the
card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from cufa.dashboard.model import splits
from cufa.dashboard.model.asked import Asked, figures, where
from cufa.dashboard.model.devices import is_card
from cufa.dashboard.model.evidence import Evidence
from cufa.dashboard.model.measurements import Measurement
from cufa.dashboard.model.splits import Batch
from cufa.gpu.architectures import Device
from cufa.measure.regimes import Regime
from cufa.plan.decode_splits import item_bytes, merge_bytes
from cufa.plan.planner import Plan, make_plan

_FEWEST = 4
"""Minimum number of recorded times for a fit."""
_STARTS = np.linspace(2e-6, 12e-6, 101)
_BLOCK_RATES = np.geomspace(5e9, 200e9, 149)


@dataclasses.dataclass(frozen=True)
class Load:
    """The work of one launch."""

    total: float
    """Bytes of keys and values, each once."""
    busiest: float
    """Bytes that the busiest place (a resident block) reads."""
    merged: float
    """Bytes that a block could read during the merge of a work item."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """The read rate of a card with one tile config."""

    card: float
    """Bytes per second of the card: the fastest recorded rate."""
    block: float
    """Bytes per second of one thread block."""
    start: float
    """Fixed seconds of each call."""
    error: float
    """Largest relative error over the times that were fitted."""
    typical: float
    """Median relative error."""
    fitted: int
    """Number of times that were fitted."""
    where: str

    def floor(self, load: Load) -> float:
        """Lower bound in seconds: the bytes at the card's rate."""
        return load.total / self.card

    def seconds(self, load: Load) -> float:
        return self.start + max(self.floor(load), load.busiest / self.block) + load.merged / self.block


def load_of(plan: Plan, lengths: tuple[int, ...] | None = None) -> Load:
    """The work of a plan, for sequences of these lengths (None: as long as the cache)."""
    assert plan.split is not None
    problem, config = plan.problem, plan.config
    batch = Batch.of(plan, lengths or (problem.seqlen_k,) * problem.batch, 0)
    if plan.split.kind == "fixed":
        span, parts = splits.fixed(batch, plan.num_splits).span, plan.num_splits
    else:
        blocks = splits.balanced_blocks(batch, plan.num_splits)
        span = splits.evaluate(batch, blocks, plan.num_splits).span
        item = blocks.batch * batch.kv_heads + blocks.head
        parts = int(np.bincount(item).max()) if len(item) else 1
    total = _bytes(problem.kv_bytes(), lengths, problem.seqlen_k * problem.batch)
    tile = config.block_kv * item_bytes(problem) / problem.visible_capacity
    through_memory = parts > 1 and all(launch.cluster == 1 for launch in plan.launches)
    return Load(total, span * tile, parts * merge_bytes(problem, config) if through_memory else 0.0)


def _bytes(all_of_them: int, lengths: tuple[int, ...] | None, keys: int) -> float:
    return float(all_of_them) if lengths is None else all_of_them * sum(lengths) / keys


def reading(device: Device, block_q: int, evidence: Iterable[Evidence]) -> Reading | None:
    """A fit to the records of such a card; None if there are too few."""
    for e in evidence:
        if e.arch == device.arch.name and is_card(e.device, device.name) and e.read_bytes:
            return _fitted(e, device, block_q)
    return None


@functools.lru_cache(32)
def _fitted(records: Evidence, device: Device, block_q: int) -> Reading | None:
    known = ((m, _recorded(m, device, block_q)) for m in figures(records.rows, Asked(regime=Regime.IN_TURNS)))
    fitted = [(m, load) for m, load in known if load is not None]
    rows = [(load, m.seconds) for m, load in fitted]
    if len(rows) < _FEWEST:
        return None
    total, busiest, merged, seconds = (
        np.array(x)[:, None, None]
        for x in ([r[0].total for r in rows], [r[0].busiest for r in rows], [r[0].merged for r in rows],
                  [r[1] for r in rows])
    )  # fmt: skip
    start, block = _STARTS[None, :, None], _BLOCK_RATES[None, None, :]
    predicted = start + np.maximum(total / records.read_bytes, busiest / block) + merged / block
    missed = np.abs(predicted / seconds - 1)
    mean = missed.mean(axis=0)  # minimising the largest error would fit waves, which the model ignores
    i, j = np.unravel_index(mean.argmin(), mean.shape)
    return Reading(
        records.read_bytes,
        float(_BLOCK_RATES[j]),
        float(_STARTS[i]),
        float(missed[:, i, j].max()),
        float(np.median(missed[:, i, j])),
        len(rows),
        where([m for m, _ in fitted]),
    )


def _recorded(m: Measurement, device: Device, block_q: int) -> Load | None:
    """The work of a recorded launch with these tiles; None for other records."""
    config = m.row.json.get("config") or {}
    lengths_known = m.lengths is not None or not m.problem.lengths.ragged
    if m.split is None or config.get("block_q") != block_q or not lengths_known:
        return None
    count = m.split.count if m.split.kind == "fixed" else None
    try:
        plan = make_plan(m.problem, device, m.split.kind, num_splits=count)
    except ValueError:  # no kernel has such a split
        return None
    return load_of(plan, m.lengths) if plan.config.block_q == block_q else None
