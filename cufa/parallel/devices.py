"""Several GPUs in one process: copies by the driver's copy engines (memcpyPeerAsync) on a stream of their own for each
GPU, ordered by events. Without peer access the driver copies through host memory."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..problem.checks import is_device_array
from .group import Move, Transport

_PEER_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled
_ANY_KIND = 4  # cudaMemcpyDefault: the addresses say which memory
_EVENTS = 8
"""Pairs of events of a rank, recorded round robin. A step waits for the copies of two :meth:`Devices.start`. A wait
refers to the event's latest recording at that time, so a pair may be recorded again after the wait."""


class Devices(Transport):
    def __init__(self, devices: list[int]) -> None:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if not devices or not all(isinstance(x, int) and 0 <= x < count for x in devices):
            raise ValueError(f"devices={devices}: GPUs of this process are 0 to {count - 1}")
        if len({*devices}) != len(devices):
            raise ValueError(
                f"devices={devices} names a GPU twice: use Group(virtual=P) for ranks on one GPU"
            )
        self.devices, self.size, self.local = devices, len(devices), tuple(range(len(devices)))
        self._cupy = cupy
        self.peers = True
        """Whether every GPU can read every other GPU's memory."""
        self._streams: list[tuple[Any, Any]] = []
        """For each rank: a stream for copies from other GPUs, and a stream for copies within its own GPU."""
        self._ready: list[Any] = []
        self._done: list[collections.deque[tuple[Any, Any]]] = []
        for one in devices:
            with cupy.cuda.Device(one):
                self._streams.append(
                    (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True))
                )
                self._ready.append(_event(cupy))
                self._done.append(collections.deque((_event(cupy), _event(cupy)) for _ in range(_EVENTS)))
        for one, other in itertools.permutations(devices, 2):
            self.peers &= self._enable(one, other)

    def _enable(self, one: int, other: int) -> bool:
        runtime = self._cupy.cuda.runtime
        if not runtime.deviceCanAccessPeer(one, other):
            return False
        with self._cupy.cuda.Device(one):
            try:
                runtime.deviceEnablePeerAccess(other)
            except runtime.CUDARuntimeError as error:
                if error.status != _PEER_ALREADY:
                    raise
        return True

    def on(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        device: contextlib.AbstractContextManager[Any] = self._cupy.cuda.Device(self.devices[rank])
        return device

    def start(self, moves: Sequence[Move]) -> Any:
        """Each receiver pulls, after its own and the sender's earlier work. Returns the events of the copies, by the
        ranks that wait for them, and the moves, which keep their arrays alive until then."""
        waiting: dict[int, list[Any]] = {}
        for rank in {rank for move in moves for rank in (move.sender, move.receiver)}:
            with self.on(rank):
                self._ready[rank].record()
        for receiver in sorted({move.receiver for move in moves}):
            mine, events = [x for x in moves if x.receiver == receiver], self._done[receiver]
            events.rotate()
            with self.on(receiver):
                for own, stream, event in zip((False, True), self._streams[receiver], events[0], strict=True):
                    here = [x for x in mine if (x.sender == receiver) == own]
                    if not here:
                        continue
                    for rank in sorted({receiver, *(x.sender for x in here)}):
                        stream.wait_event(self._ready[rank])
                    for move in here:
                        self._copy(move, stream.ptr)
                    event.record(stream)
                    for rank in {receiver, *(x.sender for x in here)}:
                        waiting.setdefault(rank, []).append(event)
        return waiting, moves

    def _copy(self, move: Move, stream: int) -> None:
        runtime = self._cupy.cuda.runtime
        to, of = self.devices[move.receiver], self.devices[move.sender]
        for target, source, pitches, width, height in boxes(move.target, move.source):
            if height > 1 and (self.peers or to == of):
                runtime.memcpy2DAsync(
                    target, pitches[0], source, pitches[1], width, height, _ANY_KIND, stream
                )
            else:
                for i in range(height):
                    at = target + i * pitches[0], source + i * pitches[1]
                    runtime.memcpyPeerAsync(at[0], to, at[1], of, width, stream)

    def finish(self, started: Any) -> None:
        """Senders wait, too: after this the sent arrays may be freed, and later work may overwrite their memory."""
        for rank, events in started[0].items():
            with self.on(rank):
                for event in events:
                    self._cupy.cuda.get_current_stream().wait_event(event)

    def synchronize(self) -> None:
        for rank in self.local:
            with self.on(rank):
                self._cupy.cuda.get_current_stream().synchronize()


def _event(cupy: Any) -> Any:
    return cupy.cuda.Event(disable_timing=True)


def boxes(target: Any, source: Any) -> Iterator[tuple[int, int, tuple[int, int], int, int]]:
    """The arguments of each two-dimensional copy: (target address, source address, pitches of both, bytes of a row,
    rows). A pitch is at least a row."""
    if 0 in source.shape:
        return
    axes = [
        (n, *steps) for n, *steps in zip(source.shape, target.strides, source.strides, strict=True) if n > 1
    ]
    width = source.itemsize
    while axes and axes[-1][1:] == (width, width):
        width *= axes.pop()[0]
    height, pitches = 1, (width, width)
    if axes and min(axes[-1][1:]) >= width:
        height, *steps = axes.pop()
        pitches = steps[0], steps[1]
        while axes and axes[-1][1:] == (height * pitches[0], height * pitches[1]):
            height *= axes.pop()[0]
    begins = _address(target), _address(source)
    for place in itertools.product(*(range(n) for n, *_ in axes)):
        at, of = (sum(i * x[side] for i, x in zip(place, axes, strict=True)) for side in (1, 2))
        yield begins[0] + at, begins[1] + of, pitches, width, height


def _address(x: Any) -> int:
    return int(x.data.ptr if is_device_array(x) else x.ctypes.data)
