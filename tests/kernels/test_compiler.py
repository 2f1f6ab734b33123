"""Translation units, digests, and static compiles read back from ptxas's log. No GPU needed."""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
import time
from pathlib import Path

import pytest

import cufa
from cufa.build import compiler
from cufa.build import static_compile as static
from cufa.build.compiler import (
    INSIDE,
    included_files,
    source_digest,
    trace_constants,
    translation_unit,
)
from cufa.build.static_compile import (
    CompileError,
    CompileReport,
    EntryReport,
    MissingCompilerError,
    check_report,
    compile_text,
    nvrtc_version,
    parse_log,
    static_compile,
)
from cufa.gpu.architectures import ARCHITECTURES
from cufa.problem.checks import install

AMPERE, HOPPER = ARCHITECTURES[80], ARCHITECTURES[90]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder with one kernel that includes one header."""
    monkeypatch.setattr(compiler, "SOURCE_DIR", tmp_path)
    for folder in ("kernels", "tiles", "host", "shared"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tiles/scale.cuh").write_text(
        '#pragma once\n#include "host/twin.h"\n__device__ float scaled(float x) { return 2 * x; }\n'
    )
    (tmp_path / "host/twin.h").write_text("// what a host compiler sees\n")
    (tmp_path / "shared/phases.cuh").write_text(
        "#ifdef TRACE_INSIDE\n#define INSIDE(...) __VA_ARGS__\n#endif\n"
    )
    (tmp_path / "shared/phase_log.cuh").write_text("")
    (tmp_path / "kernels/k.cu").write_text(
        '#include "shared/phases.cuh"\n#include "tiles/scale.cuh"\n'
        'extern "C" __global__ void k(float* x) { INSIDE(if (f(g(h()))) stamp(1, (2)));'
        " x[threadIdx.x] = scaled(x[threadIdx.x]) + OFFSET; }\n"
    )
    return tmp_path


# Digests and translation units

K, SCALE, TWIN, PHASES = "kernels/k.cu", "tiles/scale.cuh", "host/twin.h", "shared/phases.cuh"


@pytest.mark.parametrize(
    ("file", "old", "new", "digest_changes", "unit_changes"),
    [
        (K, "+ OFFSET", "- OFFSET", True, True),
        (SCALE, "2 * x", "3 * x", True, True),
        (SCALE, "return 2 * x;", "// twice\n  /* as much,\n in */ return  2*x;", False, True),
        (K, "= scaled(", "\n\t=  scaled(", False, True),
        (K, "stamp(1, (2))", "stamp(2, (1))", False, True),
        (PHASES, "__VA_ARGS__", "", False, True),
        (TWIN, "sees", "reads", False, False),
    ],
)
def test_digests_see_what_is_compiled(sources, file, old, new, digest_changes, unit_changes):
    """A digest of the source leaves out comments, white space, stamps, and what only a host compiles. The text that a
    compiler gets changes with every byte of a header: caches see no included file."""
    before, text = (source_digest(K), translation_unit(K, {})), (sources / file).read_text()
    assert old in text
    (sources / file).write_text(text.replace(old, new))
    after = source_digest(K), translation_unit(K, {})
    assert [x != y for x, y in zip(before, after, strict=True)] == [digest_changes, unit_changes]


def test_a_translation_unit_is_constants_then_an_include(sources):
    first, *rest = translation_unit(K, {"OFFSET": 3, "SOFTCAP": True, "TF32": False}).splitlines()
    assert first.startswith("// headers ")
    assert rest == [
        "[[maybe_unused]] constexpr int OFFSET = 3;",
        "[[maybe_unused]] constexpr bool SOFTCAP = true;",
        "[[maybe_unused]] constexpr bool TF32 = false;",
        '#include "kernels/k.cu"',
    ]
    found = {stamps: {x.name for x in included_files(K, stamps)} for stamps in (False, True)}
    assert found[False] == {"k.cu", "scale.cuh"} == found[True] - {"phases.cuh", "phase_log.cuh"}
    assert [INSIDE in translation_unit(K, trace_constants(True, x)) for x in (False, True)] == [False, True]


# Static compiles


PLAIN = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }'


def test_report_of_a_small_kernel(nvrtc):
    report = compile_text(PLAIN, HOPPER)
    assert report.arch == "sm_90a" and report.nvrtc == nvrtc_version()
    assert [entry.name for entry in report.entries] == ["k"] and 4 <= report.entry("k").registers <= 16
    assert report.warnings == check_report(report) == ()
    with pytest.raises(KeyError, match=r"no entry 'other'; compiled: k"):
        report.entry("other")
    # The cubin is whole: its ELF section table, the last thing in the file, ends where the file does.
    assert report.cubin[:4] == b"\x7fELF"
    (phoff, shoff) = struct.unpack_from("<QQ", report.cubin, 32)
    (phentsize, phnum, shentsize, shnum) = struct.unpack_from("<HHHH", report.cubin, 54)
    assert max(phoff + phentsize * phnum, shoff + shentsize * shnum) == len(report.cubin)


def test_a_source_that_does_not_compile_says_what_was_given_to_nvrtc(sources, nvrtc):
    (sources / K).write_text('#include "tiles/scale.cuh"\nfloat x = OFFSETS;\n')
    with pytest.raises(CompileError) as caught:
        static_compile(K, {"OFFSET": 3}, AMPERE)
    message = str(caught.value)
    assert f'{sources}/kernels/k.cu(2): error: identifier "OFFSETS" is undefined' in message
    assert "-arch=sm_80" in message
    assert "    2 | [[maybe_unused]] constexpr int OFFSET = 3;" in message
    assert '    3 | #include "kernels/k.cu"' in message
    assert "error: identifier" in caught.value.summary and "\n" not in caught.value.summary


def test_bad_ptx_is_a_compile_error_too(nvrtc):
    with pytest.raises(CompileError, match=r"no\.such\.instruction"):
        compile_text(PLAIN.replace("x[threadIdx.x] += 1", 'asm volatile("no.such.instruction;")'), AMPERE)


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) k(float* x) {
  float s[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) s[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = 2 * s[199 - i] - s[i];
}
"""
LOCAL_MEMORY = """
extern "C" __global__ void k(float* x, int n) {
  float s[64];
  for (int i = 0; i < 64; ++i) s[i] = x[i * n];
  for (int i = 0; i < n; ++i) s[int(x[i]) & 63] += 1;
  x[threadIdx.x] = s[n & 63];
}
"""
IGNORED = PLAIN.replace("{ ", '{ asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); ')
BOUNDS = PLAIN.replace("void k", "void __launch_bounds__(1024, 2) k")


@pytest.mark.parametrize(
    ("unit", "capability", "finding"),
    [
        (SPILLS, 80, r"^k: spills, [1-9]\d* bytes stored and [1-9]\d* loaded"),
        (LOCAL_MEMORY, 80, r"^k: 256 bytes of local memory per thread \(a stack frame\)$"),
        (IGNORED, 90, "C7508.*ignored"),
        (BOUNDS, 80, None),  # 2048 threads an SM
        (BOUNDS, 120, "ignored"),  # 1536
    ],
    ids=["spills", "local memory", "setmaxnreg", "bounds", "bounds that ptxas cannot keep"],
)
def test_findings(unit, capability, finding, nvrtc):
    found = check_report(compile_text(unit, ARCHITECTURES[capability]))
    assert len(found) == (finding is not None)
    assert finding is None or re.search(finding, found[0])


LOG = """\
cufa.cu(3): warning #177-D: variable "y" was declared but never referenced
Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"
ptxas info    : (C7510) Potential Performance Loss: wgmma instructions are serialized
ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compile time = 37.372 ms
ptxas info    : Function properties for _Z6calledPf
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, 360 bytes cmem[0]
"""


def test_every_figure_of_a_log_is_read():
    assert parse_log(LOG) == (
        EntryReport("first", registers=24),
        EntryReport(
            "second",
            registers=168,
            spill_store_bytes=12,
            spill_load_bytes=16,
            stack_bytes=24,
            static_shared_bytes=2048,
            barriers=3,
        ),
    )
    report = CompileReport("sm_90a", parse_log(LOG), LOG, b"", 0.0, "13.5")
    assert [w.split(":")[0] for w in report.warnings] == ["cufa.cu(3)"]
    spill, serialized = check_report(report)
    assert spill.startswith("second: spills, 12 bytes stored and 16 loaded")
    assert "serialized" in serialized
    assert check_report(report, spills_up_to=11) == (spill, serialized)
    assert check_report(report, spills_up_to=12) == (serialized,)


@pytest.mark.parametrize(("products", "fences", "found"), [(72, 9, 0), (72, 72, 1), (0, 0, 0)])
def test_products_that_are_serialised_are_found_where_nothing_is_said(monkeypatch, products, fences, found):
    monkeypatch.setattr(static, "warpgroup_instructions", lambda cubin: (products, fences))
    report = CompileReport("sm_90a", (), "", b"", 0.0, "13.5")
    assert len(check_report(report)) == found
    assert check_report(dataclasses.replace(report, arch="sm_80")) == ()


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingCompilerError, match=re.escape(install("cuda13"))):
        compile_text("", AMPERE)


@pytest.mark.parametrize(
    ("seconds", "lines"), [(30, []), (0, ["compiling fa3_forward for sm_90 (once, about 2 s)"])]
)
def test_a_compile_is_logged_and_a_load_from_the_cache_is_not(caplog, monkeypatch, seconds, lines):
    monkeypatch.setattr(compiler, "_LOAD_SECONDS", seconds)
    with caplog.at_level("INFO", "cufa"), compiler.announced("fa3_forward", "sm_90"):
        deadline = time.monotonic() + 5
        while lines and not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages == lines


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / compiler.FOLDER


def test_a_plan_compiled_ahead_is_found_by_what_the_compiler_would_get(cache, tmp_path, nvrtc):
    plan = cufa.plan((1, 4, 256, 64), device="sm_80", dtype="bfloat16")
    unit = compiler.unit_of(plan)
    assert compiler.find_compiled("fa2_forward", unit, "sm_80") is None and not cache.exists()
    file = cufa.compile(plan)
    assert file.read_bytes() == static.compile_text(unit, AMPERE).cubin and file.parent == cache
    made = file.stat().st_mtime_ns
    assert cufa.compile(plan) == file and file.stat().st_mtime_ns == made, "compiled once"
    assert compiler.find_compiled("fa2_forward", unit, "sm_80") == file
    assert compiler.find_compiled("fa2_forward", unit, "sm_90a") is None, "another architecture"
    assert compiler.find_compiled("fa2_forward", unit + "// changed", "sm_80") is None
    assert cufa.compile(plan, tmp_path / "other").name == file.name, "the folder can be copied"
    assert {x.name for x in cache.iterdir()} == {file.name}, "nothing unfinished is left"


def test_what_others_may_have_put_into_the_cache_is_not_loaded(cache, caplog):
    cache.mkdir(parents=True)
    (cache / compiler.cubin_name("fa2_forward", "unit", "sm_80")).write_bytes(b"")
    cache.chmod(0o777)
    assert compiler.find_compiled("fa2_forward", "unit", "sm_80") is None
    assert "can be written by other users" in caplog.text


def test_a_plan_of_the_cpu_has_nothing_to_compile():
    with pytest.raises(ValueError, match="name a GPU, such as sm_90"):
        cufa.compile(cufa.plan((1, 4, 256, 64), device="cpu"))
