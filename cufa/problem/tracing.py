"""Functions written in NumPy, traced once into an expression: :func:`trace`.

A function is called with symbols in place of numbers. Operators, NumPy's ufuncs, ``np.where`` and ``np.clip`` on
symbols append instructions to a :class:`~cufa.problem.expression.Trace`.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .expression import BOOL, COMPARISONS, FLOAT, FUNCTIONS, INT, ArrayForm, Expression, Trace

_UFUNCS: dict[str, str] = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "floor_divide": "floordiv",
    "remainder": "mod", "power": "pow", "float_power": "pow", "minimum": "min", "maximum": "max", "fmin": "min",
    "fmax": "max", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "logical_and": "all",
    "logical_or": "any", "negative": "neg", "absolute": "abs", "fabs": "abs", "invert": "not", "logical_not": "not",
    "square": "square", "reciprocal": "reciprocal", "sign": "sign", "left_shift": "shl", "right_shift": "shr",
    "positive": "positive", **{name: name for name in FUNCTIONS},
}  # fmt: skip

_KNOWN = (
    "operators, comparisons, np.where, np.clip, np.minimum, np.maximum, np.abs, np.sign, np.square, np.power, "
    f"{', '.join(f'np.{name}' for name in FUNCTIONS)} and .astype(int or float)"
)

_A = {FLOAT: "a float", INT: "an integer", BOOL: "a boolean"}


def trace(
    function: Callable[..., Any],
    what: str,
    inputs: Mapping[str, str],
    arrays: tuple[ArrayForm, ...],
    result: str,
) -> Expression:
    """The expression that ``function`` computes. Its arguments: ``inputs`` (name to kind) by position, ``arrays`` by
    name, and an integer by the name ``delta`` if the function has it. ``what``: the kind of function, for errors.

    Raises TypeError or ValueError for what cannot be traced: a branch on a symbol, other functions of NumPy, a result
    of another kind than ``result``.
    """
    name = getattr(function, "__name__", type(function).__name__)
    what = what if name == "<lambda>" else f"{what} {name}"
    t = Trace(what, arrays)
    given = [Symbol(t, t.put("input", kind, name)) for name, kind in inputs.items()]
    by_name: dict[str, Any] = {form.name: TracedArray(t, place) for place, form in enumerate(arrays)}
    if takes_delta(function):
        by_name["delta"] = Symbol(t, t.put("input", INT, "delta"))
    _check_arguments(function, what, [*inputs], [*by_name])
    found = function(*given, **by_name)
    if isinstance(found, (np.ndarray, list, tuple)) and np.shape(found) == ():
        found = np.asarray(found)[()]
    if not isinstance(found, (Symbol, bool, np.bool_, numbers.Real)):
        kind = "an array" if isinstance(found, (np.ndarray, TracedArray)) else type(found).__qualname__
        raise TypeError(f"{what} returns {kind}: it must return one number, computed from its arguments")
    place = _place(t, found)
    kind = t.code[place][1]
    if kind == INT and result == FLOAT and not isinstance(found, Symbol):
        place, kind = t.as_float(place), FLOAT
    if kind != result:
        to_float, to_bool = "add it to the score s, or use .astype(float)", "compare, such as ids[b, i] == 3"
        cure = to_float if result == FLOAT else to_bool
        raise TypeError(f"{what} returns {_A[kind]}, where it must return {_A[result]}: {cure}")
    return Expression(tuple(t.code), arrays, (place,)).pruned()


def _check_arguments(
    function: Callable[..., Any], what: str, by_place: list[str], by_name: list[str]
) -> None:
    try:
        inspect.signature(function).bind(*by_place, **dict.fromkeys(by_name))
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        wanted = ", ".join([*by_place, *by_name])
        raise TypeError(f"{what} is called with {wanted}, in this order or by these names: {error}") from None


def takes_delta(function: Callable[..., Any]) -> bool:
    """Whether a function has an argument named ``delta``."""
    try:
        return "delta" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return False


def _place(t: Trace, x: Any) -> int:
    """The place of a symbol or a number in a trace. Raises TypeError for other objects."""
    if isinstance(x, Symbol):
        return x.place
    if isinstance(x, np.ndarray) and x.shape == ():
        x = x[()]
    if isinstance(x, (bool, np.bool_, numbers.Real)):
        return t.const(x)
    if isinstance(x, TracedArray):
        raise TypeError(
            f"{t.what} computes with the whole array {x.form.name}: index it, one integer for each of its "
            f"{x.form.ndim} axes, such as {x.form.name}[{', '.join('bhij'[: x.form.ndim])}]"
        )
    if isinstance(x, np.ndarray):
        raise TypeError(
            f"{t.what} uses an array of shape {x.shape} that it was not given: pass it by name, "
            "cufa.score(function, table=array), and index it"
        )
    raise TypeError(f"{t.what} computes with {type(x).__qualname__}: it takes numbers and its own arguments")


class Symbol:
    """A number in a trace: its value is not known yet."""

    __slots__ = ("place", "trace")
    __array_priority__ = 1000

    def __init__(self, trace: Trace, place: int) -> None:
        self.trace, self.place = trace, place

    @property
    def kind(self) -> str:
        kind: str = self.trace.code[self.place][1]
        return kind

    shape = ()
    ndim = 0

    def astype(self, dtype: Any, **_: Any) -> Symbol:
        kind, t = np.dtype(dtype).kind, self.trace
        if kind == "b":
            return Symbol(t, t.truth(self.place))
        if kind not in "iuf":
            raise TypeError(f"{t.what} converts to {np.dtype(dtype)}: it may convert to int, float and bool")
        return Symbol(t, t.as_float(self.place) if kind == "f" else t.as_int(self.place))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Symbol:
        t, op = self.trace, _UFUNCS.get(ufunc.__name__)
        if op is None or method != "__call__" or options:
            more = f".{method}" * (method != "__call__") + f" with {', '.join(options)}=" * bool(options)
            raise TypeError(
                f"{t.what} uses np.{ufunc.__name__}{more}, which has no CUDA form here: use {_KNOWN}"
            )
        places = [_place(t, x) for x in inputs]
        return Symbol(t, t.unary(op, *places) if len(places) == 1 else t.binary(op, *places))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Symbol:
        name = getattr(function, "__name__", "")
        if name == "where" and len(args) == 3 and not options:
            return Symbol(self.trace, self.trace.where(*(_place(self.trace, x) for x in args)))
        if name == "clip":
            return _clip(self.trace, *args, **options)
        raise TypeError(f"{self.trace.what} uses np.{name}, which has no CUDA form here: use {_KNOWN}")

    def clip(self, low: Any = None, high: Any = None) -> Symbol:
        return _clip(self.trace, self, low, high)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            f"{self.trace.what} needs the value of a score or an index (in if, and, or, not, min(), math.exp(), int(), "
            "an index of an array that it was not given): it is called once, for all scores. Write np.where(condition, "
            "a, b), &, |, ~, np.minimum, np.exp, .astype(int), and pass arrays by name"
        )

    __bool__ = __float__ = __int__ = __index__ = __iter__ = __len__ = __round__ = __trunc__ = _refuse
    __array__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _clip(
    t: Trace, x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Symbol:
    place = _place(t, x)
    for bound, op in ((a_min if min is None else min, "max"), (a_max if max is None else max, "min")):
        if bound is not None:
            place = t.binary(op, place, _place(t, bound))
    return Symbol(t, place)


def _operator(op: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    def method(self: Symbol, other: Any) -> Symbol:
        a, b = self.place, _place(self.trace, other)
        return Symbol(self.trace, self.trace.binary(op, b, a) if swapped else self.trace.binary(op, a, b))

    return method


_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod", "pow": "pow",
    "and": "and", "or": "or", "xor": "xor", "lshift": "shl", "rshift": "shr",
}  # fmt: skip
for _name, _op in _OPERATORS.items():
    setattr(Symbol, f"__{_name}__", _operator(_op))
    setattr(Symbol, f"__r{_name}__", _operator(_op, swapped=True))
for _op in COMPARISONS:
    setattr(Symbol, f"__{_op}__", _operator(_op))
for _name, _op in {"neg": "neg", "pos": "positive", "abs": "abs", "invert": "not"}.items():
    setattr(Symbol, f"__{_name}__", lambda self, op=_op: Symbol(self.trace, self.trace.unary(op, self.place)))


class TracedArray:
    """An array in a trace, indexed by symbols."""

    __array_ufunc__ = None  # NumPy leaves operators to this class, which refuses them
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, place: int) -> None:
        self._trace, self._place = trace, place

    @property
    def form(self) -> ArrayForm:
        return self._trace.arrays[self._place]

    def __getitem__(self, index: Any) -> Symbol:
        t, form = self._trace, self.form
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != form.ndim or any(x is None or x is ... or isinstance(x, slice) for x in given):
            raise TypeError(
                f"{t.what} reads {form.name}[{', '.join(_shown(x) for x in given)}]"
                f": {form.name} has {form.ndim} axes, and takes one integer for each"
            )
        places = [_place(t, x) for x in given]
        for axis, place in enumerate(places):
            if t.code[place][1] == FLOAT:
                raise TypeError(f"{t.what} indexes axis {axis} of {form.name} with a float: use .astype(int)")
        return Symbol(t, t.load(self._place, tuple(map(t.as_int, places))))

    def _refuse(self, *_: Any) -> Any:
        _place(self._trace, self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __neg__ = __bool__ = __iter__ = __len__ = _refuse


def _shown(index: Any) -> str:
    return "an index" if isinstance(index, Symbol) else repr(index)
