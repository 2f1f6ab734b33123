"""Masks and score functions by name: operators of PyTorch and XLA take text as an argument, but no Python object."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import Any

_LATEST = 1024
"""Most objects that are kept and not pinned."""

_kept: OrderedDict[str, Any] = OrderedDict()
_name_of: dict[int, str] = {}
"""By ``id(x)``, which stays valid while x is in ``_kept``."""
_pinned: set[str] = set()
_numbers = itertools.count()
_lock = threading.Lock()


def keep(x: Any, pinned: bool, what: str = "mask") -> str:
    """The name of x, a mask or a score function, in this process. Pinned objects (of compiled functions) are kept
    forever, others while they are among the latest 1,024."""
    with _lock:
        name = _name_of.setdefault(id(x), "")
        if not name:
            name = _name_of[id(x)] = f"{what} {next(_numbers)}"
            _kept[name] = x
        if pinned:
            _pinned.add(name)
        elif name not in _pinned:
            _kept.move_to_end(name)
        if len(_kept) - len(_pinned) > _LATEST:
            oldest = next(x for x in _kept if x not in _pinned)
            del _name_of[id(_kept.pop(oldest))]
    return name


def kept(name: str) -> Any:
    """The object of a name. Raises LookupError if 1,024 others came after it, or if another process gave the name."""
    found = _kept.get(name)
    if found is None:
        raise LookupError(
            f"{name} is no longer kept: call attention again with the {name.split()[0]}, in the process that made it"
        )
    return found
