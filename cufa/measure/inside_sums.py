"""Evaluation of an inside trace: its warps, and the times of products, softmax and waits, alone and overlapped."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from ..build.phases import PHASES, PRODUCTS, WAITS, WORDS
from .inside import InsideTrace

Intervals = npt.NDArray[Any]
"""Array of dtype :data:`cufa.build.phases.INTERVAL`."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """One warp of one thread block."""

    log: int
    sm: int
    thread_block: int
    warp: int
    role: str
    """"consumer" (has wgmma products in flight), "producer" (computes nothing, next to consumers), or "warp"."""

    def __str__(self) -> str:
        return f"block {self.thread_block} · {self.role} {self.warp}"


@dataclasses.dataclass(frozen=True)
class Sums:
    """Times of one SM in the trace's unit. ``products``, ``softmax``: time in which at least one warp executes it."""

    sm: int
    lanes: int
    span: float
    """Time from the first stamp to the last."""
    lane_time: float
    """Sum over lanes of the time from first to last stamp."""
    products: float
    softmax: float
    both: float
    """Time in which softmax and products run at once, in the same warp or in different warps."""
    phases: dict[str, float]
    """Time of each phase, summed over lanes. Products in flight do not count: their warp does other work."""

    @property
    def overlap(self) -> float:
        """Fraction of the softmax time in which products run."""
        return self.both / self.softmax if self.softmax else 0.0

    @property
    def exposed(self) -> float:
        """Softmax time in which no product runs."""
        return self.softmax - self.both

    @property
    def waits(self) -> dict[str, float]:
        """Time of each kind of wait, summed over lanes."""
        return {name: self.phases[name] for name in WAITS if name in self.phases}

    def share(self, time: float) -> float:
        """``time`` as a fraction of :attr:`lane_time`."""
        return time / self.lane_time if self.lane_time else 0.0


def lanes(trace: InsideTrace, found: Intervals) -> list[Lane]:
    """The trace's lanes by SM, thread block and warp. Logs are numbered in the order in which warps start."""
    result = []
    products, softmax = (_numbers(names) for names in (PRODUCTS, ("SOFTMAX", "TILE")))
    flying = set(found["log"][found["flight"]].tolist())
    computing = set(found["log"][np.isin(found["phase"], [*products, *softmax])].tolist())
    for log, head in enumerate(trace.logs.heads):
        role = "consumer" if log in flying else "warp" if log in computing or not flying else "producer"
        sm, block, warp = (int(head[name]) for name in ("sm", "thread_block", "warp"))
        result.append(Lane(log, sm, block, warp, role))
    return sorted(result, key=lambda lane: (lane.sm, lane.thread_block, lane.warp))


def busiest_sm(trace: InsideTrace) -> int:
    """The SM with the most logs."""
    sms, number = np.unique(trace.logs.heads["sm"], return_counts=True)
    return int(sms[np.argmax(number)])


def sums(trace: InsideTrace, found: Intervals, sm: int | None = None) -> Sums:
    """Sums of one SM (default: the busiest). Raises ValueError if the SM has no logs."""
    sm = busiest_sm(trace) if sm is None else sm
    logs = np.flatnonzero(trace.logs.heads["sm"] == sm)
    selected = found[np.isin(found["log"], logs)]
    if not len(selected):
        raise ValueError(f"no warp of SM {sm} kept a log")
    products = union(selected[np.isin(selected["phase"], _numbers(PRODUCTS))])
    softmax = union(selected[selected["phase"] == PHASES.index("SOFTMAX")])
    states = selected[~selected["flight"]]
    total = np.bincount(states["phase"], states["end"] - states["begin"], len(PHASES))
    both = length(products) + length(softmax) - length(union(np.concatenate([products, softmax])))
    return Sums(
        sm, len(logs), span=float(selected["end"].max() - selected["begin"].min()), lane_time=_lane_time(selected),
        products=length(products), softmax=length(softmax), both=both,
        phases={name: float(t) for name, t in zip(PHASES, total, strict=True) if t},
    )  # fmt: skip


def _lane_time(found: Intervals) -> float:
    first = np.unique(found["log"], return_index=True)[1]  # intervals are sorted by log, then begin
    ends = np.maximum.reduceat(found["end"], first)
    return float((ends - found["begin"][first]).sum())


def _numbers(names: tuple[str, ...]) -> list[int]:
    return [PHASES.index(name) for name in names]


def union(found: Any) -> npt.NDArray[Any]:
    """The union of the intervals: disjoint intervals in order."""
    pairs = np.zeros(len(found), [("begin", np.float64), ("end", np.float64)])
    order = np.argsort(found["begin"], kind="stable")
    pairs["begin"], pairs["end"] = found["begin"][order], np.maximum.accumulate(found["end"][order])
    if not len(pairs):
        return pairs
    starts = np.flatnonzero(np.append(True, pairs["begin"][1:] > pairs["end"][:-1]))
    merged = pairs[starts]
    merged["end"] = pairs["end"][np.append(starts[1:], len(pairs)) - 1]
    return merged


def length(pairs: npt.NDArray[Any]) -> float:
    """Total length of disjoint intervals."""
    return float((pairs["end"] - pairs["begin"]).sum())


def about(trace: InsideTrace, interval: Any) -> str:
    """An interval in words: phase, tile, block and head."""
    text = WORDS[PHASES[interval["phase"]]] + (", in flight" if interval["flight"] else "")
    number, item = int(interval["number"]), int(interval["item"])
    by_keys = trace.problem.operation == "backward"
    if number >= 0 and PHASES[interval["phase"]] not in ("STORE", "MERGE", "WAIT_ITEM"):
        text += f" · {_tile(trace, number, by_keys)}"
    if item >= 0:
        record = trace.logs.items[item]
        block = "key block" if by_keys else "part" if trace.problem.operation == "decode" else "query block"
        text += f" · {block} {record['q_block']}, head {record['head']}, batch {record['batch']}"
    return text


def _tile(trace: InsideTrace, number: int, by_keys: bool) -> str:
    if by_keys:
        return f"query tile {number & 0xFFF} of head {number >> 12}"
    first = number * trace.config.block_kv
    return f"key tile {number} (keys {first} to {first + trace.config.block_kv - 1})"


def perfetto(trace: InsideTrace, found: Intervals | None = None) -> bytes:
    """Chrome trace-event JSON for ui.perfetto.dev. Each SM is a process, each warp a thread; each kind of product that
    a warp has in flight is one more thread. In a trace of a CPU, each primitive takes one microsecond."""
    found = trace.intervals() if found is None else found
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], int] = {}
    for lane in lanes(trace, found):
        name = f"SM {lane.sm}" if trace.is_time else f"CPU thread {lane.sm}"
        events.append({"ph": "M", "name": "process_name", "pid": lane.sm, "args": {"name": name}})
        lane_intervals = found[found["log"] == lane.log]
        kinds = [0, *np.unique(lane_intervals["phase"][lane_intervals["flight"]]).tolist()]
        for kind in kinds:
            thread = threads[lane.log, kind] = len(threads)
            label = f"{lane}: {WORDS[PHASES[kind]]} in flight" if kind else str(lane)
            ids = {"pid": lane.sm, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": label}})
            events.append({"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": thread}})
    for x in found:
        log, kind = int(x["log"]), int(x["phase"]) if x["flight"] else 0
        begin, end = float(x["begin"]), float(x["end"])
        place = {
            "pid": int(trace.logs.heads["sm"][log]),
            "tid": threads[log, kind],
            "ts": begin,
            "dur": end - begin,
        }
        name, what = WORDS[PHASES[x["phase"]]], about(trace, x)
        events.append({"ph": "X", "name": name, "cat": PHASES[x["phase"]], **place, "args": {"what": what}})
    other = {
        "title": f"{trace.kernel}, {trace.problem}, {trace.config}",
        "clock": trace.clock,
        "unit": trace.unit,
    }
    if not trace.is_time:
        other["note"] = "executed on a CPU: order, not time"
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}).encode()
