"""Errors of results: sampled rows against float64, computed on the arrays' device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..problem.checks import is_device_array
from ..problem.element import Element
from ..problem.lengths import DENSE
from ..problem.mask_family import Mask
from ..problem.problem import Problem
from ..problem.score_change import changed
from ..problem.scores import softcap_derivative, softcapped
from .distributions import NEEDLES, needle_keys

Arrays = Mapping[str, Any]
"""By role: q, k, v, o, or the operand's name."""
#: Most (sequence, key/value head) pairs that are checked; rows of each pair; rows for an :class:`Accuracy`.
_PAIRS, ROWS, MANY_ROWS = 8, 8, 128
_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)


Expected = dict[tuple[int, int, int], Any]
"""Rows of one result in float64, each of shape (head_dim,), by (batch, head, query or key)."""


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The differences of a result from float64 over the rows checked."""

    distribution: str
    """Name of the inputs' distribution."""
    rmse: float
    largest: float
    bias: float
    """Σ|o| over Σ|o| in float64, minus 1."""
    quantiles: dict[str, float]
    """Quantiles of absolute differences. A key is the share of smaller differences, as text."""
    found: float | None = None
    """Share of rows whose result has its largest dot product with the value of the row's own needle, among all needles.
    None: the inputs have no needles (:mod:`cufa.measure.distributions`)."""
    exact_found: float | None = None
    """As ``found``, for the float64 result."""


def sampled_reference(
    problem: Problem, arrays: Arrays, lengths: tuple[int, ...] | None = None, seed: int = 0, count: int = ROWS
) -> dict[str, Expected]:
    """Rows of each result in float64, by role, for random pairs of a sequence and a key/value head. A pair gives
    ``count`` rows: the first, the last, and random others.

    ``arrays`` as :meth:`cufa.measure.inputs.Inputs.arrays` makes them.
    """
    rng, found = np.random.default_rng(seed), dict[str, Expected]()
    rows_of = _gradients if "dout" in arrays else _outputs
    for index in rng.permutation(problem.batch * problem.kv_heads)[:_PAIRS]:
        sequence, kv_head = divmod(int(index), problem.kv_heads)
        heads = range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size)
        head_masks = [problem.mask.at(sequence, problem.mask.head_of(h, problem.heads)) for h in heads]
        dense, views, batch, first = _dense(problem, arrays, sequence)
        length = dense.seqlen_k if lengths is None else lengths[sequence]
        if dense.empty:
            continue
        for role, (b, head, n), value in rows_of(
            dense, head_masks, views, batch, kv_head, length, rng, count
        ):
            found.setdefault(role, {})[b, head, n + first[role in _OF_KEYS]] = value
    return found


def max_error(problem: Problem, results: Mapping[str, Any], expected: Mapping[str, Expected]) -> float:
    """Largest absolute difference over the expected rows of all results; NaN if a result has NaN there."""
    worst = 0.0
    for role, rows in expected.items():
        for row, value in rows.items():
            error = float(abs(_float64(results[role][row], problem.out_element) - value).max())
            worst = float(np.maximum(worst, error))  # NaN stays
    return worst


def accuracy(problem: Problem, distribution: str, out: Any, v: Any, expected: Expected) -> Accuracy:
    """The accuracy of a forward's result ``out``. ``v`` is the input v."""
    found, exact = (
        np.array([_on_host(x) for x in rows])
        for rows in ([_float64(out[row], problem.out_element) for row in expected], expected.values())
    )
    off = abs(found - exact)  # absolute differences
    quantiles = {f"{share:g}": _short(x) for share, x in zip(_SHARES, np.quantile(off, _SHARES), strict=True)}
    rmse, bias = _short(np.sqrt((off**2).mean())), _short(abs(found).sum() / abs(exact).sum() - 1)
    needles = distribution == "needle"
    shares = [_found(problem, x, expected, v) if needles else None for x in (found, exact)]
    return Accuracy(distribution, rmse, _short(off.max()), bias, quantiles, *shares)


def _short(x: float) -> float:
    """``x`` with the four digits that are recorded."""
    return float(f"{x:.4g}")


def _found(problem: Problem, rows: Any, expected: Expected, v: Any) -> float:
    """:attr:`Accuracy.found`."""
    right, keys = 0, needle_keys(problem.seqlen_k)
    for (batch, head, query), row in zip(expected, rows, strict=True):
        head_values = v[batch, head // problem.group_size]
        values = [_on_host(_float64(head_values[key], problem.v_element)) for key in keys]
        right += int(np.argmax(values @ row)) == query % NEEDLES
    return right / len(rows)


def _on_host(x: Any) -> Any:
    return x.get() if is_device_array(x) else x


#: Roles of arrays whose third axis counts queries; and keys.
_OF_QUERIES, _OF_KEYS = ("q", "o", "lse", "dout", "dq"), ("k", "v", "dk", "dv")


def _dense(problem: Problem, arrays: Arrays, sequence: int) -> tuple[Problem, Arrays, int, tuple[int, int]]:
    """One packed or padded sequence as a dense problem. Returns the problem, views of the arrays, the batch index in
    these views, and the first query and first key in the original arrays."""
    places = problem.lengths.places()
    if places is None:
        return problem, arrays, sequence, (0, 0)
    _, batch, rows, keys = places[sequence]
    (q_first, q_end, _), (k_first, k_end, _) = (
        x.indices(arrays[name].shape[2]) for name, x in (("q", rows), ("k", keys))
    )
    views = dict(arrays)
    views |= {name: x[:, :, q_first:q_end] for name, x in arrays.items() if name in _OF_QUERIES}
    views |= {name: x[:, :, k_first:k_end] for name, x in arrays.items() if name in _OF_KEYS}
    dense = dataclasses.replace(problem, seqlen_q=q_end - q_first, seqlen_k=k_end - k_first, lengths=DENSE)
    return dense, views, batch.start, (q_first, k_first)


_Rows = Iterator[tuple[str, tuple[int, int, int], Any]]
"""Role of a result, index of the row, values of the row."""


def _outputs(
    problem: Problem, masks: Sequence[Mask], arrays: Arrays, batch: int, kv_head: int, length: int,
    rng: np.random.Generator, count: int,
) -> _Rows:  # fmt: skip
    k, v = (_tokens(problem, arrays, name, batch, kv_head, length) for name in "kv")
    for packed in _picked(problem.rows, rng, count):
        head, query = divmod(packed, problem.seqlen_q)
        row = batch, kv_head * problem.group_size + head, query
        q = _float64(arrays["q"][row], problem.q_element)
        yield "o", row, _attend(problem, masks[head], arrays, row[:2], q, k, v, query)


def _picked(rows: int, rng: np.random.Generator, count: int) -> list[int]:
    """``count`` indices of ``rows`` rows: the first, the last, and random others."""
    between = 1 + rng.permutation(max(rows - 2, 0))[: count - 2]
    return [int(n) for n in np.unique(np.append(between, [0, rows - 1]))]


def _tokens(problem: Problem, arrays: Arrays, name: str, batch: int, kv_head: int, length: int) -> Any:
    """Keys or values of one sequence and head, (length, head_dim), with the scale factors of an 8-bit cache applied."""
    x, table, factor = arrays[name], arrays.get("block_table"), arrays.get(f"{name}_scale")
    if table is None:
        tokens = x[batch, kv_head]
    else:
        tokens = x[table[batch, : -(-length // x.shape[2])], kv_head].reshape(-1, x.shape[-1])
    wide = _float64(tokens[:length], problem.k_element if name == "k" else problem.v_element)
    if factor is None:
        return wide
    return wide * (factor[kv_head] if factor.ndim == 1 else factor[batch, kv_head, :length, None])


def _attend(
    problem: Problem, mask: Mask, arrays: Arrays, head: tuple[int, int], q: Any, k: Any, v: Any, query: int
) -> Any:  # fmt: skip
    """One row of the output. Sums replace matrix products, for which CuPy would need cuBLAS. On CuPy arrays NumPy's
    functions call CuPy's."""
    visible = np.flatnonzero(mask.visible([query], np.arange(len(k)), problem.seqlen_q, len(k))[0])
    if not len(visible):
        return np.zeros_like(q)
    if visible[-1] - visible[0] + 1 == len(visible):
        k, v = (x[visible[0] : visible[-1] + 1] for x in (k, v))
    else:
        k, v = (x[_on_device_of(x, visible)] for x in (k, v))
    s, _ = _changed(
        problem, mask, arrays, head, (k * q).sum(axis=1) * problem.scale, query, _on_device_of(k, visible)
    )
    if problem.softcap is not None:
        s = softcapped(s, problem.softcap)
    p = np.exp(s - s.max())
    return (v * p[:, None]).sum(axis=0) / p.sum()


def _gradients(
    problem: Problem, masks: Sequence[Mask], arrays: Arrays, batch: int, kv_head: int, length: int,
    rng: np.random.Generator, count: int,
) -> _Rows:  # fmt: skip
    """Rows of dq, dk and dv, from the rounded out and lse among the arrays: to compute them exactly would take all of
    attention in float64. Sums replace matrix products, as in :func:`_attend`."""
    group = problem.group_size
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q, dout, out = (_float64(arrays[name][batch, heads], problem.q_element) for name in ("q", "dout", "o"))
    k, v = (_float64(arrays[name][batch, kv_head], problem.k_element) for name in "kv")
    lse, delta = arrays["lse"][batch, heads].astype(np.float64), (dout * out).sum(axis=-1)
    queries, keys = np.arange(problem.seqlen_q), np.arange(length)
    for packed in _picked(problem.rows, rng, count):
        head, query = divmod(packed, problem.seqlen_q)
        visible = masks[head].visible([query], keys, problem.seqlen_q, length)[0]
        row = head, query
        s = (k * q[row]).sum(axis=1) * problem.scale
        place = batch, heads.start + head
        s, change = _changed(problem, masks[0], arrays, place, s, query, _on_device_of(k, keys))
        p, slope = _weights(problem, s, lse[row], _on_device_of(k, visible))
        slope = slope * change
        ds = p * ((v * dout[row]).sum(axis=1) - delta[row]) * slope * problem.scale
        yield "dq", (batch, heads.start + head, query), (k * ds[:, None]).sum(axis=0)
    for key in _picked(length, rng, count):
        visible = np.stack([x.visible(queries, [key], problem.seqlen_q, length)[:, 0] for x in masks])
        s = (q * k[key]).sum(axis=2) * problem.scale
        places = batch, _on_device_of(k, np.arange(heads.start, heads.stop))[:, None]
        s, change = _changed(problem, masks[0], arrays, places, s, _on_device_of(k, queries), key)
        p, slope = _weights(problem, s, lse, _on_device_of(k, visible))
        slope = slope * change
        ds = p * ((dout * v[key]).sum(axis=2) - delta) * slope * problem.scale
        yield "dk", (batch, kv_head, key), (q * ds[..., None]).sum(axis=(0, 1))
        yield "dv", (batch, kv_head, key), (dout * p[..., None]).sum(axis=(0, 1))


def _changed(
    problem: Problem, mask: Mask, arrays: Arrays, head: tuple[int, Any], s: Any, query: Any, key: Any
) -> tuple[Any, Any]:  # fmt: skip
    """Scaled scores ``s`` after the score function and ALiBi, and their derivative by ``s``. ``head``: (batch, head).
    (No case has ALiBi with a soft cap.)"""
    penalty = 0.0
    shift = mask.shift(problem.seqlen_q, problem.seqlen_k)
    if problem.alibi:
        penalty = arrays["alibi_slopes"][head[1]] * abs(query + shift - key)
    if problem.score is None:
        return s - penalty, 1.0
    inputs = {"s": s, "b": head[0], "h": head[1], "i": query, "j": key, "delta": shift}
    score_arrays = [arrays[f"score{n}"] for n in range(len(problem.score.shapes))]
    new, slope, *_ = changed(problem.score, inputs, score_arrays, np.float64, derivatives=True)
    return new - penalty, slope


def _weights(problem: Problem, s: Any, lse: Any, visible: Any) -> tuple[Any, Any]:
    """exp(s - lse), 0 where masked, and the derivative of the soft cap. ``s``: scores before the soft cap."""
    slope = 1.0
    if problem.softcap is not None:
        s = softcapped(s, problem.softcap)
        slope = softcap_derivative(s, problem.softcap)
    return np.where(visible, np.exp(np.where(visible, s - lse, 0)), 0), slope


def _float64(x: Any, element: Element) -> Any:
    """``x`` in float64. bfloat16 and e4m3, which CuPy does not have, are converted by their bits."""
    if element.itemsize == 1:
        numbers = np.arange(256, dtype=np.uint8).view(element.dtype).astype(np.float64)
        return _on_device_of(x, numbers)[x.view(np.uint8).astype(np.int32)]
    if element.name == "bfloat16":
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def _on_device_of(x: Any, numbers: Any) -> Any:
    """The NumPy array ``numbers`` on the device of ``x``."""
    if not is_device_array(x):
        return numbers
    import cupy

    return cupy.asarray(numbers)
