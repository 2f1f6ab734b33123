"""The short cut for calls on CuPy arrays like one that was seen before.

Such a call has passed every check, its kernel is compiled, its shapes and strides are packed. Python time is
the host cost of a call: this path is what keeps it under PyTorch's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays

_MAX_SEEN = 1024
_seen: dict[tuple[Any, ...], SeenCall] = {}


def seen_before(key: tuple[Any, ...] | None) -> SeenCall | None:
    return _seen.get(key) if key is not None else None


def remember(key: tuple[Any, ...], call: SeenCall) -> None:
    if len(_seen) >= _MAX_SEEN:
        _seen.clear()
    _seen[key] = call


class SeenCall:
    """A call like one that went through every check: only addresses are new.

    ``launch`` takes the addresses of the inputs (0 for those that are None), of out and of lse. ``check(out,
    inputs)`` raises when memory that is written is also read or written through another argument: called for
    arrays whose ranges meet, once per relative offset of the two arrays. ``written`` names the inputs
    that the call writes to.
    """

    def __init__(
        self,
        launch: Callable[..., None],
        inputs: dict[str, Any],
        out: Any,
        lse_shape: tuple[int, ...],
        check: Callable[[Any, dict[str, Any]], None],
        written: Sequence[str] = (),
    ) -> None:
        import cupy

        self._cupy = cupy  # importing it again would cost every call 0.1 µs
        self._launch, self._check, self._names = launch, check, tuple(inputs)
        self._out_shape, self._dtype, self._lse_shape = out.shape, out.dtype, lse_shape
        self._device_id = out.data.device_id
        places = [self._names.index(name) for name in written]
        self._pairs = _pairs(list(inputs.values()), places)
        self._pairs_with_out = _pairs([*inputs.values(), out], [len(inputs), *places])
        self._apart: set[tuple[int, int, int]] = set()

    def __call__(self, inputs: Sequence[Any], out: Any, return_lse: bool) -> Any:
        cupy = self._cupy
        # What is allocated here is on the current device; a launch sees to it itself.
        if (out is None or return_lse) and cupy.cuda.runtime.getDevice() != self._device_id:
            with cupy.cuda.Device(self._device_id):
                return self(inputs, out, return_lse)
        addresses = [0 if x is None else x.data.ptr for x in inputs]
        if out is not None:
            addresses.append(out.data.ptr)
            self._check_overlap(self._pairs_with_out, addresses, inputs, out)
        else:  # what is yet to be allocated shares no memory
            self._check_overlap(self._pairs, addresses, inputs, out)
            out = cupy.ndarray(self._out_shape, self._dtype)
            addresses.append(out.data.ptr)
        if return_lse:
            lse = cupy.ndarray(self._lse_shape, np.float32)
            self._launch(*addresses, lse.data.ptr)
            return out, lse
        self._launch(*addresses, 0)
        return out

    def _check_overlap(
        self, pairs: list[_Pair], addresses: list[int], inputs: Sequence[Any], out: Any
    ) -> None:
        for i, j, low, high in pairs:
            if low < addresses[j] - addresses[i] < high:
                how = i, j, addresses[j] - addresses[i]
                if how not in self._apart:
                    self._check(out, dict(zip(self._names, inputs, strict=True)))
                    if len(self._apart) >= _MAX_SEEN:
                        self._apart.clear()
                    self._apart.add(how)


_Pair = tuple[int, int, int, int]
"""Arrays i and j, and the differences of their addresses between which their ranges meet."""


def _pairs(arrays_: list[Any], written: Sequence[int]) -> list[_Pair]:
    """Each array that is written, with each other one. Those that are None or empty meet nobody."""
    spans = {}
    for i, x in enumerate(arrays_):
        if x is not None and x.size:
            low, high = arrays.byte_range(x)
            spans[i] = low - arrays.address(x), high - arrays.address(x)
    found = {}
    for i in written:
        for j in spans:
            if i in spans and i != j and (j, i) not in found:
                found[i, j] = (i, j, spans[i][0] - spans[j][1], spans[i][1] - spans[j][0])
    return list(found.values())


def typed(window: Any) -> Any:
    """A window with the types of its sides: to a dict (1.0, 0) would be (1, 0)."""
    if type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int:
        return window  # what nearly every call passes, without a copy
    return (*window, *map(type, window)) if type(window) in (tuple, list) else window


def signature(
    inputs: Sequence[Any], out: Any, *options: Any, small: Sequence[Any] = ()
) -> tuple[Any, ...] | None:
    """What decides plan, code and strides of a call on CuPy arrays, all but the first of which may be left out
    (None); None for a call on anything else.

    How wide copies can be follows from the addresses of ``inputs`` and ``out``; ``small`` arrays are read
    number by number.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or type(inputs[0]) is not cupy.ndarray:
        return None
    try:
        hash(options)
    except TypeError:  # the checks will say what is wrong with them
        return None
    ndarray = cupy.ndarray
    key: list[Any] = [options]
    for group in (inputs, small):
        low_bits = 0
        for x in group:
            if type(x) is ndarray:
                memory = x.data
                low_bits |= memory.ptr
                key += (x.shape, x.strides, x.dtype, memory.device_id)
            elif x is None:
                key.append(None)
            else:
                return None
        key.append(low_bits & 15 if group is inputs else low_bits & 3)
    if out is not None:
        if type(out) is not ndarray:
            return None
        memory = out.data
        key.append((out.shape, out.strides, out.dtype, memory.device_id, memory.ptr & 15))
    key.append(os.environ.get("CUPY_TF32") if key[3].char == "f" else None)
    return tuple(key)
