"""Masks by name: operators of PyTorch and XLA take text as an argument, but no Python object."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

from .mask_family import Mask

_LATEST = 1024
"""Most masks that are kept and not pinned."""

_kept: OrderedDict[str, Mask] = OrderedDict()
_name_of: dict[int, str] = {}
"""By ``id(mask)``, which stays valid while the mask is in ``_kept``."""
_pinned: set[str] = set()
_numbers = itertools.count()
_lock = threading.Lock()


def keep(mask: Mask, pinned: bool) -> str:
    """The mask's name in this process. Pinned masks (of compiled functions) are kept forever, others while they are
    among the latest 1,024."""
    with _lock:
        name = _name_of.setdefault(id(mask), "")
        if not name:
            name = _name_of[id(mask)] = f"mask {next(_numbers)}"
            _kept[name] = mask
        if pinned:
            _pinned.add(name)
        elif name not in _pinned:
            _kept.move_to_end(name)
        if len(_kept) - len(_pinned) > _LATEST:
            oldest = next(x for x in _kept if x not in _pinned)
            del _name_of[id(_kept.pop(oldest))]
    return name


def kept(name: str) -> Mask:
    """The mask of a name. Raises LookupError if 1,024 others came after it, or if another process gave the name."""
    found = _kept.get(name)
    if found is None:
        raise LookupError(
            f"{name} is no longer kept: call attention again with the mask, in the process that made it"
        )
    return found
