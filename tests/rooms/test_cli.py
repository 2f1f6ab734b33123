"""Commands: what goes to which stream, exit codes, and that the figures are those of the benchmark layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import why_no_gpu

import cufa
from cufa import doctor
from cufa.cli import _COMMANDS, main
from cufa.commands.common import bytes_text, seconds_text
from cufa.measure import measuring
from cufa.plan.candidates import algorithms

ROOT = Path(cufa.__file__).parents[1]
NO_GPU = why_no_gpu() is not None
needs_no_gpu = pytest.mark.skipif(not NO_GPU, reason="says what happens without a GPU")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(
        measuring, "MIN_ROUNDS", 3
    )  # what is printed is asked here, not how well it is measured

    def invoke(*arguments: str):
        return CliRunner().invoke(main, arguments, catch_exceptions=False)

    return invoke


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for name in _COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert "Exit codes" in result.stdout
    for name in ("CUFA_CACHE_DIR", "CUFA_RUNS_DIR", "CUPY_CACHE_DIR", "CUPY_TF32", "CXX"):
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_help(run, name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "xit" in result.stdout, "exit codes are part of the help"


def test_version_and_an_unknown_command(run):
    assert cufa.__version__ in run("--version").stdout
    assert run("nonsense").exit_code == 2


@pytest.mark.slow
def test_demo_shows_every_algorithm_and_the_map(run):
    demo = ("demo", "--device", "cpu", "--seconds", "0.05", "--seqlen")
    document = json.loads(run(*demo, "600", "--json").stdout)
    assert {row["label"] for row in document["rows"]} == {"naive", "fa1", "fa2_noskip", "fa2"}
    assert all(row["max_error"] < 2e-5 for row in document["rows"])
    assert document["extra_memory_bytes"]["fa2"] < document["extra_memory_bytes"]["naive"]
    result = run(*demo, "1100")
    assert result.exit_code == 0, result.output
    for text in ("naive", "FlashAttention-1", "no skipping", "tiles skipped", "extra memory", "max error"):
        assert text in result.stdout
    assert "██▒▒· " in result.stdout, "the block map"
    assert "tile counts alone predict 1.67×" in result.stdout
    assert "`cufa demo train`" in result.stdout


def test_demo_fails_when_a_result_is_wrong(run, monkeypatch):
    from cufa.run.cpu import forward as cpu

    real = cpu.run

    def off_by_a_little(plan, q, k, v, out, lse, **options):
        real(plan, q, k, v, out, lse, **options)
        out[..., 0] += 1e-3 * (plan.spec.algorithm == "fa1")

    monkeypatch.setattr(cpu, "run", off_by_a_little)
    result = run("demo", "--device", "cpu", "--seqlen", "300", "--seconds", "0.05")
    assert result.exit_code == 1
    assert "wrong" in result.stderr


def test_bench_json_is_self_describing(run):
    shape = ("--seqlen", "200", "--seqlen-k", "300", "--head-dim", "40", "--heads", "4", "--kv-heads", "2")
    result = run("bench", "--device", "cpu", *shape, "--causal", "--seconds", "0.05", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["label"] for row in document["rows"]] == list(algorithms()[1:])
    problem = document["rows"][0]["problem"]
    assert (problem["seqlen_q"], problem["seqlen_k"], problem["kv_heads"]) == (200, 300, 2)
    assert problem["mask"] == {"family": "band", "left": None, "right": 0, "diagonal": "bottom-right"}
    assert document["rows"][0]["regime"] == "in turns"
    assert {"recorded", "device", "versions"} <= document["environment"].keys()
    assert document["limits"]["copy_bytes"] > 1e8
    assert "visible" in document["flop_convention"]


@pytest.mark.parametrize(
    "arguments", [("--suite", "forward"), ("decode",), ("backward", "--suite", "ladder")]
)
def test_a_suite_made_for_a_gpu_is_refused_on_the_cpu(run, arguments):
    result = run("bench", *arguments, "--device", "cpu")
    assert result.exit_code == 3
    assert "made for a GPU" in result.stderr


@needs_no_gpu
def test_no_cpu_is_proposed_that_would_not_do(run):
    decoding, forward = (run("bench", *x, "--device", "cuda").stderr for x in (["decode"], []))
    assert "--device cpu" not in " ".join(decoding.split())
    assert "--device cpu" in " ".join(forward.split())


def test_one_shape_of_decoding(run):
    shape = "--seqlen-k 600 --heads 4 --kv-heads 2 --head-dim 32 --window none,0"
    result = run(*f"bench decode --device cpu {shape} --seconds 0.02 --json".split())
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["label"] for row in rows] == ["fixed", "balanced"]
    problem = rows[0]["problem"]
    assert (problem["operation"], problem["seqlen_q"], problem["seqlen_k"]) == ("decode", 1, 600)
    assert rows[0]["split"]["kind"] == "fixed" and rows[0]["max_error"] < 1e-5


def test_one_shape_of_the_backward(run):
    shape = "--seqlen 150 --seqlen-k 200 --heads 4 --kv-heads 2 --causal --softcap 9 --deterministic"
    result = run(*f"bench backward --device cpu {shape} --seconds 0.02 --json".split())
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["label"]: row["kernel"] for row in rows} == {"fa3": "fa3_backward", "fa2": "fa2_backward"}
    for row in rows:
        assert row["max_error"] < 1e-5
        assert row["problem"]["operation"] == "backward" and row["problem"]["deterministic"]
        assert row["flops"] == 10 * 64 * row["scores"]


@pytest.mark.in_turn
def test_the_backwards_own_suite(run):
    result = run("bench", "backward", "--device", "cpu", "--seconds", "0.02")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("backward batch 1") == 4


def test_a_window_and_a_cap_alone(run):
    shape = ("--seqlen", "100", "--window", "20,0", "--softcap", "30", "--algorithm", "fa2", "--sustained")
    result = run("bench", "--device", "cpu", *shape, "--seconds", "0.01")
    assert result.exit_code == 0, result.output
    assert "window (20, 0), softcap 30; sustained" in " ".join(result.stdout.split())
    assert "a CPU's energy is not measured" in result.stderr


def test_bench_default_suite_prints_a_table_a_problem(run):
    result = run("bench", "--device", "cpu", "--algorithm", "fa2", "--seconds", "0.02")
    assert result.exit_code == 0
    assert result.stdout.count("% of ceiling") == 3


@needs_no_gpu
@pytest.mark.parametrize(
    "command",
    [("bench", "--device", "cuda"), ("tune", "backward"), ("demo", "--device", "cuda")],
)
def test_without_a_gpu_exit_code_3_and_a_way_out(run, command):
    result = run(*command)
    assert result.exit_code == 3
    assert "No usable GPU" in result.stderr
    assert "cufa doctor" in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--heads", "6", "--kv-heads", "4"),
        ("bench", "--head-dim", "12"),
        ("bench", "--dtype", "float16", "--precision", "tf32"),
        ("bench", "--seqlen", "0"),
        ("demo", "--seqlen", str(2**31)),
        ("bench", "--seqlen", str(2**31)),
        ("bench", "--batch", str(2**31 - 1), "--heads", str(2**31 - 1)),
        ("bench", "decode", "--batch", str(2**31 - 1), "--seqlen-k", str(2**30 - 1)),
        ("compare", "fa2", "fa2"),
        ("compare", "fa2", "nothing"),
        ("compare", "fa2", "balanced"),
        ("bench", "--window", "-1,0"),
        ("bench", "--window", "5"),
        ("bench", "--causal", "--window", "5,3"),
        ("bench", "--softcap", "0"),
        ("bench", "decode", "--causal", "--seqlen-k", "100"),
        ("bench", "decode", "--deterministic"),
        ("bench", "decode", "--seqlen", "17"),
        ("bench", "decode", "--seqlen-k", str(2**30)),
        ("bench", "--deterministic", "--seqlen", "100"),
        ("compare", "fa1", "fa2", "--operation", "backward"),
        ("compare", "fa2", "torch flash", "--operation", "decode"),
    ],
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert "Error" in result.stderr


@pytest.mark.parametrize(
    ("command", "there"),
    [
        ("bench decode --device cpu --seqlen-k 64 --algorithm fa2", "decode has fixed, balanced"),
        ("bench backward --device cpu --seqlen 64 --algorithm fa1", "backward has fa3, fa2"),
        ("bench forward --device cpu --seqlen 64 --algorithm fa2 --algorithm fixed", "forward has fa3, fa2,"),
        ("bench --suite backward-quick --device cpu --algorithm fixed", "backward has fa3, fa2"),
        ("emulate backward --algorithm fa1", "backward has fa3, fa2"),
        ("inside backward --algorithm naive", "backward has fa3, fa2"),
    ],
)
def test_an_algorithm_of_another_operation_is_wrong_usage(run, command, there):
    result = run(*command.split())
    assert result.exit_code == 2
    assert f"{command.split()[-1]}: {there}" in " ".join(result.stderr.split())
    assert "auto" not in result.stderr


@pytest.mark.slow
def test_compare_gives_measured_and_predicted_ratio(run):
    arguments = [
        "compare", "fa2_noskip", "fa2", "--causal", "--seqlen", "1100", "--device", "cpu", "--seconds",
        "0.1",
    ]  # fmt: skip
    document = json.loads(run(*arguments, "--json").stdout)
    ratio = document["speedup"]
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert ratio["predicted_by_tiles"] == pytest.approx(15 / 9)
    arguments[-1] = "0.01"
    text = run(*arguments).stdout
    assert "tile counts alone predict 1.67×" in text


def test_compare_with_a_peer_that_cannot_run_here_is_exit_code_3(run, monkeypatch):
    def measured(*_, **__):
        raise AssertionError("the other one was measured all the same")

    monkeypatch.setattr("cufa.measure.measuring.measure", measured)
    for operation in ((), ("--operation", "backward")):
        how = ["--device", "cpu", "--seconds", "0.05", "--seqlen", "128"]
        result = run("compare", "fa2", "torch flash", *how, *operation)
        assert result.exit_code == 3
        assert "torch flash" in result.stderr


def test_doctor_finds_nothing_wrong_and_proves_it_with_a_call(run):
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").stdout)}
    assert checks["first call"]["status"] == "ok"
    assert checks["first gradients"]["status"] == "ok"
    assert checks["kernel sources"]["status"] == "ok"
    for check in checks.values():
        assert check["status"] == "ok" or check["fix"], "every problem comes with its fix"


class TestDoctorFinds:
    """Broken machines, staged."""

    @pytest.fixture
    def problems(self):
        def examine():
            return {c.name: c for c in doctor.examine() if c.status is doctor.Status.PROBLEM}

        return examine

    def test_a_driver_without_cupy(self, problems, monkeypatch, run):
        monkeypatch.setattr(doctor, "driver_cuda_version", lambda: (13, 0))
        monkeypatch.setattr(doctor.importlib.metadata, "distributions", list)
        assert f"{ROOT}[cuda13]" in problems()["cupy"].fix
        assert run("doctor").exit_code == 1

    def test_two_cupys(self, problems, monkeypatch):
        class Distribution:
            version = "14.0"

            def __init__(self, name):
                self.metadata = {"Name": name}

        both = [Distribution("cupy-cuda12x"), Distribution("cupy-cuda13x")]
        monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: both)
        assert "pip uninstall cupy-cuda12x cupy-cuda13x" in problems()["cupy"].fix

    def test_an_old_driver(self, problems, monkeypatch):
        monkeypatch.setattr(doctor, "driver_cuda_version", lambda: (11, 4))
        assert "580" in problems()["driver"].fix

    @pytest.mark.parametrize(
        ("version", "bad"), [((12, 4), True), ((12, 8), True), ((12, 9), False), ((13, 0), False)]
    )
    def test_an_nvrtc_that_refuses_hopper(self, problems, monkeypatch, version, bad):
        nvrtc = pytest.importorskip("cupy").cuda.nvrtc
        monkeypatch.setattr(nvrtc, "getVersion", lambda: version)
        monkeypatch.setattr(doctor, "_capabilities", lambda: [90])
        monkeypatch.setattr(doctor, "_call", lambda: ())
        assert ("nvrtc" in problems()) is bad

    def test_an_old_nvrtc_is_fine_for_other_gpus(self, problems, monkeypatch):
        nvrtc = pytest.importorskip("cupy").cuda.nvrtc
        monkeypatch.setattr(nvrtc, "getVersion", lambda: (12, 4))
        monkeypatch.setattr(doctor, "_capabilities", lambda: [86])
        monkeypatch.setattr(doctor, "_call", lambda: ())
        assert "nvrtc" not in problems()

    def test_a_cache_that_cannot_be_written(self, problems, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file" / "cache"))
        assert "CUFA_CACHE_DIR" in problems()["tuning cache"].fix

    @pytest.mark.parametrize("missing", ["forward/fa2/kernel.cu", "decode/balanced.cu"])
    def test_missing_sources(self, problems, monkeypatch, tmp_path, missing):
        import cufa.build.compiler

        copy = shutil.copytree(cufa.build.compiler.SOURCE_DIR, tmp_path / "cuda_src")
        (copy / missing).unlink()
        monkeypatch.setattr(cufa.build.compiler, "SOURCE_DIR", copy)
        found = problems()["kernel sources"]
        assert missing in found.detail
        assert "reinstall" in found.fix

    @pytest.mark.parametrize(
        ("named", "there", "status", "detail"),
        [
            ("/bin/false", ["g++"], "problem", "/bin/false does not compile C++17"),
            ("/bin/true", ["g++"], "problem", "/bin/true does not compile C++17"),
            ("g++-99", ["g++"], "problem", "CXX=g++-99 is not on the PATH"),
            ("", ["g++"], "ok", "/g++: `cufa emulate` works"),
            (None, ["clang++"], "ok", "/clang++: `cufa emulate` works"),
            (None, [], "absent", "none: `cufa emulate` needs one"),
        ],
    )
    def test_which_compilers_there_are(self, monkeypatch, tmp_path, named, there, status, detail):
        for name in there:
            (tmp_path / name).symlink_to(shutil.which("g++"))
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        if named is not None:
            monkeypatch.setenv("CXX", named)
        *_, check = doctor._compilers()
        assert check.status == status and detail in check.detail
        assert (check.fix != "") == (status != "ok")

    def test_a_check_that_breaks_is_a_finding_itself(self, problems, monkeypatch):
        def _python():
            raise RuntimeError("unexpected")
            yield

        monkeypatch.setattr(doctor, "_python", _python)
        assert "unexpected" in problems()["python"].detail


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments", [("demo",), ("bench", "--algorithm", "fa2"), ("compare", "fa1", "fa2"), ("doctor",)]
)
def test_on_a_gpu(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.gpu
def test_tune_keeps_a_winner_that_the_planner_reads(run, monkeypatch, tmp_path):
    from cufa.calls import tuning
    from cufa.run.cuda import backend as cuda

    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    tuning.load.cache_clear()
    result = run("tune", "--seqlen", "512", "--seconds", "0.2", "--json")
    assert result.exit_code == 0, result.output
    winner = json.loads(result.stdout)["winner"]
    assert winner["key"] in tuning.load(cuda.current_device().name)
    tuning.load.cache_clear()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2 s"), (0.123456, "123 ms"), (1.5e-3, "1.5 ms"), (0.9999e-3, "1e+03 µs"), (12.34e-6, "12.3 µs")],
)
def test_seconds_text(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (1023 << 20, "1023 MiB")]
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text
