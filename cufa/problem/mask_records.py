"""Masks from JSON, in records and links: checked as the builders in :mod:`cufa.masks` check their arguments."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

from .checks import check_count, check_diagonal, check_from_0, check_sizes, check_window, shown
from .combined import SIGNS
from .integers import Integers
from .mask import Band, Mask


def read_mask(record: Any) -> Mask:
    """The mask of a record from :meth:`cufa.masks.Mask.as_json`. Raises ValueError naming the field, its value and the
    cure."""
    try:
        family = _family(record)
        fields = {name: _read(name, x) for name, x in record.items() if name != "family"}
        _check_names(family, set(fields))
        if issubclass(family, Band):
            check_window((fields.get("left"), fields.get("right")), "(left, right)")
        return family(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _family(record: Any) -> type[Mask]:
    known = ", ".join(Mask.families)
    if not isinstance(record, dict):
        raise TypeError(f"a mask's record is a JSON object with one family of {known}, not {shown(record)}")
    family = record.get("family")
    if not isinstance(family, str) or family not in Mask.families:
        raise ValueError(f"family={family!r} of a mask's record is not known; use one of {known}")
    return Mask.families[family]


def _check_names(family: type[Mask], given: set[str]) -> None:
    fields = dataclasses.fields(family)  # type: ignore[arg-type]
    known = {x.name: x.default is dataclasses.MISSING for x in fields}
    what = f"a mask of family {family.__name__.lower()}"
    for name in sorted(given - known.keys()):
        raise ValueError(f"{what} has no field {name!r}; it has {', '.join(known)}")
    for name, needed in known.items():
        if needed and name not in given:
            raise ValueError(f"{what} needs the field {name!r}, which its record lacks")


def _read(name: str, value: Any) -> Any:
    if name in _READERS:
        return _READERS[name](name, value)
    if not isinstance(value, dict):
        return value
    return read_mask(value) if "family" in value else _integers(name, value)


def _numbers(name: str, value: Any) -> int | Integers:
    """One integer for all sequences, or one per sequence."""
    if not isinstance(value, dict):
        return check_count(name, value)
    found = _integers(name, value)
    if len(found.shape) != 1:
        raise ValueError(f"{name} has shape {found.shape}: it takes (batch,)")
    if found.known:
        check_from_0(name, found.values)
    return found


def _array(axes: str, *firsts: int) -> Callable[[str, Any], Integers]:
    """The reader of an array of four axes. ``firsts``: sizes that the first axis may have; none given: any."""

    def read(name: str, value: Any) -> Integers:
        found = _integers(name, value)
        if len(found.shape) != 4 or (firsts and found.shape[0] not in firsts):
            raise ValueError(f"{name} has shape {found.shape}: it takes {axes}")
        return found

    return read


def _integers(name: str, value: Any) -> Integers:
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        raise TypeError(f"{name} is {shown(value)}: it takes an array's record, shape and packed or digest")
    shape = check_sizes(name, tuple(value["shape"]))
    content = value.get("packed", value.get("digest"))
    if not isinstance(content, str):
        raise TypeError(f"{name}: packed, or digest, of its record must be text, not {shown(content)}")
    try:
        return Integers.from_json({**value, "shape": shape})
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{name}: packed of its record does not hold {shape} integers: {error}") from error


def _band(name: str, value: Any) -> Band:
    found = read_mask(value)
    if not isinstance(found, Band):
        raise ValueError(f"{name} is {found}: it takes a mask of family band")
    return found


def _operation(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in SIGNS:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(SIGNS)}")
    return value


def _parts(name: str, value: Any) -> tuple[Mask, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        raise ValueError(f"{name} is {shown(value)}: it takes the records of one mask or two")
    return tuple(map(read_mask, value))


def _title(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {shown(value)}")
    return value


def _matrix(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{name} is {shown(value)}: it takes the lengths [seqlen_q, seqlen_k], or null")
    return check_sizes(name, value)


#: Readers of a field's value, for all families.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("diagonal", "rows"), lambda name, value: check_diagonal(value, name)),
    "size": lambda name, value: check_count(name, value, least=1),
    "prefix": _numbers, "keep": _numbers, "global_tokens": _numbers,
    "matrix": _matrix, "band": _band, "title": _title, "keys": check_count, "operation": _operation, "parts": _parts,
    "intervals": _array("(2 or 4, batch or 1, kv_heads or 1, seqlen_k)", 2, 4),
    "by_row": _array("(batch or 1, kv_heads or 1, seqlen_q, words)"),
}  # fmt: skip
