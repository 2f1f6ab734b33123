"""Builds of the executor in the cache: damaged, left behind by a killed process, or with no place to go."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import probes
import pytest
from click.testing import CliRunner
from support import make_inputs

from cufa.cli import main
from cufa.run.emulate import build as host_build
from cufa.run.emulate.build import CompilerError
from cufa.run.emulate.calls import emulate

LOAD = host_build.load.__wrapped__
ARGUMENTS = ["emulate", "--seqlen", "40", "--heads", "1", "--mode", "plain"]


class Unloaded:
    """Of a library: it has every entry."""

    def __getattr__(self, name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(1)


@pytest.fixture(scope="module", autouse=True)
def quick_builds():
    """Builds are looked at as files, and not loaded: the loader would take a second runtime, in another folder, for the
    one that this process has, or the other way round, and kernels would find no thread of theirs in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_build, "_KERNEL_FLAGS", ("-std=c++17", "-O0", "-fPIC", "-w"))
        patch.setattr(host_build, "runtime", host_build.runtime.__wrapped__)
        patch.setattr(host_build, "load", lambda path: Unloaded())
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory, quick_builds):
    folder = tmp_path_factory.mktemp("built")
    (folder / "host").mkdir()
    shutil.copy(host_build.runtime(), folder / "host")  # seconds to build
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUFA_CACHE_DIR", str(folder))
        build()
    return folder


@pytest.fixture
def cache(built, tmp_path, monkeypatch):
    """A cache with one kernel and the runtime in it."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    return tmp_path


def build() -> tuple[Path, Path]:
    """A kernel of one line: (its library, the runtime's)."""
    host_build.kernel(probes.DECODE_SOURCE, {}, ["probe_byte_permute"], False, ["ProbeParams"])
    folder = Path(os.environ["CUFA_CACHE_DIR"], "host")
    return next(folder.glob("kernel-*.so")), next(folder.glob("libcufa_host-*.so"))


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:200] + bytes([b[200] ^ 1]) + b[201:]]
)
def test_a_damaged_library_is_built_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path))
    library = host_build._build("kernel-0.so", "int x;", ("-shared", "-fPIC"))
    sound = library.read_bytes()
    library.write_bytes(damage(sound))
    assert host_build._build("kernel-0.so", "int x;", ("-shared", "-fPIC")) == library
    assert library.read_bytes() == sound


def test_a_sound_library_is_not_built_again(cache):
    kernel, runtime = build()
    times = kernel.stat().st_ino, runtime.stat().st_ino
    build()
    assert (kernel.stat().st_ino, runtime.stat().st_ino) == times


def test_folders_of_killed_builds_are_removed(cache):
    folder = cache / "host"
    killed, at_work = folder / "build-killed", folder / "build-at-work"
    for scratch in (killed, at_work):
        scratch.mkdir(parents=True)
        (scratch / "unit.cpp").write_text("int x;")
    long_ago = time.time() - 2 * host_build._ABANDONED_SECONDS
    os.utime(killed, (long_ago, long_ago))
    next(folder.glob("kernel-*.so")).unlink()
    build()
    assert sorted(folder.glob("build-*")) == [at_work]


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    """Its parent is a file. The command says so and exits as where something is missing."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CompilerError, match="let CUFA_CACHE_DIR name a folder of your own"):
        emulate(*make_inputs(1, 1, 1, 8, 8, 8))
    result = CliRunner().invoke(main, ARGUMENTS, catch_exceptions=False)
    assert result.exit_code == 3
    assert "compiled kernels cannot be kept in" in result.stderr


def compiler_that(folder: Path, does: str) -> str:
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n{does}\n')
    script.chmod(0o700)
    return str(script)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """Not by what a compiler prints of it."""
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "cache"))
    does = 'echo "/tmp/ccX.s: fatal error: error writing to -: No space left on device" >&2; exit 1'
    monkeypatch.setattr(host_build, "cxx", lambda: compiler_that(tmp_path, does))
    with pytest.raises(
        CompilerError, match=r"cannot be kept in .*No space left on device\. Fix: make room there"
    ):
        host_build.runtime()


def test_sigterm_leaves_no_compiler_and_no_folder(tmp_path):
    compiler = compiler_that(tmp_path, f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    process = subprocess.Popen(
        [sys.executable, "-c", "from cufa.run.emulate import build; build.runtime()"],
        env={
            **os.environ,
            "CXX": compiler,
            "CUFA_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    stat = Path(
        "/proc", (tmp_path / "pid").read_text().strip(), "stat"
    )  # a killed orphan may await its parent
    while stat.exists() and stat.read_text().split()[2] != "Z":  # the signal is on its way
        time.sleep(0.01)
    assert not list(tmp_path.glob("host/build-*"))


def test_a_library_that_does_not_load_is_named(cache, monkeypatch):
    def refuse(path: str) -> None:
        raise OSError("invalid ELF header")

    monkeypatch.setattr(host_build, "load", LOAD)
    monkeypatch.setattr(host_build.ctypes, "CDLL", refuse)
    with pytest.raises(
        CompilerError, match=r"kernel-\w+\.so cannot be loaded: invalid ELF header.*delete it"
    ):
        build()
