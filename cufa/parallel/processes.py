"""One process for each GPU: arrays travel by NCCL, on a stream of their own. nccl4py is taken if it is installed, else
CuPy's NCCL."""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .group import Move, Transport, exchange
from .host_processes import Roll, late

_POLL_S = 0.02


class Processes(Transport):
    one_process = False

    def __init__(self, comm: Any, timeout: float) -> None:
        import cupy

        self._cupy, self.timeout, self.calls = cupy, timeout, 0
        self._device = cupy.cuda.Device()
        self._roll = Roll(comm, timeout) if hasattr(comm, "Get_rank") else None
        if self._roll is not None:
            rank, self.size = self._roll.rank, self._roll.size
            _check_apart(comm, self._device)
            self._link: Any = _connect(comm, rank, self.size)
        elif hasattr(comm, "nranks"):  # nccl4py
            rank, self.size, self._link = comm.rank, comm.nranks, _Nccl4py(comm)
        elif hasattr(comm, "_comm") and hasattr(comm, "all_to_all"):  # cupyx.distributed
            rank, self.size, self._link = comm.rank, comm._n_devices, _CupyNccl(comm._comm)
        else:
            raise TypeError(
                f"Group({type(comm).__name__}): it takes a list of GPUs, an mpi4py communicator, a Communicator of "
                "nccl4py or a backend of cupyx.distributed; virtual=P makes ranks without GPUs"
            )
        self.rank, self.local = rank, (rank,)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        # All ranks have begun the call: which rank has stopped is not known.
        self._watch = _Watch(self._device, timeout, lambda: late([], self), self._link.abort)

    def on(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        device: contextlib.AbstractContextManager[Any] = self._device
        return device

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        self._watch.check()
        self.calls += 1
        if self._roll is not None:
            return self._roll.gather(numbers)
        cupy = self._cupy
        mine = cupy.asarray(np.asarray(numbers, np.int64))
        every = cupy.empty((self.size, len(mine)), np.int64)
        every[self.rank] = mine
        exchange(self, {self.rank: every})
        self.synchronize()
        return [x.tolist() for x in every.get()]

    def start(self, moves: Sequence[Move]) -> Any:
        self._watch.check()
        cupy, stream, held, apart = self._cupy, self._stream, [], []
        ready = cupy.cuda.get_current_stream().record()
        with self._device, stream:
            stream.wait_event(ready)
            sends, receives = [], []
            for move in moves:
                if move.sender == move.receiver:
                    move.target[...] = move.source
                elif move.sender == self.rank:
                    sends.append((move.receiver, cupy.ascontiguousarray(move.source)))
                else:
                    whole = move.target.flags.c_contiguous
                    into = move.target if whole else cupy.empty(move.shape, move.dtype)
                    receives.append((move.sender, into))
                    apart += [] if whole else [(move.target, into)]
            if sends or receives:
                self._link.exchange(sends, receives, stream.ptr)
            for target, found in apart:
                target[...] = found
            held = [sends, receives]
            done = stream.record()
        self._watch.add(done)
        return done, moves, held

    def finish(self, started: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(started[0])

    def synchronize(self) -> None:
        event = self._cupy.cuda.get_current_stream().record()
        while not event.done:
            self._watch.check()
            time.sleep(0.0005)
        self._watch.check()


class _Watch:
    """A thread that aborts communication without progress: kernels that wait for a dead rank would wait forever."""

    def __init__(
        self, device: Any, timeout: float, say: Callable[[], str], abort: Callable[[], None]
    ) -> None:
        self._events: collections.deque[Any] = collections.deque()
        self._device, self._timeout, self._say, self._abort = device, timeout, say, abort
        self._progress, self._error = time.monotonic(), ""
        self._thread: threading.Thread | None = None

    def add(self, event: Any) -> None:
        if not self._events:
            self._progress = time.monotonic()
        self._events.append(event)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="cufa-parallel-watch", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        with self._device:
            while self._events and not self._error:
                if self._events[0].done:
                    self._events.popleft()
                    self._progress = time.monotonic()
                elif time.monotonic() - self._progress > self._timeout:
                    self._error = self._say()  # set before the abort lets waiting work go on
                    logging.getLogger("cufa").error("%s", self._error)
                    self._abort()
                else:
                    time.sleep(_POLL_S)

    def check(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class _Nccl4py:
    def __init__(self, comm: Any) -> None:
        import nccl.core

        self._comm, self._nccl = comm, nccl.core

    def exchange(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], stream: int
    ) -> None:
        with self._nccl.group():
            for peer, x in sends:
                self._comm.send(_bytes(x), peer, stream=stream)
            for peer, x in receives:
                self._comm.recv(_bytes(x), peer, stream=stream)

    def abort(self) -> None:
        self._comm.abort()


class _CupyNccl:
    def __init__(self, comm: Any) -> None:
        from cupy.cuda import nccl

        self._comm, self._nccl = comm, nccl

    def exchange(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], stream: int
    ) -> None:
        kind = self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        try:
            for peer, x in sends:
                self._comm.send(x.data.ptr, x.nbytes, kind, peer, stream)
            for peer, x in receives:
                self._comm.recv(x.data.ptr, x.nbytes, kind, peer, stream)
        finally:
            self._nccl.groupEnd()

    def abort(self) -> None:
        self._comm.abort()


def _bytes(x: Any) -> Any:
    return x.reshape(-1).view(np.uint8)


def _connect(comm: Any, rank: int, size: int) -> Any:
    """NCCL among the processes of an mpi4py communicator."""
    try:
        import nccl.core as nccl4py
    except ImportError:
        nccl4py = None
    every = comm.allgather(nccl4py is not None)
    if nccl4py is not None and all(every):
        name = comm.bcast(bytes(nccl4py.get_unique_id()) if rank == 0 else None, root=0)
        return _Nccl4py(nccl4py.Communicator.init(size, rank, nccl4py.UniqueId.from_bytes(name)))
    from cupy.cuda import nccl

    if not nccl.available:
        raise RuntimeError("NCCL was not found: pip install 'cufa[multi]'")
    name = comm.bcast(nccl.get_unique_id() if rank == 0 else None, root=0)
    return _CupyNccl(nccl.NcclCommunicator(size, name, rank))


def _check_apart(comm: Any, device: Any) -> None:
    """Raises RuntimeError, in every process, if two of them compute on one GPU: NCCL's own error names neither."""
    every = comm.allgather((socket.gethostname(), device.pci_bus_id))
    for rank, place in enumerate(every):
        first = every.index(place)
        if first != rank:
            raise RuntimeError(
                f"ranks {first} and {rank} both use the GPU {place[1]} of {place[0]}: call "
                "cupy.cuda.Device(cufa.parallel.local_rank()).use() before Group(...)"
            )
