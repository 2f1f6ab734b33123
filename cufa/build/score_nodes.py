"""The values of a score function that is printed as CUDA (:mod:`cufa.build.score_text`), and what each depends on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..problem.evaluation import Bounds
from ..problem.expression import BOOL, COMPARISONS, FLOAT, INT, Expression, Trace, with_operands
from ..problem.score_change import ScoreChange

_SCALARS = {
    "bool": "unsigned char", "int8": "signed char", "int16": "short", "int32": "int", "int64": "i64",
    "uint8": "unsigned char", "uint16": "u16", "uint32": "u32", "float16": "u16", "bfloat16": "u16",
    "float32": "float", "float64": "double",
}  # fmt: skip
_WIDEN = {"float16": "SixteenBit<false>::widen({})", "bfloat16": "SixteenBit<true>::widen({})"}
_TYPES = {FLOAT: "float", INT: "int", BOOL: "bool"}
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    **dict(zip(COMPARISONS, ("<", "<=", ">", ">=", "==", "!="), strict=True)),
}  # fmt: skip
_EXACT = 2.0**24
UNIFORM, ROW, COLUMN, SCORE = 0, 1, 2, 4
"""What a term depends on, as bits."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A value of the printed function."""

    type: str
    text: str
    """CUDA, with ``{}`` for each operand."""
    operands: tuple[str | int, ...] = ()
    """Literals, or numbers of nodes."""
    level: int = UNIFORM


def with_floats(e: Expression, found: dict[int, Bounds]) -> Expression:
    """The expression, with integers below 2^24 computed as floats if they become floats."""
    t = Trace("", e.arrays)
    new: dict[int, int] = {}

    def is_exact(place: int) -> bool:
        return max(map(abs, found[place])) < _EXACT

    def as_float(place: int) -> int:
        op, kind, *args = e.code[place]
        if kind == INT and op == "where":
            return t.where(new[args[0]], as_float(args[1]), as_float(args[2]))
        if (
            kind == INT
            and op in ("add", "sub", "mul", "min", "max", "neg", "abs")
            and all(map(is_exact, (place, *args)))
        ):
            parts = [as_float(x) for x in args]
            return t.unary(op, *parts) if len(parts) == 1 else t.binary(op, *parts)
        return t.as_float(new[place])

    for place, (op, _, *args) in enumerate(e.code):
        if op == "float":
            new[place] = as_float(args[0])
        else:
            new[place] = t.put(*with_operands(e.code[place], new))
    return Expression(tuple(t.code), e.arrays, tuple(new[x] for x in e.results)).pruned()


class Nodes:
    """The nodes of an expression with its derivatives, ``e``. ``sizes``: batch and heads. ``folds``: factors of a score
    become part of one constant (:mod:`cufa.build.score_text`)."""

    def __init__(self, change: ScoreChange, e: Expression, sizes: tuple[int, int], folds: bool) -> None:
        self.change, self.e, self.folds = change, e, folds
        self.bounds = change.bounds(*sizes, 2**31, 2**31, e)
        self.nodes: list[Node] = []
        self.known: dict[Node, int] = {}
        self.of_place: dict[int, str | int] = {}
        self.tanh: dict[str | int, tuple[str | int, str]] = {}
        """By node of a hyperbolic tangent: its argument as (node, factor)."""
        for place in range(len(e.code)):
            self.of_place[place] = self._node_of(place)
        self.results = [self.of_place[x] for x in e.results]
        wanted = [change.place_of(name) for name in change.gradients]
        loads = [x for x in e.code if x[0] == "load" and x[2] in wanted]
        self.targets = [self._gradient(x[2], x[3:]) for x in loads]
        self.arrays_of_targets = [x[2] for x in loads]

    def __getitem__(self, n: int) -> Node:
        return self.nodes[n]

    def put(self, type: str, text: str, *operands: str | int, level: int = UNIFORM) -> int:
        for x in operands:
            level |= self.nodes[x].level if isinstance(x, int) else UNIFORM
        node = Node(type, text, operands, level)
        if node not in self.known:
            self.known[node] = len(self.nodes)
            self.nodes.append(node)
        return self.known[node]

    # --- Instructions -------------------------------------------------------------------------------------

    def _node_of(self, place: int) -> str | int:
        op, kind, *args = self.e.code[place]
        if op == "const":
            return _literal(args[0])
        if op == "input":
            return self._input(args[0])
        if op == "load":
            return self._load(args[0], args[1:])
        type, x = _TYPES[kind], [self.of_place[n] for n in args]
        factor = self._factor(place)
        if factor is not None:
            return self.put(type, f"x * ({factor})", level=SCORE)
        if op == "tanh":
            return self._tanh(args[0], "1.0f")
        if op == "mul" and self.e.code[args[1]][0] == "tanh" and isinstance(x[0], str) and self.folds:
            return self._tanh(self.e.code[args[1]][2], x[0])
        if op == "float" and self.e.code[args[0]][0] == "input" and self.e.code[args[0]][2] in "ij":
            name = self.e.code[args[0]][2]
            return self.put(type, f"{name}_float", level=ROW if name == "i" else COLUMN)
        if op in _SIGNS:
            return self.put(type, f"{{}} {_SIGNS[op]} {{}}", *x)
        if op == "where":
            return self.put(type, "{} ? {} : {}", *x)
        if op in ("neg", "not", "bitnot"):
            return self.put(type, f"{ {'neg': '-', 'bitnot': '~'}.get(op, '!') }{{}}", *x)
        own = {"float": "float", "int": "int", "min": "min", "max": "max"}
        float_names = {"abs": "fabsf", "min": "fminf", "max": "fmaxf"}
        name = (own | float_names if kind == FLOAT else own).get(op, f"score_{op}")
        return self.put(type, f"{name}({', '.join(['{}'] * len(x))})", *x)

    def _input(self, name: str) -> int:
        if name == "s":
            return self.put("float", "x * p.score_scale", level=SCORE)
        return self.put("int", name, level={"i": ROW, "j": COLUMN}.get(name, UNIFORM))

    def _factor(self, place: int) -> str | None:
        """The factor of x, if the value is a score times a constant; else None."""
        op, _, *args = self.e.code[place]
        if not self.folds:
            return None
        if op == "mul" and self.e.code[args[0]][0] == "const" and self.e.code[args[1]][::2] == ("input", "s"):
            return f"p.score_scale * {_literal(self.e.code[args[0]][2])}"
        return "p.score_scale" if (op, args) == ("input", ["s"]) else None

    def _tanh(self, place: int, factor: str) -> int:
        """``factor`` times the hyperbolic tangent of a value."""
        unit, x = self._factor(place), self.of_place[place]
        of, scale = (x, "1.0f") if unit is None else (self.put("float", "x", level=SCORE), unit)
        node = self.put("float", f"score_tanh<SMALL>({{}}, {scale}, {factor})", of)
        self.tanh[node] = of, scale
        return node

    def _indexes(self, array: int, places: Sequence[int]) -> list[str | int]:
        """The indexes, clamped if this call may compute one that lies outside the axis."""
        found: list[str | int] = []
        for axis, (place, size) in enumerate(zip(places, self.change.shapes[array], strict=True)):
            index, (low, high) = self.of_place[place], self.bounds[place]
            if low < 0:
                index = self.put("int", "max({}, 0)", index)
            if high > size - 1:
                index = self.put("int", f"min({{}}, p.array{array}.size{axis} - 1)", index)
            found.append(index)
        return found

    def level(self, x: str | int) -> int:
        return self.nodes[x].level if isinstance(x, int) else UNIFORM

    def _load(self, array: int, places: Sequence[int]) -> int:
        """Advances the array's pointer by terms that all scores share, by the row's terms, by the score's, and last by
        the sum of the column's."""
        form = self.e.arrays[array]
        scalar, indexes = _SCALARS[form.dtype], self._indexes(array, places)
        pointer = f"const {scalar}*"
        terms = [(self.level(x), x, f"p.array{array}.stride{axis}") for axis, x in enumerate(indexes)]
        address = self.put(pointer, f"static_cast<{pointer}>(p.score{array})")
        column_offset: str | int = "0"
        for level, index, stride in sorted(terms, key=lambda term: (term[0] == COLUMN, term[0])):
            if level == COLUMN:
                column_offset = self.put("i64", f"{{}} + i64({{}}) * {stride}", column_offset, index)
            elif index != "0":
                address = self.put(pointer, f"{{}} + i64({{}}) * {stride}", address, index)
        if column_offset != "0":
            address = self.put(pointer, "{} + {}", address, column_offset)
        text = _WIDEN.get(form.dtype, f"{_TYPES[form.kind]}({{}})").format(f"ld_global<{scalar}>({{}})")
        return self.put(_TYPES[form.kind], text, address)

    def _gradient(self, array: int, places: Sequence[int]) -> str | int:
        """The element that the gradient of a load is added to: gradients are contiguous."""
        shape = self.change.shapes[array]
        sizes = [f"p.array{array}.size{axis}" for axis in range(len(shape))]
        strides = [" * ".join(sizes[axis + 1 :]) or "1" for axis in range(len(shape))]
        found: str | int = "0"
        indexes = self._indexes(array, places)
        for index, stride in sorted(zip(indexes, strides, strict=True), key=lambda x: self.level(x[0])):
            found = self.put("int", f"{{}} + {{}} * ({stride})", found, index)
        return found

    def needed(self, outputs: Sequence[str | int]) -> list[int]:
        """The nodes that ``outputs`` depend on, in order."""
        wanted: set[int] = set()
        pending = [x for x in outputs if isinstance(x, int)]
        while pending:
            n = pending.pop()
            if n not in wanted:
                wanted.add(n)
                pending += [x for x in self.nodes[n].operands if isinstance(x, int)]
        return sorted(wanted)


def _literal(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "u32_as_float(0x7fffffffu)"
    if abs(value) > 3.4028235e38:
        return "NEG_INF" if value < 0 else "(-NEG_INF)"
    return f"({value!r}f)" if value < 0 else f"{value!r}f"
