"""A problem's score function printed as CUDA: ``struct ScoreFunction`` of cuda_src/shared/score_function.cuh.

Terms that depend on neither query nor key are members of the function. Terms of the query alone are members of its
Row, terms of the key alone of its Column: kernels compute each once per tile. Other terms are computed for each score.
Integers that only become floats are computed as floats, which hold them exactly below 2^24. Kernels give the product
``x`` of query and key. If a kernel has registers for it (:attr:`cufa.kernels.base.Kernel.folds_score_scale`), the
softmax scale becomes part of a constant factor of the score, and factors of a tanh part of the tanh."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..problem.problem import Problem
from ..problem.score_change import ScoreChange
from .score_nodes import COLUMN, ROW, SCORE, UNIFORM, Nodes, with_floats

_PADDING = 1024
"""Queries and keys past the end, which kernels compute because tiles are whole."""

_PLACES = {UNIFORM: "", ROW: "r.", COLUMN: "c."}
"""Levels of values that are computed once, and where a function for each score finds them."""
_EACH_SCORE = UNIFORM | ROW | COLUMN | SCORE
"""The level of a function for each score."""

_WITHOUT_GRADIENTS = """\
  template <int G>
  static DEVICE float* target(const Params&, Size<G>) { return nullptr; }
  template <int G>
  DEVICE int place(Size<G>, const Row&, const Column&) const { return 0; }
  template <int G>
  DEVICE float weight(Size<G>, float, const Row&, const Column&) const { return 0.0f; }"""


def score_text(problem: Problem, folds: bool) -> str:
    """The text of a translation unit before the kernel; empty without a score function. ``folds``: the kernel's
    ``folds_score_scale``."""
    if problem.score is None:
        return ""
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return change_text(problem.score, *sizes, folds)


def operations(problem: Problem, folds: bool) -> dict[str, list[str]]:
    """The operations of a score function's value, as CUDA with ``{}`` for operands, by how often they are computed:
    once per "call", "query", "key" or "score"."""
    assert problem.score is not None
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    e = problem.score.expression
    nodes = Nodes(problem.score, with_floats(e, problem.score.bounds(*sizes)), sizes[:2], folds)
    level_names = {UNIFORM: "call", ROW: "query", COLUMN: "key"}
    texts: dict[str, list[str]] = {name: [] for name in (*level_names.values(), "score")}
    for node in (nodes[n] for n in nodes.needed(nodes.results[:1])):
        if node.text not in _INPUTS:
            texts[level_names.get(node.level, "score")].append(node.text)
    return texts


_INPUTS = ("b", "h", "i", "j", "delta", "x", "i_float", "j_float")


def change_text(
    change: ScoreChange, batch: int, heads: int, seqlen_q: int, seqlen_k: int, folds: bool = False
) -> str:
    """The text of a score function in calls of these sizes."""
    whole = (-(-n // _PADDING) * _PADDING for n in (seqlen_q, seqlen_k))
    return _text(change, folds, batch, heads, *whole)


@functools.lru_cache(64)
def _text(change: ScoreChange, folds: bool, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> str:
    e = change.differentiated
    bounds = change.bounds(batch, heads, seqlen_q + _PADDING, seqlen_k + _PADDING, e)
    return _ScoreText(Nodes(change, with_floats(e, bounds), (batch, heads), folds)).text()


class _ScoreText:
    """Prints nodes as a struct."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def text(self) -> str:
        nodes = self.nodes
        needed = nodes.needed([nodes.results[0]])
        tangents = (nodes.tanh[n] for n in needed if n in nodes.tanh and nodes.level(n) & SCORE)
        score_tangents = list(dict.fromkeys(tangents))
        unit = score_tangents[0][1] if len(score_tangents) == 1 else "1.0f"
        greatest: str | int = "0.0f"
        for of, scale in score_tangents:
            x = of if scale in (unit, "1.0f") else nodes.put("float", f"{{}} * ({scale})", of)
            greatest = nodes.put("float", "fmaxf({}, fabsf({}))", greatest, x)
        outputs = [*nodes.results, *nodes.targets, greatest]
        uniform, row, column = self._members(outputs)
        slope, weights = nodes.results[1], nodes.results[2:]
        reads = any(nodes.level(x) & SCORE for x in weights)
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
            f"  static constexpr bool HAS_TANH = {_bool(bool(score_tangents))};",
            f"  static constexpr bool TANH_OF_PRODUCT = {_bool(unit != '1.0f')};",
            f"  static constexpr int GRADIENTS = {len(nodes.targets)};",
            f"  static constexpr bool WEIGHTS_READ_SCORES = {_bool(reads)};",
            "  const Params& p;",
            *(f"  {nodes[x].type} u{x};" for x in uniform),
            f"  struct Row {{ {' '.join(f'{nodes[x].type} v{x};' for x in row)} }};",
            f"  struct Column {{ {' '.join(f'{nodes[x].type} v{x};' for x in column)} }};",
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
            *self._function("float", f"value({arguments})", nodes.results[0]),
            "  template <bool SMALL>",
            *self._function("float", f"slope({arguments})", slope),
            *self._function("float", f"greatest({arguments})", greatest),
        ]
        for n, (weight, target) in enumerate(zip(weights, nodes.targets, strict=True)):
            lines += self._function("float", f"weight(Size<{n}>, {arguments})", weight)
            lines += self._function("int", f"place(Size<{n}>, {arguments.partition(', ')[2]})", target)
            array = nodes.arrays_of_targets[n]
            lines.append(
                f"  static DEVICE float* target(const Params& p, Size<{n}>) {{ return p.dscore{array}; }}"
            )
        if not nodes.targets:
            lines.append(_WITHOUT_GRADIENTS)
        return "\n".join([*lines, "};"]) + "\n"

    def _is_light(self, needed: Sequence[int]) -> bool:
        """Whether a score takes a few operations only, without memory reads and function calls."""
        each = [self.nodes[n] for n in needed if self.nodes[n].level not in _PLACES]
        return len(each) <= 8 and not any("ld_global" in x.text or "score_" in x.text for x in each)

    def _members(self, outputs: Sequence[str | int]) -> list[list[int]]:
        """The nodes of each level of ``_PLACES`` that a node of another level reads."""
        members: dict[int, list[int]] = {level: [] for level in _PLACES}
        used = {(n, _EACH_SCORE) for n in outputs if isinstance(n, int)}
        for n in self.nodes.needed(outputs):
            used |= {(x, self.nodes[n].level) for x in self.nodes[n].operands if isinstance(x, int)}
        for n, level in sorted(used):
            own = self.nodes[n].level
            if own in members and level != own and n not in members[own]:
                members[own].append(n)
        return list(members.values())

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
        for n in self.nodes.needed(outputs):
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
        lines = self._lines(_EACH_SCORE, [result])
        if not head.startswith(("value", "slope")):
            lines = [line.replace("SMALL", "false") for line in lines]
        return [
            f"  DEVICE {type} {head} const {{",
            *lines,
            f"    return {self._ref(result, _EACH_SCORE)};",
            "  }",
        ]


def _bool(x: bool) -> str:
    return str(x).lower()
