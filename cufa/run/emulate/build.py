"""Kernels compiled by the system's C++ compiler for execution on a CPU: found, built, cached.

A kernel is built once per source, flags and machine, under :func:`cufa.cache.own_folder`. A build goes to a temporary
file and is then renamed: several processes may build at once. Each library ends with a digest of itself, so that a
damaged library is built again. The least recently used builds are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...build import compiler
from ...cache import cache_dir, locked, own_folder

_FLAGS = ("-std=c++17", "-fno-strict-aliasing", "-march=native", "-fPIC", "-w")
#: The runtime library is built once, and an execution spends nearly all of its time in the library. These options make
#: executions a third shorter than -O2: kernels call the library and read its thread-local state at every step.
_RUNTIME_FLAGS = (*_FLAGS, "-O3", "-fno-semantic-interposition", "-ftls-model=initial-exec")
#: Kernels call the runtime at every step and most run once: a fast build is worth more than fast code. In the tests,
#: -O1 adds four times more build time than it saves in run time. Hidden inline functions are called without a PLT.
_KERNEL_FLAGS = (*_FLAGS, "-Og", "-fno-exceptions", "-fvisibility-inlines-hidden")
#: Unknown to clang. They shorten a build by a fifth and do not slow the kernel.
_GCC_KERNEL_FLAGS = (
    "-fno-tree-loop-optimize", "-fira-region=one", "-fno-tree-dominator-opts", "-fno-tree-ccp",
    "-fno-tree-bit-ccp", "-fno-tree-fre", "-fno-tree-pta", "-fno-tree-ch", "-fno-forward-propagate",
    "-fno-cprop-registers", "-fno-guess-branch-probability", "-fcf-protection=none",
)  # fmt: skip
_LINK_FLAGS = ("-shared", "-pthread")
#: A kernel calls only the runtime. Without the standard libraries, linking takes a tenth of the time.
_LINK_KERNEL_FLAGS = ("-shared", "-nostdlib")

_FOLDER = "host"
"""Subfolder of the cache."""

#: Builds kept, by prefix of their names. A kernel takes some 30 KB; all tests together build fewer than this.
_KEPT = {"kernel-": 3000, "libcufa_host-": 8}

#: A build folder of this age was left by a process that was killed.
_ABANDONED_SECONDS = 3600

_DIGEST_BYTES = hashlib.sha256().digest_size


class CompilerError(RuntimeError):
    """There is no usable C++ compiler, it refused a source, or its output cannot be stored; the message names the
    fix."""


@functools.cache
def cxx() -> str:
    """Path of the C++ compiler: ``$CXX``, or the first of g++, clang++ and c++ on the PATH.

    Raises CompilerError when there is none.
    """
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
    looked_for = f"CXX={named}" if named else "g++, clang++ or c++"
    raise CompilerError(
        f"emulation compiles kernels with the system's C++ compiler, and {looked_for} is not on the PATH. "
        "Fix: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora). "
        "Without one, `cufa emulate --recorded` shows recorded counters of each kernel's tiles."
    )


@functools.cache
def runtime() -> Path:
    """The runtime library that every kernel links to: built on first use, in a few seconds.

    ``$CUFA_CXXFLAGS`` adds options, e.g. ``-DCUFA_PORTABLE_FIBERS`` to switch stacks with ucontext.
    """
    host = compiler.SOURCE_DIR / "host"
    flags = (*_RUNTIME_FLAGS, *os.environ.get("CUFA_CXXFLAGS", "").split(), *_LINK_FLAGS)
    primitives = [compiler.SOURCE_DIR / f"primitives/{name}.cuh" for name in ("register_budget", "types")]
    sources = sorted([*host.glob("*.h"), *host.glob("*.cpp"), *primitives])
    name = f"libcufa_host-{_digest(*(path.read_bytes() for path in sources), ' '.join(flags).encode())}.so"
    with contextlib.ExitStack() as alone:  # one process builds, the others wait and then find the result
        with contextlib.suppress(OSError):  # the folder cannot be written: the build's error says so
            alone.enter_context(locked(own_folder(_FOLDER) / "runtime.lock"))
        return _build(name, (host / "runtime.cpp").read_text(encoding="utf-8"), flags)


def kernel(
    source: str, constants: Mapping[str, int | bool], entries: Sequence[str], checked: bool,
    parameters: Sequence[str], score: str = "",
) -> dict[str, int]:  # fmt: skip
    """Build a kernel file and load it: entry name → address of ``void entry(const void* const* arguments)``.

    ``parameters`` are the C++ types of the kernels' parameters. With ``checked`` the compiler calls the runtime at
    every plain load and store. Raises CompilerError.
    """
    unit = compiler.translation_unit(source, constants, score)
    for entry in entries:
        values = ", ".join(f"*static_cast<const {t}*>(a[{i}])" for i, t in enumerate(parameters))
        unit += f'extern "C" void cufa_entry_{entry}(const void* const* a) {{ {entry}({values}); }}\n'
    library = runtime()
    flags = (*_KERNEL_FLAGS, *(() if "clang" in _version() else _GCC_KERNEL_FLAGS))
    flags += ("-fsanitize=thread",) if checked else ()
    name = f"kernel-{_digest(unit.encode(), library.name.encode(), ' '.join(flags).encode())}.so"
    # Linked without -fsanitize: the runtime has the functions that instrumented code calls.
    link = (*_LINK_KERNEL_FLAGS, f"-L{library.parent}", f"-l:{library.name}", "-Wl,-rpath,$ORIGIN")
    loaded = load(str(_build(name, unit, flags, link)))
    return {
        entry: ctypes.cast(getattr(loaded, f"cufa_entry_{entry}"), ctypes.c_void_p).value or 0
        for entry in entries
    }


@functools.cache
def load(path: str) -> ctypes.CDLL:
    """A library, once per process. Raises CompilerError."""
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise CompilerError(f"{path} cannot be loaded: {error}. Fix: delete it, to be built anew") from error


@functools.cache
def _version() -> str:
    """The output of the compiler's --version."""
    return subprocess.run([cxx(), "--version"], capture_output=True, text=True, check=False).stdout


@functools.cache
def _machine() -> bytes:
    """The machine's properties that -march=native and the compiler's version depend on."""
    try:
        cpu = next(
            x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    return f"{platform.machine()} {cpu} {_version()}".encode()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256(_machine())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def _build(name: str, text: str, flags: Sequence[str], link: Sequence[str] = ()) -> Path:
    """Compile ``text`` to ``name`` in the cache unless it is there. With ``link``, in two steps."""
    try:
        folder = own_folder(_FOLDER)
        target = folder / name
        if _is_sound(target):
            with contextlib.suppress(OSError):
                os.utime(target)  # used now
            return target
        _build_anew(target, text, flags, link)
    except OSError as error:
        named = "CUFA_CACHE_DIR" if os.environ.get("CUFA_CACHE_DIR") else "the cache folder"
        raise CompilerError(
            f"compiled kernels cannot be kept in {cache_dir() / _FOLDER} ({named}): {error}. "
            "Fix: make room there, or let CUFA_CACHE_DIR name a folder of your own that only you can write"
        ) from error
    _prune(folder)
    return target


def _build_anew(target: Path, text: str, flags: Sequence[str], link: Sequence[str]) -> None:
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        unit, built = Path(scratch, "unit.cpp"), Path(scratch, target.name)
        unit.write_text(text, encoding="utf-8")
        include = f"-I{compiler.SOURCE_DIR}"
        if link:
            unit_object = str(Path(scratch, "unit.o"))
            _run([cxx(), *flags, include, "-c", str(unit), "-o", unit_object], scratch)
            _run([cxx(), unit_object, *link, "-o", str(built)], scratch)
        else:
            _run([cxx(), *flags, include, str(unit), "-o", str(built)], scratch)
        with built.open("ab") as library:  # the loader ignores what follows the library itself
            library.write(hashlib.sha256(built.read_bytes()).digest())
        os.replace(built, target)


def _is_sound(library: Path) -> bool:
    """Whether the library exists and is undamaged: loading a truncated file would kill the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _prune(folder: Path) -> None:
    """Remove the least recently used builds, an eighth at a time, and folders of killed builds. A process keeps the
    libraries that it has loaded."""
    for scratch in folder.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)
    for prefix, kept in _KEPT.items():
        with contextlib.suppress(OSError):  # another process may be at it too
            builds = [entry for entry in os.scandir(folder) if entry.name.startswith(prefix)]
            if len(builds) > kept * 9 // 8:
                for entry in sorted(builds, key=lambda entry: entry.stat().st_mtime)[:-kept]:
                    os.unlink(entry)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a build as Ctrl-C does: no compiler and no folder is left."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(command: Sequence[str], scratch: str) -> None:
    """Raises CompilerError; OSError for a full disk."""
    environment = {**os.environ, "TMPDIR": scratch, "LC_ALL": "C"}  # assembly goes where the build goes
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a separate process
            raise
    if process.returncode and "No space left on device" in errors:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if process.returncode:
        raise CompilerError(f"{' '.join(command)}\n{errors.strip()}")
