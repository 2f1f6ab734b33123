"""Changes of scores before the softmax: the NumPy form and derivative of each. Device side:
``cuda_src/shared/softcap.cuh`` and ``alibi_sink.cuh``.

Order:

- A soft cap (Gemma 2) replaces a scaled score s by ``cap · tanh(s / cap)``: scores stay within ±cap, and their gradient
  is multiplied by ``1 - tanh²(s / cap)``.
- ALiBi (Press et al., 2022, section 3) subtracts ``slope · |i + δ - j|`` from the score of query i and key j, with a
  slope per query head. δ is the mask's (:meth:`cufa.problem.mask_family.Mask.shift`), by default seqlen_k - seqlen_q.
  It enters the gradients of q, k and v through the weights only; slopes have no gradient.
- The mask.
- A sink (gpt-oss) is a logit of each query head that joins the softmax denominator, and so the log-sum-exp; it has no
  value vector. Its gradient is ``-Σ exp(sink - lse) · (rowsum(dO ∘ O) - dlse)`` over all rows. It enters the gradients
  of q, k and v through the log-sum-exp only. A row that sees no key gives zeros and lse = sink.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Finite slopes and sinks are clamped to ±MAX_NUMBER: times log2(e), and times a distance, they still fit float32.
MAX_NUMBER = 1e30

#: With a fixed maximum m, a row's sum of weights 2^(s - m) must lie between these powers of two
#: (cuda_src/decode/maximum.cuh): then no weight has overflowed, and underflow is below rounding. Half: weights are
#: float16; wide: bfloat16 or float32.
_HALF_SUMS, _WIDE_SUMS = (-4, 15), (-90, 64)

#: (c, largest U), in units of log2: if scores are bounded by U, up to the largest U, the fixed maximum is m = U - c.
_HALF_BOUND, _WIDE_BOUND = (7.0, 5.5), (32.0, 61.0)


def safe_sums(half: bool) -> tuple[int, int]:
    """Least and greatest sum of weights, as powers of two. ``half``: weights are float16."""
    return _HALF_SUMS if half else _WIDE_SUMS


def bound_limits(half: bool) -> tuple[float, float]:
    """(what is subtracted from a bound, the largest bound), as powers of two."""
    return _HALF_BOUND if half else _WIDE_BOUND


def bounded(x: Any) -> Any:
    """Slopes or sinks with finite values within ±:data:`MAX_NUMBER`."""
    return np.where(np.isfinite(x), np.clip(x, -MAX_NUMBER, MAX_NUMBER), x)


def softcapped(s: Any, cap: float) -> Any:
    """``cap · tanh(s / cap)``, in s's own precision."""
    return np.tanh(s / s.dtype.type(cap)) * s.dtype.type(cap)


def softcapped_in_place(s: Any, cap: float) -> Any:
    """As :func:`softcapped`, in s's own memory."""
    s /= s.dtype.type(cap)
    np.tanh(s, out=s)
    s *= s.dtype.type(cap)
    return s


def softcap_derivative(capped: Any, cap: float) -> Any:
    """d softcapped(s) / d s, from softcapped(s)."""
    return 1 - (capped / capped.dtype.type(cap)) ** 2


def distances(rows: Any, keys: Any, shift: int, dtype: Any) -> Any:
    """ALiBi's distances ``|i + δ - j|``, (rows, keys)."""
    return np.abs(np.subtract.outer(np.asarray(rows) + shift, np.asarray(keys))).astype(dtype)


def with_sink(m: Any, l: Any, sink: Any) -> tuple[Any, Any]:
    """A row's maximum and sum of exponentials with the sink's logit included; a sink of -inf changes nothing."""
    m_new = np.maximum(m, sink)
    shift = np.where(m_new == -np.inf, 0, m_new)
    return m_new, l * np.exp(m - shift) + np.exp(sink - shift)


def sink_gradient(sink: Any, lse: Any, delta: Any) -> Any:
    """dsink (heads,), from the log-sum-exp, which includes the sink, and delta = rowsum(dO ∘ O) - dlse, (heads,
    rows)."""
    nothing = np.isneginf(lse)  # the sink is -inf too, or the row is padding
    weight = np.exp(sink[:, None] - np.where(nothing, np.inf, lse))
    return -(weight * np.where(nothing, 0, delta)).sum(axis=-1)
