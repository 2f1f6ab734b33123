"""The page Decode under Streamlit's AppTest."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from card_support import edit, edit_rows, lines_of, write_lines
from dashboard_page_support import alts, figures, has, open_page, words
from dashboard_support import DEVICE, ENVIRONMENT, case_records, write_evidence
from streamlit.testing.v1 import AppTest

from cufa.dashboard.model.configs import config_key
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.views import links
from cufa.dashboard.views.ladder_view import IDEAS
from cufa.dashboard.worker.jobs import Job
from cufa.gpu.architectures import Device
from cufa.measure.cards import read_lines
from cufa.measure.decode_cases import make_decode, steps
from cufa.measure.suites import SUITES
from cufa.plan.planner import make_plan


def test_decode_follows_the_planner() -> None:
    said = words(open_page("decode"))
    assert "measured</span>" not in said and "faster" not in said
    plan = make_plan(make_decode(1, 32, 8, 8192), Device.typical(90))
    has(html.unescape(said), *plan.reasons, f"{plan.num_splits:,}", "predicted</span>")
    has(said, "is not recorded", "No decoding is recorded")  # the read rate of the card
    for contender in steps(plan.problem, Device.typical(90)):
        has(said, contender.label, IDEAS[contender.label])


@pytest.mark.sampled(fixed=2)
@pytest.mark.parametrize(
    "link",
    [
        {"batch": "512", "cached": "4096"},
        {"batch": "3", "heads": "64", "kv": "1", "tokens": "16", "d": "256"},
        {"dtype": "bfloat16.float8_e4m3", "d": "64"},
        {"cached": "1", "ragged": "2", "spread": "1"},
        {"batch": "16", "kv": "32", "cached": "1048576", "ragged": "32"},
        {"mask": "window", "left": "1023", "cached": "131072", "softcap": "30"},
    ],
)
def test_any_batch_can_be_decoded(link: dict[str, str]) -> None:
    app = open_page("decode", **link)
    assert not app.warning
    assert "predicted</span>" in words(app)


def test_recorded_decoding_stands_beside_the_plan(elsewhere: Path) -> None:
    write_evidence(elsewhere / "records", "versions")
    app = open_page("decode")
    has(words(app), "flash_decode reaches 91% of a plain read", "recorded</span>")
    has(words(app), "Measured for this problem: ")  # one sequence, 32/8 heads, 8k: a published shape
    app.selectbox(key="decode.record").set_value("made-up-gpu, sustained").run()
    assert "Measured sustained on" in words(app)


def test_times_of_the_chosen_card_stand_beside_its_prediction(elsewhere: Path) -> None:
    """Not times of another card, which is twice as fast and comes first."""
    case = next(iter(SUITES["splits"].cases(DEVICE)))
    link = links.link("decode", Subject(case.problem, card="90"))
    file = write_evidence(elsewhere / "records", "splits", with_loads=False)
    h200 = Path(shutil.copy(file, file.with_name("nvidia-h200.jsonl")))
    edit(h200, lambda line: {**line, "device": "NVIDIA H200"} if line.get("what") == "session" else line)
    edit_rows(h200, lambda row: row.update(p50_ns=2 * row["p50_ns"]))
    rows = [row for row in read_lines(h200) if row.get("suite") == "splits"]
    app = open_page("decode", **link)
    asked = [row for row in rows if row["case"] == case.name and row.get("split", {}).get("kind") == "fixed"]
    assert drawn_as_measured(app) == {x["split"]["count"]: x["p50_ns"] / 1e3 for x in reversed(asked)}
    assert re.search(r"Measured for this problem: .*NVIDIA H200, 2026-01-02", words(app))
    edit(h200, lambda line: None if line.get("problem") == asked[0]["problem"] else line)
    app = open_page("decode", **link)
    assert drawn_as_measured(app) == {}
    assert re.search(r"Measured for this problem: .*Made-up GPU, 2026-01-02", words(app))


def drawn_as_measured(app: AppTest) -> dict[int, float]:
    """Microseconds by number of splits."""
    (curve,) = (
        figure for figure, alt in zip(figures(app), alts(app), strict=True) if alt.startswith("Two panels")
    )
    drawn = (zip(x["x"], x["y"], strict=True) for x in curve["data"] if x["name"] == "measured")
    return {n: pytest.approx(y) for points in drawn for n, y in points}


def test_the_least_time_is_not_beaten_by_what_is_recorded(shipped: Path) -> None:
    said = words(open_page("decode", batch="64"))
    least = re.search(r"at least ([0-9.]+) µs", said)
    seen = re.search(r"Measured for this problem: ([0-9.]+) µs", said)
    assert least is not None and seen is not None, said
    assert float(least[1]) <= float(seen[1])


def test_a_window_reads_only_what_it_sees() -> None:
    whole, window = (words(open_page("decode", cached="131072", **x)) for x in ({}, {"mask": "window"}))
    assert "Visible keys and values: 536.9 MB" in whole  # in the caption
    has(window, "Visible keys and values: 4.2 MB", "window (1023, 0)")


def test_a_curve_of_splits_is_measured_on_a_gpu(asked: list[Job], with_gpu: None) -> None:
    app = open_page("decode", cached="4096")
    app.button(key="decode.measure").click().run()
    assert not app.exception
    (job,) = asked
    (case,) = job.cases
    assert [c.label for c in case.contenders][:4] == ["planner", "balanced", "1 split", "2 splits"]
    assert all(c.plan(case.problem, DEVICE).num_splits for c in case.contenders if c.is_ours)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_ragged_batch_is_measured_on_a_gpu(elsewhere: Path, asked: list[Job], with_gpu: None) -> None:
    link = {"ragged": "16", "spread": "64"}
    app = open_page("decode", **link)
    app.button(key="decode.measure.ragged").click().run()
    assert not app.exception
    (case,) = asked[0].cases
    assert len(case.lengths) == 16
    assert {c.algorithm for c in case.contenders} == {"balanced", "fixed", "streaming read"}
    assert Job.from_json(json.loads(json.dumps(asked[0].to_json()))) == asked[0]
    assert "against" not in words(app)
    file = write_evidence(elsewhere / "records", "versions")
    lines = lines_of({"decode": case_records(case)}, ENVIRONMENT)
    numbered = ({**x, **{n: x[n] + 1000 for n in ("id", "problem") if n in x}} for x in lines)
    write_lines(file, [*read_lines(file), *numbered])
    said = words(open_page("decode", **link))
    assert re.search(r"Shares are 1\.05× faster than .*: .*, 91% against 87% of a plain read", said)
    planned, configs = app.selectbox(key="decode.tiles").value, make_plan(case.problem, DEVICE).spec.configs
    tiles = next(config_key(c) for c in configs if c.fits(128) and config_key(c) != planned)
    other = open_page("decode", **link, tiles=tiles)
    assert other.button(key="decode.measure.ragged").disabled  # runs use the planner's tiles


def test_an_architecture_without_a_decode_kernel_says_so() -> None:
    app = open_page("decode", card="80", dtype="bfloat16.float8_e4m3")
    assert "No kernel decodes this on sm_80" in words(app)
