"""Several GPUs in one process: copies by the driver's copy engines (memcpyPeerAsync) on a stream of their own for each
GPU, ordered by events. Without peer access the driver copies through host memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..problem.checks import is_device_array
from .group import Move

_PEER_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled


class Devices:
    one_process = True

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
        self._cupy, self._streams = cupy, []
        self.peers = True
        """Every GPU reads every other one's memory."""
        for one in devices:
            with cupy.cuda.Device(one):
                self._streams.append(cupy.cuda.Stream(non_blocking=True))
        for one, other in itertools.permutations(devices, 2):
            self.peers &= self._enable(one, other)
        self._sent: dict[int, list[Any]] = {}

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

    def begin(self) -> None:
        self._sent = {}

    def _recorded(self, rank: int, stream: Any = None) -> Any:
        """An event at the end of a rank's stream, by default the one that it computes on."""
        with self.on(rank):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(stream or self._cupy.cuda.get_current_stream())
        return event

    def start(self, moves: Sequence[Move]) -> Any:
        """Each receiver pulls, after its own and the sender's earlier work."""
        runtime, done = self._cupy.cuda.runtime, {}
        ranks = {rank for move in moves for rank in (move.sender, move.receiver)}
        ready = {rank: self._recorded(rank) for rank in ranks}
        for receiver in sorted({move.receiver for move in moves}):
            stream, mine = self._streams[receiver], [x for x in moves if x.receiver == receiver]
            with self.on(receiver):
                for rank in sorted({receiver, *(x.sender for x in mine)}):
                    stream.wait_event(ready[rank])
                for move in mine:
                    ends = self.devices[move.receiver], self.devices[move.sender]
                    for target, source, size in blocks(move.target, move.source):
                        runtime.memcpyPeerAsync(target, ends[0], source, ends[1], size, stream.ptr)
            done[receiver] = self._recorded(receiver, stream)
            for move in mine:
                self._sent.setdefault(move.sender, []).append(done[receiver])
        return done, moves  # moves: their arrays live until the copies are waited for

    def finish(self, started: Any) -> None:
        for receiver, event in started[0].items():
            with self.on(receiver):
                self._cupy.cuda.get_current_stream().wait_event(event)

    def end(self) -> None:
        for sender, events in self._sent.items():
            with self.on(sender):
                stream = self._cupy.cuda.get_current_stream()
                for event in dict.fromkeys(events):
                    stream.wait_event(event)

    def synchronize(self) -> None:
        for rank in self.local:
            with self.on(rank):
                self._cupy.cuda.get_current_stream().synchronize()


def blocks(target: Any, source: Any) -> Iterator[tuple[int, int, int]]:
    """(address of the target, of the source, bytes) of each run that is contiguous in both."""
    axes = source.ndim
    size = source.itemsize
    if 0 in source.shape:
        return
    while axes and (
        source.shape[axes - 1] == 1 or (source.strides[axes - 1] == target.strides[axes - 1] == size)
    ):
        size *= source.shape[axes - 1]
        axes -= 1
    begins = _address(target), _address(source)
    strides = list(zip(target.strides, source.strides, strict=True))[:axes]
    for place in itertools.product(*map(range, source.shape[:axes])):
        at = of = 0
        for i, (to_target, to_source) in zip(place, strides, strict=True):
            at, of = at + i * to_target, of + i * to_source
        yield begins[0] + at, begins[1] + of, size


def _address(x: Any) -> int:
    return int(x.data.ptr if is_device_array(x) else x.ctypes.data)
