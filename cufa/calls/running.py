"""Attention over keys that arrive in pieces: each call joins its result to a running result, in float32."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from ..plan.dense import FORWARD
from ..problem.options import Options
from ..problem.problem import Problem
from .call import ForwardCall
from .dispatch import run


@dataclasses.dataclass(frozen=True)
class RunningCall(ForwardCall):
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    """:attr:`cufa.problem.problem.Problem.running`."""

    def check(self, on_gpu: bool) -> tuple[Self, Problem]:
        call, problem = super().check(on_gpu)
        shapes = {"running": problem.shapes[3], "running_lse": problem.lse_shape}
        for name, shape in shapes.items():
            x = call.inputs[name]
            if x.shape != shape or str(x.dtype) != problem.lse_dtype:
                raise ValueError(f"{name} is {x.dtype} {x.shape}: it takes {problem.lse_dtype} {shape}")
        return call, dataclasses.replace(problem, running=self.rows)


def attend(
    q: Any, k: Any, v: Any, out: Any, running: Any, running_lse: Any, rows: tuple[int, int, int, int],
    options: Options, *, alibi_slopes: Any = None, device: str | None = None,
) -> None:  # fmt: skip
    """Attention over ``k`` and ``v``, joined to the running result of earlier keys.

    q, k, v : arrays, (batch, heads, seqlen, head_dim)
        As for :func:`cufa.flash_attention`.
    out : array, q's shape and dtype
        Receives finished rows.
    running, running_lse : float32 (float64 where q is) arrays, (batch, heads, seqlen_q, head_dim) and (batch, heads,
        seqlen_q). Read and written in place. The call writes ``running_lse`` of every row, and leaves ``running`` of
        finished rows in any state.
    rows
        First and end of the rows without an earlier result, whose running result is not read; first and end of the
        rows that this call finishes.

    Raises ValueError if no kernel for q's GPU takes running results.
    """
    given = {
        "q": q, "k": k, "v": v, "out": out, "alibi_slopes": alibi_slopes, "running": running,
        "running_lse": running_lse,
    }  # fmt: skip
    call = RunningCall.read([given.get(x.name) for x in FORWARD.all_operands], ("out",), options)
    run(dataclasses.replace(call, rows=rows), device, ("running", rows, options))
