"""The roll call of processes: every call begins with it, so that a slow or dead rank is named instead of awaited."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

_TAG = 4747
_SPIN_S, _POLL_S = 0.002, 0.0005


class Roll:
    """Numbers of all ranks on the host. ``comm`` has mpi4py's ``isend``, ``iprobe`` and ``recv``."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        self.calls = 0
        self._comm = comm
        self._posted = collections.deque[Any](maxlen=1024)

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The numbers of every rank. Raises RuntimeError that names the ranks whose numbers did not come within the
        group's timeout."""
        self.calls += 1
        others = [r for r in range(self.size) if r != self.rank]
        self._posted += [self._comm.isend([*numbers], dest=r, tag=_TAG) for r in others]
        found: dict[int, Sequence[int]] = {self.rank: [*numbers]}
        began = time.monotonic()
        while len(found) < self.size:
            for rank in others:
                if rank not in found and self._comm.iprobe(source=rank, tag=_TAG):
                    found[rank] = self._comm.recv(source=rank, tag=_TAG)
            waited = time.monotonic() - began
            if waited > self.timeout and len(found) < self.size:
                raise RuntimeError(late([r for r in others if r not in found], self))
            if waited > _SPIN_S:
                time.sleep(_POLL_S)
        return [found[r] for r in range(self.size)]


def late(ranks: Sequence[int], roll: Any) -> str:
    """What to say of ranks that do not answer. ``roll`` has rank, timeout and calls."""
    who = f"rank {', '.join(map(str, ranks))} did not" if ranks else "some rank did not"
    return (
        f"{who} answer rank {roll.rank} within {roll.timeout:g} s (call {roll.calls}): it is slow, has ended, or makes "
        "other calls. The group cannot be used any more: results of its last call are wrong"
    )
