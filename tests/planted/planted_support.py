"""Kernels made for one bug at a time (``planted_*.cu``), executed in checked mode."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cufa.build import compiler
from cufa.kernels import Launch
from cufa.run.emulate import build as host_build
from cufa.run.emulate.calls import EmulationError, Execution, Finding
from cufa.run.emulate.launch import execute_all
from cufa.run.emulate.memory import GlobalArray

_ENTRY = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)


def beside_the_kernels(folder: Path, name: str) -> Iterator[Path]:
    """The kernels' sources, with the planted kernel beside them, are what is compiled meanwhile."""
    copy = folder / "cuda_src"
    shutil.copytree(compiler.SOURCE_DIR, copy)
    shutil.copy(Path(__file__).with_name(name), copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "SOURCE_DIR", copy)
        yield copy


def run_planted(
    name: str,
    bug: int,
    arrays: Mapping[str, np.ndarray],
    launches: tuple[Launch, ...],
    execution: Execution,
    maps: tuple[Any, ...] = (),
    constants: Mapping[str, int | bool] | None = None,
    ordered_sums: bool = False,
) -> tuple[Finding, ...]:
    """``arrays`` are the fields of PlantedParams and may be written, but those whose name ends in ``_in``."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    types = ["PlantedParams", *["TensorMap"] * len(maps)]
    values = {"BUG": bug, **(constants or {})}
    checked = execution.mode == "checked"
    entries = host_build.kernel(name, values, _ENTRY.findall(text), checked, types)
    fields = [(field, ctypes.c_void_p) for field in arrays]
    params = type("PlantedParams", (ctypes.Structure,), {"_fields_": fields})()
    for field, x in arrays.items():
        setattr(params, field, x.ctypes.data)
    memory = [GlobalArray(field, x, not field.endswith("_in")) for field, x in arrays.items()]
    try:
        return execute_all(entries, launches, [params, *maps], memory, execution, ordered_sums)[1]
    except EmulationError as error:
        return error.findings
