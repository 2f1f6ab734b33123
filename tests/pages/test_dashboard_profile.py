"""Counters of NVIDIA's profiler: reading them, and attaching them to a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from card_support import lines_of
from dashboard_page_support import open_page, words
from dashboard_support import DEVICE, case_records

from cufa.dashboard.model import measured_rows, ncu
from cufa.dashboard.model.ncu import NotNcuError
from cufa.dashboard.views import run_profile
from cufa.dashboard.worker.store import Store
from cufa.measure.cards import of_lines
from cufa.measure.cases import Case, contenders
from cufa.measure.costs import cost_on
from cufa.measure.suites import make
from cufa.plan.planner import make_plan
from cufa.problem.mask import CAUSAL

GOLDEN = Path(__file__).parents[1] / "golden"
HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Section Name"'
LONG = f"""==PROF== Connected to process 42 (/usr/bin/python3)
==PROF== Profiling "fa2_forward" - 0: 0%....50%....100% - 1 pass
{HEAD},"Metric Name","Metric Unit","Metric Value"
"0","42","python3","127.0.0.1","fa2_forward","1","7","Command line","dram__bytes_read.sum","Mbyte","1,203.5"
"0","42","python3","127.0.0.1","fa2_forward","1","7","Command line","gpu__time_duration.sum","us","722.4"
"0","42","python3","127.0.0.1","fa2_forward","1","7","Command line","lts__t_sectors_op_read.sum","sector","1000000"
"0","42","python3","127.0.0.1","fa2_forward","1","7","SpeedOfLight","Note","","n/a"
"1","42","python3","127.0.0.1","fa3_forward","1","7","Command line","dram__bytes_read.sum","byte","5"
"""
RAW = """"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","launch__registers_per_thread"
"","","","Gbyte","Kbyte","register/thread"
"0","42","void fa2_forward(AttentionParams)","1.5","20","255"
"""


def test_the_long_form_is_read() -> None:
    first, second = ncu.parse(LONG)
    assert (first.kernel, second.kernel) == ("fa2_forward", "fa3_forward")
    assert first.first(["nothing", "dram__bytes_read.sum"]) == pytest.approx(1.2035e9)
    assert first.first(ncu.SHOWN["time"]) == pytest.approx(722.4e-6)
    assert first.first(ncu.SHOWN["requested from L2, read"]) == 32e6
    assert [m.name for m in first.metrics][
        -1
    ] == "lts__t_sectors_op_read.sum"  # values without a number are omitted
    assert second.first(ncu.SHOWN["time"]) is None


def test_the_raw_page_is_read() -> None:
    (only,) = ncu.parse(RAW)
    assert only.first(["dram__bytes_read.sum"]) == 1.5e9
    assert only.first(["dram__bytes_write.sum"]) == 20e3
    assert only.first(ncu.SHOWN["registers per thread"]) == 255


@pytest.mark.parametrize("form", ["long", "raw"])
def test_what_the_profiler_prints_is_read(form: str) -> None:
    """Output for FA3's forward and backward on an H200, causal."""
    found = ncu.parse((GOLDEN / f"ncu_fa3_{form}.csv").read_text())
    names = ["fa3_forward", "fa3_backward_prepare", "fa3_backward", "fa3_backward_convert"]
    assert [profile.kernel for profile in found] == names
    for profile in found:
        assert None not in [profile.first(metrics) for metrics in ncu.SHOWN.values()]
    assert found[0].first(ncu.SHOWN["time"]) == pytest.approx(213e-6, rel=0.01)
    assert found[0].first(ncu.SHOWN["registers per thread"]) == 168
    assert found[2].first(ncu.SHOWN["tensor cores busy"]) == pytest.approx(0.696, abs=0.001)


def test_what_tiles_ask_of_l2_is_what_the_profiler_counted() -> None:
    """Reads only: the profiler counts additions to dQ neither as reads nor as writes."""
    forward = make(2, 16, 4096, 128, "float16", True)
    counted = {p.kernel: p for p in ncu.parse((GOLDEN / "ncu_fa3_long.csv").read_text())}
    for problem in (forward, dataclasses.replace(forward, operation="backward")):
        plan = make_plan(problem, DEVICE, "fa3")
        asked = cost_on(problem, plan.spec, plan.config)
        read = counted[plan.spec.name].first(ncu.SHOWN["requested from L2, read"])
        assert asked is not None
        assert asked.read == pytest.approx(read, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line names the column"),
        ("a,b,c\n1,2,3\n", "not output of ncu --csv"),
        (LONG.replace('"722.4"\n', '"722.4"\n"0","42"\n'), "row 3 has 2 columns"),
        ("\n".join(LONG.splitlines()[:3]), "a header but no kernel"),
        (
            f'{HEAD},"Metric Name"\n"0","1","2","3","fa2","5","6","7","m"\n',
            "no column Metric Unit, Metric Value",
        ),
        (RAW.replace('"","","","Gbyte"', '"0","1","x","Gbyte"'), "no line of units"),
        (
            LONG.replace("1,203.5", "?").replace("722.4", "?").replace("1000000", "?").replace('"5"', '"?"'),
            "no metric",
        ),
        (LONG + '"0","42","python3', "cannot be read"),
    ],
)
def test_anything_else_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(NotNcuError, match=message):
        ncu.parse(text)


def test_a_file_is_attached_to_a_run_and_a_bad_one_is_not(with_runs: Store, tmp_path: Path) -> None:
    file = tmp_path / "ncu.csv"
    for bad in (b"\xff\xfe\x00", b"a,b\n1,2\n", b""):
        run_profile._attach(file, bad)
        assert not file.exists()
    run_profile._attach(file, LONG.encode("utf-8-sig"))
    assert len(ncu.parse(file.read_text())) == 2
    run = next(run for run in with_runs.all() if run.rows)
    attached = with_runs.folder(run.id) / "ncu.csv"
    try:
        attached.write_text(LONG)
        app = open_page("run", run=run.id)
        assert not app.error
        table = next(e.value for e in app.dataframe if "ncu" in e.value)
        assert "722 µs" in set(table["ncu"])
        attached.write_text("cut")
        assert "The attached file cannot be read: no line names the column" in words(
            open_page("run", run=run.id)
        )
    finally:
        attached.unlink()  # other tests use these runs too


def test_counters_stand_beside_ours() -> None:
    problem = make(4, 16, 4096, 128, "bfloat16", CAUSAL)
    rows = case_records(Case(problem, contenders("fa2", "fa3")))
    environment = {"device": DEVICE.name, "arch": "sm_90", "recorded": "2026-01-02T03:04:05+00:00"}
    found = measured_rows.of_card(of_lines("a", lines_of({"forward": rows}, environment)))
    fa2 = next(m for m in found if m.label == "fa2")
    (profile, _) = ncu.parse(LONG)
    told = {line[""]: line for line in run_profile.lines(profile, fa2)}
    assert set(told) == {"time", "device memory, read", "requested from L2, read"}
    subject = fa2.subject
    assert subject.spec is not None
    assert subject.config is not None
    traffic = cost_on(problem, subject.spec, subject.config)
    assert traffic is not None
    assert told["requested from L2, read"]["ncu ÷ cufa"] == f"{32e6 / traffic.read:.2f}×"
    (raw,) = ncu.parse(RAW)
    together = next(x for x in run_profile.lines(raw, fa2) if x[""] == "device memory, total")
    assert together["ncu ÷ cufa"] == f"{(1.5e9 + 20e3) / problem.io_bytes:.2f}×"
    other = dataclasses.replace(fa2, row=dataclasses.replace(fa2.row, json={**fa2.row.json, "kernel": None}))
    assert run_profile._profile_of(other, [profile]) is None
