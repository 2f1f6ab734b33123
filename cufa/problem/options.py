"""The keywords that the public calls share, as one value."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np

from .booleans import mask_of_booleans
from .checks import check_flag, check_number, check_window, is_device_array, shown
from .columns import Chunks
from .mask import CAUSAL, FULL, Band, Mask
from .problem import default_scale
from .score_function import Score
from .scores import MAX_NUMBER

#: The smallest soft cap: kernels read smaller float32 numbers as 0.
_SMALLEST = float(np.finfo(np.float32).tiny)

#: The largest soft cap. Kernels compute tanh to 2e-7, so scores to 2e-7 · cap: up to this cap the error is below the
#: rounding of 16-bit inputs.
MAX_SOFTCAP = 10_000

#: The largest scale that float32 holds after multiplication by log2(e).
MAX_SCALE = float(np.finfo(np.float32).max) / math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Options:
    """The keywords of a call that are not arrays. Public signatures are written out; all code after them passes this
    object. Raises TypeError or ValueError for an invalid soft cap or number of splits."""

    mask: Mask = FULL
    """The mask of ``causal``, ``window`` and ``mask``: :func:`resolve_mask`."""
    softcap: float | None = None
    scale: float | None = None
    precision: str | None = None
    layout: str = "bhsd"
    algorithm: str = "auto"
    """Decode: the schedule."""
    num_splits: int | None = None
    deterministic: bool = False
    accumulate: str = "auto"
    score: Score | None = None
    gradients: tuple[str, ...] = ()
    """Backward: arrays of the score function whose gradients are returned."""
    dropped: int = 0
    """Dropped weights per 256, on average: :func:`~cufa.problem.dropout.resolve_dropout`."""
    softmax_max: str | float = ""
    """Decode: :attr:`~cufa.problem.problem.Problem.softmax_max`."""
    invariant: bool = False

    @classmethod
    def of(
        cls, causal: Any, window: Any, mask: Any, *options: Any, accumulate: Any = None, **more: Any
    ) -> Options:
        """The options of a call's keywords. ``causal``, ``window`` and ``mask`` make one mask; ``options`` and ``more``
        are the other fields. Raises TypeError or ValueError, naming the argument."""
        found = cls(resolve_mask(causal, window, mask), *options, **more)
        return dataclasses.replace(found, accumulate=check_accumulate(accumulate))

    def __post_init__(self) -> None:
        object.__setattr__(self, "softcap", check_softcap(self.softcap))
        object.__setattr__(self, "num_splits", check_num_splits(self.num_splits))


def read_forward(return_lse: Any, *arguments: Any, **more: Any) -> tuple[tuple[str, ...], Options]:
    """The results and the options that keywords of a forward call ask for. ``arguments`` and ``more``: as for
    :meth:`Options.of`."""
    wanted = ("out", "lse") if check_flag("return_lse", return_lse) else ("out",)
    return wanted, Options.of(*arguments, **more)


def check_accumulate(accumulate: Any) -> str:
    """ "auto", "tile", "row" or a number of tiles; None is "auto" and 1 is "tile". Raises ValueError."""
    names = {None: "auto", 1: "tile", "tile": "tile", "row": "row"}
    if (accumulate is None or type(accumulate) in (int, str)) and accumulate in names:
        return names[accumulate]
    if type(accumulate) is int and 1 < accumulate < 2**20:
        return str(accumulate)
    raise ValueError(
        f"accumulate={accumulate!r} is not possible: products with V are added in float32 after each tile ('tile' or "
        "1), after a number of tiles, or after all tiles of a row ('row'); None decides by length"
    )


def check_softmax_max(x: Any) -> str | float:
    """ "" for None, "bound", or a finite number. Raises TypeError or ValueError otherwise."""
    if x is None or (isinstance(x, str) and x == "bound"):
        return x or ""
    value = check_number("softmax_max", x, "'bound', a number, an array (heads,) or None")
    if not abs(value) <= MAX_NUMBER:
        raise ValueError(
            f"softmax_max={x!r} must be finite, within ±{MAX_NUMBER:g}: scaled scores are compared with it"
        )
    return value


def check_num_splits(num_splits: Any) -> int | None:
    """An int from 1 up, or None. Raises TypeError or ValueError otherwise."""
    if num_splits is None:
        return None
    if isinstance(num_splits, bool) or not isinstance(num_splits, (int, np.integer)):
        raise TypeError(f"num_splits must be an int or None, not {type(num_splits).__qualname__}")
    if num_splits < 1:
        raise ValueError(
            f"num_splits={num_splits} is not possible; use 1 or more, or None for the planner's choice"
        )
    return int(num_splits)


def check_softcap(softcap: Any) -> float | None:
    """A cap as a number, or None. Raises TypeError or ValueError naming the argument."""
    if softcap is None:
        return None
    value = check_number("softcap", softcap, "a number above 0 or None")
    if not _SMALLEST <= value < math.inf:
        raise ValueError(f"softcap={softcap!r} must be finite and above 0, in float32; for no cap pass None")
    if value > MAX_SOFTCAP:
        raise ValueError(
            f"softcap={softcap!r} must be at most {MAX_SOFTCAP:,}: kernels compute scores to 2e-7 of the cap; for no "
            "cap pass None"
        )
    return value


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return default_scale(head_dim)
    value = check_number("scale", scale, "a number or None")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"scale={value} must be finite and at least 0; to negate the scores, negate q")
    if value > MAX_SCALE:
        raise ValueError(
            f"scale={value} is too large: kernels multiply by it in float32, in units of log2, so it is at most "
            f"{MAX_SCALE:.4g}; scale q instead"
        )
    return value


def resolve_precision(dtype: str, precision: str | None) -> str:
    """Problem.precision for a dtype. None for float32 means "tf32" if CuPy's CUPY_TF32=1 is set."""
    if dtype != "float32":
        if precision is not None:
            raise ValueError(
                f"precision={precision!r} is a choice for float32 inputs only; {dtype} takes precision=None"
            )
        return "native"
    if precision is None:
        return "tf32" if os.environ.get("CUPY_TF32") == "1" else "float32"
    if not isinstance(precision, str) or precision not in ("float32", "tf32"):
        raise ValueError(f"precision={precision!r} is not known; use None, 'float32' or 'tf32'")
    return precision


def resolve_mask(causal: Any, window: Any, mask: Any) -> Mask:
    """One mask from the arguments of a call.

    Raises TypeError or ValueError, naming the argument, for invalid values and for contradictions.
    """
    causal = check_causal(causal)
    if mask is not None and not isinstance(mask, Mask):
        if not (isinstance(mask, np.ndarray) or is_device_array(mask)) or mask.dtype != bool:
            raise TypeError(
                "mask must be made by cufa.masks, such as cufa.masks.window(1023, 0), or be a NumPy or CuPy array of "
                f"booleans, or None, not {shown(mask)}: cufa.masks.from_dense makes one of booleans"
            )
        if mask.ndim == 3:
            raise ValueError(
                f"mask has shape {mask.shape}: the first of three axes may be sequences or heads; pass "
                "mask[:, None] or mask[None]"
            )
        mask = mask_of_booleans(mask, "mask", spreads=True)
    if isinstance(mask, Mask):
        for name, given in (("causal", causal or None), ("window", window)):
            if given is not None:
                raise ValueError(f"mask={mask} and {name}={given} both say what is seen: pass one of them")
        return mask
    return band_of(causal, window)


def band_of(causal: bool, window: Any, diagonal: str | int = "bottom-right") -> Band:
    """The band of ``causal`` and ``window``. Raises TypeError or ValueError for an invalid window or a
    contradiction."""
    left, right = (None, None) if window is None else check_window(window)
    if causal and right not in (None, 0):
        raise ValueError(
            f"window={window!r} lets queries see keys after their own, but causal=True hides them: pass "
            f"window=({left}, 0), or causal=False"
        )
    found = Band(left, 0 if causal else right, diagonal)
    return next((known for known in (FULL, CAUSAL) if known == found), found)


def decode_mask(window: Any, mask: Any = None) -> Mask:
    """The mask of a decoding call, whose queries are the last tokens of their sequence: causal, also with a window,
    with exempt tokens, or in chunks.

    Raises TypeError or ValueError, naming the argument, for other masks.
    """
    if mask is not None:
        found = resolve_mask(False, window, mask)
        is_aligned = isinstance(found, (Band, Chunks)) and found.diagonal == "bottom-right"
        if not is_aligned or (isinstance(found, Band) and found.right != 0):
            raise ValueError(
                f"mask={mask}: the queries of a decoding call are the last tokens of their sequence; it takes "
                "cufa.masks.causal(), window(left, 0), prefix, streaming, global_window(tokens, left, 0) and chunks, "
                "with the default diagonal; for a cache without pages cufa.flash_attention takes every mask"
            )
        return found
    if window is None:
        return CAUSAL
    left, right = check_window(window)
    if right not in (None, 0):
        raise ValueError(f"window={window!r}: decoding is causal, so right must be 0 or None")
    return Band(left, 0)


def check_causal(causal: Any) -> bool:
    return check_flag("causal", causal, ": other masks go to mask=, such as cufa.masks.window")
