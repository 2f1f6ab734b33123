"""Records: what is written, read back, judged and shown. The rows are measured here, on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from cufa import tuning
from cufa.bench import evidence, fastest, gpu_tests, overview, records, report, summary
from cufa.bench.cases import READ, Case, Contender, Work, contenders, one_item_a_block
from cufa.bench.decode_cases import make_decode
from cufa.bench.ladder import ladder
from cufa.bench.limits import Limits
from cufa.bench.power import Power
from cufa.bench.recorded import Recorded, by_case, rows_of
from cufa.bench.regimes import Regime
from cufa.bench.runner import Row, run_case, with_bounds
from cufa.bench.suites import make
from cufa.bench.sustained import Load
from cufa.bench.timing import Timing, speedup
from cufa.core.architectures import Device
from cufa.core.mask import CAUSAL, Band
from cufa.kernels import KERNELS, TileConfig, kernels_of
from cufa.planner import make_plan, tuning_key

FORWARD, DECODE = (kernels_of(name) for name in ("forward", "decode"))
H200 = Device.typical("sm_90")
LIMITS = Limits(1e10, {"float32": 1e11, "float64": 5e10}, 1e9)


@pytest.fixture(scope="module")
def versions_suite():
    rows = []
    for seqlen in (600, 1100):
        problem = make(1, 2, seqlen, 32, "float32", True)
        case = Case(problem, contenders("naive", "fa1", "fa2_noskip", "fa2"))
        got, skipped = run_case(case, None, LIMITS, seconds=0.05)
        assert not skipped
        rows += got
    return {"title": "versions", "rows": [records.row_record(row) for row in rows], "skipped": []}


@pytest.fixture
def record(versions_suite):
    """Evidence as a GPU run would leave it, with rows from the CPU."""
    kernels = {
        name: {
            "source": spec.source,
            "digest": records.digest(spec),
            "tests_passed": 5,
            **({"compile_seconds": 3.0} if name in FORWARD else {}),
        }
        for name, spec in KERNELS.items()
    }
    # The CPU plans every algorithm under one kernel; a GPU record has a row of each.
    rows = copy.deepcopy(versions_suite["rows"])
    extra = [{**rows[0], "label": name, "kernel": name} for name in FORWARD]
    return {
        "schema": records.SCHEMA,
        "environment": {
            "device": "Test GPU",
            "arch": "sm_90",
            "recorded": "2026-01-02T03:04:05+00:00",
            "nvrtc": "13.0",
            "versions": {},
        },
        "limits": {"copy_bytes": 4e12, "flops": {"float16": 6e14}, "exponentials": 4e12},
        "kernels": kernels,
        "tests": {"passed": 9, "failed": 0, "skipped": 1, "failures": []},
        "suites": {
            "versions": {**versions_suite, "rows": rows},
            "all": {"title": "all", "rows": extra, "skipped": []},
        },
        "first_result_seconds": {"cold": 6.0, "warm": 1.5},
        "host_calls": [{"call": "f(x)", "p10_us": 1.0, "p50_us": 2.0, "p90_us": 3.0}],
    }


def test_row_record_is_plain_json_and_keeps_every_sample(versions_suite):
    row = json.loads(json.dumps(versions_suite["rows"][3]))
    assert row["label"] == "fa2"
    assert row["kernel"] in KERNELS
    assert len(row["samples_ns"]) >= 10
    assert all(type(n) is int for n in row["samples_ns"])
    assert row["p10_ns"] <= row["p50_ns"] <= row["p90_ns"]
    assert row["max_error"] < 1e-5
    assert row["problem"]["seqlen_q"] == 600
    assert (
        row["tiles_visited"] + row["tiles_skipped"] == 2 * 3 * 2
    )  # heads, 256-row and 512-column blocks of 600


def test_digest_ignores_comments_and_white_space(tmp_path, monkeypatch):
    import cufa.nvrtc.compiler

    def digest_of(text: str) -> str:
        (tmp_path / "k.cu").write_text(text)
        return cufa.nvrtc.compiler.source_digest("k.cu")

    monkeypatch.setattr(cufa.nvrtc.compiler, "SOURCE_DIR", tmp_path)
    first = digest_of("int f() { return 1; }")
    assert digest_of("// says why\nint f() {\n  return 1; /* one */ }\n") == first
    assert digest_of("int f() { return 2; }") != first


def test_good_evidence_has_no_problems(record):
    assert evidence.problems_with(record) == []
    assert records.stale_kernels(record) == []


def test_a_changed_kernel_is_stale(record):
    record["kernels"]["fa2_forward"]["digest"] = "0" * 64
    assert records.stale_kernels(record) == ["fa2_forward"]


@pytest.mark.parametrize("name", DECODE)
def test_a_changed_decode_kernel_is_stale(record, name):
    record["kernels"][name]["digest"] = "0" * 64
    assert records.stale_kernels(record) == [name]


@pytest.mark.parametrize("name", ["fa1_forward", "decode_split_fp8"])
def test_a_kernel_in_no_record_is_missed(record, name):
    other = copy.deepcopy(record)
    del record["kernels"][name]
    assert records.unrecorded_kernels([record]) == [name]
    assert records.unrecorded_kernels([record, other]) == []
    assert evidence.problems_with(record) == [f"{name} is not recorded"]
    record["environment"]["arch"] = "sm_80"  # runs no e4m3: none is missed there
    assert bool(evidence.problems_with(record)) == (name == "fa1_forward")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda r: r["tests"].update(failed=1), "1 GPU tests failed"),
        (lambda r: r.update(tests=None), "were not run"),
        (lambda r: r["suites"]["versions"]["rows"][0].update(max_error=None), "NaN"),
        (lambda r: r["kernels"]["fa1_forward"].update(tests_passed=0), "no GPU test ran fa1_forward"),
        (lambda r: r["kernels"]["decode_split_fp8"].update(tests_passed=0), "ran decode_split_fp8"),
        (lambda r: r["suites"]["all"]["rows"].clear(), "fa3_forward was not timed"),
    ],
)
def test_bad_evidence_is_named(record, break_it, message):
    break_it(record)
    assert any(message in problem for problem in evidence.problems_with(record))


def test_nan_error_is_recorded_as_null():
    problem = make(1, 1, 8, 8, "float32", False)
    rows, _ = run_case(Case(problem, contenders("fa2")), None, LIMITS, seconds=0.01)
    row = dataclasses.replace(rows[0], error=float("nan"))
    assert records.row_record(row)["max_error"] is None


def as_json(record):
    """Tuples become lists on the way."""
    return json.loads(json.dumps(record))


def test_saved_and_loaded(record, tmp_path):
    file = records.save(record, records.evidence_path("NVIDIA H200 (PCIe)", tmp_path))
    assert file.name == "nvidia-h200-pcie.json"
    assert records.load_all(tmp_path) == {"nvidia-h200-pcie": as_json(record)}
    assert "\n" not in file.read_text().split('"samples_ns": [')[1].split("]")[0], "samples take one line"


@pytest.mark.parametrize(("failed", "exit_code"), [(0, 0), (2, 1)])
def test_evidence_command_writes_the_record_and_says_what_is_wrong(
    record, monkeypatch, tmp_path, failed, exit_code
):
    """The GPU's part is staged; what is done with its record is real."""
    from click.testing import CliRunner

    from cufa.bench import traces
    from cufa.commands import evidence as command

    record["tests"]["failed"] = failed
    monkeypatch.setattr(command, "find_device", lambda choice: Device.typical("sm_90"))
    monkeypatch.setattr(evidence, "record_evidence", lambda *a, keep, **k: keep(record) and record)
    monkeypatch.setattr(traces, "evidence_plans", lambda device: [])
    result = CliRunner().invoke(command.evidence_command, ["--output", str(tmp_path)])
    assert result.exit_code == exit_code, result.output
    assert records.load_all(tmp_path) == {"h200": as_json(record)}
    assert "GPU tests passed" in result.stdout
    assert ("2 GPU tests failed" in result.stderr) == bool(failed)


def test_readme_command_fails_without_markers(tmp_path):
    from click.testing import CliRunner

    from cufa.commands.evidence import evidence_command

    file = tmp_path / "README.md"
    file.write_text("no markers")
    assert CliRunner().invoke(evidence_command, ["readme", str(file)]).exit_code == 1
    assert file.read_text() == "no markers"


def test_another_schema_is_refused(record, tmp_path):
    records.save({**record, "schema": 999}, tmp_path / "new.json")
    with pytest.raises(ValueError, match="schema 999"):
        records.load_all(tmp_path)


def test_markdown_shows_ratios_beside_predictions(record):
    text = report.markdown({"test-gpu": record})
    line = next(line for line in text.splitlines() if line.startswith("| 1 × 2 × 1100"))
    assert "| 1.67× |" in line  # 5 query blocks × 3 key blocks, of which 1 + 1 + 2 + 2 + 3 are visited
    assert "9 GPU tests passed, 0 failed, 1 skipped." in text
    assert all(name in text for name in FORWARD)


def test_markdown_puts_every_kernel_of_ours_over_the_first_peer(record):
    fast, slow = copy.deepcopy(record["suites"]["versions"]["rows"][:2])
    fast |= {"label": "fa2", "samples_ns": [1000] * 20, "p50_ns": 1000}
    slow |= {"label": "torch flash", "samples_ns": [1500] * 20, "p50_ns": 1500}
    del slow["kernel"]  # what makes a row one of ours
    record["suites"] = {"forward": {"title": "forward", "rows": [fast, slow], "skipped": []}}
    lines = report.markdown({"test-gpu": record}).splitlines()
    header = next(line for line in lines if line.startswith("| head dim"))
    assert header == "| head dim | seq | mask | fa2 | torch flash | fa2 over torch flash |"
    assert lines[lines.index(header) + 2].endswith("| 1.50× (1.50–1.50) |")


def test_markdown_puts_fa3_over_the_fastest_peer(record):
    """And names shapes in full where batch, heads and both lengths vary."""
    row = copy.deepcopy(record["suites"]["versions"]["rows"][0])
    row["problem"] |= {"heads": 8, "kv_heads": 2, "seqlen_q": 128, "seqlen_k": 8192}
    times = {"fa3": 1000, "fa2": 2000, "torch flash": 3000, "torch cudnn": 1100}
    rows = [row | {"label": x, "samples_ns": [t] * 20, "p50_ns": t} for x, t in times.items()]
    for peer in rows[2:]:
        del peer["kernel"]
    record["suites"] = {"awkward": {"title": "awkward", "rows": rows, "skipped": []}}
    lines = report.markdown({"test-gpu": record}).splitlines()
    header = next(line for line in lines if line.startswith("| batch"))
    assert header.endswith(
        "| mask | fa3 | fa2 | torch flash | torch cudnn | fa3 over torch cudnn | fa2 over torch flash |"
    )
    line = lines[lines.index(header) + 2]
    assert line.startswith("| 1 × 8/2 × 128×8192 | 32 | causal |")
    assert line.endswith("| 1.10× (1.10–1.10) | 1.50× (1.50–1.50) |")


def fa3_row(contender, seconds, **sustained):
    """A row of FA3 on an H200, as a run there would leave it."""
    limits = Limits(4e12, {"bfloat16": 1e15}, 4e12, sustained)
    problem = make(4, 16, 7680, 128, "bfloat16")  # every tiling divides it
    plan = make_plan(problem, H200, "fa3", contender.config)
    if contender.one_item_a_block:
        plan = one_item_a_block(plan)
    return with_bounds(measured_row(contender.label, problem, seconds, plan), limits)


def measured_row(label, problem, seconds, plan=None, case="", load=None, lengths=None):
    """Twenty samples of the same length."""
    timing = Timing((seconds,) * 20, Regime.SUSTAINED if load else Regime.IN_TURNS)
    error, work = None if label == READ else 1e-3, Work.of(problem, lengths)
    return Row(case, label, problem, timing, error, plan, 1e-4, "memory", work, lengths, load=load)


def section(rows, title="a suite"):
    return {"title": title, "rows": [as_json(records.row_record(row)) for row in rows], "skipped": []}


def test_markdown_has_the_ladder_with_what_was_predicted(record):
    rungs = ladder("fa3", next(c for c in KERNELS["fa3_forward"].configs if c.fits(128)))
    measured = [fa3_row(rung, 1e-3 / (1 + n)) for n, rung in enumerate(rungs)]
    rows = [as_json(records.row_record(row)) for row in measured]
    items = 64 * 7680 // rungs[0].config.block_q
    assert [row["grid"] for row in rows] == [[[items, 1, 1]]] * (len(rungs) - 1) + [[[132, 1, 1]]]
    record["suites"] = {"ladder": {"title": "ladder", "rows": rows, "skipped": []}}
    lines = report.markdown({"test-gpu": record}).splitlines()
    header = next(line for line in lines if line.startswith("| head dim"))
    assert header == f"| head dim | seq | mask | {' | '.join(r.label for r in rungs)} |"
    cells = lines[lines.index(header) + 2].split(" | ")
    assert cells[:3] == ["| 128", "7680", "full"]
    assert cells[4].split(" · ")[1].startswith("2.00× (")


def test_what_each_resource_would_need_is_recorded_and_shown(record, capsys):
    from cufa.commands.rows import print_needs

    row = fa3_row(Contender("fa3"), 4e-3)
    print_needs([row])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("128, 7680×7680, full", "48%", "24%", "1.99 ms"))
    rows = [as_json(records.row_record(row))]
    record["suites"] = {"forward": {"title": "forward", "rows": rows, "skipped": []}}
    lines = report.markdown({"test-gpu": record}).splitlines()
    header = next(line for line in lines if "| exponentials |" in line)
    assert "power" not in header
    # 4 · 128 flops of 4 · 16 · 7680² scores at 1e15/s, and the scores at 4e12/s, in four milliseconds
    assert lines[lines.index(header) + 2].startswith("| 128 | 7680 | full | 483 | 48% | 24% |")
    loaded = fa3_row(Contender("fa3"), 4e-3, bfloat16=8e14)
    record["suites"]["forward"]["rows"] = [as_json(records.row_record(loaded))]
    text = report.markdown({"test-gpu": record})
    assert "| products | power | exponentials |" in text
    assert "| 128 | 7680 | full | 483 | 48% | 60% | 24% |" in text


def test_update_writes_between_the_markers_only():
    def page(top, tables):
        first = f"before\n{summary.BEGIN}\n{top}\n{summary.END}\nbetween\n"
        return f"{first}{report.BEGIN}\n{tables}\n{report.END}\nafter\n"

    evidence = records.load_all()
    new = report.update(page("old", "old"), evidence)
    rows = "\n".join(overview.overview(evidence))
    assert new == page(summary.summary(evidence).strip(), rows.strip())
    assert report.update(new, evidence) == new
    with pytest.raises(ValueError, match="no lines"):
        report.update("nothing here", evidence)


def test_the_overview_claims_the_lower_regime_and_hides_no_loss(record):
    """Means of both regimes, with the least and the most; the claim is the lower mean."""

    def beside(regime, *times):
        row = copy.deepcopy(record["suites"]["versions"]["rows"][0]) | {"regime": regime}
        rows = []
        for seqlen, (ours, peer) in enumerate(times, 1000):
            at = copy.deepcopy(row)
            at["problem"] |= {"seqlen_q": seqlen, "seqlen_k": seqlen}
            rows += [at | {"label": "fa2", "p50_ns": ours}, at | {"label": "torch flash", "p50_ns": peer}]
            del rows[-1]["kernel"]
        return rows

    rows = [*beside("in turns", (1000, 800), (1000, 1800)), *beside("sustained", (1000, 1100))]
    record["suites"] = {"forward": {"title": "forward", "rows": rows, "skipped": []}}
    (line,) = (x for x in overview.overview({"x": record}) if x.startswith("| FA2, 1k"))
    assert line == "| FA2, 1k to 16k | PyTorch's FA2 | 1.20× (0.80–1.80) | 1.10× | 1.10× |"


def test_summary_is_of_rows_timed_side_by_side():
    """A ratio for each length that has both; nothing for what was not measured."""
    text = summary.summary(records.load_all())
    assert "| FA3 over cuDNN, causal, in turns | " in text and " · " in text
    record = next(iter(records.load_all().values()))
    rows = [row for row in record["suites"]["forward"]["rows"] if row["label"] != "torch cudnn"]
    forward = {**record["suites"]["forward"], "rows": rows}
    alone = summary.summary({"x": {**record, "suites": {"forward": forward}}})
    assert "cuDNN" not in alone and "FA2 over PyTorch's FA2, full" in alone


class TestRegimes:
    @pytest.fixture
    def record(self, record):
        """FA3 is 1.5 times as fast in turns, 1.2 times alone."""
        problem = make(4, 16, 4096, 128, "bfloat16", CAUSAL)
        load = Load(1000, 1, 3.0, 0.0, Power(650.0, 1500.0, 0.5))
        plan = make_plan(problem, H200, "fa3")
        rows = [measured_row("fa3", problem, 1e-3, plan), measured_row("torch cudnn", problem, 1.5e-3)]
        rows += [
            measured_row("fa3", problem, 1.25e-3, plan, load=load),
            measured_row("torch cudnn", problem, 1.5e-3, load=load),
        ]
        record["suites"] = {"forward": section(rows)}
        return record

    def test_stand_side_by_side_and_the_lower_one_is_claimed(self, record):
        text = summary.summary({"x": record})
        assert "| FA3 over cuDNN, causal, in turns | " in text and "1.50×" in text
        assert "| FA3 over cuDNN, causal, sustained | " in text
        assert "FA3 over cuDNN, geometric mean over these shapes: 1.20× sustained (1.50× in turns)." in text
        tables = report.markdown({"x": record})
        lines = tables.splitlines()
        line = next(x for x in lines if x.startswith("| 4 × 16 × 4096, d128, causal |"))
        assert "| 1.50× (1.50–1.50) | 1.20× (1.20–1.20) |" in line and "· 1500" in line

    def test_what_waited_for_the_host_is_no_claim(self, record):
        record["suites"]["forward"]["rows"][-1]["load"]["host_bound"] = True
        assert "sustained" not in summary.summary({"x": record}).split("geometric mean")[-1]
        assert "host-bound" in report.markdown({"x": record})

    def test_a_row_says_all_of_its_load(self, record):
        row = record["suites"]["forward"]["rows"][2]
        flops = row["flops"]
        assert row["regime"] == "sustained" and row["load"]["joules"] == 0.5
        assert row["load"]["tflop_per_joule"] == pytest.approx(flops / 0.5e12, rel=1e-3)
        assert (row["load"]["clock_mhz"], row["load"]["watts"]) == (1500, 650)

    def test_rows_of_different_regimes_are_not_compared(self, record):
        rows = rows_of(record)
        with pytest.raises(ValueError, match="not compared"):
            speedup(rows[0].timing, rows[2].timing)
        assert [list(found) for found in by_case(rows)] == [["fa3", "torch cudnn"]] * 2


class TestDecode:
    @pytest.fixture
    def record(self, record):
        """A published shape with peers, and a ragged batch."""
        shape, lengths = make_decode(1, 32, 8, 8 << 10), (100, 4000)
        ragged = make_decode(2, 32, 8, 4096, lengths_given=True)
        rows = [
            measured_row("flash_decode", shape, 2e-5, make_plan(shape, H200), "1 × 32/8 × 8k"),
            measured_row("torch flash", shape, 4e-5, None, "1 × 32/8 × 8k"),
            measured_row("torch cudnn", shape, 5e-5, None, "1 × 32/8 × 8k"),
            measured_row(READ, shape, 1e-5, None, "1 × 32/8 × 8k"),
            measured_row(
                "balanced", ragged, 2e-5, make_plan(ragged, H200, "balanced"), "ragged", None, lengths
            ),
            measured_row(READ, ragged, 1e-5, None, "ragged", None, lengths),
        ]
        record["suites"] = {"decode": section(rows, "decode")}
        return record

    def test_rows_are_as_those_of_any_operation(self, record):
        rows = rows_of(as_json(record))
        assert rows[0].problem == make_decode(1, 32, 8, 8 << 10) and rows[0].problem.operation == "decode"
        assert rows[0].json["split"] == dataclasses.asdict(make_plan(rows[0].problem, H200).split)
        assert rows[4].json["lengths"] == [100, 4000] and rows[4].json["max_error"] == 1e-3
        assert rows[4].tbytes == pytest.approx(rows[4].json["io_bytes"] / 2e-5 * 1e-12, abs=1e-6)
        assert rows[3].json["max_error"] is None and evidence.problems_with(record) != []
        assert not any("NaN" in problem for problem in evidence.problems_with(record))

    def test_tables(self, record):
        lines = report.markdown({"x": record}).splitlines()
        compared = next(line for line in lines if line.startswith("| 1 × 32/8 × 8k |"))
        assert "| 50% |" in compared and "2.00×" in compared
        assert any(line.startswith("| ragged | balanced |") for line in lines)
        assert "Decoding, a token against 1k to 512k: 2.00–2.00×" in summary.summary(
            {"x": {**record, "suites": {**record["suites"], "forward": section([])}}}
        )


OLD_FORWARD = {
    "batch": 2, "heads": 8, "kv_heads": 2, "seqlen_q": 64, "seqlen_k": 96, "head_dim": 16, "dtype": "bfloat16",
    "causal": True, "scale": 0.25, "precision": "native", "alignment": 16, "positive_strides": True,
}  # fmt: skip
OLD_DECODE = {
    "batch": 2, "heads": 8, "kv_heads": 2, "tokens": 1, "capacity": 64, "head_dim": 16, "dtype": "bfloat16",
    "cache_dtype": "float8_e4m3", "scale": 0.25, "page_size": 16, "max_pages": 4, "num_pages": 8,
    "ragged": True, "new_tokens": 0, "alignment": 16, "positive_strides": True,
}  # fmt: skip


class TestOldRecords:
    """Those of schema 1, as they were written."""

    @pytest.fixture
    def rows(self):
        common = {"samples_ns": [1000, 1001], "p50_ns": 1000, "max_error": 1e-3}
        forward = {**common, "label": "fa2", "problem": OLD_FORWARD, "tflops": 1.0, "gbytes_per_s": 1.0}
        decode = {
            **common, "case": "a case", "label": "balanced", "problem": OLD_DECODE, "kv_bytes": 640,
            "tbytes_per_s": 0.00064, "kernel": "decode_balanced", "schedule": "balanced", "num_splits": 3,
        }  # fmt: skip
        run = {"schema": 1, "rows": [forward], "skipped": [], "decode": {"rows": [decode]}}
        return rows_of(records.upgrade(run))

    def test_a_mask_that_was_a_bool(self, rows):
        found = rows[0]
        assert found.problem == make(2, 8, 64, 16, "bfloat16", CAUSAL, kv_heads=2, seqlen_k=96)
        assert found.regime is Regime.IN_TURNS and found.case == ""
        assert found.json["flops"] == found.problem.flops

    def test_decoding_that_was_a_road_of_its_own(self, rows):
        found = rows[1]
        assert found.problem == make_decode(
            2, 8, 2, 64, head_dim=16, page_size=16, lengths_given=True, cache_dtype="float8_e4m3"
        )
        assert found.case == "a case" and found.tbytes == pytest.approx(0.00064)
        assert found.json["split"] == {"kind": "balanced", "count": 3}
        assert found.json["flops"] == 4 * 16 * 8 * 10, "ten keys were read in all"

    def test_shipped_evidence_is_read_whole(self):
        for record in records.load_all().values():
            for row in rows_of(record):
                assert Recorded(row.json).problem.flops > 0 and row.p50_ns > 0


class TestFastest:
    def record(self, problem, times):
        rows = [
            measured_row(name, problem, seconds, make_plan(problem, H200, name))
            for name, seconds in times.items()
        ]
        return {"environment": {"arch": "sm_90", "device": "X"}, "suites": {"forward": section(rows)}}

    def test_what_was_measured_to_be_fastest_is_taken(self):
        problem = make(1, 8, 1024, 64, "bfloat16", Band(100, 0))
        found = fastest.fastest(self.record(problem, {"fa3": 2e-3, "fa2": 1e-3, "fa1": 5e-3}))
        assert set(found.values()) == {"fa2_forward"}
        assert make_plan(problem, H200, fastest=found).spec.name == "fa2_forward"

    def test_a_race_without_the_first_choice_decides_nothing(self):
        problem = make(1, 8, 1024, 64, "bfloat16", CAUSAL)
        assert fastest.fastest(self.record(problem, {"fa2": 1e-3, "fa1": 5e-3})) == {}

    def test_the_shipped_files_are_of_the_records(self):
        for record in records.load_all().values():
            kept = dict(tuning.fastest_kernels(record["environment"]["device"]))
            assert kept == fastest.fastest(record), "run `cufa evidence fastest`"


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("test_lengths[1-1-fa2_forward-float16-native-full]", ["fa2_forward"]),
        ("test_x[fa2_noskip]", ["fa2_noskip"]),
        ("test_every_config[decode_split_tma-64]", ["decode_split_tma"]),
        ("test_about_fa2_forward", []),
    ],
)
def test_tests_are_counted_for_the_kernel_in_their_parameters(name, kernels):
    assert gpu_tests._kernels_of(name) == kernels


#: A field that configs do not have, fields that are missing, a kernel that there is not, no config, none that could
#: be one, and no entry at all.
DAMAGED = """{
    "naive/field": {"config": {"block_q": 64, "block_kv": 64, "num_warps": 4, "no_such_field": 1}},
    "naive/missing": {"config": {"block_q": 64}}, "k": {"config": {}}, "naive/none": {},
    "naive/number": {"config": 5}, "naive/null": {"config": null}, "naive/list": {"config": [64, 64, 4]}, "naive/x": 3
}"""


class TestTuning:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(tuning, "TILES", tmp_path / "nothing ships")
        tuning.load.cache_clear()
        yield
        tuning.load.cache_clear()

    def test_nothing_tuned(self):
        assert tuning.load("NVIDIA H200") == {}

    def test_kept_and_found_again(self):
        a, b = TileConfig(64, 64, 4), TileConfig(128, 32, 8, num_stages=2)
        file = tuning.save("NVIDIA H200", "naive/one", a, {"seconds": 1e-3})
        tuning.save("NVIDIA H200", "naive/two", b, {})
        tuning.save("NVIDIA H200", "naive/one", b, {})
        assert tuning.load("NVIDIA H200") == {"naive/one": b, "naive/two": b}
        assert tuning.load("NVIDIA A100") == {}
        assert [f.name for f in file.parent.iterdir()] == ["tuned-nvidia-h200.json"], (
            "no temporary file is left"
        )

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"3", b"\xff\xfe{}", b"[" * 200_000, DAMAGED.encode()]
    )
    def test_a_damaged_file_means_untuned(self, content):
        file = tuning.path("GPU")
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        assert tuning.load("GPU") == {}
        tuning.save("GPU", "naive/key", TileConfig(64, 64, 4), {})
        assert tuning.load("GPU") == {"naive/key": TileConfig(64, 64, 4)}

    def test_what_is_damaged_spoils_nothing_else(self):
        good = TileConfig(64, 64, 4)
        file = tuning.save("GPU", "naive/key", good, {})
        file.write_text(json.dumps({**json.loads(DAMAGED), **json.loads(file.read_text())}))
        tuning.load.cache_clear()
        assert tuning.load("GPU") == {"naive/key": good}

    def test_what_ships_is_taken_where_the_user_has_measured_nothing(self, tmp_path, monkeypatch):
        mine, shipped = TileConfig(64, 64, 4), TileConfig(128, 32, 8)
        file = tuning.save("NVIDIA H200", "naive/both", shipped, {})
        tuning.save("NVIDIA H200", "naive/shipped", shipped, {})
        monkeypatch.setattr(tuning, "TILES", tmp_path / "shipped")
        (tmp_path / "shipped").mkdir()
        file.rename(tmp_path / "shipped" / "h200.json")
        tuning.save("NVIDIA H200", "naive/both", mine, {})
        assert tuning.load("NVIDIA H200") == {"naive/both": mine, "naive/shipped": shipped}

    def test_tiles_that_do_not_fit_are_passed_over(self):
        device = Device.typical("sm_90")
        problem = make(1, 8, 4096, 64, "float16", True)
        plan = make_plan(problem, device)
        for field, value in (("block_q", 4096), ("block_kv", 0), ("num_warps", "8")):
            wrong = dataclasses.replace(plan.config, **{field: value})
            tuning.save(device.name, tuning_key(plan.spec, problem), wrong, {})
            assert make_plan(problem, device, tuned=tuning.load(device.name)).config == plan.config

    def test_the_planner_takes_the_winner(self):
        from cufa.core.architectures import Device
        from cufa.planner import fitting_configs, make_plan, tuning_key

        device = Device.typical("sm_90")
        problem = make(1, 8, 4096, 64, "float16", True)
        plan = make_plan(problem, device)
        other = next(c for c in fitting_configs(plan.spec, 64, device) if c != plan.config)
        tuning.save(device.name, tuning_key(plan.spec, problem), other, {})
        tuned = make_plan(problem, device, tuned=tuning.load(device.name))
        assert tuned.config == other
        assert "cufa tune" in str(tuned)
