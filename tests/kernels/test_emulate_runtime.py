"""The executor itself: twins for every primitive, struct layouts, builds, errors, other fibers."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import probes
import pytest
import support
from support import make_inputs

import cufa
from cufa.build import compiler
from cufa.kernels import Launch
from cufa.run.emulate import build as host_build
from cufa.run.emulate import launch as emulator_launch
from cufa.run.emulate import memory as emulator_memory
from cufa.run.emulate import run as emulator_run
from cufa.run.emulate import shared_accesses
from cufa.run.emulate.calls import EmulationError, emulate

_FUNCTION = re.compile(r"^DEVICE\s+[\w:]+\s+(\w+)(?:<[^>]*>)?\(", re.MULTILINE)
_TWIN = re.compile(r"^(?:DEVICE )?\w+ (\w+)\(", re.MULTILINE)
_RUNTIME = re.compile(r"^namespace cufa_host \{.*?^\}  // namespace", re.MULTILINE | re.DOTALL)


def functions(*files: Path) -> set[str]:
    return {name for file in files for name in _FUNCTION.findall(file.read_text(encoding="utf-8"))}


def test_every_primitive_has_a_twin():
    primitives = functions(*(compiler.SOURCE_DIR / "primitives").glob("*.cuh"))
    headers = (compiler.SOURCE_DIR / "host").glob("*_host.h")
    twins = {
        name for file in headers for name in _TWIN.findall(_RUNTIME.sub("", file.read_text(encoding="utf-8")))
    }
    assert len(primitives) > 30
    assert primitives == twins


def test_every_primitive_is_probed():
    text = "".join(path.read_text(encoding="utf-8") for path in probes.FOLDER.glob("*_probes.cu"))
    text += (compiler.SOURCE_DIR / "wgmma/operands.cuh").read_text(encoding="utf-8")
    primitives = functions(*(compiler.SOURCE_DIR / "primitives").glob("*.cuh")) - probes.UNOBSERVABLE
    assert not {name for name in primitives if not re.search(rf"\b{name}\b", text)}


def test_structs_match_the_header(tmp_path):
    """Offset and size of each field, and the size of the whole."""
    structs = {"CufaLaunch": emulator_launch._Launch, "CufaArray": emulator_memory._Array}
    structs |= {"TensorMap": emulator_memory.TensorMap}
    places = {
        name: [(x, getattr(struct, x).offset, getattr(struct, x).size) for x, _ in struct._fields_]
        for name, struct in structs.items()
    }
    sizes = {name: ctypes.sizeof(struct) for name, struct in structs.items()}
    kept = shared_accesses._PASS
    places["CufaPass"] = [(x, at, dtype.itemsize) for x, (dtype, at) in kept.fields.items()]
    sizes["CufaPass"] = kept.itemsize
    asserts = [f"static_assert(sizeof({name}) == {size});" for name, size in sizes.items()]
    asserts += [
        f"static_assert(offsetof({name}, {field}) == {at} && sizeof({name}::{field}) == {size});"
        for name, fields in places.items()
        for field, at, size in fields
    ]
    source = tmp_path / "layout.cpp"
    includes = "<cstddef>", '"host/launch.h"', '"host/primitives_host.h"'
    source.write_text("\n".join([*(f"#include {x}" for x in includes), *asserts]))
    command = [host_build.cxx(), "-std=c++17", "-fsyntax-only", f"-I{compiler.SOURCE_DIR}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_script(text: str, **environment: str) -> subprocess.Popen[str]:
    pythonpath = os.pathsep.join([str(Path(cufa.__file__).parents[1]), str(Path(support.__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": pythonpath, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


_DIGEST = """
import hashlib, numpy, support, cufa
run = cufa.emulate(*support.make_inputs(1, 2, 1, 70, 130, 64), causal=True, algorithm="naive", mode="checked")
assert not run.findings
print(hashlib.sha256(run.out.tobytes() + run.lse.tobytes()).hexdigest())
"""


@pytest.mark.in_turn
def test_processes_may_build_at_once_and_fibers_may_be_portable(tmp_path):
    """Three processes with one cache that has no kernel, one of them switching stacks by ucontext: the same bits."""
    (tmp_path / "host").mkdir()
    shutil.copy(host_build.runtime(), tmp_path / "host")  # seconds to build; the third builds its own
    options = [{}, {}, {"CUFA_CXXFLAGS": "-O0 -DCUFA_PORTABLE_FIBERS"}]
    started = [run_script(_DIGEST, CUFA_CACHE_DIR=str(tmp_path), **x) for x in options]
    finished = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], finished
    assert len({out for out, _ in finished}) == 1
    assert not list(tmp_path.glob("host/build-*")), "scratch folders are removed"


def test_builds_not_used_for_longest_make_way(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host_build, "_KEPT", {"kernel-": 4})
    monkeypatch.setattr(host_build, "_run", lambda command, scratch: Path(command[-1]).touch())
    for i in range(8):
        built = host_build._build(f"kernel-{i}.so", "", ())
        os.utime(built, (i, i))
        host_build._build("kernel-0.so", "", ())  # used all the time
    assert sorted(x.name for x in (tmp_path / "host").iterdir()) == [f"kernel-{i}.so" for i in (0, 5, 6, 7)]


def test_missing_compiler_is_a_clear_message(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    expected = re.escape("g++, clang++ or c++ is not on the PATH") + r".*apt-get install g\+\+"
    with pytest.raises(host_build.CompilerError, match=expected):
        host_build.cxx.__wrapped__()


def test_a_kernel_that_does_not_compile_says_where(tmp_path, monkeypatch):
    (tmp_path / "host").symlink_to(compiler.SOURCE_DIR / "host")
    (tmp_path / "primitives").symlink_to(compiler.SOURCE_DIR / "primitives")
    (tmp_path / "broken.cu").write_text(
        '#include "primitives/primitives.cuh"\nKERNEL broken(const u32* p) { p = nothing; }\n'
    )
    monkeypatch.setattr(compiler, "SOURCE_DIR", tmp_path)
    with pytest.raises(host_build.CompilerError, match=r"broken\.cu:2.*nothing"):
        host_build.kernel("broken.cu", {}, ["broken"], False, ["u32"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode='fast' is not known; use one of plain, checked, counted"),
        ({"schedule": "sideways"}, "schedule='sideways' is not known"),
        ({"schedule": -1}, "schedule=-1 is not known; use 'ascending', 'descending' or a seed (an int below 2**32)"),
        ({"schedule": 2**32}, "schedule=4294967296 is not known; use 'ascending', 'descending' or a seed"),
        ({"schedule": True}, "schedule=True is not known"),
        ({"copies": "never"}, "copies='never' is not known"),
        ({"algorithm": "fa9"}, "algorithm='fa9' is not known"),
        ({"arch": "sm_70"}, "sm_70 is not supported"),
        ({"layout": "sbhd"}, "layout='sbhd' is not known"),
    ],
)  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        emulate(*make_inputs(1, 1, 1, 8, 8, 8), **options)


def test_bad_arrays():
    q, k, v = make_inputs(1, 1, 1, 8, 8, 8)
    with pytest.raises(TypeError, match="float64"):
        emulate(*(x.astype(np.float64) for x in (q, k, v)))
    with pytest.raises(ValueError, match="empty axis"):
        emulate(q[:, :, :0], k, v)
    with pytest.raises(ValueError, match="last axis"):
        emulate(*(x[..., ::2] for x in make_inputs(1, 1, 1, 8, 8, 16)))


@pytest.mark.parametrize(
    ("name", "kind", "spoil"),
    [
        ("counters", "counters: .* left counters that are not zero", lambda x: x.fill(1)),
        ("trace", "trace: .* left a trace that cannot be read", lambda x: x.view(np.uint32).fill(10**6)),
    ],
)
def test_findings_outlive_what_cannot_be_read(monkeypatch, name, kind, spoil):
    """They explain it."""
    finding = emulator_launch.Finding("race", 1, "", 0, "block (0,0,0) and block (1,0,0)")

    def spoiled(entries, launches, arguments, memory, execution, ordered_sums):
        counters, _ = emulator_launch.execute_all(
            entries, launches, arguments, memory, execution, ordered_sums
        )
        spoil(next(x.array for x in memory if x.name == name))
        return counters, (finding,)

    monkeypatch.setattr(emulator_run, "execute_all", spoiled)
    q, k, v = make_inputs(1, 1, 1, 70, 80, 64)
    with pytest.raises(EmulationError, match=rf"(?s)race: block .*{kind}") as raised:
        emulate(q, k, v, algorithm="fa2", num_splits=2 if name == "counters" else None)
    assert raised.value.findings[0] is finding


def test_findings_of_earlier_launches_outlive_a_deadlock(monkeypatch):
    early, late = (emulator_launch.Finding(kind, 1, "", 0, "") for kind in ("race", "deadlock"))

    def execute(entry, *rest):
        if entry:
            raise EmulationError((late,))
        return np.zeros(1, [("grid_releases", np.uint64)]), (early,)

    monkeypatch.setattr(emulator_launch, "execute", execute)
    launches = [Launch(name, (1, 1, 1), 32, 0) for name in ("first", "second")]
    with pytest.raises(EmulationError) as raised:
        emulator_launch.execute_all({"first": 0, "second": 1}, launches, (), [], emulator_launch.Execution())
    assert raised.value.findings == (early, late)


def test_inputs_are_left_alone_and_strides_are_kept():
    """Views of wider arrays, in either layout; checked mode copies them with the same strides modulo 16."""
    wide = make_inputs(2, 3, 3, 40, 50, 80, layout="bshd")
    q, k, v = (x[..., 8:72] for x in wide)
    before = [x.copy() for x in wide]
    results = [emulate(q, k, v, layout="bshd", mode=mode).out for mode in ("plain", "checked", "counted")]
    for x, y in zip(wide, before, strict=True):
        np.testing.assert_array_equal(x, y)
    for out in results:
        np.testing.assert_array_equal(out, results[0])


def test_counters_do_not_depend_on_threads_or_order():
    inputs = make_inputs(1, 2, 2, 256, 256, 64)
    first = emulate(*inputs, mode="counted", threads=1)
    other = emulate(*inputs, mode="counted", threads=2, schedule=5)
    for entry, counts in first.counters.items():
        for name in counts.dtype.names:
            if name != "switches":
                np.testing.assert_array_equal(counts[name], other.counters[entry][name], err_msg=name)
