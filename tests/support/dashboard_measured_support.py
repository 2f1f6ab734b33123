"""Runs that tests of several pages look at, made once by a real worker on the CPU."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

from dashboard_run_support import end_worker
from dashboard_support import DEVICE
from streamlit.testing.v1 import AppTest

from cufa.dashboard.model import devices
from cufa.dashboard.worker import client
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Run, Status
from cufa.dashboard.worker.store import Store
from cufa.measure.cases import Case, contenders
from cufa.measure.decode_cases import make_decode
from cufa.measure.regimes import Regime
from cufa.measure.suites import make
from cufa.problem.mask import CAUSAL, Band


@pytest.fixture(scope="session")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs: three lengths, one of them again, and one under a window beside decoding, each
    kernel alone. Made by the first process that asks for it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "measured.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "measured").exists():
            _measure(Store(base / "measuring"))
            (base / "measuring").rename(shared / "measured")
    return shared / "measured"


def _measure(store: Store) -> None:
    cases = tuple(
        Case(make(2, 4, n, 64, "float32", CAUSAL), contenders("fa1", "fa2")) for n in (64, 512, 1024)
    )
    window = Case(make(2, 4, 256, 64, "float32", Band(63, 0)), contenders("fa2"))
    decode = Case(make_decode(2, 4, 2, 512, head_dim=64, dtype="float32"), contenders("auto", "balanced"))
    for job in (
        Job("alone", "cpu", (window, decode), 0.02, Regime.SUSTAINED),
        Job("lengths", "cpu", cases, 0.02),
        Job("again", "cpu", cases[1:2], 0.02),
    ):
        client.submit(store, job)
    wait(store)
    assert [run.status for run in store.all()] == [Status.DONE] * 3
    end_worker(store)


@pytest.fixture(scope="module")
def measured(measured_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Such a folder of the module's own."""
    root = tmp_path_factory.mktemp("measured") / "runs"
    shutil.copytree(measured_once, root)
    yield root
    end_worker(Store(root))


@pytest.fixture
def with_runs(measured: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("CUFA_RUNS_DIR", str(measured))
    return Store(measured)


def named(store: Store, title: str) -> Run:
    return next(run for run in store.all() if run.job.title == title)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the driver shows; nothing can run on it."""
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu", lambda number: DEVICE)


def wait(store: Store) -> None:
    deadline = time.monotonic() + 300
    while store.active():
        assert time.monotonic() < deadline, store.active()
        client.refresh(store)
        time.sleep(0.1)


def start(app: AppTest) -> Run:
    """Press Start and wait for the end."""
    app.button(key="run.start").click().run()
    assert not app.exception
    store = Store(Path(os.environ["CUFA_RUNS_DIR"]))
    wait(store)
    app.run()
    return store.all()[0]
