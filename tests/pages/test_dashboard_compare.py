"""The page Compare under AppTest."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from card_support import edit
from dashboard_page_support import figures, has, open_page, parameters, words
from dashboard_support import DEVICE, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.dashboard.model import published
from cufa.dashboard.worker.jobs import Job
from cufa.dashboard.worker.store import Store


def test_own_runs_by_length_and_speedup(with_runs: Store) -> None:
    app = open_page("compare", base="fa1", show="fa1,fa2")
    said = words(app)
    assert "measured on CPU</span>" in said
    assert "Speed-up over fa1" in [h.value for h in app.header]
    drawn = figures(app)
    assert {t["name"] for t in drawn[0]["data"]} == {"fa1", "fa2"}
    assert [t["name"] for t in drawn[1]["data"]] == ["fa2"]
    app.multiselect(key="compare.show").set_value([]).run()
    assert "choose at least one kernel" in words(app)


def test_what_ships_opens_with_the_curve_that_most_ask_for(shipped: Path) -> None:
    """Few queries over many keys are separate curves, one per number of queries."""
    shapes = open_page("compare").selectbox(key="compare.shapes")
    assert shapes.value == "Forward: head dim 128, 16 heads, bfloat16, causal"
    assert "Forward: head dim 128, 32/8 heads, 16 queries, bfloat16, causal" in shapes.options


def looks(app: AppTest) -> dict[str, str]:
    """Colour of each series of the first figure."""
    return {trace["name"]: trace["line"]["color"] for trace in figures(app)[0]["data"]}


def test_regimes_are_never_mixed(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    app = open_page("compare")
    has(words(app), "fastest in turns", "recorded</span>", "Made-up GPU, 2026-01-02", "start the suite fp8")
    before = looks(app)
    app.segmented_control(key="compare.regime").set_value("sustained").run()
    assert "fastest sustained" in words(app)
    after = looks(app)
    both = before.keys() & after.keys()
    assert len(both) > 1 and all(before[name] == after[name] for name in both), "a kernel keeps its colour"
    app.segmented_control(key="compare.metric").set_value("joules").run()
    assert "TFLOP per joule" in json.dumps(figures(app)[0]["layout"])
    assert "takes the fewest joules sustained" in words(app) and "is the fastest" not in words(app)
    assert set(app.dataframe[0].value["power"]) == {"600 W"}
    app.segmented_control(key="compare.metric").set_value("time").run()
    shapes = app.selectbox(key="compare.shapes")
    shapes.set_value(next(x for x in shapes.options if x.startswith("Decode:"))).run()
    assert "TB/s at" in words(app)
    for metric in ("time", "gbytes"):
        assert not open_page("compare", metric=metric).warning


@pytest.mark.parametrize("table", ["versions", "blocks", "traffic"])
def test_a_known_table_is_measured_by_its_button(table: str, with_runs: Store, asked: list[Job]) -> None:
    app = open_page("compare", table=table)
    assert "published" in words(app).lower()
    app.button(key=f"known.{table}").click().run()
    assert not app.exception
    (job,) = asked
    assert job.device == "cpu"
    for case in job.cases:
        for contender in case.contenders:
            assert contender.plan(case.problem, None)


def test_the_known_tables_run_on_a_gpu_too() -> None:
    tables = (published.version_cases, published.block_cases, published.traffic_cases)
    for cases in tables:
        plans = [c.plan(case.problem, DEVICE) for case in cases(DEVICE) for c in case.contenders]
        assert plans
        assert {p.problem.head_dim for p in plans} == {64}
    lengths = [case.problem.seqlen_k for case in published.version_cases(DEVICE)]
    assert lengths == [x.seqlen for x in published.VERSIONS]


def test_published_figures_hang_together() -> None:
    for x in published.VERSIONS:
        assert x.fa1_ms / x.fa2_ms == pytest.approx(x.speedup, rel=0.02)


def test_only_float32_is_set_against_a_published_float32(
    elsewhere: Path, with_runs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = words(open_page("compare"))  # CPU runs are float32
    assert re.search(
        r"In float32 at 1,024 keys: [0-9.]+× from FA1 to FA2 on .*; published 1.27× on an A10G", said
    )
    monkeypatch.setenv("CUFA_RUNS_DIR", str(elsewhere / "none"))
    file = write_evidence(elsewhere / "records", "forward", "versions")
    assert "In float32 at 4,096 keys: " in words(open_page("compare"))
    edit(file, lambda line: None if line.get("kernel") == "fa1_forward_f32" else line)
    said = words(open_page("compare"))
    assert "Only float16 is timed on Made-up GPU; the published table is float32 on an A10G" in said
    assert "× from FA1 to FA2 on" not in said


def test_known_results_are_those_of_the_chosen_machine(elsewhere: Path) -> None:
    """Even if another machine has newer measurements."""
    file = write_evidence(elsewhere / "records", "forward", "versions")
    another = Path(shutil.copy(file, file.with_name("another.jsonl")))
    later = {"device": "Another GPU", "recorded": "2026-02-02T03:04:05+00:00"}
    edit(another, lambda line: {**line, **({} if line.get("what") == "problem" else later)})
    edit(another, lambda x: x if x.get("what") == "session" else {n: x[n] for n in x if n != "device"})
    for name in ("Made-up GPU", "Another GPU"):
        said = words(open_page("compare", machine=f"recorded:{name}"))
        assert f"× from FA1 to FA2 on {name}" in said


def test_one_small_run_stands_behind_what_was_measured_most(with_runs: Store, elsewhere: Path) -> None:
    write_evidence(elsewhere / "records")
    app = open_page("compare")
    assert parameters(app)["machine"] == "recorded:Made-up GPU"
    assert "Measured in turns on **Made-up GPU, 2026-01-02**" in words(app)


def test_a_link_shows_the_same_after_another_run(elsewhere: Path, with_runs: Store) -> None:
    """The first visitor has only CPU runs, the second has GPU evidence too."""
    link = parameters(open_page("compare"))
    assert {"machine", "regime", "shapes", "base", "show"} <= link.keys()
    write_evidence(elsewhere / "records")
    assert parameters(open_page("compare"))["machine"] != link["machine"]
    again = open_page("compare", **link)
    assert not again.warning
    assert parameters(again) == link
