"""Tiles and kernels that were measured to be fastest, per GPU model and class of problem.

Tiles come from `cufa tune` (:func:`load`): one JSON file per GPU model in the user's cache folder. Kernels come from
the recorded benchmarks (:func:`fastest_kernels`). A missing, damaged or outdated entry is no error: its class of
problem counts as unmeasured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..build.compiler import source_digest
from ..cache import cache_dir
from ..kernels import KERNELS, Kernel, TileConfig
from ..plan.operation import Tuned


def path(device_name: str) -> Path:
    """The file of one GPU model, e.g. ``tuned-nvidia-h200.json``."""
    return cache_dir() / f"tuned-{_slug(device_name)}.json"


def _slug(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@functools.cache
def load(device_name: str) -> Mapping[str, Tuned]:
    """Winners by :func:`cufa.plan.candidates.tuning_key`. Empty if nothing was tuned on this card model. Measurements
    of a kernel that has changed are left out."""
    winners = {}
    for key, entry in _read(path(device_name)).items():
        # Damaged entries, and those of another version of cufa, are passed over.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            tuned = _tuned(KERNELS[key.partition("/")[0]], entry)
            if tuned is not None:
                winners[key] = tuned
    return winners


def _tuned(spec: Kernel, entry: Mapping[str, Any]) -> Tuned | None:
    """An entry of the file; None if the kernel's source has changed since. Raises AttributeError, KeyError, TypeError
    or ValueError for a damaged entry."""
    config = spec.read_config(entry["config"])
    if entry.get("digest", "") not in ("", _digest(spec.sources)):
        return None
    cut = (str(entry["schedule"]), int(entry["num_splits"])) if "num_splits" in entry else None
    if "planned" not in entry:
        return Tuned(config)
    planned, where = (
        spec.read_config(entry["planned"]),
        f"tuned on {entry['device']}, {entry['recorded'][:10]}",
    )
    speedup = float(entry["over_planned"])
    if speedup == 1 if cut else config == planned:
        return Tuned(config, planned, f"{where}: none was faster, {entry['regime']}", cut)
    return Tuned(config, planned, f"{where}: {speedup:.2f}× as fast as {planned}, {entry['regime']}", cut)


@functools.cache
def _digest(sources: tuple[str, ...]) -> str:
    return source_digest(*sources)


def save(device_name: str, key: str, config: TileConfig, evidence: Mapping[str, Any]) -> Path:
    """Remember a winner, with the figures that made it one. Returns the file written.

    Raises OSError when the cache folder cannot be written.
    """
    file = path(device_name)
    entries = {**_read(file), key: {"config": dataclasses.asdict(config), **evidence}}
    write_json(file, entries)
    load.cache_clear()
    return file


RECORDED = Path(__file__).parents[1] / "records" / "fastest"
"""Files of :func:`fastest_kernels`."""


@functools.cache
def fastest_kernels(device_name: str) -> Mapping[str, str]:
    """Names of kernels by :func:`cufa.plan.candidates.problem_class`; empty for a GPU model without recorded
    benchmarks."""
    known = {spec.name for spec in KERNELS.values()}
    entries = _read(recorded_path(device_name))
    return {key: name for key, name in entries.items() if isinstance(name, str) and name in known}


def recorded_path(device_name: str) -> Path:
    """The file of one GPU model: "NVIDIA H200" and "H200" are the same."""
    return RECORDED / f"{_slug(device_name).removeprefix('nvidia-')}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # RecursionError: brackets nested too deep
        return {}
    return content if isinstance(content, dict) else {}


def write_json(file: Path, content: Any) -> None:
    """Write all of it or nothing: readers never see half a file. Lists of numbers take one line.

    Raises OSError.
    """
    text = re.sub(
        r"\[\s+(-?\d[^\[\]{}\"]*?)\s+\]",
        lambda numbers: "[" + re.sub(r"\s+", " ", numbers[1]) + "]",
        json.dumps(content, indent=1),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
