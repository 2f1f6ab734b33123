"""One mask from the arguments causal, window and mask of the public calls."""

from __future__ import annotations

from typing import Any

from ..problem.checks import check_flag, check_window, shown
from ..problem.columns import Chunks
from ..problem.mask import CAUSAL, FULL, Band, Mask


def resolve_mask(causal: Any, window: Any, mask: Any) -> Mask:
    """The one mask that the arguments of a call come to.

    Raises TypeError or ValueError, naming the argument, for values that are none and for contradictions.
    """
    causal = check_causal(causal)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be made by cufa.masks, such as cufa.masks.window(1023, 0), or None, not {shown(mask)}: "
            "arrays of booleans are not taken"
        )
    if mask is not None:
        for name, given in (("causal", causal or None), ("window", window)):
            if given is not None:
                raise ValueError(f"mask={mask} and {name}={given} both say what is seen: pass one of them")
        return mask
    if window is None:
        return CAUSAL if causal else FULL
    left, right = check_window(window)
    if causal and right not in (None, 0):
        raise ValueError(
            f"window={window!r} lets queries see keys after their own, but causal=True hides them: pass "
            f"window=({left}, 0), or causal=False"
        )
    return Band(left, 0 if causal else right)


def decode_mask(window: Any, mask: Any = None) -> Mask:
    """Of a decoding call, whose queries are the last tokens of their sequence: causal, in a window or not, with tokens
    that are exempt from it, or in chunks.

    Raises TypeError or ValueError, naming the argument, for what is none.
    """
    if mask is not None:
        found = resolve_mask(False, window, mask)
        of_last_tokens = isinstance(found, (Band, Chunks)) and found.diagonal == "bottom-right"
        if not of_last_tokens or (isinstance(found, Band) and found.right != 0):
            raise ValueError(
                f"mask={mask}: the queries of a decoding call are the last tokens of their sequence; it takes "
                "cufa.masks.causal(), window(left, 0), prefix, streaming, global_window(tokens, left, 0) and chunks, "
                "with the default diagonal"
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
