"""Traces of trace builds: timelines, comparison with the schedule, export."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from cufa.dashboard.model.launch import WHOLE_HEAD, Blocks, Timeline
from cufa.kernels.params import TRACE_RECORD
from cufa.problem.tile_classes import TileRanges
from cufa.schedule.schedule import Schedule

Records = npt.NDArray[Any]
"""An array of dtype :data:`cufa.kernels.params.TRACE_RECORD`: one entry per query block and head."""


def measured_timeline(records: Records, num_sms: int, whole_heads: bool = False) -> Timeline:
    """The timeline of a trace in order of block numbers, in microseconds from the first start.

    One entry per record; with ``whole_heads`` one entry per thread block, which computes all query blocks of a head.
    """
    assert records.dtype == TRACE_RECORD
    ordered = np.sort(records, order=["thread_block", "start_ns"])
    number, first, count = np.unique(ordered["thread_block"], return_index=True, return_counts=True)
    zero = records["start_ns"].min()
    start = (ordered["start_ns"] - zero).astype(np.float64) / 1e3
    end = (ordered["end_ns"] - zero).astype(np.float64) / 1e3
    block_start, block_end = np.minimum.reduceat(start, first), np.maximum.reduceat(end, first)
    sm = ordered["sm"].astype(np.int64)
    slot = _slots(block_start, block_end, sm[first])
    q_block, head, batch, tiles = (
        ordered[name].astype(np.int64) for name in ("q_block", "head", "batch", "tiles_visited")
    )
    if whole_heads:
        whole = np.full(len(number), WHOLE_HEAD)
        blocks = Blocks(whole, head[first], batch[first], np.add.reduceat(tiles, first))
        start, end, sm = block_start, block_end, sm[first]
    else:
        taker = np.repeat(np.arange(len(number)), count) if len(number) < len(ordered) else None
        blocks = Blocks(q_block, head, batch, tiles, taker)
        slot = np.repeat(slot, count)
    slots = int(slot.max(initial=0)) + 1
    return Timeline(start, end, sm, slot, blocks, max(num_sms, int(sm.max(initial=0)) + 1), slots, "µs")


def _slots(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], sm: npt.NDArray[np.int64]) -> Any:
    """The lowest free place on the block's SM at its start."""
    slot = np.zeros(len(start), np.int64)
    free_at: dict[int, list[float]] = {}
    for i in np.argsort(start, kind="stable").tolist():
        places = free_at.setdefault(int(sm[i]), [])
        for place, end_of_place in enumerate(places):
            if end_of_place <= start[i]:
                places[place] = end[i]
                slot[i] = place
                break
        else:
            slot[i] = len(places)
            places.append(end[i])
    return slot


def disagreements(records: Records, schedule: Schedule) -> list[str]:
    """Differences between the kernel's counters and the schedule, one sentence each."""
    block, name = records["q_block"].astype(np.int64), "key block" if schedule.by_keys else "query block"
    if len(block) and block.max() >= schedule.num_blocks:
        return [f"the trace has {name} {block.max()}, the schedule only {schedule.num_blocks} of them"]
    ranges = schedule.ranges
    expected = {
        "tiles_visited": ranges.count,
        "tiles_skipped": schedule.tiles_of_block - ranges.count,
        "tiles_clear": ranges.clear,
    }
    if isinstance(ranges, TileRanges):
        expected |= {"first_tile": ranges.first, "first_clear": ranges.clear_first}
    differences = []
    for field, prediction in expected.items():
        wrong = np.flatnonzero(records[field].astype(np.int64) != prediction[block])
        if len(wrong):
            r = records[wrong[0]]
            differences.append(
                f"{field.replace('_', ' ')}: {len(wrong):,} of {len(records):,} records differ; first: "
                f"{name} {r['q_block']}, head {r['head']}, batch {r['batch']} counted {r[field]}, the "
                f"schedule has {prediction[r['q_block']]}"
            )
    return differences


def perfetto(timeline: Timeline, title: str) -> bytes:
    """Chrome trace-event JSON for ui.perfetto.dev: a process per SM, a thread per place.

    In a predicted timeline, a tile lasts one microsecond. Overlapping items of a persistent block get separate threads:
    events of one thread must not overlap.
    """
    predicted = timeline.unit == "tiles"
    if not predicted and timeline.blocks.thread_block is not None:
        timeline = dataclasses.replace(timeline, slot=_slots(timeline.start, timeline.end, timeline.sm))
    events: list[dict[str, Any]] = []
    for sm, slot in sorted(set(zip(timeline.sm.tolist(), timeline.slot.tolist(), strict=True))):
        events.append({"ph": "M", "name": "process_name", "pid": sm, "args": {"name": f"SM {sm}"}})
        events.append(
            {"ph": "M", "name": "thread_name", "pid": sm, "tid": slot, "args": {"name": f"place {slot}"}}
        )
    blocks = timeline.blocks
    columns = (timeline.start, timeline.end, timeline.sm, timeline.slot)
    number = np.arange(len(blocks)) if blocks.thread_block is None else blocks.thread_block
    work = (number, blocks.q_block, blocks.head, blocks.batch, blocks.tiles)
    for start, end, sm, slot, taker, q_block, head, batch, tiles in zip(
        *(x.tolist() for x in (*columns, *work)), strict=True
    ):
        name = f"head {head}" if q_block == WHOLE_HEAD else f"query block {q_block}, head {head}"
        arguments = {"thread_block": taker, "batch": batch, "tiles": tiles}
        events.append(
            {"ph": "X", "name": name, "cat": "block", "pid": sm, "tid": slot, "ts": start, "dur": end - start}
            | {"args": arguments}
        )
    other = {"title": title, "predicted": predicted, "unit": "1 µs = 1 tile" if predicted else "µs"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}).encode()
