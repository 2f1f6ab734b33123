"""`cufa compile`, on kernels of our own that ship nowhere: exit status, tables, JSON, findings."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support import changed

from cufa.build import compiler
from cufa.build import variants as variants_module
from cufa.build.static_compile import nvrtc_version
from cufa.commands import compile as compile_module
from cufa.commands.compile import compile_command
from cufa.kernels import Kernel, Launch, TileConfig
from cufa.kernels.config import Buffer
from cufa.problem.checks import install
from cufa.problem.problem import BAND_KINDS

#: A third of the builds of a kernel of one config and element at one head dim for one architecture.
PART, BUILDS = ("--part", "1/3"), 2
WHOLE = ("--part", "1/1")

CLEAN = 'extern "C" __global__ void first(float* x) { x[threadIdx.x] = HEAD_DIM; }\n'
SECOND = """
extern "C" __global__ void second(float* x) {
  __shared__ float shared[256];
  shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = shared[255 - threadIdx.x];
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) second(float* x) {
  float s[140];
#pragma unroll
  for (int i = 0; i < 140; ++i) s[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 140; ++i) x[i * 1024 + threadIdx.x] = 2 * s[139 - i] - s[i];
}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging(TileConfig):
    """Tiles of a family with fields of its own."""

    fold: bool
    cluster_merge: bool
    long: bool


Compile = Callable[..., Result]


@pytest.fixture
def compile_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: None) -> Compile:
    """Run the command on a registry of one kernel, of this source, that is launched as first then second."""
    monkeypatch.setattr(compiler, "SOURCE_DIR", tmp_path)
    launch_threads = [256]

    class TwoStep(Kernel):
        name = algorithm = "two_step"
        title = paper = ""
        source = "two_step.cu"
        dtypes = ("float16",)
        configs = (TileConfig(64, 64, num_warps=8),)

        def shared_memory(self, config, head_dim, v_dim=0):
            return (Buffer("ALL", 1024),)

        def launches(self, problem, config, shared_memory, split=None):
            second = Launch("second", (1, 1, 1), launch_threads[0], shared_memory)
            return (Launch("first", (1, 1, 1), 128, 0), second)

    spec = TwoStep()
    monkeypatch.setattr(variants_module, "KERNELS", {spec.name: spec})

    def run(source: str, *arguments: str, threads: int = 256) -> Result:
        launch_threads[0] = threads
        (tmp_path / "two_step.cu").write_text(source)
        return CliRunner().invoke(compile_command, ["--arch", "90", "--head-dim", "64", *PART, *arguments])

    return run


def test_json_goes_to_stdout_and_the_rest_to_stderr(compile_kernel):
    result = compile_kernel(CLEAN + SECOND, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["nvrtc"] == nvrtc_version()
    assert (document["builds"], document["builds_with_findings"]) == (BUILDS, 0)
    assert f"{BUILDS} builds" in result.stderr
    first, second, *_ = document["kernels"]
    assert (first["entry"], first["arch"], first["threads"]) == ("first", "sm_90a", 128)
    assert (first["blocks_per_sm"], first["warps_per_sm"], first["occupancy"]) == (16, 64, 1.0)
    assert first["limiters"] == ["warps"]
    # 256 floats in the source and 1024 bytes at the launch; what the system reserves is not the kernel's.
    assert second["shared_bytes"] == 2048
    assert second["barriers"] == 1
    assert second["spill_store_bytes"] == second["spill_load_bytes"] == second["stack_bytes"] == 0


def test_the_table_has_a_row_for_each_launch(compile_kernel):
    result = compile_kernel(CLEAN + SECOND)
    assert result.exit_code == 0
    assert "sm_90a (H200)" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if "64×64" in line]
    assert [row[0] for row in rows] == ["first", "second"]  # whatever their masks, builds share a row
    assert "100.0" in rows[0]


def test_configs_of_one_tiling_have_rows_of_their_own(compile_kernel, monkeypatch):
    """A cluster takes more shared memory: in one row, one's bytes would stand beside the other's blocks."""
    plain, cluster = (
        Merging(64, 64, num_warps=8, fold=not merge, cluster_merge=merge, long=True)
        for merge in (False, True)
    )
    fewer = dataclasses.replace(plain, blocks_per_sm=2)
    elsewhere = dataclasses.replace(cluster, min_head_dim=72, long=False)
    spec = changed(
        variants_module.KERNELS["two_step"],
        configs=(plain, cluster, fewer, elsewhere),
        shared_memory=lambda config, head_dim, v_dim: (
            Buffer("ALL", 100_000 if config.cluster_merge else 1024),
        ),
    )
    monkeypatch.setattr(variants_module, "KERNELS", {spec.name: spec})
    result = compile_kernel(CLEAN + SECOND, *WHOLE)
    assert result.exit_code == 0, result.output
    lines = map(str.strip, result.stdout.splitlines())
    rows = [re.split(r"  +", line) for line in lines if line.startswith("second")]
    # Fields that all of them have, or that only another head dim's differ in, tell nothing apart.
    of_tiles = {row[1]: (row[6], row[7]) for row in rows}
    assert of_tiles == {
        "64×64, 8 warps, for 1 an SM, fold": ("2,048", "8"),
        "64×64, 8 warps, for 1 an SM, cluster merge": ("101,024", "2"),
        "64×64, 8 warps, for 2 an SM, fold": ("2,048", "8"),
    }


def test_a_spill_fails_and_is_named(compile_kernel):
    result = compile_kernel(CLEAN + SPILLING, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["builds_with_findings"] == BUILDS
    spills = {row["entry"]: row["spill_store_bytes"] for row in document["kernels"]}
    assert spills["first"] == 0
    assert spills["second"] > 0
    assert "two_step" in result.stderr
    assert "second: spills" in result.stderr


def test_a_source_that_does_not_compile_fails_with_the_compilers_words(compile_kernel):
    result = compile_kernel("nonsense;\n")
    assert result.exit_code == 1
    assert "two_step.cu(1): error" in result.stderr
    assert "constexpr int HEAD_DIM = 64;" in result.stderr
    assert result.stderr.count("does not compile") == 1
    assert f"(and {BUILDS - 1} more builds)" in result.stderr
    assert result.stderr.count("options: ") == 1  # in full once, not once a build


def test_a_warning_is_shown_once_and_does_not_fail(compile_kernel):
    result = compile_kernel(CLEAN.replace("{ x", "{ int unused; x") + SECOND)
    assert result.exit_code == 0
    assert result.stderr.count('warning #177-D: variable "unused" was declared but never referenced') == 1


def test_a_launch_of_a_kernel_that_is_not_in_the_source_fails(compile_kernel):
    result = compile_kernel(CLEAN)
    assert result.exit_code == 1
    assert "no entry 'second'; compiled: first" in result.stderr


@pytest.mark.slow
def test_a_block_that_fits_no_sm_fails(compile_kernel):
    """Without launch bounds ptxas may take registers that a block of this many threads cannot have."""
    hungry = CLEAN + SPILLING.replace("__launch_bounds__(1024, 2) ", "")
    assert compile_kernel(hungry).exit_code == 0  # 256 threads
    result = compile_kernel(hungry, threads=512)
    assert result.exit_code == 1
    assert "second: no block fits an SM of sm_90" in result.stderr


def test_every_combination_is_more_than_every_two(compile_kernel, monkeypatch):
    spec = changed(
        variants_module.KERNELS["two_step"],
        dtypes=("float16", "bfloat16"),
        configs=tuple(TileConfig(64, n, num_warps=8) for n in (32, 64)),
    )
    monkeypatch.setattr(variants_module, "KERNELS", {spec.name: spec})
    few, all_of_them = (
        json.loads(compile_kernel(CLEAN + SECOND, "--json", *WHOLE, *more).stdout) for more in ([], ["--all"])
    )
    assert few["builds"] < all_of_them["builds"] == 2 * 2 * 2 * len(BAND_KINDS)
    masks = {(row["mask"], row["softcap"]) for row in few["kernels"]}
    assert masks == {(kind, cap) for kind in BAND_KINDS for cap in (False, True)}


def test_the_parts_are_the_whole(monkeypatch):
    built = []
    monkeypatch.setattr(compile_module, "_with_progress", lambda wanted, jobs: built.extend(wanted) or [])
    for part in ("1/3", "2/3", "3/3"):
        CliRunner().invoke(compile_command, ["--kernel", "naive", "--arch", "90", "--part", part])
    whole = list(variants_module.variants([90], ("naive",), None))
    assert len(built) == len(whole) > 3
    assert set(built) == set(whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "70"], "sm_70 is not supported"),
        (["--arch", "hopper"], "'hopper' is not known"),
        (["--head-dim", "65"], "not a multiple of 8"),
        (["--head-dim", "264"], "264"),
        (["--kernel", "fa9"], "fa9"),
        (["--jobs", "0"], "--jobs"),
        (["--part", "3/2"], "'3/2' is not K/N"),
    ],
)
def test_wrong_usage_is_exit_status_2(arguments, words):
    result = CliRunner().invoke(compile_command, arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_without_nvrtc_the_exit_status_and_words_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    result = CliRunner().invoke(compile_command, ["--arch", "90", "--head-dim", "64"])
    assert result.exit_code == 3
    assert install("cuda13") in result.stderr.replace("\n", " ")
    assert result.stdout == ""


@pytest.mark.usefixtures("nvrtc")
def test_what_a_shape_needs_is_compiled_into_a_folder(tmp_path: Path) -> None:
    arguments = ["--for", "1,8/2,512,64", "--causal", "--arch", "sm_80", "--into", str(tmp_path), "--json"]
    result = CliRunner().invoke(compile_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    files = json.loads(result.stdout)["files"]
    assert [Path(x["path"]).name.split("-")[0] for x in files] == ["fa2_forward", "fa2_backward"]
    assert {x["path"]: x["bytes"] for x in files} == {str(x): x.stat().st_size for x in tmp_path.iterdir()}


@pytest.mark.parametrize("shape", ["1,8,512", "1,8/3,512,64", "1,8,512,7"])
def test_a_shape_that_cannot_be_is_wrong_usage(shape: str) -> None:
    result = CliRunner().invoke(compile_command, ["--for", shape, "--arch", "sm_80"])
    assert result.exit_code == 2 and "Error" in result.stderr
