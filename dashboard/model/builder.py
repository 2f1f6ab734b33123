"""Results of kernel builds on this machine, made in the background and cached.

The key of a cached result covers all its inputs (sources, constants, options, NVRTC's version): a cached result is
never stale.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from cufa.build.compiler import nvrtc_options, translation_unit
from cufa.build.static_compile import MissingCompilerError, nvrtc_version
from cufa.build.variants import Variant
from cufa.cache import cache_dir
from cufa.calls.tuning import write_json

Result = TypeVar("Result")


class Builder(Generic[Result]):
    """Makes results of variants on a few threads, and caches them. Sessions can share a builder. Subclasses define
    :meth:`make` and :meth:`read`."""

    folder: str
    """Name of the folder below the cache folder."""

    def __init__(self, jobs: int = 2, directory: Path | None = None) -> None:
        self._directory = directory or cache_dir() / self.folder
        self._known: dict[str, Result] = {}
        self._running: dict[str, Future[Result]] = {}
        self._lock = threading.Lock()
        # Last in, first out: the current page comes before earlier pages.
        self._waiting: queue.LifoQueue[tuple[str, Variant, Future[Result]]] = queue.LifoQueue()
        try:
            self._version, self.missing = nvrtc_version(), None
        except MissingCompilerError as error:
            self._version, self.missing = "none", str(error)
        for number in range(jobs if self.missing is None else 0):
            # Not a pool: the exit of the dashboard must not wait for a hundred builds.
            threading.Thread(target=self._work, name=f"nvrtc-{number}", daemon=True).start()

    missing: str | None
    """Why this machine cannot compile; None if it can."""

    def make(self, variant: Variant) -> dict[str, Any]:
        """The result, as JSON."""
        raise NotImplementedError

    def read(self, content: Mapping[str, Any]) -> Result:
        """The result from the JSON of :meth:`make`. Raises ValueError, KeyError, IndexError or TypeError for other
        JSON."""
        raise NotImplementedError

    def tools(self) -> str:
        """Further inputs of the result, for the key."""
        return ""

    def known(self, variant: Variant) -> Result | None:
        """A result from memory or the cache folder; None if not made yet."""
        key = self._key(variant)
        if key not in self._known:
            stored = self._read(key)
            if stored is None:
                return None
            self._known[key] = stored
        return self._known[key]

    def want(self, variants: Iterable[Variant]) -> int:
        """Start making unknown results; returns the number of results still to come."""
        waiting = 0
        for variant in reversed(list(variants)):
            if self.missing or self.known(variant) is not None:
                continue
            waiting += 1
            key = self._key(variant)
            with self._lock:
                if key not in self._running:
                    self._running[key] = Future()
                    self._waiting.put((key, variant, self._running[key]))
        return waiting

    def get(self, variant: Variant) -> Result:
        """The result; waits for it. Raises :class:`MissingCompilerError` if this machine cannot compile."""
        if self.missing and self.known(variant) is None:
            raise MissingCompilerError(self.missing)
        while (result := self.known(variant)) is None:
            self.want([variant])
            with self._lock:
                future = self._running.get(self._key(variant))
            if future is not None:
                return future.result()
        return result

    def _work(self) -> None:
        while True:
            key, variant, future = self._waiting.get()
            try:
                future.set_result(self._compile(key, variant))
            except Exception as error:
                future.set_exception(error)

    def _compile(self, key: str, variant: Variant) -> Result:
        try:
            stored_as = _key.__wrapped__(variant, self._version + self.tools(), 0)  # of the current sources
            content = self.make(variant)
            self._known[key] = self.read(content)
            with contextlib.suppress(OSError):  # a full or read-only disk only costs time at the next start
                write_json(self._directory / f"{stored_as}.json", content)
            return self._known[key]
        finally:
            with self._lock:
                self._running.pop(key, None)

    def _key(self, variant: Variant) -> str:
        """The key, cached for a second: a page asks for it several times."""
        return _key(variant, self._version + self.tools(), int(time.monotonic()))

    def _read(self, key: str) -> Result | None:
        try:
            return self.read(json.loads((self._directory / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None


@functools.lru_cache(2048)
def _key(variant: Variant, nvrtc: str, second: int) -> str:
    """Digest of all inputs: the unit contains the digest of the sources, the launches the block sizes."""
    options = [o for o in nvrtc_options(variant.arch.nvrtc_name) if not o.startswith("-I")]
    unit = translation_unit(variant.source, variant.constants)
    parts = [unit, *options, nvrtc, repr(variant.launches)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
