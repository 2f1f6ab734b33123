"""torch's FlexAttention, compiled, with its block mask made beforehand: "flex" in Triton, "flex flash" on
FlashAttention-4."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...problem.bits import WORD, Bits
from ...problem.columns import FROM_THE_START, TO_THE_END, Columns
from ...problem.expression import Expression
from ...problem.integers import Integers
from ...problem.mask import Band, reduced
from ...problem.mask_family import shift_of
from ...problem.problem import Problem
from . import tensors

MaskMod = Callable[[Any, Any, Any, Any], Any]
"""A function of (batch, query head, query, key): whether the query sees the key."""


def make(name: str, problem: Problem, arrays: Mapping[str, Any]) -> tensors.Runs:
    if problem.deterministic:
        raise NotImplementedError(tensors.NOT_DETERMINISTIC)
    if problem.alibi or (problem.score is not None and problem.softcap is not None):
        raise NotImplementedError("FlexAttention is measured with one change of scores, and not with ALiBi")
    attention = _compiled(problem, name)
    if problem.score is not None:
        score_arrays = [tensors.to_torch(arrays[f"score{n}"]) for n in range(len(problem.score.shapes))]
        attention = functools.partial(attention, score_mod=score_mod(problem.score.expression, score_arrays))
    return tensors.runs(attention, arrays)


@functools.lru_cache(1)
def _new_problem(problem: Problem) -> None:
    """Reset torch's compiler: after a handful of shapes it falls back to a slow path without a warning."""
    import torch

    torch._dynamo.reset()


@functools.lru_cache(2)  # the sets of inputs of a problem share a compilation
def _compiled(problem: Problem, name: str) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _new_problem(problem)
    # Timing runs the backward many times on the tensors that one forward saved.
    torch._functorch.config.donated_buffer = False
    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
    block_mask = None
    if problem.mask_kind != "full":
        lengths = problem.seqlen_q, problem.seqlen_k
        batches, heads = problem.mask.spread
        outer = problem.batch if batches > 1 else None, problem.heads if heads > 1 else None
        seen = mask_mod(problem, lambda x: torch.from_numpy(x.copy()).cuda())
        block_mask = create_block_mask(seen, *outer, *lengths, device="cuda")
    options: dict[str, Any] = {"block_mask": block_mask, "scale": problem.scale}
    if name == "flex flash":
        options["kernel_options"] = {"BACKEND": "FLASH"}
    if problem.softcap is not None:
        options["score_mod"] = _capped(problem.softcap)
    if problem.group_size > 1:
        options["enable_gqa"] = True
    return functools.partial(torch.compile(flex_attention, dynamic=False), **options)


def mask_mod(problem: Problem, put: Callable[[Any], Any]) -> MaskMod:
    """The mask as FlexAttention takes it. The function compares its arguments, which may be numbers or arrays of any
    library. ``put`` copies NumPy arrays to the device of the arguments.

    Raises NotImplementedError for masks of other classes than those of :mod:`cufa.masks`.
    """
    mask = problem.mask.on_host().for_kernels(problem.seqlen_q, problem.seqlen_k)
    if isinstance(mask, Bits):
        return _of_bits(mask, problem, put)
    runs = _hidden_runs(mask, problem, put) if isinstance(mask, Columns) else []
    band = mask.band if isinstance(mask, Columns) else mask
    if not isinstance(band, Band):
        raise NotImplementedError(f"FlexAttention is not measured with masks of class {type(mask).__name__}")
    return _all([_band(band, problem, put), *runs])


def _of_bits(mask: Bits, problem: Problem, put: Callable[[Any], Any]) -> MaskMod:
    """A mask of bits: reads the bit of a (query, key) pair in the mask's words."""
    words, (batches, heads) = put(mask.by_row.values), mask.spread
    group = problem.heads // heads

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        outer = batch if batches > 1 else 0, head // group if heads > 1 else 0
        return (words[(*outer, query, key // WORD)] >> (key % WORD)) & 1 == 1

    return seen


def _all(tests: list[MaskMod | None]) -> MaskMod:
    """The tests that are not None, joined by "and". (None hides no key: a test would only cost time.)"""
    given = [test for test in tests if test is not None]

    def every(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = given[0](batch, head, query, key)
        for test in given[1:]:
            seen = seen & test(batch, head, query, key)
        return seen

    return every if given else lambda batch, head, query, key: key >= 0


def _band(band: Band, problem: Problem, put: Callable[[Any], Any]) -> MaskMod | None:
    lengths = problem.seqlen_q, problem.seqlen_k
    first, last = reduced(band.edges(*lengths), *lengths)
    prefix, keep, exempt = (
        _of_sequence(x, problem, put) for x in (band.prefix, band.keep, band.global_tokens)
    )
    shift = band.shift(*lengths)
    left = None if first is None else lambda batch, head, query, key: key >= query + first
    if left is not None and keep is not None:
        left = _either(left, lambda batch, head, query, key: key < keep(batch))
    right = None if last is None else lambda batch, head, query, key: key <= query + last
    if left is right is None:
        return None
    seen = _all([left, right])
    if prefix is not None:
        seen = _either(seen, lambda batch, head, query, key: key < prefix(batch))
    if exempt is not None:
        seen = _either(seen, lambda batch, head, query, key: query + shift < exempt(batch))
    return seen


def _either(one: MaskMod, other: MaskMod) -> MaskMod:
    return lambda batch, head, query, key: one(batch, head, query, key) | other(batch, head, query, key)


def _of_sequence(
    count: int | Integers, problem: Problem, put: Callable[[Any], Any]
) -> Callable[[Any], Any] | None:
    """A function from a batch index to the sequence's count; None if all counts are the number 0."""
    if isinstance(count, int):
        return (lambda batch: count) if count else None
    counts = put(np.ascontiguousarray(np.broadcast_to(count.values, problem.batch)))
    return lambda batch: counts[batch]


def _hidden_runs(mask: Columns, problem: Problem, put: Callable[[Any], Any]) -> list[MaskMod | None]:
    """Of each pair of bounds, which hides a run of rows from each key: the test that a row is outside its key's run."""
    group, shift = problem.group_size, shift_of(mask.rows, problem.seqlen_q, problem.seqlen_k)
    values = mask.intervals.values[..., : problem.seqlen_k]
    if values.shape[1:3] != (1, 1):
        values = np.broadcast_to(values, (len(values), problem.batch, problem.kv_heads, values.shape[-1]))
    found: list[MaskMod | None] = []
    for lo, hi in zip(values[::2], values[1::2], strict=True):
        before = None if (lo == FROM_THE_START).all() else _row_test(lo, group, shift, put, True)
        behind = None if (hi == TO_THE_END).all() else _row_test(hi, group, shift, put, False)
        if before is not None and behind is not None:
            found.append(_either(before, behind))
        else:
            found.append(before or behind or (lambda batch, head, query, key: key < 0))
    return found


def _row_test(bounds: Any, group: int, shift: int, put: Callable[[Any], Any], before: bool) -> MaskMod:
    """Whether a row comes before its key's bound; ``before`` False: whether it does not."""
    shared = bounds.shape[:2] == (1, 1)
    by_key = put(np.ascontiguousarray(bounds[0, 0] if shared else bounds))

    def bound(batch: Any, head: Any, key: Any) -> Any:
        return by_key[key] if shared else by_key[batch, head // group, key]

    if before:
        return lambda batch, head, query, key: query + shift < bound(batch, head, key)
    return lambda batch, head, query, key: query + shift >= bound(batch, head, key)


def score_mod(expression: Expression, arrays: list[Any]) -> Callable[..., Any]:
    """A score function as FlexAttention takes it: torch evaluates the traced expression. ``arrays`` are tensors."""
    import torch

    functions: dict[str, Callable[..., Any]] = {
        **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne")},
        "min": lambda a, b: torch.where(a < b, a, b), "max": lambda a, b: torch.where(a > b, a, b),
        "div": operator.truediv, "floordiv": operator.floordiv, "mod": operator.mod, "and": operator.and_,
        "or": operator.or_, "where": torch.where, "not": torch.logical_not,
        "float": lambda x: x.to(torch.float32), "int": lambda x: x.to(torch.int32),
    }  # fmt: skip

    def mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        inputs = {"s": score, "b": batch, "h": head, "i": query, "j": key}
        found: list[Any] = []
        for op, _, *args in expression.code:
            if op in ("const", "input"):
                found.append(args[0] if op == "const" else inputs[args[0]])
            elif op == "load":
                found.append(arrays[args[0]][tuple(found[x] for x in args[1:])])
            else:
                found.append((functions.get(op) or getattr(torch, op))(*(found[x] for x in args)))
        return found[expression.results[0]]

    return mod


def _capped(cap: float) -> Callable[..., Any]:
    import torch

    return lambda score, batch, head, query, key: cap * torch.tanh(score / cap)
