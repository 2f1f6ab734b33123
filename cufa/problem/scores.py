"""Changes of scores before the softmax. Each is here once: its NumPy form and its derivative; the device pair
is in ``cuda_src/shared/softcap.cuh`` and ``alibi_sink.cuh``.

In this order:

- A soft cap (Gemma 2) replaces a scaled score s by ``cap · tanh(s / cap)``: scores stay within ±cap, and their gradient
  is multiplied by ``1 - tanh²(s / cap)``.
- ALiBi (Press et al., 2022) takes ``slope · |i + δ - j|`` off the score of query i and key j, with a slope for each
  query head: the further, the less. δ is the mask's (:meth:`cufa.problem.mask_family.Mask.shift`), seqlen_k - seqlen_q
  unless it says otherwise. Gradients of q, k and v see it in the weights alone; slopes are given none.
- The mask.
- A sink (gpt-oss) is a logit of each query head that joins the sum of exponentials which a row is divided by, and so
  the log-sum-exp, but brings no value. Its gradient is ``-Σ exp(sink - lse) · (rowsum(dO ∘ O) - dlse)`` over all rows;
  those of q, k and v see it in the log-sum-exp alone. A row that sees no key gives zeros, and the sink as its
  log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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


def distances(rows: Any, keys: Any, shift: int, dtype: Any) -> Any:
    """ALiBi's ``|i + δ - j|``, (rows, keys), which slopes are multiplied by."""
    return np.abs(np.subtract.outer(np.asarray(rows) + shift, np.asarray(keys))).astype(dtype)


def with_sink(m: Any, l: Any, sink: Any) -> tuple[Any, Any]:
    """A row's maximum and sum of exponentials with one logit more. -inf changes nothing."""
    m_new = np.maximum(m, sink)
    shift = np.where(m_new == -np.inf, 0, m_new)
    return m_new, l * np.exp(m - shift) + np.exp(sink - shift)


def sink_gradient(sink: Any, lse: Any, delta: Any) -> Any:
    """Of each head, from the log-sum-exp with the sink in it and rowsum(dO ∘ O) - dlse, (heads, rows) each."""
    nothing = np.isneginf(lse)  # then the sink is -inf too, or the row lies past the end
    weight = np.exp(sink[:, None] - np.where(nothing, np.inf, lse))
    return -(weight * np.where(nothing, 0, delta)).sum(axis=-1)
