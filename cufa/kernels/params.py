"""Parameter structures of kernels: declared once, in the headers that kernels include, and read from there.

:class:`Params` reads a header such as ``cuda_src/shared/params.cuh`` and makes the ctypes structure with the same
bytes, for the CUDA backend and for the executor. A test compiles the headers and compares every offset.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGE = Path(__file__).parents[1]

#: Inside the wheel, or beside the package in a checkout.
SOURCE_DIR = _PACKAGE / "cuda_src" if (_PACKAGE / "cuda_src").is_dir() else _PACKAGE.parent / "cuda_src"

_TENSOR_MAP_BYTES, _ALIGNMENT = 128, 64
_COMMENT = re.compile(r"//[^\n]*")
_MEMBER = re.compile(r"(?:alignas\(\d+\)\s*)?(const\s+)?(\w+)(\*?)\s+([\w\s,]+)")


class Strides(ctypes.Structure):
    """Elements between neighbours along batch, head and sequence."""

    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("seq", ctypes.c_int64)]


_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "Strides": Strides,
    "TensorMap": ctypes.c_ubyte * _TENSOR_MAP_BYTES,
}
_NUMPY = {"u32": np.uint32, "u64": np.uint64, "i32": np.int32}


class Params:
    """One structure of a header under ``cuda_src``."""

    def __init__(self, header: str, struct: str) -> None:
        self.header, self.struct = header, struct

    def __repr__(self) -> str:
        return f"{self.struct} of {self.header}"

    @functools.cached_property
    def members(self) -> list[tuple[str, str, bool]]:
        """(name, type, is it a pointer) of each member, in order."""
        return read_struct(self.header, self.struct)

    @property
    def padding(self) -> int:
        """Bytes at the end, after the last member."""
        field = getattr(self.ctype, "padding_", None)
        return 0 if field is None else int(field.size)

    @functools.cached_property
    def ctype(self) -> type[ctypes.Structure]:
        fields = [(name, ctypes.c_void_p if pointer else _type(kind)) for name, kind, pointer in self.members]
        plain = type(self.struct, (ctypes.Structure,), {"_fields_": fields})
        # Tensor maps are aligned to 64 bytes: C++ pads the structure to a multiple, and a launch copies the padding.
        alignment = _ALIGNMENT if any(kind == "TensorMap" for _, kind, _ in self.members) else 1
        padding = -ctypes.sizeof(plain) % alignment
        fields += [("padding_", ctypes.c_ubyte * padding)] * (padding > 0)
        return type(self.struct, (ctypes.Structure,), {"_fields_": fields})

    @functools.cached_property
    def size(self) -> int:
        """Bytes that a launch reads."""
        return ctypes.sizeof(self.ctype)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _, _ in self.members)

    def new(self) -> Any:
        """A structure of zeros, aligned for tensor maps."""
        storage = (ctypes.c_ubyte * (self.size + _ALIGNMENT))()
        return self.ctype.from_buffer(storage, -ctypes.addressof(storage) % _ALIGNMENT)

    def offset(self, name: str) -> int:
        return int(getattr(self.ctype, name).offset)


def read_struct(header: str, struct: str) -> list[tuple[str, str, bool]]:
    """Members of a plain structure: ``type a, b;`` lines, pointers one per line.

    Raises ValueError for other lines.
    """
    text = _COMMENT.sub("", (SOURCE_DIR / header).read_text(encoding="utf-8"))
    body = re.search(rf"struct {struct}(?: : (\w+))? \{{(.*?)\}};", text, re.DOTALL)
    if body is None:
        raise ValueError(f"{header} declares no struct {struct}")
    headers = (header, "shared/params.cuh", "shared/score_params.cuh")
    base = next((x for x in headers if body[1] and _declares(x, body[1])), "")
    members = read_struct(base, body[1]) if body[1] else []  # a base class comes first
    if padding := Params(base, body[1]).padding if body[1] else 0:
        members.append(("base_padding", f"{padding} bytes", False))
    for statement in filter(None, (line.strip() for line in body[2].split(";"))):
        found = _MEMBER.fullmatch(statement)
        if found is None:
            raise ValueError(f"{header}: cannot read {statement!r} of struct {struct}")
        _, kind, star, names = found.groups()
        members += [(name.strip(), kind, bool(star)) for name in names.split(",")]
    return members


def _declares(header: str, struct: str) -> bool:
    return (
        re.search(rf"struct {struct}(?: : \w+)? \{{", (SOURCE_DIR / header).read_text(encoding="utf-8"))
        is not None
    )


def _type(kind: str) -> Any:
    return ctypes.c_ubyte * int(kind.split()[0]) if kind.endswith(" bytes") else _TYPES[kind]


_TYPES["MaskParams"] = Params("shared/params.cuh", "MaskParams").ctype
_TYPES["ScoreArray"] = Params("shared/score_params.cuh", "ScoreArray").ctype


def numpy_struct(header: str, struct: str) -> np.dtype[Any]:
    """The NumPy dtype of a C struct of integers that a header of ``cuda_src`` declares."""
    return np.dtype([(name, _NUMPY[kind]) for name, kind, _ in read_struct(header, struct)])


#: One record per work item, written by trace builds.
TRACE_RECORD = numpy_struct("shared/params.cuh", "TraceRecord")

SMALLEST_SCALE, LARGEST_SCALE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def softmax_scalars(scale: float, softcap: float | None) -> dict[str, float]:
    """``scale_log2`` and ``softcap`` of a parameter structure: scores in units of log2, before and, with a
    cap, after the hyperbolic tangent."""
    log2_e = math.log2(math.e)
    # A scale of 0 would turn the mask's -inf into NaN; the smallest normal float gives the same weights.
    if softcap is None:
        return {"scale_log2": max(scale * log2_e, SMALLEST_SCALE), "softcap": 0.0}
    # An infinite ratio would turn a score of 0 into NaN.
    return {"scale_log2": softcap * log2_e, "softcap": min(2 * log2_e * scale / softcap, LARGEST_SCALE)}


def strides_of(byte_strides: Sequence[int], itemsize: int) -> Strides:
    """Strides in elements of an array (batch, head, seqlen, head_dim)."""
    return Strides(*(s // itemsize for s in byte_strides[:3]))
