"""e4m3 as a contender: how q, k and v of a case are quantised, and the public call on the quantised arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..calls.forward import flash_attention
from ..calls.quantize import quantize
from ..problem import float8
from ..problem.problem import Problem
from .timing import Run

BASELINE = "bfloat16"
"""The label of the baseline of e4m3: the planner's kernel on 16-bit inputs."""
QUANTIZE = "quantize q, k and v"
"""A contender that only quantises."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """The arguments of :func:`cufa.quantize`. v has one scale per head, or one in all if per="tensor"."""

    per: str = "head"
    rotated: bool = False
    smooth: bool = False
    sums: str = ""
    """``accumulate`` of the public call; "": the planner chooses."""

    def __str__(self) -> str:
        sums = f", sums by {self.sums}" if self.sums else ""
        return f"e4m3 per {self.per}" + ", rotated" * self.rotated + ", smooth" * self.smooth + sums

    def problem(self, problem: Problem) -> Problem:
        """The same attention with e4m3 inputs and a result of the problem's dtype."""
        scales = (self.per, self.per, self._of_values)
        return dataclasses.replace(
            problem, dtype=float8.NAME, out_dtype=problem.dtype, scales=scales, accumulate=self.sums or "auto"
        )

    @property
    def _of_values(self) -> str:
        return "tensor" if self.per == "tensor" else "head"

    def made(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Quantised q, k and v, and their scales, as keywords of the public call."""
        signs = 1 if self.rotated else None
        q = quantize(arrays["q"], role="q", per=self.per, rotate=signs)
        k = quantize(arrays["k"], role="k", per=self.per, rotate=signs, smooth=self.smooth)
        v = quantize(arrays["v"], role="v", per=self._of_values)
        return {"q": q[0], "k": k[0], "v": v[0], "q_scale": q[1], "k_scale": k[1], "v_scale": v[1]}

    def run(self, problem: Problem, arrays: dict[str, Any], on_gpu: bool, algorithm: str = "auto") -> Run:
        """The public call on quantised inputs; writes ``arrays["o"]``. ``problem``: from :meth:`problem`."""
        return functools.partial(
            flash_attention, **self.made(arrays), mask=problem.mask, scale=problem.scale,
            softcap=problem.softcap, out=arrays["o"], out_dtype=problem.out_dtype,
            accumulate=self.sums or None, algorithm=algorithm, device=None if on_gpu else "cpu",
        )  # fmt: skip
