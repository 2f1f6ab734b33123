"""Kernels compiled before a program runs, without a GPU: cubin files, by default in the user's cache folder, where
:func:`cufa.build.compiler.find_compiled` finds them."""

from __future__ import annotations

import os
from pathlib import Path

from ..cache import own_folder
from ..plan.planner import Plan
from .compiler import FOLDER, cubin_name, unit_of
from .static_compile import compile_text


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
    unit = unit_of(plan)
    target = own_folder(FOLDER) if folder is None else Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    file = target / cubin_name(plan.spec.name, unit, plan.device.arch.nvrtc_name)
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(compile_text(unit, plan.device.arch).cubin)
        unfinished.replace(file)
    return file
