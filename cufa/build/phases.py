"""Phases of each warp over time, from the stamps of an inside trace (``cuda_src/shared/phases.cuh``).

The names of phases and the layout of logs are read from that header, which declares them. Nothing here needs a GPU.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels.params import TRACE_RECORD, numpy_struct
from .compiler import SOURCE_DIR

_HEADER, _LOG_HEADER = "shared/phases.cuh", "shared/phase_log.cuh"
_TEXT = (SOURCE_DIR / _HEADER).read_text(encoding="utf-8")

LOGS_HEAD = numpy_struct(_LOG_HEADER, "LogsHead")
LOG_HEAD = numpy_struct(_LOG_HEADER, "LogHead")
STAMP = np.dtype([("clock", np.uint32), ("code", np.uint32)])

#: Phase names; the index is the phase's value in the enum.
PHASES: tuple[str, ...] = tuple(
    re.findall(
        r"^\s*([A-Z_]+),", re.sub(r"//.*", "", _TEXT.partition("enum Phase")[2].partition("};")[0]), re.M
    )
)

#: What a warp does in each phase, as shown to users.
WORDS = {
    "WAIT_ITEM": "waits for work",
    "WAIT_DATA": "waits for data",
    "WAIT_SPACE": "waits for a free buffer",
    "WAIT_TURN": "waits for its ping-pong slot, or for other warps",
    "WAIT_PRODUCTS": "waits for products in flight",
    "COPY": "issues the copy of a tile",
    "ISSUE": "issues products",
    "SCORES": "S = Q Kᵀ",
    "VALUES": "O += P V",
    "WEIGHT_GRADIENTS": "dP = dO Vᵀ",
    "VALUE_GRADIENTS": "dV += Pᵀ dO",
    "KEY_GRADIENTS": "dK += dSᵀ Q",
    "QUERY_GRADIENTS": "dQ = dS K",
    "SOFTMAX": "softmax",
    "TILE": "products and softmax of a tile",
    "ADD": "adds to dQ",
    "MERGE": "merges partial results",
    "STORE": "stores results",
}
PRODUCTS = ("SCORES", "VALUES", "WEIGHT_GRADIENTS", "VALUE_GRADIENTS", "KEY_GRADIENTS", "QUERY_GRADIENTS")
WAITS = ("WAIT_ITEM", "WAIT_DATA", "WAIT_SPACE", "WAIT_TURN", "WAIT_PRODUCTS")

_ANY_SM, _IN_FLIGHT, _LANDED = 0xFFFFFFFF, 0x40, 0x80
#: Tile field of a stamp without a tile.
NO_TILE = 0xFFFFFF
_SECONDS_OF_32_BITS = 2**32

#: One phase of one warp. ``flight``: the interval of products in flight, during which the warp may do other work.
#: ``item``: index of the trace record (-1: none yet). Times count from the first stamp.
INTERVAL = np.dtype(
    [
        ("log", np.int32),
        ("phase", np.uint8),
        ("flight", np.bool_),
        ("number", np.int32),
        ("item", np.int32),
        ("begin", np.float64),
        ("end", np.float64),
    ]
)


@dataclasses.dataclass(frozen=True)
class Room:
    """Layout of the trace buffer: logs, followed by the trace records."""

    records: int
    logs: int = 256
    stamps: int = 8192
    """Most stamps of each log."""

    @property
    def before(self) -> int:
        """Bytes before the records, a multiple of 16."""
        return self.logs * self._log_bytes + LOGS_HEAD.itemsize

    @property
    def _log_bytes(self) -> int:
        return LOG_HEAD.itemsize + self.stamps * STAMP.itemsize

    @property
    def size(self) -> int:
        return self.before + self.records * TRACE_RECORD.itemsize

    def head(self, sm: int | None = None) -> npt.NDArray[np.uint8]:
        """The header just before the records: sizes, and the SM whose blocks keep logs (None: all SMs)."""
        head = np.zeros(1, LOGS_HEAD)
        head["sm"], head["logs"], head["stamps"] = _ANY_SM if sm is None else sm, self.logs, self.stamps
        return head.view(np.uint8)

    def read(self, buffer: npt.NDArray[np.uint8]) -> Logs:
        """The logs and records that a kernel has written to a buffer of ``size`` bytes."""
        head = buffer[self.before - LOGS_HEAD.itemsize : self.before].view(LOGS_HEAD)[0]
        claimed = int(head["claimed"])
        heads, stamps = np.zeros(min(claimed, self.logs), LOG_HEAD), []
        for index in range(len(heads)):
            end = self.before - LOGS_HEAD.itemsize - index * self._log_bytes
            log = buffer[end - self._log_bytes : end]
            heads[index] = log[: LOG_HEAD.itemsize].view(LOG_HEAD)[0]
            kept = min(int(heads[index]["stamps"]), self.stamps)
            stamps.append(log[LOG_HEAD.itemsize :].view(STAMP)[:kept].copy())
        order = np.lexsort((heads["warp"], heads["thread_block"], heads["start_clock"], heads["sm"]))
        items = buffer[self.before :].view(TRACE_RECORD).copy()
        return Logs(heads[order], tuple(stamps[i] for i in order), items, claimed - len(heads))


@dataclasses.dataclass(frozen=True)
class Logs:
    """The logs of a launch, one per warp that kept a log."""

    heads: npt.NDArray[Any]
    """:data:`LOG_HEAD`, by SM and start."""
    stamps: tuple[npt.NDArray[Any], ...]
    """Stamps of each log, of dtype :data:`STAMP`."""
    items: npt.NDArray[Any]
    """:data:`~cufa.kernels.params.TRACE_RECORD` of every work item, by its number."""
    refused: int
    """Warps without a log, because all logs were taken."""

    @property
    def lost(self) -> int:
        """Stamps that were not kept, because their log was full."""
        return int(self.heads["stamps"].sum()) - sum(len(x) for x in self.stamps)

    def clocks(self, index: int) -> npt.NDArray[np.int64]:
        """64-bit clock of each stamp, from its 32 bits and the log's start."""
        low = self.stamps[index]["clock"].astype(np.int64)
        start = int(self.heads[index]["start_clock"])
        steps = np.diff(low, prepend=start % _SECONDS_OF_32_BITS) % _SECONDS_OF_32_BITS
        return start + np.cumsum(steps)

    def ticks_per_ns(self) -> float:
        """Ticks of the SM's clock per nanosecond, from the two most distant pairs of both clocks."""
        h = self.heads
        same_sm = h[h["sm"] == h["sm"][0]]
        first, last = same_sm[np.argmin(same_sm["start_clock"])], same_sm[np.argmax(same_sm["end_clock"])]
        ticks, ns = (
            int(last["end_clock"]) - int(first["start_clock"]),
            int(last["end_ns"]) - int(first["start_ns"]),
        )
        return ticks / ns if ns > 0 else 1.0


def intervals(logs: Logs, unit: float = 1.0) -> npt.NDArray[Any]:
    """:data:`INTERVAL` of all logs, by log and begin. Times are ticks divided by ``unit``, from the SM's first stamp.

    A phase lasts until the warp's next phase. Products in flight last until the warp knows that they are complete. If
    the log lost its last stamps, open intervals end at the last stamp that was kept.
    """
    rows: list[tuple[Any, ...]] = []
    starts: dict[int, int] = {}
    for sm, start in zip(logs.heads["sm"].tolist(), logs.heads["start_clock"].tolist(), strict=True):
        starts[sm] = min(start, starts.get(sm, start))
    for index, stamps in enumerate(logs.stamps):
        clocks = (logs.clocks(index) - starts[int(logs.heads[index]["sm"])]) / unit
        rows += _log_intervals(index, clocks.tolist(), stamps["code"].tolist())
    result = np.array(rows, INTERVAL)
    return result[np.lexsort((result["begin"], result["log"]))]


def _log_intervals(index: int, clocks: list[float], codes: list[int]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    flying: dict[int, list[tuple[int, int, float]]] = {}
    item, open_since, phase, number, of = -1, 0.0, 0, 0, -1  # `of`: the work item of the open phase
    for clock, code in zip(clocks, codes, strict=True):
        kind, what = code >> 24, code & NO_TILE
        about = -1 if what == NO_TILE else what
        if kind == PHASES.index("ITEM"):
            item = what
        elif kind & _IN_FLIGHT:
            flying.setdefault(kind & ~_IN_FLIGHT, []).append((about, item, clock))
        elif kind & _LANDED:
            same_kind = flying.get(kind & ~_LANDED)
            if same_kind:
                tile, of_item, since = same_kind.pop(0)
                rows.append((index, kind & ~_LANDED, True, tile, of_item, since, clock))
        else:
            if phase:
                rows.append((index, phase, False, number, of, open_since, clock))
            phase, number, open_since, of = kind, about, clock, item
    last = clocks[-1] if clocks else 0.0
    if phase:
        rows.append((index, phase, False, number, of, open_since, last))
    for product, pending in flying.items():
        rows += [(index, product, True, tile, of_item, since, last) for tile, of_item, since in pending]
    return rows


def visited(found: npt.NDArray[Any]) -> dict[int, dict[int, list[int]]]:
    """Work item → log → tiles whose scores this log's warp computed, in its order. ``found``: from :func:`intervals`.

    In a backward kernel, the number of a tile combines a head and a query tile (``query_tile_number`` in the header).
    """
    scores = np.isin(found["phase"], [PHASES.index("SCORES"), PHASES.index("TILE")]) & (found["number"] >= 0)
    result: dict[int, dict[int, list[int]]] = {}
    for x in found[scores]:
        result.setdefault(int(x["item"]), {}).setdefault(int(x["log"]), []).append(int(x["number"]))
    return result


def mistakes(logs: Logs) -> list[str]:
    """Errors and omissions in the logs of a kernel, one sentence each."""
    sentences = []
    if logs.refused:
        sentences.append(
            f"{logs.refused} warps kept no log, because all logs were taken: their phases are missing"
        )
    if logs.lost:
        full = int((logs.heads["stamps"] > [len(x) for x in logs.stamps]).sum())
        sentences.append(
            f"{logs.lost} stamps were lost, because {full} logs were full: the end of these logs is missing"
        )
    for index, (head, stamps) in enumerate(zip(logs.heads, logs.stamps, strict=True)):
        name = f"block {head['thread_block']} warp {head['warp']}"
        if not head["stamps"]:
            sentences.append(f"{name} never closed its log")
        if head["stamps"] > len(stamps) or not len(stamps):
            continue
        if stamps["code"][-1] >> 24:
            sentences.append(f"{name} ends in {_name(int(stamps['code'][-1]))}")
        if logs.clocks(index)[-1] > int(head["end_clock"]):
            sentences.append(f"{name} has stamps after its end: its clock wrapped, or went back")
        flying: dict[int, int] = {}
        for code in stamps["code"].tolist():
            kind = code >> 24
            if kind & ~(_IN_FLIGHT | _LANDED) >= len(PHASES):
                sentences.append(f"{name} has a stamp {code:#010x}, which is no phase")
            elif kind & _IN_FLIGHT:
                flying[kind & ~_IN_FLIGHT] = flying.get(kind & ~_IN_FLIGHT, 0) + 1
            elif kind & _LANDED:
                flying[kind & ~_LANDED] = flying.get(kind & ~_LANDED, 0) - 1
                if flying[kind & ~_LANDED] < 0:
                    sentences.append(f"{name} awaits {_name(code)}, which is not in flight")
        sentences += [f"{name} ends with {PHASES[p]} in flight" for p, n in flying.items() if n > 0]
    return sentences


def _name(code: int) -> str:
    return PHASES[code >> 24 & ~(_IN_FLIGHT | _LANDED)]
