"""Cases of e4m3: errors beside times on five distributions, and times and joules beside bfloat16's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ..problem.problem import Problem
from .cases import Case, Contender, contenders
from .distributions import DISTRIBUTIONS, NEEDLES
from .quantized import BASELINE, QUANTIZE, Quantized

NEEDLE_KEYS = {True: 1 << 17, False: 1 << 13}
"""Number of keys that a needle lies among, on a GPU (True) and on the CPU."""
_NEEDLE_QUERIES = 4 * NEEDLES
_BASELINE = Contender(name=BASELINE)
_RECIPES = (
    *(
        Quantized(per, rotated)
        for rotated, per in itertools.product((False, True), ("head", "block", "token"))
    ),
    *(Quantized(per, rotated=True, smooth=True) for per in ("head", "block")),
)


def accuracy(problem: Problem, needle_keys: int, on_gpu: bool = False) -> Iterator[Case]:
    """One case for each distribution, of a bfloat16 problem. The needle case has few queries and ``needle_keys`` keys.
    On a GPU it also compares both values of ``accumulate``; the CPU always sums in float32."""
    plain = (_BASELINE, *(Contender(quantized=recipe) for recipe in _RECIPES))
    accumulations = (Quantized(rotated=True, sums=x) for x in (("tile", "row") if on_gpu else ()))
    needle = (*plain, *(Contender(quantized=recipe) for recipe in accumulations))
    fa2 = Contender(
        "fa2", name=f"FA2, {_RECIPES[0]}", quantized=_RECIPES[0]
    )  # on Hopper not the planner's choice
    for name, (words, _) in DISTRIBUTIONS.items():
        if name == "needle":
            shape = dataclasses.replace(
                problem, batch=1, seqlen_q=min(problem.seqlen_q, _NEEDLE_QUERIES), seqlen_k=needle_keys
            )
        else:
            shape = problem
        chosen = needle if name == "needle" else (*plain, fa2) if on_gpu and name == "normal" else plain
        yield Case(shape, chosen, f"{name} ({words}): {shape}", distribution=name)


def speed(problems: Iterator[Problem]) -> Iterator[Case]:
    """bfloat16; e4m3, rotated, with the cheapest scales (one per head); and the time of quantising."""
    rotated = Quantized(rotated=True)
    for problem in problems:
        ours = _BASELINE, Contender(quantized=rotated), Contender(QUANTIZE, quantized=rotated)
        yield Case(problem, (*ours, *contenders("torch cudnn", "fa4")), str(problem))
