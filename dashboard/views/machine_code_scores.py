"""The page Machine code: what a score function becomes inside a kernel."""

from __future__ import annotations

import dataclasses

import streamlit as st

from cufa.build.score_text import operations, score_text
from cufa.dashboard import page
from cufa.dashboard.state import Controls
from cufa.kernels import KERNELS
from cufa.measure.score_cases import forms
from cufa.measure.suites import make
from cufa.problem.problem import Problem
from cufa.problem.score_function import score

_SLOTS = {"score_tanh<": 6, "score_": 9, "float(ld": 4, "int(ld": 4, "bool(ld": 4, "{} + i64(": 2, "int(": 4}
"""Issue slots of a warp for an operation, by the beginning of its text; 1 for any other. From the throughput of its
instructions on sm_90. A tangent: the polynomial near 0, and the search for the greatest argument."""
_SOFTMAX = 4.5
"""Instructions per score of a clear tile without a change of scores (cuda_src/forward/fa3/NOTES.md)."""
_FOR = {
    "call": "each head of a call", "query": "each query of a tile", "key": "each key of a tile", "score": "each score",
}  # fmt: skip


def problem_of(name: str) -> Problem:
    """The problem of one function of `cufa bench --suite scores`."""
    shape = make(2, 32, 8192, 128, "bfloat16", True, kv_heads=8)
    function, arrays, _ = forms(shape.batch, shape.heads, shape.seqlen_k)[name]
    floats = tuple(name for name, x in arrays.items() if getattr(x, "dtype", None) == "float32")
    return dataclasses.replace(shape, score=score(function, **arrays).change(floats))


def slots(text: str) -> int:
    return next((n for begin, n in _SLOTS.items() if text.startswith(begin)), 1)


def show(controls: Controls) -> None:
    """Formula, derivatives, operations and CUDA of one function. Nothing is compiled."""
    page.header("A score function inside a kernel")
    names = {name.replace(" ", "-"): name for name in forms(1, 1, 1)}
    name = names[controls.choice("score", "Score function", names)]
    problem, kernel = problem_of(name), KERNELS["fa3_forward"]
    assert problem.score is not None
    change, by_place = problem.score, operations(problem, kernel.folds_score_scale)
    cost = sum(map(slots, by_place["score"]))
    page.verdict(
        f"{len(by_place['score'])} operations per score, about {cost} issue slots; the softmax has {_SOFTMAX:g}.",
        tag="predicted", small=True,
    )  # fmt: skip
    graph, loads = change.differentiated, [change.expression.text(x) for x in change.loads]
    wanted = ["∂s'/∂s", *(f"∂s'/∂{x}" for x in loads)]
    page.listing("\n".join([f"s' = {change.expression}", *(
        f"{x} = {graph.text(place)}" for x, place in zip(wanted, graph.results[1:], strict=True)
    )]))  # fmt: skip
    page.table([
        {"computed for": words, "operations": f"{len(by_place[place])}",
         "issue slots": f"{sum(map(slots, by_place[place]))}"}
        for place, words in _FOR.items()
    ])  # fmt: skip
    st.caption(
        "What fa3_forward is compiled with. `score=cufa.score(function, **arrays)` needs no other language."
    )
    page.listing(score_text(problem, kernel.folds_score_scale))
