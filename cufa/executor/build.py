"""Kernels compiled by the system's C++ compiler for execution on a CPU: found, built, cached.

Built once per source, flags and machine, under :func:`cufa.tuning.cache_dir`. A build goes to a file of
its own and is then renamed, so that several processes may build at once. What has not been used for longest
makes way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..nvrtc import compiler
from ..tuning import cache_dir

_FLAGS = ("-std=c++17", "-O2", "-fno-strict-aliasing", "-march=native", "-fPIC", "-w")
_LINK_FLAGS = ("-shared", "-pthread")

#: Builds kept, by what their names begin with: kernels are some 30 KB each, all tests make fewer.
_KEPT = {"kernel-": 3000, "libcufa_host-": 8}


class CompilerError(RuntimeError):
    """There is no usable C++ compiler, or it refused a source; the message says what to do."""


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
        "Without one, `cufa emulate --recorded` shows recorded counters of standard shapes."
    )


@functools.cache
def runtime() -> Path:
    """The runtime library that every kernel links to: built on first use, in a few seconds.

    ``$CUFA_CXXFLAGS`` adds options, e.g. ``-DCUFA_PORTABLE_FIBERS`` to switch stacks with ucontext.
    """
    host = compiler.SOURCE_DIR / "host"
    flags = (*_FLAGS, *os.environ.get("CUFA_CXXFLAGS", "").split(), *_LINK_FLAGS)
    sources = sorted([*host.glob("*.h"), *host.glob("*.cpp"), compiler.SOURCE_DIR / "primitives/types.cuh"])
    name = f"libcufa_host-{_digest(*(path.read_bytes() for path in sources), ' '.join(flags).encode())}.so"
    return _build(name, (host / "runtime.cpp").read_text(encoding="utf-8"), flags)


def kernel(
    source: str,
    constants: Mapping[str, int | bool],
    entries: Sequence[str],
    checked: bool,
    parameters: Sequence[str] = ("AttentionParams",),
) -> dict[str, int]:
    """Build a kernel file and load it: entry name → address of ``void entry(const void* const* arguments)``.

    ``parameters`` are the C++ types of the kernels' parameters.

    ``checked`` has the compiler call the runtime at every plain load and store. Raises CompilerError.
    """
    unit = compiler.translation_unit(source, constants)
    for entry in entries:
        values = ", ".join(f"*static_cast<const {t}*>(a[{i}])" for i, t in enumerate(parameters))
        unit += f'extern "C" void cufa_entry_{entry}(const void* const* a) {{ {entry}({values}); }}\n'
    library = runtime()
    flags = (*_FLAGS, "-fsanitize=thread") if checked else _FLAGS
    name = f"kernel-{_digest(unit.encode(), library.name.encode(), ' '.join(flags).encode())}.so"
    # Linked without -fsanitize: the functions that instrumented code calls are the runtime's own.
    link = (*_LINK_FLAGS, f"-L{library.parent}", f"-l:{library.name}", "-Wl,-rpath,$ORIGIN")
    loaded = _load(str(_build(name, unit, flags, link)))
    return {
        entry: ctypes.cast(getattr(loaded, f"cufa_entry_{entry}"), ctypes.c_void_p).value or 0
        for entry in entries
    }


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


@functools.cache
def _machine() -> bytes:
    """-march=native and the compiler's version decide what comes out."""
    version = subprocess.run([cxx(), "--version"], capture_output=True, text=True, check=False).stdout
    try:
        cpu = next(
            x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    return f"{platform.machine()} {cpu} {version}".encode()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256(_machine())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def _build(name: str, text: str, flags: Sequence[str], link: Sequence[str] = ()) -> Path:
    """Compile ``text`` to ``name`` in the cache unless it is there. With ``link``, in two steps."""
    folder = cache_dir() / "host"
    target = folder / name
    if target.exists():
        with contextlib.suppress(OSError):
            os.utime(target)  # used now
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        unit, built = Path(scratch, "unit.cpp"), Path(scratch, name)
        unit.write_text(text, encoding="utf-8")
        include = f"-I{compiler.SOURCE_DIR}"
        if link:
            unit_object = str(Path(scratch, "unit.o"))
            _run([cxx(), *flags, include, "-c", str(unit), "-o", unit_object])
            _run([cxx(), unit_object, *link, "-o", str(built)])
        else:
            _run([cxx(), *flags, include, str(unit), "-o", str(built)])
        os.replace(built, target)
    _prune(folder)
    return target


def _prune(folder: Path) -> None:
    """Remove the builds not used for longest, a good many at a time. A library that some process has loaded
    stays with that process."""
    for prefix, kept in _KEPT.items():
        with contextlib.suppress(OSError):  # another process may be at it too
            builds = [entry for entry in os.scandir(folder) if entry.name.startswith(prefix)]
            if len(builds) > kept * 9 // 8:
                for entry in sorted(builds, key=lambda entry: entry.stat().st_mtime)[:-kept]:
                    os.unlink(entry)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(f"{' '.join(command)}\n{done.stderr.strip()}")
