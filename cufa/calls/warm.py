"""The warm call: CuPy arrays with the layout of an earlier call.

Such a call has passed every check, its kernel is compiled, its shapes and strides are packed. Python time is
the host cost of a call: this path is what keeps it under PyTorch's.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..plan.operation import Operation
from . import arrays

if TYPE_CHECKING:
    from .call import Call

_MAX_CALLS = 1024
_calls: dict[tuple[Any, ...], WarmCall] = {}
_evicted: dict[tuple[Any, ...], WarmCall] = {}
"""Evicted calls, kept for one generation: their kernels may still read mask buffers that the call owns."""


def remember(key: tuple[Any, ...], call: WarmCall) -> None:
    if len(_calls) >= _MAX_CALLS:
        _evicted.clear()
        _evicted.update(_calls)
        _calls.clear()
    _calls[key] = call


_calls_of_parent: list[dict[tuple[Any, ...], WarmCall]] = []


def forget() -> None:
    """In a fork, drop earlier calls, which cannot be launched there. Keep their objects: CUDA cannot free memory in a
    fork."""
    _calls_of_parent.append(dict(_calls))
    _calls.clear()


def find(
    operation: Operation, given: Sequence[Any], options: tuple[Any, ...]
) -> tuple[WarmCall | None, tuple[Any, ...] | None, list[int]]:
    """Returns (an earlier call with the same key or None, the key, the addresses of the operands). The key holds all
    that decides plan, code and strides. A call with an array that is not CuPy's has neither key nor addresses.

    ``given`` are the operands in launch order, None if left out or to be allocated; the optional operands are appended
    only if one of them is given. The first operand is never None. Modulo 16, the addresses of strided operands decide
    how wide copies are; other operands are read element by element.
    """
    ndarray = _ndarray
    if type(given[0]) is not ndarray:
        ndarray = _find_ndarray()
        if type(given[0]) is not ndarray:
            return _NOTHING
    key: list[Any] = [operation.name, options]
    addresses: list[int] = []
    wide = narrow = 0
    for x, strided in zip(given, operation.strided):  # noqa: B905  (`strict` costs 0.1 µs, and lengths may differ)
        if x is None:
            key.append(None)
            addresses.append(0)
        elif type(x) is ndarray:
            memory = x.data
            address = memory.ptr
            addresses.append(address)
            if strided:
                wide |= address
            else:
                narrow |= address
            # The strides of a C-contiguous array follow from its shape; reading them costs 0.1 µs.
            key.append((x.shape, x._c_contiguous or x.strides, x.dtype, memory.device_id))
        else:
            return _NOTHING
    key.append((wide & 15) + 16 * (narrow & 3))
    if given[0].dtype.char == "f":
        key.append(os.environ.get("CUPY_TF32"))
    found = tuple(key)
    try:
        return _calls.get(found), found, addresses
    except TypeError:  # an option that is not hashable: the checks refuse it
        return _NOTHING


def _find_ndarray() -> Any:
    """cupy.ndarray, or None before anything has imported CuPy. Cached: a lookup in every call costs 0.1 µs."""
    global _ndarray
    cupy = sys.modules.get("cupy")
    _ndarray = getattr(cupy, "ndarray", None)  # a folder named cupy in the path has no ndarray
    return _ndarray


_ndarray: Any = None
_NOTHING: tuple[None, None, list[int]] = (None, None, [])


class WarmCall:
    """A checked call that can be repeated with other addresses.

    ``launch`` takes the addresses of all operands in launch order, 0 for None, with the arrays' device current.
    ``call`` is the checked call, ``results`` are the results that it returned. If the address ranges of two arrays
    intersect, :meth:`~cufa.calls.call.Call.check_memory` checks them once per relative offset.
    """

    def __init__(self, launch: Callable[[list[int]], None], call: Call, results: Mapping[str, Any]) -> None:
        import cupy

        names = [x.name for x in call.operation.all_operands]
        given = {**call.inputs, **results}
        made = [name for name in results if call.results[name] is None]
        self._launch, self._check, self._names = launch, call.check_memory, names
        # Attributes of this object: a lookup in their modules costs every call 0.1 µs.
        self._get_device, self._device, self._allocate = (
            cupy.cuda.runtime.getDevice,
            cupy.cuda.Device,
            cupy.ndarray,
        )
        self._device_id = call.first[1].data.device_id
        self._made = [(names.index(name), results[name].shape, results[name].dtype) for name in made]
        self._returned = operator.itemgetter(*map(names.index, results))  # one result, or a tuple of several
        # New results share no memory.
        there = [None if name in made else given.get(name) for name in names]
        self._pairs = _pairs(there, [names.index(name) for name in (*results, *call.written)])
        self._apart: set[tuple[int, int, int]] = set()
        self._checked: list[int] = []  # the last addresses that passed

    def __call__(self, given: Sequence[Any], addresses: list[int]) -> Any:
        # Results are allocated on the current device, and kernels are launched there.
        if self._get_device() != self._device_id:
            with self._device(self._device_id):
                return self(given, addresses)
        if self._pairs and addresses != self._checked:
            for i, j, low, high in self._pairs:
                if low < addresses[j] - addresses[i] < high:
                    self._check_overlap(i, j, addresses[j] - addresses[i], given)
            self._checked = list(addresses)
        if self._made:
            given = list(given)
            for place, shape, dtype in self._made:
                x = given[place] = self._allocate(shape, dtype)
                addresses[place] = x.data.ptr
        self._launch(addresses)
        return self._returned(given)

    def _check_overlap(self, i: int, j: int, distance: int, given: Sequence[Any]) -> None:
        if (i, j, distance) not in self._apart:
            self._check(dict(zip(self._names, given, strict=False)))
            if len(self._apart) >= _MAX_CALLS:
                self._apart.clear()
            self._apart.add((i, j, distance))


_Pair = tuple[int, int, int, int]
"""Arrays i and j, and bounds of address[j] - address[i]: between them the arrays' address ranges intersect."""


def _pairs(arrays_: list[Any], written: Sequence[int]) -> list[_Pair]:
    """Each written array with each other array, except those that are None or empty."""
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
    """A window with the types of its sides: the lookup must tell (1.0, 0) from (1, 0), which are equal."""
    if type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int:
        return window  # the usual case, without a copy
    return (*window, *map(type, window)) if type(window) in (tuple, list) else window
