"""Kernels compiled before a program runs, without a GPU: cubin files in the folder ``kernels`` of the user's cache.

A file is named after a digest of all that NVRTC was given, so that a kernel that was changed is compiled anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from ..cache import cache_dir, own_folder
from ..plan.planner import Plan
from .compiler import nvrtc_options, trace_constants, translation_unit
from .static_compile import compile_text

FOLDER = "kernels"


def cubin_name(name: str, unit: str, nvrtc_arch: str) -> str:
    """The file of a translation unit. The folder of the headers is left out: the unit has a digest of their text."""
    options = nvrtc_options(nvrtc_arch, Path("cuda_src"))
    digest = hashlib.sha256("\0".join((unit, *options)).encode()).hexdigest()[:24]
    return f"{name}-{nvrtc_arch}-{digest}.cubin"


def compile(plan: Plan, folder: str | os.PathLike[str] | None = None) -> Path:
    """Compile the kernel of a plan without a GPU, and return the cubin file: programs that need it do not compile.

    ``folder`` is where the file goes; None: where programs on this machine look, ``$CUFA_CACHE_DIR/kernels`` or
    ``~/.cache/cufa/kernels``. Files copied there serve another machine with the same version of cufa and GPUs of the
    plan's architecture. There, a call uses the file if its own plan is the same: plan for the GPU by its name in
    ``device``, with the dtype, mask and options of the call.

    Raises ValueError for a plan of the CPU, MissingCompilerError without NVRTC, PermissionError if the folder of the
    cache is not this user's alone.
    """
    if plan.device is None:
        raise ValueError("this plan is for the CPU, where nothing is compiled: name a GPU, such as sm_90")
    unit = translation_unit(plan.spec.source_of(plan.config), {**plan.constants, **trace_constants(False)})
    target = own_folder(FOLDER) if folder is None else Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    file = target / cubin_name(plan.spec.name, unit, plan.device.arch.nvrtc_name)
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(compile_text(unit, plan.device.arch).cubin)
        unfinished.replace(file)
    return file


def find_compiled(name: str, unit: str, nvrtc_arch: str) -> Path | None:
    """The file that :func:`compile` left in the cache for a translation unit; None if there is none, or if others may
    have put it there."""
    file = cache_dir() / FOLDER / cubin_name(name, unit, nvrtc_arch)
    try:
        return own_folder(FOLDER) / file.name if file.is_file() else None
    except OSError as error:
        logging.getLogger("cufa").warning("%s is not used: %s", file, error)
        return None
