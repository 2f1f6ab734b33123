"""One call as a value: its arrays and options, how they are checked, and the problem that they state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from ..gpu.architectures import Device
from ..plan.candidates import any_serves
from ..plan.operation import CACHE, OPERATIONS, Operand, Operation
from ..problem import float8
from ..problem.bits import Bits
from ..problem.checks import as_array, is_device_array
from ..problem.combined import Combined
from ..problem.lengths import DENSE, Packed
from ..problem.mask import FULL
from ..problem.options import Options
from ..problem.packed_masks import of_sequences
from ..problem.problem import Problem
from ..problem.where import Where
from . import arrays, optional_operands
from .cache_checks import check_written_cache
from .shapes import (
    LAYOUTS,
    bits_on_gpu,
    check_but_last,
    check_equal,
    check_mask,
    check_rows,
    dtype_name,
    make_problem,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, read but not yet checked. Every operation has a subclass that checks them."""

    name: ClassVar[str]
    """Name of the operation."""

    inputs: dict[str, Any]
    """Arrays by operand name, in the operation's order, NumPy or CuPy; None for an argument that was left out."""
    results: dict[str, Any]
    """The requested results by operand name, in the operation's order: the array to write to, or None if the call
    allocates it."""
    options: Options

    may_be_none: ClassVar[tuple[str, ...]] = ()
    """Inputs that may be None, in addition to the operation's optional operands."""

    @classmethod
    def read(cls, given: Sequence[Any], wanted: Sequence[str], options: Options) -> Self:
        """The call with the arguments ``given``, in the order of the operation's operands; ``wanted`` names its
        results.

        Raises TypeError or ValueError, naming the argument, for an argument that is no array, and for arrays in
        different places.
        """
        operation = OPERATIONS[cls.name]
        named = dict(zip((x.name for x in operation.all_operands), given, strict=False))
        for x in operation.all_operands:
            if x.result and x.name not in wanted and named.get(x.name) is not None:
                also = {"lse": "return_lse=True", "dsink": "sink="}[x.name]
                raise ValueError(
                    f"{x.name}= receives a result that the call does not return: pass {also} too"
                )
        found = {
            x.name: None
            if named[x.name] is None and (x.result or x.name in cls.may_be_none)
            else (as_array if x.result else cls.to_array)(x.name, named[x.name])
            for x in operation.operands
        }
        q = found["q"]
        bound = {name: x for name, x in found.items() if x is not None and not cls.may_move(name, x, q)}
        arrays.same_place({"q": q, **bound})
        inputs = {name: found[name] for name in operation.inputs}
        if len(given) > len(found):
            optional = {x.name: named.get(x.name) for x in operation.optional_operands if not x.result}
            inputs |= optional_operands.read(optional, q)
            found |= {x: as_array(x, named[x]) for x in wanted if x not in found and named.get(x) is not None}
        return cls(inputs, {name: found.get(name) for name in wanted}, options)

    @staticmethod
    def to_array(name: str, x: Any) -> Any:
        """An input as a NumPy or CuPy array."""
        return as_array(name, x)

    @staticmethod
    def may_move(name: str, x: Any, q: Any) -> bool:
        """Whether the call copies a host array to q's GPU."""
        return False

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    @property
    def first(self) -> tuple[str, Any]:
        """Name and array of the first input, which is never None; the call is computed where this array is."""
        return next(iter(self.inputs.items()))

    def check(self, on_gpu: bool) -> tuple[Self, Problem]:
        """Check the whole call before anything runs. Returns the call with arrays as kernels read them, and the problem
        that it states. Raises TypeError or ValueError naming the argument."""
        raise NotImplementedError

    def problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        """The inputs as kernels read them, and the problem that their shapes and the options state."""
        if any(self.inputs.get(x.name) is not None for x in CACHE):
            from .cached import cached_problem

            return optional_operands.check(*cached_problem(self.inputs, dtype, self.options))
        return self._problem(dtype)

    def _problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        """:meth:`problem`, for keys that are not in a cache."""
        raise NotImplementedError

    def gpu_serves(self, device: Device) -> bool:
        """Whether a call with NumPy inputs can be computed on this GPU. Raises as :meth:`check` does."""
        _, problem = self.check(on_gpu=False)
        return any_serves(problem, device.arch.capability)

    def check_results(self, problem: Problem) -> None:
        """Check the arrays that the caller passed for results. Part of every :meth:`check`."""
        for operand in self._results():
            x = self.results.get(operand.name)
            if x is not None:
                arrays.same_place(dict([self.first, (operand.name, x)]))
                arrays.check_result(operand, x, *self._form(operand, problem))
        self.check_memory({**self.inputs, **self.results})

    @classmethod
    def check_memory(cls, given: Mapping[str, Any]) -> None:
        """Raises ValueError if an array that the call writes overlaps another array. ``given``: the call's arrays by
        operand name, None or missing if left out."""
        there = {name: x for name, x in given.items() if x is not None}
        for operand in OPERATIONS[cls.name].all_operands:
            if operand.result and operand.name in there:
                arrays.check_apart(operand.name, there)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of an input in the caller's layout."""
        shape: tuple[int, ...] = self.inputs[name].shape
        return shape

    @property
    def written(self) -> tuple[str, ...]:
        """Inputs that the call writes to."""
        return ()

    def finish_on_host(self, problem: Problem) -> None:
        """Write to the caller's NumPy inputs what a call on the GPU wrote to its copies of them."""

    def arrays(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """All operands in launch order, over the same memory, axes (batch, heads, seqlen, head_dim); None for results
        that were not requested."""
        given = {**self.inputs, **results}
        found = {x.name: self._as_dense(x, given.get(x.name)) for x in self.operation.operands}
        optional = {x.name: self._as_dense(x, given.get(x.name)) for x in self.operation.optional_operands}
        return found | optional if any(x is not None for x in optional.values()) else found

    def _as_dense(self, operand: Operand, x: Any) -> Any:
        """One operand, as :meth:`arrays` returns it."""
        return x.transpose(LAYOUTS[self.options.layout]) if operand.stride and x is not None else x

    def allocate(self, problem: Problem, empty: Callable[..., Any]) -> dict[str, Any]:
        """The requested results by name: the caller's arrays, or new ones from ``empty(shape, dtype)``."""
        found = dict(self.results)
        for operand in self._results():
            if operand.name in found and found[operand.name] is None:
                found[operand.name] = empty(*self._form(operand, problem))
        return found

    def _form(self, operand: Operand, problem: Problem) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a result."""
        if isinstance(operand.like, str):
            like = self.inputs[operand.like]
            shape = self.shape_of(operand.like)
            return (shape if operand.name != "out" else (*shape[:-1], problem.v_dim)), like.dtype
        return operand.like(problem), np.dtype(problem.lse_dtype)

    def fill_empty(self, results: Mapping[str, Any]) -> None:
        """Fill the results of a problem without queries or without keys."""
        for operand in self._results():
            if operand.name in results:
                results[operand.name][...] = operand.nothing

    def _results(self) -> list[Operand]:
        return [x for x in self.operation.all_operands if x.result]


def _function_of(problem: Problem) -> Where | None:
    """The function that stands for a mask of an operator where a GPU has the lengths; else None."""
    return (
        problem.mask.as_function if isinstance(problem.mask, Combined) and not problem.lengths.known else None
    )


class DenseCall(Call):
    """A call with arrays of four axes."""

    def with_memory_checked(
        self, same_dtype: dict[str, Any], inputs: dict[str, Any], problem: Problem
    ) -> tuple[Self, Problem]:
        """The last step of :meth:`check`: memory of the results and of ``same_dtype``, the arrays in the call's
        dtype."""
        for name, x in same_dtype.items():
            arrays.check_last_axis(name, x)
            arrays.check_address(name, x)
        call = dataclasses.replace(self, inputs=inputs)
        call.check_results(problem)
        return call, problem

    def _problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        shapes = [self.shape_of(name) for name in ("q", "k", "v")]
        problem = make_problem(shapes, dtype, self.options, self.first[1])
        if len(self.inputs) == len(self.operation.inputs):
            return self.inputs, problem
        inputs, problem = optional_operands.check(self.inputs, problem)
        if (function := _function_of(problem)) is None:
            return inputs, problem
        sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
        edges = optional_operands.edges_of_padded(inputs, problem)
        bits = function.by_sequence((), sizes, edges, bits_on_gpu(self.first[1]))
        return inputs, dataclasses.replace(problem, mask=bits)


class PackedCall(Call):
    """A call with packed sequences: arrays (tokens, heads, head_dim)."""

    def check(self, on_gpu: bool) -> tuple[Self, Problem]:
        """Under a mask function, the problem is one sequence of all tokens. Its mask has a bit for each score: 0 if
        query and key are of different sequences. With options that depend on positions, or a sink, each sequence has
        bits of its own."""
        call, problem = super().check(on_gpu)
        mask, lengths = _function_of(problem) or problem.mask, problem.lengths
        if not isinstance(mask, Where) or not isinstance(lengths, Packed):
            return call, problem
        edges = call.inputs["cu_seqlens_q"], call.inputs["cu_seqlens_k"]
        totals = lengths.total_q, lengths.total_k
        sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
        on_its_gpu = bits_on_gpu(self.first[1])
        # These count positions within each sequence. And in one matrix of all tokens, padding after the last sequence
        # would be rows that see no key, whose lse is the sink.
        by_sequence = problem.alibi or problem.score or problem.dropped or problem.sink
        if by_sequence or mask is not problem.mask:
            bits = mask.by_sequence(lengths.of_sequences(*sizes[2:]), sizes, edges, on_its_gpu)
            return call, dataclasses.replace(problem, mask=bits)
        bits = mask.packed(sizes, edges, totals, on_its_gpu)
        if on_its_gpu is not None:  # a call from the host keeps cu_seqlens: it is checked again on the GPU
            inputs = {name: x for name, x in call.inputs.items() if not name.startswith("cu_seqlens")}
            call = dataclasses.replace(call, inputs=inputs)
        return call, dataclasses.replace(
            problem, batch=1, seqlen_q=totals[0], seqlen_k=totals[1], lengths=DENSE, mask=bits
        )

    def _form(self, operand: Operand, problem: Problem) -> tuple[tuple[int, ...], Any]:
        """lse has two axes, also where the problem is one sequence of all tokens."""
        shape, dtype = super()._form(operand, problem)
        return shape[-2:] if operand.name == "lse" else shape, dtype

    def _problem(self, dtype: str) -> tuple[dict[str, Any], Problem]:
        shapes = {name: self.shape_of(name) for name in ("q", "k", "v")}
        for name, shape in shapes.items():
            if len(shape) != 3:
                raise ValueError(
                    f"{name} has shape {shape}; packed arrays have three axes (tokens, heads, head_dim)"
                )
        check_but_last("v", shapes["v"], "k", shapes["k"])
        # Check shapes as if there were one sequence, without the mask: masks count positions within each sequence.
        options = dataclasses.replace(self.options, mask=FULL, layout="bshd")
        problem = make_problem([(1, *shape) for shape in shapes.values()], dtype, options)
        cu_q, cu_k = self.inputs["cu_seqlens_q"], self.inputs["cu_seqlens_k"]
        cu_q, cu_k, lengths = optional_operands.packed(cu_q, cu_k, (problem.seqlen_q, problem.seqlen_k))
        batch, heads, kv_heads = len(cu_q) - 1, problem.heads, problem.kv_heads
        most = (
            max(lengths.queries, default=0) if lengths.queries is not None else lengths.total_q,
            max(lengths.keys, default=0) if lengths.keys is not None else lengths.total_k,
        )
        mask = of_sequences(self.options.mask, batch, heads, kv_heads, most, bits_on_gpu(self.first[1]))
        if not isinstance(mask, Where) or dtype == float8.NAME:
            check_mask(mask, batch, kv_heads, *most, heads, packed=True)
        if isinstance(mask, Bits) and 0 not in most:
            most = mask.matrix
        problem = dataclasses.replace(
            problem, mask=mask, batch=batch, seqlen_q=most[0], seqlen_k=most[1], lengths=lengths
        )
        return optional_operands.check({**self.inputs, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, problem)

    def _as_dense(self, operand: Operand, x: Any) -> Any:
        """The operand as a dense array of one sequence: (1, heads, tokens, head_dim), and (1, heads, tokens) for lse
        and dlse."""
        if x is None or x.ndim == 4 or (operand in self.operation.optional_operands and not operand.stride):
            return x
        return (x.swapaxes(0, 1) if operand.stride else x)[None]


class ForwardCall(DenseCall):
    name = "forward"

    def check(self, on_gpu: bool) -> tuple[Self, Problem]:
        qkv = {name: self.inputs[name] for name in ("q", "k", "v")}
        return self.with_memory_checked(qkv, *self.problem(dtype_name(qkv, on_gpu)))

    @classmethod
    def check_memory(cls, given: Mapping[str, Any]) -> None:
        """If k_new is given, the call also writes to the cache."""
        super().check_memory(given)
        for name in ("k", "v") if given.get("k_new") is not None else ():
            check_written_cache(name, {other: x for other, x in given.items() if x is not None})

    @property
    def written(self) -> tuple[str, ...]:
        return ("k", "v") if self.inputs.get("k_new") is not None else ()

    def finish_on_host(self, problem: Problem) -> None:
        if self.written and not problem.empty:
            from ..run.cpu import cache

            cache.append_rows(problem, self.arrays({}))


class BackwardCall(DenseCall):
    name = "backward"
    may_be_none = ("dlse",)

    def check(self, on_gpu: bool) -> tuple[Self, Problem]:
        given = self.inputs
        same_dtype = {name: given[name] for name in ("q", "k", "v", "out", "dout")}
        dtype = dtype_name(same_dtype, on_gpu)
        inputs, problem = self.problem(dtype)
        problem = dataclasses.replace(problem, operation=self.name)
        like = "q" if problem.v_head_dim is None else "q, with v's last axis,"
        for name in ("out", "dout"):
            check_equal(name, given[name].shape, like, (*given["q"].shape[:-1], problem.v_dim))
        for name in ("lse", "dlse"):
            if given[name] is not None:
                _check_rows(name, given[name], problem, self.options.layout)
        return self.with_memory_checked(same_dtype, inputs, problem)


def _check_rows(name: str, x: Any, problem: Problem, layout: str) -> None:
    """Raises TypeError or ValueError unless ``x`` has one number per query, is contiguous, and has lse's dtype."""
    shape, dtype = problem.lse_shape, problem.lse_dtype
    check_rows(name, x.shape, shape, layout)
    if x.dtype != dtype:
        raise TypeError(
            f"{name} is {x.dtype}; for q of {problem.dtype} it must be {dtype}, as flash_attention(..., "
            f"return_lse=True) returns it: convert with {name}.astype({dtype!r})"
        )
    if x.size and not x.flags.c_contiguous:
        module = "cupy" if is_device_array(x) else "numpy"
        raise ValueError(
            f"{name} has strides {x.strides} for shape {shape}: it must be contiguous; "
            f"use {module}.ascontiguousarray({name})"
        )
    arrays.check_address(name, x)


class PackedForward(PackedCall, ForwardCall):
    pass


class PackedBackward(PackedCall, BackwardCall):
    pass
