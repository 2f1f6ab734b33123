"""Cases of the backward: the published shapes of the forward, then what else training meets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..gpu.architectures import Device
from ..plan.planner import make_plan
from ..problem.mask import CAUSAL, FULL, Band
from ..problem.problem import Problem, default_scale
from .cases import Case, Contender, contenders
from .ladder import ladder, variations

_TORCH = ("torch flash", "torch cudnn")

Best = Callable[[Problem], list[str]]
"""Algorithms of ours that serve, preferred first."""


def of_forward(problem: Problem, *, deterministic: bool = False) -> Problem:
    """The backward of a forward problem."""
    return dataclasses.replace(problem, operation="backward", deterministic=deterministic)


def published(problems: Iterable[Problem], best: Best) -> Iterator[Case]:
    for problem in map(of_forward, problems):
        yield Case(problem, contenders(*best(problem), *_TORCH, "fa4"))


def beside(shape: Problem, best: Best) -> Iterator[Case]:
    """One thing at a time, from one shape."""
    for mask in (FULL, CAUSAL):
        problem = of_forward(dataclasses.replace(shape, mask=mask))
        ordered = dataclasses.replace(problem, deterministic=True)
        ours = best(problem)
        fixed = (Contender(name, name=f"{name} deterministic", problem=ordered) for name in best(ordered))
        yield Case(problem, (*contenders(*ours), *fixed, *contenders("torch flash")))
    changes: tuple[dict[str, Any], ...] = (
        {"mask": CAUSAL, "kv_heads": 8},
        {"mask": CAUSAL, "kv_heads": 8, "seqlen_q": 1024, "seqlen_k": 1024},
        {"mask": Band(1023, 0), "seqlen_q": 8192, "seqlen_k": 8192},
        {"mask": CAUSAL, "softcap": 30.0},
        {"mask": CAUSAL, "seqlen_q": 4097, "seqlen_k": 4097},
        {"mask": FULL, "seqlen_q": 1023, "seqlen_k": 1023, "batch": 8},
        *({"mask": CAUSAL, "head_dim": d, "scale": default_scale(d)} for d in (80, 96, 192)),
        {"mask": FULL, "head_dim": 96, "scale": default_scale(96)},
    )
    for change in changes:
        problem = of_forward(dataclasses.replace(shape, **change))
        yield Case(problem, contenders(*best(problem), *_TORCH, "fa4"))


def float32(problems: Iterable[Problem], best: Best) -> Iterator[Case]:
    for problem in map(of_forward, problems):
        yield Case(problem, contenders(*best(problem), "torch efficient"))


def steps(problems: Iterable[Problem], device: Device) -> Iterator[Case]:
    """The techniques of Hopper's kernels one after the other, on the planner's tiles for each shape; none on other
    architectures."""
    for problem in map(of_forward, problems):
        try:
            plan = make_plan(problem, device, "fa3")
        except ValueError:  # another architecture
            return
        yield Case(problem, (*ladder("fa3", plan.config), *variations(plan)))
