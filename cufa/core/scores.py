"""Changes of scores before the softmax. Each is here once: its NumPy form and its derivative; the device pair
is in ``cuda_src/tiles/score.cuh``.

A soft cap (Gemma 2) replaces a scaled score s by ``cap · tanh(s / cap)``, before the mask: scores stay within
±cap, and their gradient is multiplied by ``1 - tanh²(s / cap)``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: The smallest cap that float32, which scores are computed in, can tell from 0.
_SMALLEST = float(np.finfo(np.float32).tiny)

#: Kernels compute tanh with an error of 2e-7, and so scores with one of 2e-7 times the cap: up to here that is less
#: than what 16-bit inputs round away.
MAX_SOFTCAP = 10_000


def softcapped(s: Any, cap: float) -> Any:
    """``cap · tanh(s / cap)``, in s's own precision."""
    return np.tanh(s / s.dtype.type(cap)) * s.dtype.type(cap)


def softcapped_in_place(s: Any, cap: float) -> Any:
    """The same, in s's own memory."""
    s /= s.dtype.type(cap)
    np.tanh(s, out=s)
    s *= s.dtype.type(cap)
    return s


def softcap_derivative(capped: Any, cap: float) -> Any:
    """d softcapped(s) / d s, from softcapped(s)."""
    return 1 - (capped / capped.dtype.type(cap)) ** 2


def check_softcap(softcap: Any) -> float | None:
    """A cap as a number, or None. Raises TypeError or ValueError naming the argument."""
    if softcap is None:
        return None
    try:
        if isinstance(softcap, (bool, np.bool_, str, bytes)):
            raise TypeError
        value = float(softcap)
    except (TypeError, ValueError):
        raise TypeError(f"softcap must be a number above 0 or None, not {softcap!r}") from None
    except OverflowError:
        value = math.inf
    if not _SMALLEST <= value < math.inf:
        raise ValueError(f"softcap={softcap!r} must be finite and above 0, in float32; for no cap pass None")
    if value > MAX_SOFTCAP:
        raise ValueError(
            f"softcap={softcap!r} must be at most {MAX_SOFTCAP:,}: kernels know scores to 2e-7 of the cap; for no cap "
            "pass None"
        )
    return value
