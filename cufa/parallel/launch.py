"""Processes of this machine that `cufa parallel bench` and tests start, to try several ranks. Users start programs by
mpiexec or the like."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import queue
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_POLL_S = 0.05


class Pipes:
    """The methods of an mpi4py communicator that :class:`cufa.parallel.Group` uses, over pipes."""

    def __init__(self, rank: int, pipes: Mapping[int, Any]) -> None:
        self._rank, self._pipes = rank, pipes
        self._came: dict[tuple[int, int], collections.deque[Any]] = collections.defaultdict(collections.deque)
        self._going: dict[int, queue.SimpleQueue[Any]] = {r: queue.SimpleQueue() for r in pipes}
        for r, pipe in pipes.items():  # a full pipe blocks its sender
            threading.Thread(target=_send, args=(pipe, self._going[r]), daemon=True).start()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._pipes) + 1

    def isend(self, x: Any, dest: int, tag: int) -> None:
        self._going[dest].put((tag, x))

    def iprobe(self, source: int, tag: int) -> bool:
        """Raises RuntimeError if the source has ended and has left no message."""
        came = self._came[source, tag]
        try:
            while not came and self._pipes[source].poll():
                other, x = self._pipes[source].recv()
                self._came[source, other].append(x)
        except (EOFError, OSError):
            raise RuntimeError(f"rank {source} has ended; rank {self._rank} waits for it") from None
        return bool(came)

    def recv(self, source: int, tag: int) -> Any:
        while not self.iprobe(source, tag):
            self._pipes[source].poll(_POLL_S)
        return self._came[source, tag].popleft()

    def allgather(self, x: Any, tag: int = 0) -> list[Any]:
        for r in self._pipes:
            self.isend(x, r, tag)
        return [x if r == self._rank else self.recv(r, tag) for r in range(self.Get_size())]

    def bcast(self, x: Any, root: int = 0) -> Any:
        return self.allgather(x, tag=1)[root]


def _send(pipe: Any, going: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            pipe.send(going.get())
    except OSError:  # the receiver has ended
        return


def launch(ranks: int, function: Callable[..., Any], *arguments: Any, within: float = 600.0) -> list[Any]:
    """``function(Pipes, *arguments)`` in a new process for each rank: a function of a module. Returns each result, or a
    RuntimeError with the text of its error. A process that returns nothing for ``within`` seconds is ended."""
    context = multiprocessing.get_context("spawn")
    pipes: list[dict[int, Any]] = [{} for _ in range(ranks)]
    for one, other in itertools.combinations(range(ranks), 2):
        pipes[one][other], pipes[other][one] = context.Pipe()
    started, answers = [], []
    for rank in range(ranks):
        answer, mine = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(mine, rank, pipes[rank], function, arguments))
        with _without_main():
            process.start()
        mine.close()
        for pipe in pipes[rank].values():  # the process has copies: others then notice its end
            pipe.close()
        started.append(process)
        answers.append(answer)
    results = []
    for rank, (process, answer) in enumerate(zip(started, answers, strict=True)):
        try:
            results.append(answer.recv() if answer.poll(within) else RuntimeError(f"rank {rank} was ended"))
        except EOFError:
            process.join()
            results.append(RuntimeError(f"rank {rank} has ended with exit code {process.exitcode}"))
    for process in started:
        process.terminate()
        process.join()
    return results


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """New processes do not run this process's script again."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(answer: Any, rank: int, pipes: dict[int, Any], function: Any, arguments: tuple[Any, ...]) -> None:
    try:
        result = function(Pipes(rank, pipes), *arguments)
    except Exception:
        result = RuntimeError(traceback.format_exc())
    answer.send(result)
    answer.close()
    threading.Event().wait()  # others may still read this rank's messages: the starter ends the process
