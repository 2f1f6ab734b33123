"""One process for each rank, on CPUs: NumPy arrays travel by the communicator that the processes have."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .group import Move, Transport
from .roll import Roll, late

_TAG = 4748
_POLL_S = 0.0002


class HostProcesses(Transport):
    one_process = False

    def __init__(self, comm: Any, timeout: float) -> None:
        self._comm, self._roll = comm, Roll(comm, timeout)
        self.size, self.local = self._roll.size, (self._roll.rank,)
        self._posted = collections.deque[Any](maxlen=1024)

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        return self._roll.gather(numbers)

    def start(self, moves: Sequence[Move]) -> Any:
        """Messages of two ranks come in the order of their moves, which is the same in both."""
        for move in moves:
            if move.sender == move.receiver:
                move.target[...] = move.source
            elif move.sender == self._roll.rank:
                x = np.ascontiguousarray(move.source)
                self._posted.append(self._comm.isend(x, dest=move.receiver, tag=_TAG))
        return [x for x in moves if x.receiver == self._roll.rank != x.sender]

    def finish(self, started: Any) -> None:
        for move in started:
            until = time.monotonic() + self._roll.timeout
            while not self._comm.iprobe(source=move.sender, tag=_TAG):
                if time.monotonic() > until:
                    raise RuntimeError(late([move.sender], self._roll))
                time.sleep(_POLL_S)
            move.target[...] = self._comm.recv(source=move.sender, tag=_TAG)
