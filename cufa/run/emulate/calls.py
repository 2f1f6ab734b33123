"""The CUDA kernels executed on a CPU: every thread of every block, from the .cu files that a GPU runs.

The executor is an instrument, not a backend. It shows the tiles that a kernel visits, its memory traffic, bank
conflicts in shared memory, races and deadlocks:

>>> run = cufa.emulate(q, k, v, causal=True, mode="checked")  # doctest: +SKIP
>>> run.out, run.lse, run.findings, run.records  # doctest: +SKIP
>>> cufa.emulate(q, k, v, mode="counted").totals["bank_conflicts"]  # doctest: +SKIP

It does not show a kernel's speed, its registers, or what :mod:`cufa.run.emulate.blind_spots` lists. Golden vectors
(``tests/golden``) compare the primitives' results with a GPU's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ...calls.call import BackwardCall, Call, ForwardCall, PackedBackward, PackedForward
from ...calls.dispatch import with_memory
from ...calls.float8 import Float8Call, PackedFloat8
from ...calls.score_operands import results_of_backward, with_score, with_seed
from ...gpu.architectures import Device
from ...kernels import TileConfig
from ...plan.operation import OPERATIONS
from ...plan.planner import make_plan
from ...problem.checks import check_flag
from ...problem.dropout import resolve_dropout
from ...problem.float8 import is_float8
from ...problem.options import Options
from ...problem.score_function import Score, check_gradients, resolve_score
from ...problem.typing import AnyMask
from .launch import EmulationError, Execution, Finding
from .run import Emulation, run_plan

__all__ = ["Emulation", "EmulationError", "Execution", "Finding", "emulate", "emulate_backward", "run_plan"]


def emulate(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    mask: AnyMask | None = None, softcap: float | None = None, scale: float | None = None,
    alibi_slopes: Any = None, sink: Any = None, seqlens_q: Any = None, seqlens_k: Any = None,
    score: Score | None = None, bias: Any = None, dropout: float | None = None, seed: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, cache_seqlens: Any = None, block_table: Any = None,
    k_new: Any = None, v_new: Any = None, tree: Any = None, invariant: bool = False, layout: str = "bhsd",
    algorithm: str = "fa2", num_splits: int | None = None, precision: str | None = None,
    q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, out_dtype: str | None = None,
    accumulate: Any = None, mode: str = "plain", schedule: str | int = "ascending",
    copies: str | None = None, threads: int | None = None,
    config: TileConfig | None = None, arch: str = "sm_90", trace: bool = True, inside: bool = False,
) -> Emulation:  # fmt: skip
    """Attention by a CUDA kernel, executed on this CPU. Needs a C++ compiler, not a GPU.

    Parameters
    ----------
    q, k, v, causal, window, mask, softcap, scale, alibi_slopes, sink, seqlens_q, seqlens_k, score, bias, dropout,
    seed, layout, algorithm, num_splits, precision, q_scale, k_scale, v_scale, out_dtype, accumulate
        As for :func:`cufa.flash_attention`; NumPy arrays of a dtype that the kernel serves. e4m3 takes algorithm="fa3".
    cu_seqlens_q, cu_seqlens_k
        With these q, k and v are packed, as for :func:`cufa.flash_attention_varlen`.
    cache_seqlens, block_table, k_new, v_new, tree, invariant
        As for :func:`cufa.flash_attention` and, with ``cu_seqlens_q``, :func:`cufa.flash_attention_varlen`.
    mode : "plain", "checked" or "counted"
        "plain" only computes. "checked" also finds races, reads of shared memory that was never written, accesses
        outside shared memory or the arrays (which are surrounded by NaN), missing fences (between proxies, of wgmma,
        of mbarriers), asynchronous copies without a wait, accesses of a launch before the previous launch ends,
        additions in any order by a deterministic kernel, stores to blocks of a cluster that may not be running, and
        divergent collectives. :mod:`cufa.run.emulate.blind_spots` lists what it cannot find. Every mode finds a
        deadlock. "counted" counts bytes, wavefronts and bank conflicts.
    schedule : "ascending", "descending" or int
        The warp and the lane that run next, if several can; an integer from 0 to 2**32 - 1 seeds a random choice.
    copies : None, "early" or "late"
        ``cp.async`` writes shared memory, and a store by the copy engine reads it, when issued ("early") or when
        waited for ("late"). None: late in checked mode, else early.
    threads : int, optional
        CPU threads, which share the blocks. Default: all cores.
    config : TileConfig, optional
        Tiles; default: the planner's choice for ``arch``.
    arch : str
        The architecture of the plan, e.g. "sm_80".
    trace : bool
        Build the kernel with its trace, which costs a barrier. False: exactly the kernel of a GPU, and
        ``records`` is empty.
    inside : bool
        Build the kernel with an inside trace: :attr:`Emulation.inside`.

    Raises
    ------
    TypeError, ValueError
        As :func:`cufa.flash_attention`, naming the argument.
    EmulationError
        A deadlock or a divergent warp.
    cufa.run.emulate.build.CompilerError
        No C++ compiler, or it refused the kernel.
    """
    execution = Execution(mode, schedule, copies, threads)
    optional: tuple[Any, ...] = alibi_slopes, sink, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k
    kind, layout = (PackedForward, "bshd") if cu_seqlens_q is not None else (ForwardCall, layout)
    scales, score = (q_scale, k_scale, v_scale), resolve_score(score, bias)
    dropped, seed = resolve_dropout(dropout, seed)
    options = Options.of(
        causal, window, mask, softcap, scale, precision, layout, algorithm, num_splits, accumulate=accumulate,
        score=score, invariant=invariant, dropped=dropped,
    )  # fmt: skip
    given: tuple[Any, ...] = q, k, v, None, None
    wanted = "out", "lse"
    if is_float8(q):
        of_e4m3 = PackedFloat8 if kind is PackedForward else Float8Call
        given += optional if kind is PackedForward else optional[:-2]
        return _run(
            of_e4m3.of(given, scales, out_dtype, wanted, options), execution, config, arch, trace, inside
        )
    optional += cache_seqlens, block_table, k_new, v_new, tree
    operation = OPERATIONS[kind.name]
    operands = with_seed(operation, with_score(operation, (*given, *_optional(*optional)), score), seed)
    call: Call = kind.read(operands, wanted, options)
    return _run(call, execution, config, arch, trace, inside)


def emulate_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, mask: AnyMask | None = None,
    softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None, sink: Any = None,
    seqlens_q: Any = None, seqlens_k: Any = None, score: Score | None = None, bias: Any = None,
    gradients: tuple[str, ...] = (), dropout: float | None = None, seed: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    layout: str = "bhsd", algorithm: str = "fa2", precision: str | None = None, dlse: Any = None,
    deterministic: bool = False, mode: str = "plain", schedule: str | int = "ascending",
    copies: str | None = None, threads: int | None = None, config: TileConfig | None = None,
    arch: str = "sm_90", trace: bool = True, inside: bool = False,
) -> Emulation:  # fmt: skip
    """Gradients of attention by CUDA kernels, executed on this CPU: :attr:`Emulation.results` has dq, dk and dv.

    The arrays and the options up to ``deterministic`` are those of :func:`cufa.flash_attention_backward`; the other
    options and the errors are those of :func:`emulate`.
    """
    execution = Execution(mode, schedule, copies, threads)
    optional = alibi_slopes, sink, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k
    deterministic = check_flag("deterministic", deterministic)
    kind, layout = (PackedBackward, "bshd") if cu_seqlens_q is not None else (BackwardCall, layout)
    score = resolve_score(score, bias)
    gradients = check_gradients(score, gradients)
    dropped, seed = resolve_dropout(dropout, seed)
    options = Options.of(
        causal, window, mask, softcap, scale, precision, layout, algorithm, deterministic=deterministic, score=score,
        gradients=gradients, dropped=dropped,
    )  # fmt: skip
    wanted = results_of_backward(sink, score, gradients)
    given = dout, q, k, v, out, lse, dlse, None, None, None, *_optional(*optional)
    operation = OPERATIONS[kind.name]
    call = kind.read(with_seed(operation, with_score(operation, given, score), seed), wanted, options)
    return _run(call, execution, config, arch, trace, inside)


def _optional(*given: Any) -> tuple[Any, ...]:
    """The optional operands of a call; empty if none is given."""
    return given if any(x is not None for x in given) else ()


def _run(
    call: Call, execution: Execution, config: TileConfig | None, arch: str, trace: bool, inside: bool
) -> Emulation:
    for name, x in call.inputs.items():
        if name in call.operation.inputs and x is not None and not isinstance(x, np.ndarray):
            raise TypeError(f"{name} is on a GPU; emulation takes NumPy arrays: use {name}.get()")
    call, problem = call.check(on_gpu=True)
    if problem.empty:
        raise ValueError(f"nothing to execute: {problem} has an empty axis")
    results = call.allocate(problem, np.empty)
    for x in results.values():
        x.fill(np.nan)
    given = call.arrays(results)
    options = call.options
    plan = make_plan(
        with_memory(problem, given), Device.typical(arch), options.algorithm, config,
        num_splits=options.num_splits,
    )  # fmt: skip
    return dataclasses.replace(run_plan(plan, given, execution, trace, inside=inside), results=results)
