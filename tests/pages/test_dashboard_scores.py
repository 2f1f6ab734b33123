"""Machine code, "A score function inside a kernel": formula, derivatives, operations and CUDA, without a GPU."""

from __future__ import annotations

import html

import pytest
from dashboard_page_support import has, open_page, words

from cufa.build.score_text import score_text
from cufa.dashboard.views import machine_code_scores as view
from cufa.kernels import KERNELS
from cufa.measure.score_cases import forms


@pytest.mark.parametrize("name", forms(1, 1, 1))
def test_operations_are_those_of_the_printed_function(name: str) -> None:
    """The value is printed operation by operation: what is computed for each score is there."""
    folds = KERNELS["fa3_forward"].folds_score_scale
    problem = view.problem_of(name)
    counted, text = view.operations(problem, folds), score_text(problem, folds)
    value = text[text.index(" value(") : text.index("return", text.index(" value("))]
    lines = [x for x in value.splitlines() if " = " in x and not x.endswith("= x;")]
    assert len(lines) == len(counted["score"])


def test_the_page_shows_a_function_and_its_derivatives() -> None:
    said = html.unescape(words(open_page("machine_code", score="relative-table")))
    has(said, "A score function inside a kernel", "s' = (s + table[h, ", "∂s'/∂table[h, ", "predicted</span>")
    has(said, "struct ScoreFunction", "ld_global<float>", "| each score | 8 | 12 |")
    capped = html.unescape(words(open_page("machine_code", score="soft-cap")))
    has(capped, "tanh", "∂s'/∂s = (1 - ")
