"""Stalls by line from Nsight Compute, and `cufa profile`. The report is made by hand, in the layout of ncu's source
page; ``ncu`` and ``ncu_report`` are stand-ins, since no profiler runs here."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from dashboard_page_support import words
from streamlit.testing.v1 import AppTest

from cufa.build.machine_code import Code, Instruction, Place
from cufa.cli import main
from cufa.dashboard.model import stalls
from cufa.dashboard.model.stalls import EXCESSIVE, WAVEFRONTS, NotStallsError
from cufa.measure import cards

REPORT = Path(__file__).parents[1] / "golden" / "ncu_source_made_by_hand.csv"
TEXTS = ("LDSM.16.M88.4 R4, [R12]", "HMMA.16816.F32.BF16 R8, R4, R6, R8", "@P1 MUFU.EX2 R9, R8", "EXIT")
LINES = (10, 20, 20, 30)


def code(texts: tuple[str, ...] = TEXTS) -> Code:
    """A build with these instructions, of three lines of one file."""
    made = (Instruction(x, "other", (Place("a.cuh", n),)) for x, n in zip(texts, LINES, strict=False))
    return Code(tuple(made), ())


def test_samples_are_joined_to_the_lines_of_the_same_instructions() -> None:
    (found,) = stalls.parse(REPORT.read_text(encoding="utf-8"))
    assert found.kernel.startswith("fa2_forward") and found.samples == 100
    assert found.reasons == Counter({"long sb": 35, "math": 35, "selected": 30})
    assert (found.total(WAVEFRONTS), found.total(EXCESSIVE)) == (8192, 4096)
    assert found.is_of(code()), "registers and predicates may differ in text, opcodes may not"
    lines = found.by_line(code(), "a.cuh")
    assert {n: x.samples for n, x in lines.items()} == {10: 40, 20: 60, 30: 0}
    assert lines[20].reasons["math"] == 35
    assert found.hottest(code()) == Place("a.cuh", 20)
    assert not found.is_of(code((*TEXTS[:3], "BRA"))) and not found.is_of(code(TEXTS[:3]))


@pytest.mark.parametrize("text", ["", "no,csv\n", '"Address","Source","# Samples"\n"0x0","EXIT","many"\n'])
def test_other_files_are_refused_with_the_way_to_make_one(text: str) -> None:
    with pytest.raises(NotStallsError, match="cufa profile"):
        stalls.parse(text)


def test_a_binary_report_needs_nvidias_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(NotStallsError, match=r"extras/python.*--page source --csv"):
        stalls.of_report(tmp_path / "x.ncu-rep")


def test_a_binary_report_is_read_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the functions of NVIDIA's documentation of the Python report interface."""

    class Action(dict[str, object]):
        def name(self) -> str:
            return "fa2_forward"

        def sass_by_pc(self, pc: int) -> str:
            return TEXTS[pc // 16]

    places = types.SimpleNamespace(as_uint64=lambda n: 16 * n)
    metric = types.SimpleNamespace(
        num_instances=lambda: 2, as_uint64=lambda n: 7 + n, correlation_ids=lambda: places
    )
    wait = "smsp__pcsamp_warps_issue_stalled_wait"
    action = Action(dict.fromkeys((wait, f"{wait}_not_issued", "other"), metric))
    module = types.SimpleNamespace(load_report=lambda file: [[action]])
    monkeypatch.setitem(sys.modules, "ncu_report", module)
    (found,) = stalls.of_report(tmp_path / "x.ncu-rep")
    assert [x.samples for x in found.instructions] == [7, 8] and found.reasons == Counter({"wait": 15})


def _page(report: bytes, texts: tuple[str, ...]) -> AppTest:
    """The part of the page, with a file that was attached: AppTest attaches none."""

    def script(report: bytes, texts: tuple[str, ...], lines: tuple[int, ...]) -> None:
        import types

        import streamlit as st

        from cufa.build.machine_code import Code, Instruction, Place
        from cufa.dashboard.views import machine_code_stalls

        given = types.SimpleNamespace(name="report.csv", getvalue=lambda: report)
        st.file_uploader = lambda *_, **__: given
        made = (Instruction(x, "other", (Place("a.cuh", n),)) for x, n in zip(texts, lines, strict=True))
        machine_code_stalls.show(Code(tuple(made), ()), "fa2_forward", "a.cuh")

    app = AppTest.from_function(script, args=(report, texts, LINES)).run()
    assert not app.exception, [e.value for e in app.exception]
    return app


def test_the_page_names_the_hottest_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import streamlit as st

    monkeypatch.setattr(st, "file_uploader", st.file_uploader)  # back after the page
    app = _page(REPORT.read_bytes(), TEXTS)
    assert "of 100 warp samples" in words(app) and "a.cuh:20" in words(app)
    assert app.dataframe[0].value["line"].tolist() == [20, 10, 30]
    assert app.dataframe[0].value["stalls"][0].startswith("math 58.3%")
    assert "8,192 wavefronts, 50.0% of them excessive" in words(app)
    other = _page(REPORT.read_bytes(), (*TEXTS[:3], "BRA"))
    assert "has other instructions than this build" in words(other)
    assert other.dataframe[0].value["SASS"][0].startswith("HMMA")
    assert "not a report with source counters" in words(_page(b"\xff\xfe", TEXTS))


# --- cufa profile -------------------------------------------------------------------------------------------


def _profile(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["profile", *arguments], catch_exceptions=False)
    return done.exit_code, done.output


def _ncu(folder: Path, body: str) -> None:
    file = folder / "ncu"
    file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    file.chmod(0o755)


def test_without_ncu_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("cufa.commands.profile._PLACES", ())
    code_, said = _profile("nvidia-h200.forward.0")
    assert code_ == 3 and "install Nsight Compute" in said


def test_counters_that_are_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Path) -> None:
    _ncu(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code_, said = _profile("nvidia-h200.versions.3", "-o", str(tmp_path / "r"))
    assert code_ == 3 and "NVreg_RestrictProfilingToAdminUsers=0" in said.replace("\n", "")


def test_ncu_is_given_one_launch_of_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Path
) -> None:
    _ncu(tmp_path, f'echo "$@" >>{tmp_path}/log; case "$*" in *again.py*) cat "$(echo "$*" | grep -o "[^ ]*again.py")"'
         f' >{tmp_path}/program;; *source*) cat {REPORT};; *) echo raw;; esac')  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code_, said = _profile("nvidia-h200.versions.3", "-o", str(tmp_path / "r"))
    assert code_ == 0, said
    first, second, third = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert "-k regex:fa2_forward -c 1" in first and first.endswith("--once fa2") and "SourceCounters" in first
    assert "--page source --csv" in second and "--page raw --csv" in third
    assert "repeat(CASES, RECORDED, REGIME)" in (tmp_path / "program").read_text(encoding="utf-8")
    assert stalls.parse((tmp_path / "r.csv").read_text(encoding="utf-8"))[0].samples == 100


def test_a_row_of_another_library_is_not_profiled(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ncu(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    card = cards.load_all()["nvidia-h200"]
    number = next(n for n, row in enumerate(card.of_suite("forward")) if row.is_peer)
    code_, said = _profile(f"nvidia-h200.forward.{number}")
    assert code_ == 2 and "name a row of a kernel of cufa" in said.replace("\n", " ")
