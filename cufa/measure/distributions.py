"""Distributions of queries, keys and values on which 8-bit attention is compared with float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..problem.checks import is_device_array
from ..problem.element import Element
from ..problem.problem import Problem

Normal = Callable[[tuple[int, ...], int], Any]
"""Makes a standard normal float32 array of a shape. The second argument selects one of several random streams."""
Arrays = dict[str, Any]

NEEDLES = 16
"""Number of needles: keys that queries look for. Query i looks for needle i % NEEDLES."""
_NEEDLE_WEIGHT = 0.1
"""Expected share of a needle in its query's softmax."""
_SINKS, _SINK_SCORE, _DRIFT = 4, 8.0, 4.0
"""Number of sink keys; mean of their scores; growth of the mean key, in standard deviations."""


def needle_keys(seqlen_k: int) -> list[int]:
    """Positions of the needles."""
    return [seqlen_k * (2 * n + 1) // (2 * NEEDLES) for n in range(NEEDLES)]


def _normal(x: Arrays, normal: Normal, problem: Problem) -> None:
    """Nothing is changed."""


def _outliers(x: Arrays, normal: Normal, problem: Problem) -> None:
    """Adds a normal number of variance 100 to one element in a thousand."""
    for n, array in enumerate(x.values()):
        chosen = abs(normal(array.shape, n)) > 3.2905
        array += 10 * normal(array.shape, n + 3) * chosen


def _needle(x: Arrays, normal: Normal, problem: Problem) -> None:
    """A needle gets a tenth of its queries' weights. The expected sum of exponentials over n standard normal scores is
    n √e."""
    shape = problem.batch, problem.kv_heads, NEEDLES, problem.head_dim
    code, correlation = normal(shape, 0), 0.8
    code *= (problem.head_dim**0.5) / np.sqrt((code**2).sum(axis=-1, keepdims=True))
    x["q"] *= (1 - correlation**2) ** 0.5
    for i in range(problem.seqlen_q):
        x["q"][:, :, i] += correlation * code[:, :, i % NEEDLES].repeat(problem.group_size, axis=1)
    odds = _NEEDLE_WEIGHT / (1 - _NEEDLE_WEIGHT)
    score = math.log(problem.seqlen_k * math.exp(0.5) * odds)
    code *= score / (correlation * problem.head_dim**0.5)
    for n, key in enumerate(needle_keys(problem.seqlen_k)):
        x["k"][:, :, key] = code[:, :, n]


def _sinks(x: Arrays, normal: Normal, problem: Problem) -> None:
    """All queries score the first keys higher. The values of these keys are small."""
    direction = normal((1, 1, 1, problem.head_dim), 0)
    size = (_SINK_SCORE / problem.head_dim**0.5) ** 0.5
    x["q"] += size * direction
    x["k"][:, :, :_SINKS] += size * direction
    x["v"][:, :, :_SINKS] *= 0.1


def _drift(x: Arrays, normal: Normal, problem: Problem) -> None:
    """The mean key grows along the sequence."""
    direction = normal((1, problem.kv_heads, 1, problem.head_dim), 0)
    ramp: Any = np.linspace(0, _DRIFT, problem.seqlen_k, dtype=np.float32)[:, None]
    if is_device_array(direction):
        import cupy

        ramp = cupy.asarray(ramp)
    x["k"] += ramp * direction


DISTRIBUTIONS: dict[str, tuple[str, Callable[[Arrays, Normal, Problem], None]]] = {
    "normal": ("standard normal", _normal),
    "outliers": ("N(0, 1) + N(0, 100) · Bernoulli(0.001)", _outliers),
    "needle": (f"one key with {_NEEDLE_WEIGHT:.0%} of the weight among many", _needle),
    "sinks": (f"the first {_SINKS} keys have most of the weight", _sinks),
    "drift": (f"the mean key grows to {_DRIFT:g} standard deviations", _drift),
}
"""By name: a description, and a function that changes standard normal q, k and v in place."""


def drawn(name: str, problem: Problem, normal: Normal) -> Arrays:
    """q, k and v in float32, by role."""
    shapes = problem.shapes
    found = {role: normal(shapes[n], n - 3) for n, role in enumerate("qkv")}
    DISTRIBUTIONS[name][1](found, normal, problem)
    return found


def rounded(x: Any, element: Element) -> Any:
    """float32 to another element by its bits: CuPy has no bfloat16."""
    if element.name != "bfloat16":
        return x.astype(element.dtype)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(element.dtype)
