"""What the tests of the dashboard's runs share: stores, small and endless jobs, waiting for a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dashboard_support  # noqa: F401 - makes cufa.dashboard importable
import pytest

from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.locks import is_locked
from cufa.dashboard.worker.run import Run
from cufa.dashboard.worker.store import Store
from cufa.measure.cases import Case, contenders
from cufa.measure.regimes import Regime
from cufa.measure.suites import make
from cufa.problem.mask import CAUSAL

#: Seconds: the cores may be busy with something else.
PATIENCE = 300.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of runs whose worker serves one test after the other."""
    root = tmp_path_factory.mktemp("runs")
    yield root
    end_worker(Store(root))


@pytest.fixture
def store(shared: Path) -> Store:
    return Store(shared)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Store]:
    """A store of its own, without a worker."""
    found = Store(tmp_path / "runs")
    yield found
    end_worker(found)


def worker_pid(store: Store, device: str = "cpu") -> int | None:
    """Process id of the device's worker; None if there is none."""
    file = store.worker_lock(device)
    return int(file.read_text()) if is_locked(file) and file.read_text() else None


def end_worker(store: Store) -> None:
    for device in ("cpu", "cuda:0"):
        if pid := worker_pid(store, device):
            os.kill(pid, signal.SIGKILL)


def small(seqlen: int = 64, *names: str) -> Job:
    case = Case(make(1, 2, seqlen, 32, "float32", CAUSAL), contenders(*(names or ("fa2",))))
    return Job("small", "cpu", (case,), 0.01)


def endless() -> Job:
    """Minutes of samples, unless it is stopped; each case takes half a second to warm up."""
    case = Case(make(1, 1, 64, 32, "float32", CAUSAL), contenders("fa2"))
    return Job("endless", "cpu", (case,) * 500, 0.05, Regime.SUSTAINED)


def wait_for(store: Store, run_id: str, wanted: Callable[[Run], bool]) -> Run:
    """Refreshing as a page would, until the run is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        client.refresh(store)
        run = store.read(run_id)
        if wanted(run):
            return run
        time.sleep(0.05)
    raise AssertionError(f"{run.status}: {run.message} {run.phase}\n{run.detail}")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def over(run: Run) -> bool:
    return run.status.is_over
