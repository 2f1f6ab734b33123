"""Finds what is installed and what is broken: driver, CuPy, NVRTC, headers, GPU, caches, compilers.

Every check runs on a machine that has nothing installed, and every problem comes with its fix.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from .build.compiler import SOURCE_DIR, included_files
from .cache import cache_dir
from .calls.backward import flash_attention_backward
from .calls.forward import flash_attention
from .gpu.driver import driver
from .kernels import KERNELS
from .problem.checks import importable, install
from .problem.mask import CAUSAL
from .reference.dense import attention_reference, attention_reference_backward
from .run.emulate.build import CompilerError, cxx

_COMPILER = "apt-get install g++; CXX, if it is set, names g++ or clang++"
_INSTALL = f"{install('cuda13')} (driver 580 or newer), or the extra cuda12 (older drivers)"
#: Hopper's own instructions need -arch=sm_90a; older NVRTC refuse it beside the -arch that CuPy passes.
_NVRTC_FOR_HOPPER = (12, 9)
_HOPPER = 90
_OLDEST_CAPABILITY = 80


class Status(enum.StrEnum):
    OK = "ok"
    ABSENT = "absent"
    """Not installed; the detail says what cufa does without it."""
    PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """The remedy; empty when all is well."""


def examine() -> list[Check]:
    """Run every check. Never raises: a check that itself fails is reported as a problem."""
    found: list[Check] = []
    for check in (_python, _sources, _driver, _cupy, _nvrtc, _headers, _devices, _caches, _compilers, _call):
        try:
            found += check()
        except Exception as error:  # a broken installation can raise anything
            name = check.__name__.strip("_")
            found.append(Check(name, Status.PROBLEM, f"{type(error).__name__}: {error}", _INSTALL))
    return found


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", Status.OK, f"Python {version}, NumPy {np.__version__}, cufa {__version__}")


def _sources() -> Iterator[Check]:
    try:
        files = {x for spec in KERNELS.values() for source in spec.sources for x in included_files(source)}
    except OSError as error:
        yield Check("kernel sources", Status.PROBLEM, str(error), "reinstall cufa: files are missing")
        return
    yield Check("kernel sources", Status.OK, f"{len(KERNELS)} kernels, {len(files)} files in {SOURCE_DIR}")


def _driver() -> Iterator[Check]:
    version = driver_cuda_version()
    if version is None:
        yield Check(
            "driver",
            Status.ABSENT,
            "no NVIDIA driver (libcuda.so.1): attention runs on the CPU",
            "on a machine with an NVIDIA GPU: install its driver, 580 or newer",
        )
    elif version < (12, 0):
        yield Check(
            "driver", Status.PROBLEM, f"driver for CUDA {_dotted(version)}", "update it to 580 or newer"
        )
    else:
        yield Check("driver", Status.OK, f"driver for CUDA {_dotted(version)}")


def driver_cuda_version() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver runs; None without a driver. Needs no package."""
    try:
        library = driver()
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _cupy() -> Iterator[Check]:
    found = {
        d.metadata["Name"]: d.version
        for d in importlib.metadata.distributions()
        if (d.metadata["Name"] or "").startswith("cupy")
    }
    have_driver = driver_cuda_version() is not None
    if not found:
        status = Status.PROBLEM if have_driver else Status.ABSENT
        yield Check("cupy", status, "not installed: attention runs on the CPU", _INSTALL)
        return
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        fix = f"pip uninstall {' '.join(found)}, then {_INSTALL}"
        yield Check("cupy", Status.PROBLEM, f"several overwrite each other: {names}", fix)
        return
    import cupy

    built, driver = cupy.cuda.runtime.runtimeGetVersion() // 1000, driver_cuda_version()
    if driver is not None and built > driver[0]:
        detail = f"{names} is for CUDA {built}, the driver runs CUDA {_dotted(driver)}"
        yield Check("cupy", Status.PROBLEM, detail, f"update the driver, or {install(f'cuda{driver[0]}')}")
        return
    yield Check("cupy", Status.OK, names)


def _nvrtc() -> Iterator[Check]:
    if not importable("cupy"):
        return
    from cupy.cuda import nvrtc

    try:
        version = nvrtc.getVersion()
    except Exception as error:
        yield Check("nvrtc", Status.PROBLEM, f"CuPy cannot load it: {error}", _INSTALL)
        return
    if version < _NVRTC_FOR_HOPPER and (not _capabilities() or _HOPPER in _capabilities()):
        detail = f"NVRTC {_dotted(version)} refuses sm_90a, which kernels for H100 and H200 are compiled for"
        fix = "pip install 'nvidia-cuda-nvrtc-cu12>=12.9', or CUDA 13: " + _INSTALL
        yield Check("nvrtc", Status.PROBLEM if _capabilities() else Status.ABSENT, detail, fix)
        return
    yield Check("nvrtc", Status.OK, f"NVRTC {_dotted(version)}")


def _headers() -> Iterator[Check]:
    """cufa's kernels include nothing of CUDA's, but CuPy's own (astype, arithmetic) do."""
    if not importable("cupy"):
        return
    places = [os.environ.get("CUDA_PATH", "/usr/local/cuda")]
    specification = importlib.util.find_spec("nvidia")
    for root in (specification.submodule_search_locations or []) if specification else []:
        places += [f"{root}/cu13", f"{root}/cuda_runtime"]
    found = [place for place in places if Path(place, "include", "cuda_runtime.h").is_file()]
    if found:
        yield Check("cuda headers", Status.OK, found[0])
    else:
        fix = "pip install nvidia-cuda-runtime (CUDA 13) or nvidia-cuda-runtime-cu12"
        yield Check("cuda headers", Status.PROBLEM, "none found: CuPy's own kernels cannot be compiled", fix)


def _devices() -> Iterator[Check]:
    if driver_cuda_version() is None or not importable("cupy"):
        return
    import cupy

    capabilities = _capabilities()
    if not capabilities:
        fix = "check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that the container was given the GPU"
        yield Check("gpu", Status.PROBLEM, "a driver but no GPU", fix)
    for number, capability in enumerate(capabilities):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
        detail = (
            f"{number}: {name}, sm_{capability}, {properties['multiProcessorCount']} SMs, {memory:.0f} GiB"
        )
        if capability < _OLDEST_CAPABILITY:
            fix = "use device='cpu', or a GPU of the Ampere generation or later"
            yield Check("gpu", Status.PROBLEM, f"{detail}: older than sm_{_OLDEST_CAPABILITY}", fix)
        else:
            yield Check("gpu", Status.OK, detail)


def _caches() -> Iterator[Check]:
    named = os.environ.get("CUPY_CACHE_DIR")
    cupy_cache = Path(
        named or os.path.expanduser("~/.cupy/kernel_cache")
    )  # as CuPy, also without a home folder
    for name, folder, variable in (
        ("kernel cache", cupy_cache, "CUPY_CACHE_DIR"),
        ("tuning cache", cache_dir(), "CUFA_CACHE_DIR"),
    ):
        if _writable(folder):
            yield Check(name, Status.OK, str(folder))
        else:
            fix = f"make it writable, or set {variable} to a folder that is"
            yield Check(name, Status.PROBLEM, f"{folder} cannot be written", fix)


def _writable(folder: Path) -> bool:
    """Whether a file could be made there; the nearest folder that exists stands for one that does not."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _compilers() -> Iterator[Check]:
    if importable("cuda.bindings"):
        version = importlib.metadata.version("cuda-bindings")
        yield Check("cuda-bindings", Status.OK, f"{version}: `cufa compile` works")
    else:
        yield Check(
            "cuda-bindings", Status.ABSENT, "`cufa compile` needs it", f"{install('cuda13')} (no GPU needed)"
        )
    named = os.environ.get("CXX")
    try:
        compiler = cxx.__wrapped__()
    except CompilerError:
        what, status = (
            (f"CXX={named} is not on the PATH", Status.PROBLEM) if named else ("none", Status.ABSENT)
        )
        yield Check("c++ compiler", status, f"{what}: `cufa emulate` needs one", _COMPILER)
        return
    command = [compiler, "-std=c++17", "-E", "-x", "c++", "-"]
    trial = subprocess.run(
        command, input="__cplusplus", capture_output=True, text=True, timeout=60, check=False
    )
    if "201703" in trial.stdout:
        yield Check("c++ compiler", Status.OK, f"{compiler}: `cufa emulate` works")
    else:
        yield Check("c++ compiler", Status.PROBLEM, f"{compiler} does not compile C++17", _COMPILER)


def _call() -> Iterator[Check]:
    """The proof: one small call and its gradients where arrays would be computed here, against float64."""
    where = "GPU" if _capabilities() and importable("cupy") else "CPU"
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 2, 100, 64), np.float32).astype(np.float16)
    out, lse = flash_attention(q, k, v, mask=CAUSAL, return_lse=True)
    gradients = flash_attention_backward(dout, q, k, v, out, lse, mask=CAUSAL)
    exact = attention_reference_backward(dout, q, k, v, mask=CAUSAL)
    for name, what, error, most in (
        ("first call", "attention", _largest(out - attention_reference(q, k, v, mask=CAUSAL)), 5e-3),
        ("first gradients", "its gradients", max(map(_largest, map(np.subtract, gradients, exact))), 2e-2),
    ):
        detail = f"{what} on the {where}: error {error:.1e} against float64"
        if error < most:
            yield Check(name, Status.OK, detail)
        else:
            yield Check(name, Status.PROBLEM, detail, "report this as a bug, with this output")


def _largest(x: np.ndarray[Any, Any]) -> float:
    return float(np.abs(x).max())


def _capabilities() -> list[int]:
    """Compute capabilities of the GPUs that CuPy sees; empty without a driver or CuPy."""
    if driver_cuda_version() is None or not importable("cupy"):
        return []
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return []
    return [int(cupy.cuda.Device(number).compute_capability) for number in range(count)]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
