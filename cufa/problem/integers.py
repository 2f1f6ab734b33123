"""Arrays of integers as values: a mask's arrays per key or per sequence.

A host array is copied, immutable, and compares by its values. A GPU array is not copied and only kernels read it: its
owner may change it between calls, and two GPU arrays are equal if they are the same memory.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

#: JSON holds an array if its compressed values have at most this many base64 characters, else only its digest.
_MOST_CHARACTERS = 1 << 15

INT32 = np.iinfo(np.int32)


class Integers:
    """A frozen int32 array."""

    def __init__(self, array: Any, shape: tuple[int, ...] = (), digest: str = "") -> None:
        """``array``: NumPy integers that int32 holds, or a CuPy array of int32. None: JSON holds only ``shape`` and
        ``digest``."""
        self.on_gpu = array is not None and not isinstance(array, np.ndarray)
        if isinstance(array, np.ndarray):
            array = np.array(array, np.int32, order="C")
            array.flags.writeable = False
        self._array = array
        self.shape = shape if array is None else tuple(array.shape)
        self._given_digest = digest

    def __reduce__(self) -> Any:
        """A copy that pickle makes is frozen too."""
        return Integers, (self._array, self.shape, self._given_digest)

    @property
    def array(self) -> Any:
        """The NumPy or CuPy array. Raises ValueError if JSON held only its digest."""
        if self._array is None:
            raise ValueError(
                f"the numbers of this mask were too many to be stored (digest {self.digest}): "
                "make the mask anew with cufa.masks"
            )
        return self._array

    @property
    def known(self) -> bool:
        """The values are on the host."""
        return self._array is not None and not self.on_gpu

    @property
    def values(self) -> npt.NDArray[np.int32]:
        """The values. Raises ValueError if they are not on the host."""
        if self.on_gpu:
            raise ValueError(
                "the mask's numbers are on a GPU, where kernels alone read them: mask.on_host() brings them here"
            )
        values: npt.NDArray[np.int32] = self.array
        return values

    @functools.cached_property
    def starts(self) -> npt.NDArray[np.intp]:
        """Places along the last axis where some value differs from its left neighbour, and place 0. Masks of documents
        have few."""
        return np.flatnonzero(self._differs)

    @property
    def _differs(self) -> npt.NDArray[np.bool_]:
        rows = self.values.reshape(math.prod(self.shape[:-1]), self.shape[-1])
        differs = np.ones(self.shape[-1], bool)
        np.any(rows[:, 1:] != rows[:, :-1], axis=0, out=differs[1:])
        return differs

    @functools.cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits: a hash of the values; for a GPU array, of its address."""
        if self._array is None:
            return self._given_digest
        if self.on_gpu:
            words = f"{self._array.data.device_id} {self._array.data.ptr} {self.shape}".encode()
            return hashlib.blake2b(words, digest_size=8).hexdigest()
        starts, values = self.starts, self.values
        values = values[..., starts] if 2 * len(starts) < self.shape[-1] else values
        words = str(self.shape).encode() + np.packbits(self._differs).tobytes() + values.tobytes()
        return hashlib.blake2b(words, digest_size=8).hexdigest()

    def on_host(self) -> Integers:
        return Integers(self._array.get()) if self.on_gpu else self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Integers):
            return NotImplemented
        return self is other or (self.on_gpu, self.digest) == (other.on_gpu, other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        where = " on a GPU" if self.on_gpu else "" if self._array is not None else " left out"
        return f"Integers{self.shape}{where} #{self.digest[:6]}"

    def as_json(self) -> dict[str, Any]:
        """The compressed values if they are short, else the digest."""
        summary = {"shape": list(self.shape), "digest": self.digest}
        if not self.known:
            return summary
        steps = np.diff(self.values, prepend=np.int32(0))  # steps wrap around, and so does their sum
        packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()
        if len(packed) > _MOST_CHARACTERS:
            return summary
        return {"shape": list(self.shape), "packed": packed}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Integers:
        if "packed" not in record:
            return Integers(None, tuple(record["shape"]), record["digest"])
        packed, size = record["packed"], 4 * math.prod(record["shape"])
        if len(packed) > _MOST_CHARACTERS:
            raise ValueError(
                f"packed has {len(packed):,} characters, at most {_MOST_CHARACTERS:,} are written"
            )
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(packed), size + 1)  # never more than the shape needs
        if len(content) != size:
            raise ValueError(f"packed unpacks to {len(content):,} bytes or more, not {size:,}")
        steps = np.frombuffer(content, np.int32)
        return Integers(np.cumsum(steps.reshape(record["shape"]), axis=-1, dtype=np.int32))
