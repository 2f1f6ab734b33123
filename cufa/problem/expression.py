"""Expressions: what a function of scores and indexes computes, instruction by instruction.

A :class:`Trace` is an expression under construction, of a function in NumPy (:mod:`cufa.problem.tracing`) or of a
derivative (:mod:`cufa.problem.derivative`); equal instructions are stored once. An :class:`Expression` is a value: it
is evaluated by NumPy (:mod:`cufa.problem.evaluation`), and printed as CUDA (:mod:`cufa.build.score_text`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
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
        """The expression without instructions that no result needs."""
        kept = self.needed(*self.results)
        new = {old: place for place, old in enumerate(kept)}
        code = tuple(with_operands(self.code[old], new) for old in kept)
        return Expression(code, self.arrays, tuple(new[x] for x in self.results))

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


def with_operands(instruction: Instruction, new: Mapping[int, int]) -> Instruction:
    """The instruction with ``new[place]`` in place of each operand."""
    op, kind, *args = instruction
    if op in ("const", "input"):
        return instruction
    kept = 1 if op == "load" else 0
    return op, kind, *args[:kept], *(new[x] for x in args[kept:])


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
        """The place in the code of ``op`` of two values. Kinds follow NumPy's rules, with 32-bit integers."""
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
