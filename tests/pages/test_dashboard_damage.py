"""Damaged folders of runs: each appears as one damaged run, and nothing else changes on any page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashboard_page_support import open_page, words
from dashboard_run_support import small
from dashboard_support import DEVICE, case_records

from cufa.dashboard.model import measured_rows
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.run import Status
from cufa.dashboard.worker.store import Store
from cufa.measure.suites import SUITES

DEEP = "[" * 100_000 + "]" * 100_000
CASE = next(iter(SUITES["forward"].cases(DEVICE)))
ROW = case_records(CASE)[0]


def finished(store: Store) -> Path:
    """A successful GPU run; returns its folder."""
    run_id = store.submit(Job("sound", "cuda:0", (CASE,), 0.5))
    write_record(store.folder(run_id), case_records(CASE))
    store.finish(run_id, Status.DONE)
    return store.folder(run_id)


def write_record(folder: Path, rows: Any, **more: Any) -> None:
    environment = {"device": "Made-up GPU", "arch": "sm_90"}
    record = {"schema": 2, "rows": rows, "skipped": [], "failed": [], "environment": environment, **more}
    (folder / "record.json").write_text(json.dumps(record))


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def rename(name: str) -> Callable[[Path], object]:
    return lambda folder: folder.rename(folder.with_name(name))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a progress line that is a number": text("progress.jsonl", '{"event": "phase", "text": "x"}\n5\n'),
    "a deep progress line": text("progress.jsonl", DEEP + "\n"),
    "a phase at no time": text("progress.jsonl", '{"event": "phase", "text": "x", "time": "noon"}\n'),
    "a record that is a list": text("record.json", "[]"),
    "a deep record": text("record.json", DEEP),
    "a record of a later schema": text("record.json", '{"schema": 99}'),
    "rows that are a number": lambda folder: write_record(folder, 5),
    "a row that is a number": lambda folder: write_record(folder, [5]),
    "a row of a label alone": lambda folder: write_record(folder, [{"label": "fa2"}]),
    "a row whose samples are words": lambda folder: write_record(folder, [{**ROW, "samples_ns": ["a"]}]),
    "a row without samples": lambda folder: write_record(folder, [{**ROW, "samples_ns": []}]),
    "a row that took no time": lambda folder: write_record(folder, [{**ROW, "p50_ns": 0}]),
    "a row of a problem that is a list": lambda folder: write_record(folder, [{**ROW, "problem": []}]),
    "ceilings that are words": lambda folder: write_record(folder, [ROW], limits={"flops": "many"}),
    "nothing measured for no reason": lambda folder: write_record(folder, [ROW], skipped=[{"label": "fa9"}]),
    "a request that is a list": text("request.json", "[]"),
    "a deep request": text("request.json", DEEP),
    "no request": lambda folder: (folder / "request.json").unlink(),
    "a request for a device that is a path": lambda folder: edit(folder, device="a/../../victim"),
    "a request that measures for ever": lambda folder: edit(folder, seconds=float("inf")),
    "an outcome that is a list": text("outcome.json", "[]"),
    "an outcome that is no end": text("outcome.json", '{"status": "queued"}'),
    "an impossible date": rename("99999999T999999.000000-abcdef"),
    "an empty folder": lambda folder: [file.unlink() for file in folder.iterdir()],
}


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "request.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def store(elsewhere: Path) -> Store:
    return Store(elsewhere / "runs")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str, store: Store) -> None:
    DAMAGES[name](finished(store))
    (run,) = map(measured_rows.checked, store.all())
    assert run.status is Status.DAMAGED
    assert run.message.startswith("This run cannot be read: ")
    assert measured_rows.of_run(run) == []


def test_damaged_runs_are_rows_that_say_so_and_the_sound_one_is_shown(store: Store) -> None:
    sound = finished(store)
    for damage in DAMAGES.values():
        damage(finished(store))
    history = open_page("history")
    (label,) = (e.label for e in history.expander if "cannot be read" in e.label)
    assert label == f"{len(DAMAGES)} runs cannot be read"
    assert words(history).count("This run cannot be read: ") == len(DAMAGES)
    assert len(history.dataframe[0].value) == len(case_records(CASE))
    for name in ("compare", "decode"):
        app = open_page(name)
        assert f"{len(DAMAGES)} runs cannot be read and are ignored" in app.warning[0].value
    compared = open_page("compare")
    assert "Made-up GPU" in words(compared)
    app = open_page("run", run=sound.name)
    assert sum("cannot be read" in x for x in app.selectbox(key="run.run").options) == len(DAMAGES)
    assert "measured on GPU</span>" in words(app)
    damaged = next(run for run in store.all() if run.status is Status.DAMAGED)
    assert "damaged</span>This run cannot be read" in words(open_page("run", run=damaged.id))


def test_runs_are_deleted_damaged_ones_too(store: Store) -> None:
    finished(store)
    DAMAGES["an impossible date"](finished(store))
    app = open_page("history")
    app.toggle(key="history.delete.all").set_value(True).run()
    app.button(key="history.delete.now").click().run()
    assert not app.exception and "Nothing is measured yet" in words(app)
    assert store.ids() == []


def test_a_device_is_never_part_of_a_path(store: Store) -> None:
    for device in ("a/../../victim", "cuda:0/..", "cuda:²", "cuda:٣", "cuda:007", "CPU", ""):
        with pytest.raises(ValueError, match="not known"):
            Job("x", device, small().cases, 0.1)
        with pytest.raises(ValueError, match="not known"):
            store.worker_lock(device)
