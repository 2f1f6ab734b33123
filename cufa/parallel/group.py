"""The ranks of a parallel call, and how arrays travel between them.

A :class:`Group` runs some of the ranks (``group.local``): all of them if one process has several devices, or if they
are virtual; one if there is a process for each GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..problem.checks import module_of

_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "LOCAL_RANK")


@dataclasses.dataclass(frozen=True)
class Move:
    """One array that travels. ``source`` and ``target`` have the same shape; None where another process has it."""

    sender: int
    receiver: int
    source: Any
    target: Any
    shape: tuple[int, ...]
    dtype: Any


class Transport:
    """How arrays travel between ranks; :class:`Group` documents the methods. By default, ranks have no device of their
    own, and there is nothing to wait for."""

    one_process = True
    size: int
    local: tuple[int, ...]

    def on(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The numbers of every process. Not called if all ranks are in one process."""
        raise NotImplementedError

    def start(self, moves: Sequence[Move]) -> Any:
        raise NotImplementedError

    def finish(self, started: Any) -> None: ...

    def synchronize(self) -> None: ...


class Virtual(Transport):
    """Ranks of one process that share its memory: arrays are copied immediately."""

    def __init__(self, size: int) -> None:
        self.size, self.local = size, tuple(range(size))

    def start(self, moves: Sequence[Move]) -> Any:
        for move in moves:
            move.target[...] = move.source


class Group:
    """Ranks that compute one attention together.

    Parameters
    ----------
    ranks : list of int, or a communicator
        GPUs of this process, one for each rank. Or, with a process for each GPU: an mpi4py communicator, a
        ``Communicator`` of nccl4py, or a backend of ``cupyx.distributed``. A process computes on its current device:
        first call ``cupy.cuda.Device(local_rank()).use()``.
    device : "cpu", optional
        With an mpi4py communicator: ranks compute on CPUs, and NumPy arrays travel by the communicator.
    virtual : int, optional
        This many ranks in this process, on its CPU or on one GPU: to try schedules out, and for tests.
    timeout : float
        Processes only: seconds that a call or :meth:`synchronize` waits for a rank before it raises RuntimeError. The
        message names a rank that did not make the call.

    Raises TypeError or ValueError for other arguments, and RuntimeError if two processes have the same GPU.
    """

    def __init__(
        self,
        ranks: Any = None,
        *,
        virtual: int | None = None,
        timeout: float = 60.0,
        device: str | None = None,
    ) -> None:
        if (ranks is None) == (virtual is None):
            raise TypeError("Group takes either devices or a communicator, or virtual=P")
        if device not in (None, "cpu"):
            raise ValueError(f"device={device!r}: it takes 'cpu', or None for GPUs")
        self.timeout = timeout
        if virtual is not None:
            if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
                raise ValueError(f"virtual={virtual!r}: it takes the number of ranks, from 1 up")
            self._transport: Transport = Virtual(virtual)
        elif isinstance(ranks, Sequence):
            from .devices import Devices

            self._transport = Devices(list(ranks))
        elif device == "cpu" and hasattr(ranks, "Get_rank"):
            from .host_processes import HostProcesses

            self._transport = HostProcesses(ranks, timeout)
        else:
            from .processes import Processes

            self._transport = Processes(ranks, timeout)
        self.size = self._transport.size
        self.local = self._transport.local
        """The ranks of this process."""

    @property
    def rank(self) -> int | None:
        """This process's rank; None if the process has all ranks."""
        return None if self.one_process else self.local[0]

    @property
    def one_process(self) -> bool:
        """Whether calls take and return a list with the local part of each rank, instead of one local part."""
        return self._transport.one_process

    def parts(self, name: str, x: Any) -> dict[int, Any]:
        """The local parts of an argument by rank. Raises TypeError or ValueError naming the argument."""
        if not self.one_process:
            return {self.local[0]: x}
        if not isinstance(x, (list, tuple)) or len(x) != self.size:
            found = f"{len(x)} parts" if isinstance(x, (list, tuple)) else type(x).__name__
            raise TypeError(
                f"{name} is {found}: a group of {self.size} ranks in one process takes a list of {self.size} local "
                "parts; cufa.parallel.distribute makes them"
            )
        return dict(enumerate(x))

    def returned(self, parts: dict[int, Any]) -> Any:
        """The reverse of :meth:`parts`."""
        return [parts[rank] for rank in range(self.size)] if self.one_process else parts[self.local[0]]

    def gather(self, numbers: Mapping[int, Sequence[int]]) -> list[Sequence[int]]:
        """The numbers of every rank, on the host."""
        if self.one_process:
            return [numbers[rank] for rank in range(self.size)]
        return self._transport.gather(numbers[self.local[0]])

    def on(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        """A context in which work of a rank is launched."""
        return self._transport.on(rank)

    def start(self, moves: Sequence[Move]) -> Any:
        """Begin to copy arrays, beside the kernels of the ranks. Returns what :meth:`finish` takes."""
        return self._transport.start(moves)

    def finish(self, started: Any) -> None:
        """Work that a rank launches after this waits for the arrays sent to the rank."""
        self._transport.finish(started)

    def synchronize(self) -> None:
        """Wait for all work of the local ranks. Processes: raises RuntimeError that names the ranks that did not
        answer within ``timeout`` seconds; the group cannot be used any more."""
        self._transport.synchronize()


def exchange(group: Group | Transport, every: Mapping[int, Any]) -> None:
    """All-gather. ``every``: for each local rank, an array with a row for each rank; its own row is filled in."""
    like = next(iter(every.values()))[0]
    moves = [
        Move(
            one, other, every[one][one] if one in every else None, every[other][one] if other in every else None,
            like.shape, like.dtype,
        )
        for one, other in itertools.permutations(range(group.size), 2)
        if one in every or other in every
    ]  # fmt: skip
    group.finish(group.start(moves))


def local_rank() -> int:
    """This process's number on its host, which mpiexec, srun and torchrun set: the GPU to use. Raises RuntimeError if
    no launcher set it."""
    for name in _LOCAL_RANK:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(
        f"no launcher set {', '.join(_LOCAL_RANK)}: start the processes with mpiexec -n P or srun, or set one of these"
    )


def empty(group: Group, rank: int, shape: tuple[int, ...], like: Any, dtype: Any = None) -> Any:
    """A new array of a rank, of NumPy or CuPy like ``like``."""
    make: Callable[..., Any] = module_of(like).empty
    with group.on(rank):
        return make(shape, like.dtype if dtype is None else dtype)
