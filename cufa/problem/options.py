"""The keywords that the public calls share, as one value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .mask import FULL, Mask
from .scores import check_softcap


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call asks for besides its arrays. Public signatures are written out; everything behind them passes this
    object. Raises TypeError or ValueError for a soft cap or a number of splits that is none."""

    mask: Mask = FULL
    """What ``causal``, ``window`` and ``mask`` come to."""
    softcap: float | None = None
    scale: float | None = None
    precision: str | None = None
    layout: str = "bhsd"
    algorithm: str = "auto"
    """Decode: the schedule."""
    num_splits: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "softcap", check_softcap(self.softcap))
        object.__setattr__(self, "num_splits", check_num_splits(self.num_splits))


def check_num_splits(num_splits: Any) -> int | None:
    """An int or None. Raises TypeError or ValueError for what is no number of splits."""
    if num_splits is None:
        return None
    if isinstance(num_splits, bool) or not isinstance(num_splits, (int, np.integer)):
        raise TypeError(f"num_splits must be an int or None, not {type(num_splits).__qualname__}")
    if num_splits < 1:
        raise ValueError(
            f"num_splits={num_splits} is not possible; use 1 or more, or None for the planner's choice"
        )
    return int(num_splits)
