"""Parts of an attention, each with its log-sum-exp, merged into one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def combine(out: npt.NDArray[Any], lse: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Merge along the first axis: out (parts, ..., head_dim), lse (parts, ...), in their own dtype and in the order of
    the parts."""
    with np.errstate(all="ignore"):
        m = lse.max(axis=0)
        m = np.where(m == -np.inf, 0, m)  # exp(-inf - 0) = 0, where exp(-inf + inf) would be NaN
        w = np.exp(lse - m)
        l = w.sum(axis=0)
        w = w[..., None]
        weighted = np.where(w == 0, 0, w * out)  # a part of weight 0 may hold NaN
        total = np.where(l == 0, 1, l)[..., None]
        return weighted.sum(axis=0) / total, m + np.log(l)
