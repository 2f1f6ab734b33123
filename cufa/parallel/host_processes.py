"""Messages between processes on the host: the roll call that every call begins with, so that a slow or dead rank is
named instead of awaited, and the arrays of ranks on CPUs."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .group import Move, Transport

_NUMBERS, _ARRAY = 4747, 4748
"""Tags of messages."""
_SPIN_S, _POLL_S = 0.002, 0.0005


class Roll:
    """Messages between all ranks. ``comm`` has mpi4py's ``isend``, ``iprobe`` and ``recv``."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        self.calls = 0
        self._comm = comm
        self._posted = collections.deque[Any](maxlen=1024)

    def post(self, x: Any, rank: int, tag: int) -> None:
        self._posted.append(self._comm.isend(x, dest=rank, tag=tag))

    def receive(self, ranks: Sequence[int], tag: int) -> dict[int, Any]:
        """The next message of each rank. Raises RuntimeError that names the ranks whose message did not come within the
        group's timeout."""
        messages: dict[int, Any] = {}
        began = time.monotonic()
        while len(messages) < len(ranks):
            for rank in ranks:
                if rank not in messages and self._comm.iprobe(source=rank, tag=tag):
                    messages[rank] = self._comm.recv(source=rank, tag=tag)
            waited = time.monotonic() - began
            if waited > self.timeout and len(messages) < len(ranks):
                raise RuntimeError(late([r for r in ranks if r not in messages], self))
            if waited > _SPIN_S:
                time.sleep(_POLL_S)
        return messages

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The numbers of every rank."""
        self.calls += 1
        others = [r for r in range(self.size) if r != self.rank]
        for rank in others:
            self.post([*numbers], rank, _NUMBERS)
        rows = {self.rank: [*numbers], **self.receive(others, _NUMBERS)}
        return [rows[r] for r in range(self.size)]


def late(ranks: Sequence[int], roll: Any) -> str:
    """The message about ranks that do not answer. ``roll`` has rank, timeout and calls."""
    who = f"rank {', '.join(map(str, ranks))} did not" if ranks else "some rank did not"
    return (
        f"{who} answer rank {roll.rank} within {roll.timeout:g} s (call {roll.calls}): it is slow, has ended, or makes "
        "other calls. The group cannot be used any more: results of its last call are wrong"
    )


class HostProcesses(Transport):
    """One process for each rank, on CPUs: NumPy arrays travel by the processes' communicator."""

    one_process = False

    def __init__(self, comm: Any, timeout: float) -> None:
        self._roll = Roll(comm, timeout)
        self.size, self.local = self._roll.size, (self._roll.rank,)

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        return self._roll.gather(numbers)

    def start(self, moves: Sequence[Move]) -> Any:
        """Messages between two ranks arrive in the order of their moves, which is the same in both processes."""
        for move in moves:
            if move.sender == move.receiver:
                move.target[...] = move.source
            elif move.sender == self._roll.rank:
                self._roll.post(np.ascontiguousarray(move.source), move.receiver, _ARRAY)
        return [x for x in moves if x.receiver == self._roll.rank != x.sender]

    def finish(self, started: Any) -> None:
        for move in started:
            move.target[...] = self._roll.receive([move.sender], _ARRAY)[move.sender]
