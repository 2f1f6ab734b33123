"""Runs kernels made for one bug at a time (``planted_*.cu``), and says whether the bug was found."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cufa.kernels import Launch
from cufa.run.emulate import build as host_build
from cufa.run.emulate.calls import EmulationError, Execution, Finding
from cufa.run.emulate.launch import execute_all
from cufa.run.emulate.memory import GlobalArray

#: Where a finding is.
_PLACE = re.compile(r"block \(\d,0,0\)|blocks \d and \d|warp \d|planted_second may begin")
_ENTRY = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)


class Outcome(NamedTuple):
    findings: tuple[Finding, ...]
    counters: Mapping[str, np.ndarray]
    """By entry; none where the run ended with an error."""


def run_planted(
    name: str, bug: str, fields: Mapping[str, np.ndarray | int], launches: Sequence[Launch],
    execution: Execution, maps: tuple[Any, ...] = (), constants: Mapping[str, int | bool] | None = None,
    ordered_sums: bool = False,
) -> Outcome:  # fmt: skip
    """``fields`` are those of PlantedParams after ``bug``, in order; the kernel may write each array unless its field
    is ``in_`` or ends in ``_in``. ``bug`` is an argument: all bugs of a source share one build. The source is given by
    its absolute path: it lies outside of cuda_src."""
    source = Path(__file__).with_name(name)
    types = ["PlantedParams", *["TensorMap"] * len(maps)]
    entries = host_build.kernel(
        str(source),
        constants or {},
        _ENTRY.findall(source.read_text(encoding="utf-8")),
        execution.mode == "checked",
        types,
    )
    fields = {"bug": list(bugs_of(name)).index(bug), **fields}
    arrays = {field: x for field, x in fields.items() if isinstance(x, np.ndarray)}
    layout = [(field, ctypes.c_void_p if field in arrays else ctypes.c_int32) for field in fields]
    params = type("PlantedParams", (ctypes.Structure,), {"_fields_": layout})()
    for field, x in fields.items():
        setattr(params, field, arrays[field].ctypes.data if field in arrays else x)
    memory = [
        GlobalArray(field.rstrip("_"), x, field != "in_" and not field.endswith("_in"))
        for field, x in arrays.items()
    ]
    try:
        counters, found = execute_all(entries, launches, [params, *maps], memory, execution, ordered_sums)
    except EmulationError as error:
        return Outcome(error.findings, {})
    return Outcome(found, counters)


_BUG = re.compile(r"^  ([A-Z_]+),(?:  // ([a-z|-]+): (.+))?$", re.MULTILINE)


@functools.cache
def bugs_of(name: str) -> dict[str, tuple[str, str]]:
    """By bug of a source's enum, in its order: the kinds of finding of which one must come, and its message, both as
    regular expressions. Without: the kernel is right."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return {
        bug: (kinds, message)
        for bug, kinds, message in _BUG.findall(text[text.index("enum {") : text.index("};")])
    }


def assert_found(found: Sequence[Finding], kinds: str, message: str) -> None:
    """One finding is of these kinds and has this message. Without kinds: there is none."""
    text = "\n".join(map(str, found))
    if not kinds:
        assert not found, text
        return
    assert any(re.fullmatch(kinds, f.kind) and re.search(message, f.message) for f in found), text
    assert all(_PLACE.search(f.message) for f in found), text
