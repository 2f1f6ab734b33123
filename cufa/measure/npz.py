"""Arrays of integers and a JSON description in one .npz: how traces are kept."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def save(file: Path, description: Mapping[str, Any], arrays: Arrays) -> Path:
    """Write all of it or nothing. The bytes of an integer lie apart, the lowest of all integers first: that compresses
    by a third better."""
    stored = {name: _planes(x) for name, x in arrays.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", suffix=".npz", delete=False) as scratch:
        try:
            text: Any = np.array(json.dumps(description))
            np.savez_compressed(scratch, description=text, **stored)  # type: ignore[arg-type]
        except BaseException:
            os.unlink(scratch.name)
            raise
    os.chmod(scratch.name, 0o644)
    os.replace(scratch.name, file)
    return file


def load(file: Path) -> tuple[dict[str, Any], Arrays]:
    """Description and arrays. Raises OSError, KeyError, ValueError or BadZipFile for another file."""
    with np.load(file, allow_pickle=False) as stored:
        arrays = {name: _whole(stored[name]) for name in stored.files if name != "description"}
        return json.loads(str(stored["description"])), arrays


def _planes(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.dtype.itemsize == 1:
        return x
    return np.ascontiguousarray(np.ascontiguousarray(x).view(np.uint8).reshape(-1, x.dtype.itemsize).T)


def _whole(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x if x.ndim == 1 else np.ascontiguousarray(x.T).view(f"<u{len(x)}").reshape(-1)
