"""Functions traced into expressions: values are NumPy's, derivatives those of finite differences, and what cannot be
traced is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa.problem.derivative import derivative
from cufa.problem.evaluation import bounds, evaluate
from cufa.problem.expression import FLOAT, INT, ArrayForm, Expression, Trace
from cufa.problem.score_change import ScoreChange
from cufa.problem.tracing import trace

FORMS = (ArrayForm("table", "float64", 2), ArrayForm("ids", "int32", 1))
INPUTS = {"s": FLOAT, "h": INT, "i": INT, "j": INT}
RNG = np.random.default_rng(7)
TABLE, IDS = RNG.uniform(-2, 2, (3, 9)), np.arange(7, dtype=np.int32) % 3
VALUES = {
    "s": RNG.uniform(-2, 2, (6, 8)), "h": np.int64(1), "i": np.arange(6)[:, None], "j": np.arange(8)[None],
}  # fmt: skip

_UNARY = {
    "tanh": np.tanh, "neg": np.negative, "exp": lambda x: np.exp(np.minimum(x, 2.0)), "sin": np.sin, "cos": np.cos,
    "square": np.square, "log1p": lambda x: np.log1p(np.square(x)), "sqrt": lambda x: np.sqrt(1.0 + x * x),
    "abs": np.abs, "floor": np.floor, "sign": np.sign,
}  # fmt: skip
_BINARY = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (2.5 + b * b),
    "min": np.minimum, "max": np.maximum, "where": lambda a, b: np.where(a < b, a, 0.5 * b),
    "rsub": lambda a, b: 1 - a * b, "pow": lambda a, b: (1.0 + np.abs(a)) ** 1.5 + b**2,
}  # fmt: skip
_LEAVES = {
    "s": lambda e: e["s"], "constant": lambda e: 0.75, "distance": lambda e: 0.1 * np.abs(e["i"] - e["j"]),
    "load": lambda e: e["table"][e["h"], np.clip(e["j"] - e["i"], -4, 4) + 4],
    "ids": lambda e: np.where(e["ids"][e["i"] // 2] == e["ids"][e["j"] % 7], 1.0, -1.0),
    "bits": lambda e: ((e["i"] & 3) | (e["j"] << 1)).astype(float) * 0.1,
}  # fmt: skip
_ROUGH = {"abs", "floor", "sign", "min", "max", "where", "pow"}


def _trees(names: set[str]) -> st.SearchStrategy:
    leaves = st.sampled_from(sorted(_LEAVES)).map(lambda name: (name,))
    unary, binary = (st.sampled_from(sorted({*x} & names)) for x in (_UNARY, _BINARY))
    return st.recursive(
        leaves, lambda x: st.tuples(unary, x) | st.tuples(binary, x, x), max_leaves=8
    )  # fmt: skip


def _compute(tree, values):
    name, *parts = tree
    if not parts:
        return _LEAVES[name](values)
    return {**_UNARY, **_BINARY}[name](*(_compute(x, values) for x in parts))


def _traced(tree) -> Expression:
    def function(s, h, i, j, **arrays):
        return s * 0.5 + _compute(tree, {"s": s, "h": h, "i": i, "j": j, **arrays})

    return trace(function, "the function", INPUTS, FORMS, FLOAT)


@settings(max_examples=100, deadline=None)
@given(_trees({*_UNARY, *_BINARY}))
def test_values_are_those_of_numpy(tree):
    expected = VALUES["s"] * 0.5 + _compute(tree, {**VALUES, "table": TABLE, "ids": IDS})
    (found,) = evaluate(_traced(tree), VALUES, (TABLE, IDS), np.float64)
    np.testing.assert_allclose(np.broadcast_to(found, expected.shape), expected, rtol=1e-12, atol=1e-12)
    change = ScoreChange(_traced(tree), ((3, 9), (7,)))
    assert ScoreChange.from_json(json.loads(json.dumps(change.as_json()))) == change


@settings(max_examples=60, deadline=None)
@given(_trees(({*_UNARY} | {*_BINARY}) - _ROUGH))
def test_derivatives_are_those_of_finite_differences(tree):
    e, step = _traced(tree), 1e-5
    t = Trace("the function", FORMS, e.code)
    place = next(n for n, x in enumerate(e.code) if x[0] == "input" and x[2] == "s")
    slope = derivative(e, place, t)
    whole = Expression(tuple(t.code), FORMS, (slope,))
    (found,) = evaluate(whole, VALUES, (TABLE, IDS), np.float64)
    up, down = (
        evaluate(e, {**VALUES, "s": VALUES["s"] + x}, (TABLE, IDS), np.float64)[0] for x in (step, -step)
    )
    expected = (up - down) / (2 * step)
    np.testing.assert_allclose(
        np.broadcast_to(found, expected.shape), expected, rtol=1e-5, atol=1e-5 * (1 + abs(up).max())
    )


class OnDevice(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that, as CuPy's, stays on its device: it does not become a NumPy array, nor meet one."""

    def __init__(self, x):
        self.x, self.shape, self.ndim, self.dtype = x, np.shape(x), np.ndim(x), np.asarray(x).dtype

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array")

    def __array_ufunc__(self, ufunc, method, *x, **options):
        assert not any(isinstance(y, np.ndarray) for y in x), "an array on a device beside one of NumPy"
        return OnDevice(
            getattr(ufunc, method)(*(y.x if isinstance(y, OnDevice) else y for y in x), **options)
        )

    def __array_function__(self, function, types, x, options):
        return OnDevice(function(*(y.x if isinstance(y, OnDevice) else y for y in x), **options))

    def __getitem__(self, index):
        return OnDevice(self.x[tuple(y.x if isinstance(y, OnDevice) else y for y in index)])

    def astype(self, dtype):
        return OnDevice(self.x.astype(dtype))


@settings(max_examples=100, deadline=None)
@given(_trees({*_UNARY, *_BINARY}))
def test_arrays_on_a_device_are_evaluated_there(tree):
    expression = _traced(tree)
    inputs = {name: OnDevice(x) if np.ndim(x) else int(x) for name, x in VALUES.items()}
    (found,) = evaluate(expression, inputs, [OnDevice(TABLE), OnDevice(IDS)], np.float64)
    (expected,) = evaluate(expression, VALUES, [TABLE, IDS], np.float64)
    np.testing.assert_array_equal(found.x if isinstance(found, OnDevice) else found, expected)


@np.errstate(invalid="ignore")
def test_a_derivative_ignores_the_branch_that_is_not_taken():
    e = trace(lambda s: np.where(s > 0, np.sqrt(s), 0.0 * s), "f", {"s": FLOAT}, (), FLOAT)
    found = ScoreChange(e, ()).differentiated
    value, slope = evaluate(found, {"s": np.array([-1.0, 4.0])}, (), np.float64)
    assert value.tolist() == [0, 2]
    assert slope.tolist() == [0, 0.25]


def test_equal_functions_are_one_build_and_others_are_not():
    def made(n):
        return cufa.score(lambda s, b, h, i, j, t: s + n * t[h], t=np.ones(3, np.float32)).expression

    assert made(2).digest == made(2).digest != made(3).digest
    assert made(1).digest != made(1.5).digest
    narrow = cufa.score(lambda s, b, h, i, j, t: s + 2 * t[h], t=np.ones(3, np.float16)).expression
    assert narrow.digest != made(2).digest  # of another dtype
    longer = cufa.score(lambda s, b, h, i, j, t: s + 2 * t[h], t=np.ones(5, np.float32)).expression
    assert longer.digest == made(2).digest  # sizes are operands


def test_bounds_hold_integers():
    e = trace(
        lambda i, j: np.clip(j - i, -8, 8) + 8 + (i % 5) * 2 - np.abs(j // 4), "f", {"i": INT, "j": INT}, (), INT
    )  # fmt: skip
    low, high = bounds(e, {"i": (0, 30), "j": (0, 20)})[e.results[0]]
    i, j = np.arange(31)[:, None], np.arange(21)
    (found,) = evaluate(e, {"i": i, "j": j}, (), np.float64)
    assert low <= found.min() <= found.max() <= high
    assert (low, high) == (-5, 24)


TABLE32 = np.zeros((4, 8), np.float32)


@pytest.mark.parametrize(
    ("function", "arrays", "says"),
    [
        (lambda s, b, h, i, j: s if i > j else 0.0, {}, "np.where"),
        (lambda s, b, h, i, j: s + TABLE32[h, 0], {}, "pass arrays by name"),
        (lambda s, b, h, i, j: s + TABLE32, {}, "it was not given"),
        (lambda s, b, h, i, j: np.sort(s), {}, "np.sort"),
        (lambda s, b, h, i, j: np.arctan(s), {}, "np.arctan"),
        (lambda s, b, h, i, j: i - j, {}, "returns an integer"),
        (lambda s, b, h, i, j: i < j, {}, "returns a boolean"),
        (lambda s, i, j: s, {}, "is called with s, b, h, i, j"),
        (lambda s, b, h, i, j: s, {"t": TABLE32}, "is called with s, b, h, i, j, t"),
        (lambda s, b, h, i, j: None, {}, "returns NoneType"),
        (lambda s, b, h, i, j, t: t, {"t": TABLE32}, "returns an array"),
        (lambda s, b, h, i, j, t: s + t, {"t": TABLE32}, r"index it.*t\[b, h\]"),
        (lambda s, b, h, i, j, t: s + t[h], {"t": TABLE32}, "2 axes"),
        (lambda s, b, h, i, j, t: s + t[h, :], {"t": TABLE32}, "2 axes"),
        (lambda s, b, h, i, j, t: s + t[h, s], {"t": TABLE32}, "with a float"),
        (lambda s, b, h, i, j, t: s, {"t": TABLE32.astype(complex)}, "complex"),
        (lambda s, b, h, i, j, t: s, {"t": np.zeros((0, 3))}, "none of size 0"),
        (lambda s, b, h, j, **x: s, {"i": TABLE32}, "reserved"),
        (3, {}, "callable"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_named(function, arrays, says):
    with pytest.raises((TypeError, ValueError), match=says):
        cufa.score(function, **arrays)
