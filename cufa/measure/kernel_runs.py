"""Recorded runs of kernels: the common part of :mod:`traces` and :mod:`inside`, and their files.

A file is an LZMA-compressed .npz of integer arrays and a JSON description: a third smaller than NumPy's .npz.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..kernels import KERNELS, TileConfig
from ..problem.columns import Columns
from ..problem.problem import Problem
from . import measured

SUFFIX = ".trace"
Arrays = dict[str, npt.NDArray[Any]]
R = TypeVar("R", bound="KernelRun")


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """One run of one kernel. The last field of a subclass holds the recorded data."""

    kernel: str
    """Name in the registry."""
    digest: str
    """Digest of the sources of the kernel that ran."""
    problem: Problem
    config: TileConfig
    environment: dict[str, Any]
    """From :func:`cufa.measure.machine.environment`; empty on a CPU."""
    code: str | None = dataclasses.field(default=None, kw_only=True)
    """Digest of the machine code that ran; "": not known; None: recorded on this machine."""

    @property
    def is_current(self) -> bool:
        """Whether the build that ran still gives the same machine code."""
        code = {} if self.code is None else {"code": self.code}
        return measured.is_current(self.kernel, {"digest": self.digest, **code})

    def file_name(self, tiles: str) -> str:
        """Name of the file, without suffix."""
        p = self.problem
        parts = [self.environment.get("device", "cpu"), self.kernel, f"b{p.batch}h{p.heads}kv{p.kv_heads}"]
        parts += [
            f"{p.seqlen_q}x{p.seqlen_k}",
            f"d{p.dims_text}",
            p.dtype,
            p.scores_text,
            *_mask_digest(p),
            tiles,
        ]
        return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")

    def described(self) -> dict[str, Any]:
        """All fields except the subclass's last, for JSON."""
        *fields, _ = (field.name for field in dataclasses.fields(self))
        found = {name: getattr(self, name) for name in fields}
        return found | {"problem": self.problem.as_json(), "config": dataclasses.asdict(self.config)}


def _mask_digest(problem: Problem) -> list[str]:
    """A digest that tells masks of the same name apart; none for masks without arrays."""
    return [problem.mask.intervals.digest[:6]] if isinstance(problem.mask, Columns) else []


def save(file: Path, description: Mapping[str, Any], arrays: Arrays) -> Path:
    """Write the whole file or nothing. An array is stored as byte planes, the lowest bytes of all its integers first:
    the file is a third smaller."""
    stored = {name: _planes(x) for name, x in arrays.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", suffix=SUFFIX, delete=False) as scratch:
        try:
            text: Any = np.array(json.dumps(description))
            with lzma.open(scratch, "wb") as packed:
                np.savez(packed, description=text, **stored)  # type: ignore[arg-type]
        except BaseException:
            os.unlink(scratch.name)
            raise
    os.chmod(scratch.name, 0o644)
    os.replace(scratch.name, file)
    return file


def load(file: Path, what: str, make: Callable[[dict[str, Any], Arrays], R]) -> R:
    """The run of a file. ``make`` gets the description, with problem and config as objects, and the arrays. Raises
    ValueError for a file that is no ``what`` of this version."""
    try:
        with lzma.open(file) as packed, np.load(packed, allow_pickle=False) as stored:
            arrays = {name: _whole(stored[name]) for name in stored.files if name != "description"}
            described = json.loads(str(stored["description"]))
        described.pop("schema", None)
        described["problem"] = Problem.from_json(described["problem"])
        described["config"] = KERNELS[described["kernel"]].read_config(described["config"])
        return make(described, arrays)
    except (OSError, EOFError, KeyError, TypeError, ValueError, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file.name} is no {what} that this version reads: {error}") from error


def struct_of(stored: Arrays, dtype: np.dtype[Any], prefix: str = "") -> npt.NDArray[Any]:
    """The structured array of ``dtype`` whose fields are the stored arrays ``prefix`` + field name."""
    names = dtype.names or ()
    found = np.zeros(len(stored[prefix + names[0]]), dtype)
    for name in names:
        found[name] = stored[prefix + name]
    return found


def fields_of(x: npt.NDArray[Any], prefix: str = "") -> Arrays:
    return {prefix + name: x[name] for name in x.dtype.names or ()}


def _planes(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.dtype.itemsize == 1:
        return x
    return np.ascontiguousarray(np.ascontiguousarray(x).view(np.uint8).reshape(-1, x.dtype.itemsize).T)


def _whole(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x if x.ndim == 1 else np.ascontiguousarray(x.T).view(f"<u{len(x)}").reshape(-1)
