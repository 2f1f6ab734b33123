"""Element types of operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Element:
    """One kind of number."""

    name: str
    """Also the dtype's name where NumPy or ml_dtypes have the type."""
    itemsize: int
    """Bytes."""
    tensor_map_type: int | None
    """CU_TENSOR_MAP_DATA_TYPE_* for the copy engine; None: no kernel copies this element by TMA."""
    storage: str
    """NumPy dtype of arrays that hold it: e4m3 has none in CuPy and travels as bytes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that NumPy computes with."""
        return _dtype(self.name)


ELEMENTS = {
    element.name: element
    for element in (
        Element("float16", 2, 6, "float16"),
        Element("bfloat16", 2, 9, "bfloat16"),
        Element("float32", 4, None, "float32"),
        Element("float64", 8, None, "float64"),
        Element("float8_e4m3", 1, 0, "uint8"),
    )
}


@functools.cache
def _dtype(name: str) -> np.dtype[Any]:
    special = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3": ml_dtypes.float8_e4m3fn}
    dtype: np.dtype[Any] = np.dtype(special.get(name, name))
    return dtype
