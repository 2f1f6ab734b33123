"""Keys and values of a cache, contiguous or in pages, tile by tile in the compute dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class CacheTiles:
    """Keys or values of a stack's heads, tile by tile in the compute dtype. Valid until the next tile."""

    def __init__(
        self, cache: Array, block_table: Array | None, batch: int, heads: slice, dtype: type[Any]
    ) -> None:
        self._cache, self._batch, self._heads = cache, batch, heads
        self._pages = None if block_table is None else block_table[batch]
        self._dtype = np.dtype(dtype)
        self._scratch = np.empty(0, dtype)

    def load(self, start: int, stop: int) -> Array:
        """(heads, stop - start, head_dim). Reads no slot and no entry of the block table past ``stop``."""
        if self._pages is None:
            return self._widened(self._cache[self._batch, self._heads, start:stop])
        size = self._cache.shape[2]
        first, last = start // size, -(-stop // size)
        slots = slice(start - first * size, stop - first * size)
        if last - first == 1:
            return self._widened(self._cache[self._pages[first], self._heads, slots])
        pages = self._cache[self._pages[first:last], self._heads].swapaxes(0, 1)
        heads, count, _, head_dim = pages.shape
        return self._widened(pages).reshape(heads, count * size, head_dim)[:, slots]

    def _widened(self, x: Array) -> Array:
        """x in the compute dtype; x itself if it has that dtype and strides that BLAS takes."""
        if (
            x.dtype == self._dtype
            and x.ndim == 3
            and x.flags.aligned
            and x.strides[1] >= x.shape[2] * x.itemsize
        ):
            return x
        if self._scratch.size < x.size:
            self._scratch = np.empty(x.size, self._dtype)
        wide = self._scratch[: x.size].reshape(x.shape)
        widen(x, wide)
        return wide


_SHIFTS = {"float16": (13, 2.0**112, 65504.0), "uint8": (20, 2.0**120, 448.0)}
"""float16 and e4m3 to float32: the shift that aligns the bits, the factor that corrects the exponent (of subnormal
numbers too), and the largest finite number: a larger result was inf or NaN."""


def widen(x: Array, wide: Array) -> None:
    """Convert. Shifts and a product take a fifth (float16) or an eighth (e4m3) of the time of NumPy's conversion,
    which is fast for bfloat16."""
    if str(x.dtype) in _SHIFTS and wide.dtype == np.float32:
        shift, factor, largest = _SHIFTS[str(x.dtype)]
        bits = wide.view(np.int32)
        np.left_shift(x.view(f"i{x.itemsize}"), shift, out=bits, dtype=np.int32)  # the sign is extended
        bits &= np.int32(~(((1 << 31 - shift) - (1 << 8 * x.itemsize - 1)) << shift))
        wide *= np.float32(factor)
        if -largest <= wide.min(initial=0) and wide.max(initial=0) <= largest:
            return
    np.copyto(wide, x.view(ml_dtypes.float8_e4m3fn) if x.dtype == np.uint8 else x)
