"""A problem's score function printed as CUDA: ``struct ScoreFunction`` of cuda_src/shared/score_function.cuh.

Terms that depend on neither query nor key are members of the function, those of the query alone of its Row, those of
the key alone of its Column: kernels compute each once per tile. What depends on both, or on the score, is computed for
each score. Integers that only become floats are computed as floats, which hold them exactly below 2^24. Kernels give
the product ``x`` of query and key. If a kernel has registers for it
(:attr:`cufa.kernels.base.Kernel.folds_score_scale`), the softmax scale becomes part of a constant that the score is
multiplied by, and factors of a hyperbolic tangent part of the tangent."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from ..problem.evaluation import Bounds
from ..problem.expression import BOOL, COMPARISONS, FLOAT, INT, Expression, Trace
from ..problem.problem import Problem
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
_PADDING = 1024
"""Kernels compute whole tiles: queries and keys past the end."""

UNIFORM, ROW, COLUMN, SCORE = 0, 1, 2, 4
"""What a term depends on, as bits."""
_PLACES = {UNIFORM: "", ROW: "r.", COLUMN: "c."}


_WITHOUT_GRADIENTS = """\
  template <int G>
  static DEVICE float* target(const Params&, Size<G>) { return nullptr; }
  template <int G>
  DEVICE int place(Size<G>, const Row&, const Column&) const { return 0; }
  template <int G>
  DEVICE float weight(Size<G>, float, const Row&, const Column&) const { return 0.0f; }"""


@dataclasses.dataclass(frozen=True)
class _Node:
    """A value of the printed function."""

    type: str
    text: str
    """With ``{}`` for each operand."""
    operands: tuple[str | int, ...] = ()
    """Literals, or numbers of nodes."""
    level: int = UNIFORM


def score_text(problem: Problem, folds: bool) -> str:
    """What a translation unit has before the kernel; empty without a score function. ``folds``: the kernel's
    ``folds_score_scale``."""
    if problem.score is None:
        return ""
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return change_text(problem.score, *sizes, folds)


def operations(problem: Problem, folds: bool) -> dict[str, list[str]]:
    """Of a problem's score function: the operations of its value, as CUDA with ``{}`` for operands, by what they are
    computed for: each "call", "query", "key" or "score"."""
    assert problem.score is not None
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    e = problem.score.expression
    printer = _Printer(problem.score, with_floats(e, problem.score.bounds(*sizes)), sizes[:2], folds)
    of_level = {UNIFORM: "call", ROW: "query", COLUMN: "key"}
    found: dict[str, list[str]] = {name: [] for name in (*of_level.values(), "score")}
    for node in (printer.nodes[n] for n in printer._needed(printer.results[:1])):
        if node.text not in _INPUTS:
            found[of_level.get(node.level, "score")].append(node.text)
    return found


_INPUTS = ("b", "h", "i", "j", "delta", "x", "i_float", "j_float")


def change_text(
    change: ScoreChange, batch: int, heads: int, seqlen_q: int, seqlen_k: int, folds: bool = False
) -> str:
    """Of a score function in calls of these sizes."""
    whole = (-(-n // _PADDING) * _PADDING for n in (seqlen_q, seqlen_k))
    return _text(change, folds, batch, heads, *whole)


@functools.lru_cache(64)
def _text(change: ScoreChange, folds: bool, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> str:
    e = change.differentiated
    found = change.bounds(batch, heads, seqlen_q + _PADDING, seqlen_k + _PADDING, e)
    return _Printer(change, with_floats(e, found), (batch, heads), folds).text()


def with_floats(e: Expression, found: dict[int, Bounds]) -> Expression:
    """The same, with integers below 2^24 that become floats computed as floats."""
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

    for place, (op, kind, *args) in enumerate(e.code):
        if op == "float":
            new[place] = as_float(args[0])
        elif op == "load":
            new[place] = t.put(op, kind, args[0], *(new[x] for x in args[1:]))
        else:
            new[place] = t.put(op, kind, *(args if op in ("const", "input") else (new[x] for x in args)))
    return Expression(tuple(t.code), e.arrays, tuple(new[x] for x in e.results)).pruned()


class _Printer:
    def __init__(self, change: ScoreChange, e: Expression, sizes: tuple[int, int], folds: bool) -> None:
        self.change, self.e, self.folds = change, e, folds
        unbounded = ScoreChange(e, change.shapes).bounds(*sizes, 2**31, 2**31, e)
        self.bounds = unbounded
        self.nodes: list[_Node] = []
        self.known: dict[_Node, int] = {}
        self.of_place: dict[int, str | int] = {}
        self.tanh: dict[str | int, tuple[str | int, str]] = {}
        """By node of a hyperbolic tangent: what it is a tangent of, times a factor."""
        for place in range(len(e.code)):
            self.of_place[place] = self._node_of(place)
        self.results = [self.of_place[x] for x in e.results]
        wanted = [change.place_of(name) for name in change.gradients]
        loads = [x for x in e.code if x[0] == "load" and x[2] in wanted]
        self.targets = [self._gradient(x[2], x[3:]) for x in loads]
        self.arrays_of_targets = [x[2] for x in loads]

    def put(self, type: str, text: str, *operands: str | int, level: int = UNIFORM) -> int:
        for x in operands:
            level |= self.nodes[x].level if isinstance(x, int) else UNIFORM
        node = _Node(type, text, operands, level)
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
        if op in ("min", "max") and kind == FLOAT:
            op = f"f{op}f"
        names = {
            "abs": "fabsf" if kind == FLOAT else "score_abs",
            "min": "min",
            "max": "max",
            "float": "float",
            "int": "int",
        }
        name = op if op in ("fminf", "fmaxf") else names.get(op, f"score_{op}")
        return self.put(type, f"{name}({', '.join(['{}'] * len(x))})", *x)

    def _input(self, name: str) -> int:
        if name == "s":
            return self.put("float", "x * p.score_scale", level=SCORE)
        return self.put("int", name, level={"i": ROW, "j": COLUMN}.get(name, UNIFORM))

    def _factor(self, place: int) -> str | None:
        """What x is multiplied by, of a score times a constant."""
        op, _, *args = self.e.code[place]
        if not self.folds:
            return None
        if op == "mul" and self.e.code[args[0]][0] == "const" and self.e.code[args[1]][::2] == ("input", "s"):
            return f"p.score_scale * {_literal(self.e.code[args[0]][2])}"
        return "p.score_scale" if (op, args) == ("input", ["s"]) else None

    def _tanh(self, place: int, factor: str) -> int:
        """``factor`` times the tangent of a value."""
        unit, x = self._factor(place), self.of_place[place]
        of, scale = (x, "1.0f") if unit is None else (self.put("float", "x", level=SCORE), unit)
        node = self.put("float", f"score_tanh<SMALL>({{}}, {scale}, {factor})", of)
        self.tanh[node] = of, scale
        return node

    def _indexes(self, array: int, places: Sequence[int]) -> list[str | int]:
        """Clamped where a value that this call may compute lies outside the axis."""
        found: list[str | int] = []
        for axis, (place, size) in enumerate(zip(places, self.change.shapes[array], strict=True)):
            index, (low, high) = self.of_place[place], self.bounds[place]
            if low < 0:
                index = self.put("int", "max({}, 0)", index)
            if high > size - 1:
                index = self.put("int", f"min({{}}, p.array{array}.size{axis} - 1)", index)
            found.append(index)
        return found

    def _address(self, type: str, pointer: str, indexes: Sequence[str | int], strides: Sequence[str]) -> int:
        """A pointer, advanced first by what is the same for all scores, then by terms of the row, and so on."""
        terms = [(self._level(x), x, stride) for x, stride in zip(indexes, strides, strict=True)]
        found = self.put(type, pointer)
        for _, index, stride in sorted(terms, key=lambda term: term[0]):
            if index != "0":
                found = self.put(type, f"{{}} + i64({{}}) * {stride}", found, index)
        return found

    def _level(self, x: str | int) -> int:
        return self.nodes[x].level if isinstance(x, int) else UNIFORM

    def _load(self, array: int, places: Sequence[int]) -> int:
        form = self.e.arrays[array]
        scalar, indexes = _SCALARS[form.dtype], self._indexes(array, places)
        pointer = f"static_cast<const {scalar}*>(p.score{array})"
        rows = [x for x in indexes if self._level(x) != COLUMN]
        strides = [f"p.array{array}.stride{axis}" for axis in range(len(indexes))]
        both = [*zip(indexes, strides, strict=True)]
        first = [x for x in both if self._level(x[0]) != COLUMN] if rows else []
        address = self._address(f"const {scalar}*", pointer, [x[0] for x in first], [x[1] for x in first])
        of_column: str | int = "0"
        for index, stride in (x for x in both if x not in first):
            of_column = self.put("i64", f"{{}} + i64({{}}) * {stride}", of_column, index)
        if of_column != "0":
            address = self.put(f"const {scalar}*", "{} + {}", address, of_column)
        text = _WIDEN.get(form.dtype, f"{_TYPES[form.kind]}({{}})").format(f"ld_global<{scalar}>({{}})")
        return self.put(_TYPES[form.kind], text, address)

    def _gradient(self, array: int, places: Sequence[int]) -> str | int:
        """The element that the gradient of a load is added to: gradients are contiguous."""
        shape = self.change.shapes[array]
        sizes = [f"p.array{array}.size{axis}" for axis in range(len(shape))]
        strides = [" * ".join(sizes[axis + 1 :]) or "1" for axis in range(len(shape))]
        found: str | int = "0"
        indexes = self._indexes(array, places)
        for index, stride in sorted(zip(indexes, strides, strict=True), key=lambda x: self._level(x[0])):
            found = self.put("int", f"{{}} + {{}} * ({stride})", found, index)
        return found

    # --- Text ---------------------------------------------------------------------------------------------

    def text(self) -> str:
        self.members: dict[int, list[int]] = {UNIFORM: [], ROW: [], COLUMN: []}
        needed = self._needed([self.results[0]])
        of_scores = [
            *dict.fromkeys(self.tanh[n] for n in needed if n in self.tanh and self._level(n) & SCORE)
        ]
        unit = of_scores[0][1] if len(of_scores) == 1 else "1.0f"
        greatest: str | int = "0.0f"
        for of, scale in of_scores:
            x = of if scale in (unit, "1.0f") else self.put("float", f"{{}} * ({scale})", of)
            greatest = self.put("float", "fmaxf({}, fabsf({}))", greatest, x)
        outputs = [*self.results, *self.targets, greatest]
        self._find_members(outputs)
        uniform, row, column = (self.members[level] for level in (UNIFORM, ROW, COLUMN))
        slope, weights = self.results[1], self.results[2:]
        reads = any(self._level(x) & SCORE for x in weights)
        arguments = (
            "[[maybe_unused]] float x, [[maybe_unused]] const Row& r, [[maybe_unused]] const Column& c"
        )
        lines = [
            '#include "shared/score_language.cuh"',
            "#define CUFA_SCORE",
            "template <typename Params>",
            "struct ScoreFunction {",
            f"  static constexpr bool HAS_SLOPE = {_bool(slope != '1.0f')};",
            f"  static constexpr bool IS_LIGHT = {_bool(self._is_light(needed))};",
            f"  static constexpr bool HAS_TANH = {_bool(bool(of_scores))};",
            f"  static constexpr bool TANH_OF_PRODUCT = {_bool(unit != '1.0f')};",
            f"  static constexpr int GRADIENTS = {len(self.targets)};",
            f"  static constexpr bool WEIGHTS_READ_SCORES = {_bool(reads)};",
            "  const Params& p;",
            *(f"  {self.nodes[x].type} u{x};" for x in uniform),
            f"  struct Row {{ {' '.join(f'{self.nodes[x].type} v{x};' for x in row)} }};",
            f"  struct Column {{ {' '.join(f'{self.nodes[x].type} v{x};' for x in column)} }};",
            "  DEVICE ScoreFunction(const Params& p_, [[maybe_unused]] int b, [[maybe_unused]] int h,",
            "                       [[maybe_unused]] int delta) : p(p_) {",
            *self._lines(UNIFORM, uniform),
            *(f"    u{x} = t{x};" for x in uniform),
            "  }",
            "  DEVICE ScoreFunction& operator=(const ScoreFunction& other) {",  # `p` is the kernel's only one
            *(f"    u{x} = other.u{x};" for x in uniform),
            "    return *this;",
            "  }",
            f"  DEVICE float unit() const {{ return {unit}; }}",
            *self._section("Row row([[maybe_unused]] int i, [[maybe_unused]] float i_float)", ROW, row),
            *self._section(
                "Column column([[maybe_unused]] int j, [[maybe_unused]] float j_float)", COLUMN, column
            ),
            "  template <bool SMALL>",
            *self._function("float", f"value({arguments})", self.results[0]),
            "  template <bool SMALL>",
            *self._function("float", f"slope({arguments})", slope),
            *self._function("float", f"greatest({arguments})", greatest),
        ]
        for n, (weight, target) in enumerate(zip(weights, self.targets, strict=True)):
            lines += self._function("float", f"weight(Size<{n}>, {arguments})", weight)
            lines += self._function("int", f"place(Size<{n}>, {arguments.partition(', ')[2]})", target)
            array = self.arrays_of_targets[n]
            lines.append(
                f"  static DEVICE float* target(const Params& p, Size<{n}>) {{ return p.dscore{array}; }}"
            )
        if not self.targets:
            lines.append(_WITHOUT_GRADIENTS)
        return "\n".join([*lines, "};"]) + "\n"

    def _is_light(self, needed: Sequence[int]) -> bool:
        """A few operations for each score, none of which reads memory or is a function."""
        each = [self.nodes[n] for n in needed if self.nodes[n].level not in _PLACES]
        return len(each) <= 8 and not any("ld_global" in x.text or "score_" in x.text for x in each)

    def _needed(self, outputs: Sequence[str | int]) -> list[int]:
        wanted: set[int] = set()
        pending = [x for x in outputs if isinstance(x, int)]
        while pending:
            n = pending.pop()
            if n not in wanted:
                wanted.add(n)
                pending += [x for x in self.nodes[n].operands if isinstance(x, int)]
        return sorted(wanted)

    def _find_members(self, outputs: Sequence[str | int]) -> None:
        used = {(n, 7) for n in outputs if isinstance(n, int)}
        for n in self._needed(outputs):
            used |= {(x, self.nodes[n].level) for x in self.nodes[n].operands if isinstance(x, int)}
        for n, level in sorted(used):
            own = self.nodes[n].level
            if own in self.members and level != own and n not in self.members[own]:
                self.members[own].append(n)

    def _ref(self, x: str | int, level: int) -> str:
        """An operand, in a section of ``level``."""
        if isinstance(x, str):
            return x
        own = self.nodes[x].level
        if own in _PLACES and own != level:
            return f"u{x}" if own == UNIFORM else f"{_PLACES[own]}v{x}"
        return f"t{x}"

    def _lines(self, level: int, outputs: Sequence[str | int]) -> list[str]:
        """Definitions of the nodes that a section of ``level`` computes itself."""
        found = []
        for n in self._needed(outputs):
            node = self.nodes[n]
            own = node.level in _PLACES
            if (own and node.level != level) or (not own and level in _PLACES):
                continue
            text = node.text.format(*(self._ref(x, level) for x in node.operands))
            text = text.replace("SMALL", "false") if level in _PLACES else text
            found.append(f"    const {node.type.removeprefix('const ')} t{n} = {text};" if "*" not in node.type else
                         f"    {node.type} t{n} = {text};")  # fmt: skip
        return found

    def _section(self, head: str, level: int, members: Sequence[int]) -> list[str]:
        values = ", ".join(f"t{x}" for x in members)
        return [f"  DEVICE {head} const {{", *self._lines(level, members), f"    return {{{values}}};", "  }"]

    def _function(self, type: str, head: str, result: str | int) -> list[str]:
        lines = self._lines(7, [result])
        if not head.startswith(("value", "slope")):
            lines = [line.replace("SMALL", "false") for line in lines]
        return [f"  DEVICE {type} {head} const {{", *lines, f"    return {self._ref(result, 7)};", "  }"]


def _bool(x: bool) -> str:
    return str(x).lower()


def _literal(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return _bool(value)
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "u32_as_float(0x7fffffffu)"
    if abs(value) > 3.4028235e38:
        return "NEG_INF" if value < 0 else "(-NEG_INF)"
    return f"({value!r}f)" if value < 0 else f"{value!r}f"
