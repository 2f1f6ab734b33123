"""Functions written in NumPy, traced once into an expression: :func:`trace`.

A function is called with symbols in place of arrays. Operators, NumPy's ufuncs, ``np.where`` and ``np.clip`` on
symbols append instructions to a :class:`Trace`; equal instructions are one. The :class:`Expression` that remains is a
value: it is evaluated by NumPy (:mod:`cufa.problem.evaluation`), differentiated (:mod:`cufa.problem.derivative`), and
printed as CUDA (:mod:`cufa.build.score_text`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Instruction = tuple[Any, ...]
"""(operator, kind of the result, operands). An operand is the place of an earlier instruction. "const" has its value
instead, "input" a name; "load" has the array's number, then the place of each index."""

FLOAT, INT, BOOL = "float", "int", "bool"

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_LOGIC = ("and", "or", "xor")
#: Functions from a float to a float.
FUNCTIONS = (
    "tanh", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos", "floor", "ceil",
)  # fmt: skip

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


@dataclasses.dataclass(frozen=True)
class ArrayForm:
    """An array in an expression, without its sizes and values."""

    name: str
    dtype: str
    ndim: int

    @property
    def kind(self) -> str:
        return BOOL if self.dtype == "bool" else INT if "int" in self.dtype else FLOAT


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """Instructions, each after its operands; ``results`` are places of instructions."""

    code: tuple[Instruction, ...]
    arrays: tuple[ArrayForm, ...]
    results: tuple[int, ...]

    @functools.cached_property
    def digest(self) -> str:
        """A hash of code and array forms: expressions with one digest share their builds."""
        return hashlib.sha256(repr((self.code, self.arrays, self.results)).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.digest == other.digest

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset(x[2] for x in self.code if x[0] == "input")

    def needed(self, *results: int) -> list[int]:
        """Places of the instructions that ``results`` depend on, in order."""
        wanted, pending = set(), list(results)
        while pending:
            place = pending.pop()
            if place not in wanted:
                wanted.add(place)
                pending += operands(self.code[place])
        return sorted(wanted)

    def pruned(self) -> Expression:
        """Without instructions that no result needs."""
        kept = self.needed(*self.results)
        new = {old: place for place, old in enumerate(kept)}
        code = []
        for old in kept:
            op, kind, *args = self.code[old]
            if op == "load":
                args = [args[0], *(new[x] for x in args[1:])]
            elif op not in ("const", "input"):
                args = [new[x] for x in args]
            code.append((op, kind, *args))
        return Expression(tuple(code), self.arrays, tuple(new[x] for x in self.results))

    def __str__(self) -> str:
        """As a formula."""
        return self.text(self.results[0])

    def text(self, place: int) -> str:
        op, _, *args = self.code[place]
        if op == "const":
            return f"{args[0]:g}" if isinstance(args[0], float) else str(args[0])
        if op == "input":
            return str(args[0])
        if op == "load":
            return f"{self.arrays[args[0]].name}[{', '.join(map(self.text, args[1:]))}]"
        texts = [self.text(x) for x in args]
        if op in _SIGNS:
            return f"({f' {_SIGNS[op]} '.join(texts)})"
        return f"{op}({', '.join(texts)})"


_SIGNS = {
    "add": "+", "sub": "-", "mul": "·", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "≤", "gt": ">",
    "ge": "≥", "eq": "=", "ne": "≠", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def operands(instruction: Instruction) -> tuple[int, ...]:
    """Places of the instructions that an instruction reads."""
    op, _, *args = instruction
    return () if op in ("const", "input") else tuple(args[1:] if op == "load" else args)


def trace(
    function: Callable[..., Any], what: str, inputs: Mapping[str, str], arrays: tuple[ArrayForm, ...],
    result: str, named: tuple[str, ...] = (),
) -> Expression:  # fmt: skip
    """The expression that ``function`` computes. Its arguments: ``inputs`` (name to kind) by position, but those in
    ``named`` by name, and ``arrays`` by name. ``what`` names the function in errors.

    Raises TypeError or ValueError for what cannot be traced: a branch on a symbol, other functions of NumPy, a result
    of another kind than ``result``.
    """
    t = Trace(what, arrays)
    given = {name: Symbol(t, t.put("input", kind, name)) for name, kind in inputs.items()}
    of_arrays = {form.name: TracedArray(t, place) for place, form in enumerate(arrays)}
    by_name = {name: x for name, x in given.items() if name in named}
    found = function(*(x for name, x in given.items() if name not in named), **of_arrays, **by_name)
    if isinstance(found, (np.ndarray, list, tuple)) and np.shape(found) == ():
        found = np.asarray(found)[()]
    if not isinstance(found, (Symbol, bool, np.bool_, numbers.Real)):
        kind = "an array" if isinstance(found, (np.ndarray, TracedArray)) else type(found).__qualname__
        raise TypeError(f"{what} returns {kind}: it must return one number, computed from its arguments")
    place = t.place(found)
    kind = t.code[place][1]
    if kind == INT and result == FLOAT and not isinstance(found, Symbol):
        place, kind = t.as_float(place), FLOAT
    if kind != result:
        cure = (
            "add it to the score s, or use .astype(float)"
            if result == FLOAT
            else "compare, such as ids[b, i] == 3"
        )
        raise TypeError(f"{what} returns {_A[kind]}, where it must return {_A[result]}: {cure}")
    return Expression(tuple(t.code), arrays, (place,)).pruned()


_A = {FLOAT: "a float", INT: "an integer", BOOL: "a boolean"}


class Trace:
    """Instructions under construction."""

    def __init__(self, what: str, arrays: tuple[ArrayForm, ...], code: tuple[Instruction, ...] = ()) -> None:
        self.what, self.arrays = what, arrays
        self.code: list[Instruction] = list(code)
        self._known = {_key(x): place for place, x in enumerate(code)}

    def put(self, op: str, kind: str, *args: Any) -> int:
        """The place of an instruction. An equal earlier instruction is used again."""
        instruction = (op, kind, *args)
        key = _key(instruction)
        if key not in self._known:
            self._known[key] = len(self.code)
            self.code.append(instruction)
        return self._known[key]

    def const(self, value: Any) -> int:
        if isinstance(value, (bool, np.bool_)):
            return self.put("const", BOOL, bool(value))
        if isinstance(value, (int, np.integer)):
            if not -(2**31) <= int(value) < 2**31:
                raise ValueError(
                    f"{self.what} uses the integer {value}: integers have 32 bits; write {value}.0"
                )
            return self.put("const", INT, int(value))
        return self.put("const", FLOAT, float(value))

    def value(self, place: int) -> Any:
        """The value of a constant; None for other instructions."""
        op, _, *args = self.code[place]
        return args[0] if op == "const" else None

    def place(self, x: Any) -> int:
        """The place of a symbol or a number. Raises TypeError for other objects."""
        if isinstance(x, Symbol):
            return x.place
        if isinstance(x, np.ndarray) and x.shape == ():
            x = x[()]
        if isinstance(x, (bool, np.bool_, numbers.Real)):
            return self.const(x)
        if isinstance(x, TracedArray):
            raise TypeError(
                f"{self.what} computes with the whole array {x.form.name}: index it, one integer for each of its "
                f"{x.form.ndim} axes, such as {x.form.name}[{', '.join('bhij'[: x.form.ndim])}]"
            )
        if isinstance(x, np.ndarray):
            raise TypeError(
                f"{self.what} uses an array of shape {x.shape} that it was not given: pass it by name, "
                "cufa.score(function, table=array), and index it"
            )
        raise TypeError(
            f"{self.what} computes with {type(x).__qualname__}: it takes numbers and its own arguments"
        )

    def as_float(self, place: int) -> int:
        if self.code[place][1] == FLOAT:
            return place
        value = self.value(place)
        return self.const(float(value)) if value is not None else self.put("float", FLOAT, place)

    def as_int(self, place: int) -> int:
        kind, value = self.code[place][1], self.value(place)
        if kind == INT:
            return place
        if value is not None and math.isfinite(value):
            return self.const(int(value))
        return self.put("int", INT, place)

    def binary(self, op: str, a: int, b: int) -> int:
        """The place of ``op`` of two values. Kinds follow NumPy's rules, with 32-bit integers."""
        kinds = {self.code[a][1], self.code[b][1]}
        if op in ("all", "any"):
            a, b = (self.truth(x) for x in (a, b))
            return self.put({"all": "and", "any": "or"}[op], BOOL, a, b)
        if op in _LOGIC or op in ("shl", "shr"):
            if FLOAT in kinds:
                raise TypeError(f"{self.what} uses {_SIGNS[op]} on a float: it takes booleans and integers")
            if kinds == {BOOL} and op in _LOGIC:
                return self.put(op, BOOL, a, b)
            return self.put(op, INT, self.as_int(a), self.as_int(b))
        if op in ("div", "pow") or FLOAT in kinds:
            a, b = self.as_float(a), self.as_float(b)
        elif op not in ("eq", "ne") or kinds != {BOOL}:
            a, b = self.as_int(a), self.as_int(b)
        kind = BOOL if op in COMPARISONS else self.code[a][1]
        if op in ("floordiv", "mod") and kind == FLOAT:
            whole = self.put("floor", FLOAT, self.binary("div", a, b))
            return whole if op == "floordiv" else self.binary("sub", a, self.binary("mul", whole, b))
        if op == "pow":
            return self._power(a, b)
        x, y = self.value(a), self.value(b)
        if (op in ("add", "sub") and y == 0) or (op in ("mul", "div") and y == 1):
            return a
        if (op == "add" and x == 0) or (op == "mul" and x == 1):
            return b
        if op == "div" and y is not None and y != 0 and math.isfinite(1 / y):
            return self.binary("mul", a, self.const(1 / y))
        if x is not None and y is not None and op in ("add", "sub", "mul"):
            return self.const({"add": x + y, "sub": x - y, "mul": x * y}[op])
        if op == "mul" and kind == FLOAT and (x is not None or y is not None):
            a, b = (a, b) if x is not None else (b, a)  # the constant first
            inner = self.code[b]
            if inner[0] == "mul" and (known := self.value(inner[2])) is not None:
                return self.binary("mul", self.const(known * self.value(a)), inner[3])
        return self.put(op, kind, a, b)

    def _power(self, a: int, b: int) -> int:
        exponent = self.value(b)
        if exponent == 0.5:
            return self.put("sqrt", FLOAT, a)
        if exponent in (0, 1, 2, 3, 4):
            found = self.const(1.0)
            for _ in range(int(exponent)):
                found = self.binary("mul", found, a)
            return found
        return self.put("pow", FLOAT, a, b)

    def truth(self, place: int) -> int:
        return place if self.code[place][1] == BOOL else self.binary("ne", place, self.const(0))

    def unary(self, op: str, a: int) -> int:
        kind, value = self.code[a][1], self.value(a)
        if op == "positive":
            return a
        if op == "not":
            if kind == FLOAT:
                raise TypeError(f"{self.what} uses ~ or np.logical_not on a float: compare it first")
            return self.put("not", BOOL, a) if kind == BOOL else self.put("bitnot", INT, a)
        if op == "square":
            return self.binary("mul", a, a)
        if op == "reciprocal":
            return self.binary("div", self.const(1.0), a)
        if op in FUNCTIONS:
            a = self.as_float(a)
            if op in ("floor", "ceil") and kind != FLOAT:
                return a
            return self.put(op, FLOAT, a)
        a = self.as_int(a) if kind == BOOL else a
        kind = self.code[a][1]
        if op == "sign":
            one, zero = (self.const(1.0 if kind == FLOAT else 1), self.const(0.0 if kind == FLOAT else 0))
            below = self.where(self.binary("lt", a, zero), self.unary("neg", one), zero)
            return self.where(self.binary("gt", a, zero), one, below)
        if value is not None:
            return self.const(-value if op == "neg" else abs(value))
        return self.put(op, kind, a)

    def where(self, condition: int, a: int, b: int) -> int:
        condition = self.truth(condition)
        known = self.value(condition)
        if known is not None or a == b:
            return a if known is None or known else b
        kinds = {self.code[a][1], self.code[b][1]}
        if len(kinds) == 2:
            change = self.as_float if FLOAT in kinds else self.as_int
            a, b = change(a), change(b)
        return self.put("where", self.code[a][1], condition, a, b)

    def load(self, array: int, indexes: tuple[int, ...]) -> int:
        return self.put("load", self.arrays[array].kind, array, *indexes)


def _key(instruction: Instruction) -> Any:
    """Equal for equal instructions. 1, 1.0 and True differ, as do 0.0 and -0.0; NaN equals NaN."""
    return (*instruction[:2], repr(instruction[2])) if instruction[0] == "const" else instruction


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
        places = [t.place(x) for x in inputs]
        return Symbol(t, t.unary(op, *places) if len(places) == 1 else t.binary(op, *places))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Symbol:
        name = getattr(function, "__name__", "")
        if name == "where" and len(args) == 3 and not options:
            return Symbol(self.trace, self.trace.where(*(self.trace.place(x) for x in args)))
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
    place = t.place(x)
    for bound, op in ((a_min if min is None else min, "max"), (a_max if max is None else max, "min")):
        if bound is not None:
            place = t.binary(op, place, t.place(bound))
    return Symbol(t, place)


def _operator(op: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    def method(self: Symbol, other: Any) -> Symbol:
        a, b = self.place, self.trace.place(other)
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
        places = [t.place(x) for x in given]
        for axis, place in enumerate(places):
            if t.code[place][1] == FLOAT:
                raise TypeError(f"{t.what} indexes axis {axis} of {form.name} with a float: use .astype(int)")
        return Symbol(t, t.load(self._place, tuple(map(t.as_int, places))))

    def _refuse(self, *_: Any) -> Any:
        self._trace.place(self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __neg__ = __bool__ = __iter__ = __len__ = _refuse


def _shown(index: Any) -> str:
    return "an index" if isinstance(index, Symbol) else repr(index)
