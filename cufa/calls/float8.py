"""Forward calls with inputs of e4m3: how :func:`cufa.flash_attention` and :func:`cufa.flash_attention_varlen` check
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..plan.operation import OPERATIONS, SCALES, Operand
from ..problem import float8
from ..problem.checks import as_array, check_choice, is_device_array
from ..problem.lengths import Packed
from ..problem.options import Options, read_forward
from ..problem.problem import Problem
from .call import ForwardCall, PackedForward
from .dispatch import run
from .quantize import QuantizedValues
from .warm import find

_OUT_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Float8Call(ForwardCall):
    out_dtype: str = _OUT_DTYPES[0]
    values: QuantizedValues | None = None
    """Transposed values on a GPU; the input "v" is then their ``data``."""

    @classmethod
    def result(
        cls, given: Sequence[Any], scales: Sequence[Any], out_dtype: Any, accumulate: Any, arguments: tuple[Any, ...],
        device: Any, options: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        """The public call's result. ``arguments``: those of :func:`~cufa.problem.options.read_forward`. ``options``:
        options of the warm lookup, which :meth:`warm_result` extends."""
        found, options = cls.warm_result(given, scales, out_dtype, accumulate, options)
        if found is not None:
            return found
        call = cls.of(given, scales, out_dtype, *read_forward(*arguments, accumulate=accumulate))
        return run(call, device, options)

    @classmethod
    def of(
        cls,
        given: Sequence[Any],
        scales: Sequence[Any],
        out_dtype: Any,
        wanted: Sequence[str],
        options: Options,
    ) -> Self:
        """The call with the three ``scales`` and ``given``, the operands of a forward call without scales. Raises
        TypeError or ValueError, naming the argument, for an unsupported or missing argument."""
        out_dtype = _OUT_DTYPES[0] if out_dtype is None else out_dtype
        check_choice("out_dtype", out_dtype, {name: repr(name) for name in _OUT_DTYPES})
        if options.algorithm not in ("auto", "fa3", "fa2"):
            raise ValueError(
                f"algorithm={options.algorithm!r} with q of e4m3: it takes algorithm='auto', 'fa3' or 'fa2'"
            )
        q, k, v, *others = given  # out, lse, ALiBi, sink, lengths or begins of queries and of keys
        values = None
        if isinstance(v, QuantizedValues):
            scales = (*scales[:2], v.scale if scales[2] is None else scales[2])
            cls.check_values(v, options, others[-1])
            values = v if is_device_array(v.data) else None
            v = v.rows() if values is None else v.data
        q, k, v = (_bytes(name, as_array(name, x)) for name, x in (("q", q), ("k", k), ("v", v)))
        for name, x in zip("qkv", scales, strict=True):
            if x is None:
                raise ValueError(
                    f"{name}_scale is missing: {name} is {name}_scale times its e4m3 elements; pass the scale that "
                    f"cufa.quantize(..., role={name!r}) returns, or {name}_scale=1.0"
                )
        scales = [np.asarray(x) if isinstance(x, (int, float, np.number)) else x for x in scales]
        operands = OPERATIONS[cls.name].placed((q, k, v, *others), SCALES[0].name, scales)
        call = cls.read(operands, wanted, options)
        return dataclasses.replace(call, out_dtype=out_dtype, values=values)

    @classmethod
    def warm_result(
        cls,
        given: Sequence[Any],
        scales: Sequence[Any],
        out_dtype: Any,
        accumulate: Any,
        options: tuple[Any, ...],
    ) -> tuple[Any, tuple[Any, ...]]:
        """(the result if an earlier call on a GPU had arrays of the same layout, else None; ``options`` for
        :func:`~cufa.calls.dispatch.run`). ``given`` and ``scales`` are as for :meth:`of`."""
        q, k, v, *others = given
        form = None
        if type(v) is QuantizedValues:
            form = v.shape, v.layout, v.lengths
            scales = (*scales[:2], v.scale if scales[2] is None else scales[2])
            v = v.data
        options = (*options, "e4m3", form, out_dtype, accumulate, type(accumulate))
        operation = OPERATIONS[cls.name]
        arrays = operation.placed((q, k, v, *others), SCALES[0].name, scales)
        seen, _, addresses = find(operation, arrays, options)
        return None if seen is None else seen(arrays, addresses), options

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.values.shape if name == "v" and self.values is not None else super().shape_of(name)

    def arrays(self, results: Mapping[str, Any]) -> dict[str, Any]:
        found = super().arrays(results)
        return found if self.values is None else found | {"v": self.inputs["v"]}

    def check(self, on_gpu: bool) -> tuple[Self, Problem]:
        qkv = {name: self.inputs[name] for name in ("q", "k", "v")}
        inputs, problem = self.problem(float8.NAME)
        inputs = dict(inputs)
        if problem.head_dim % float8.HEAD_DIM_STEP:
            raise ValueError(
                f"head_dim is {problem.head_dim} (last axis of q); e4m3 takes multiples of {float8.HEAD_DIM_STEP}: pad "
                f"q, k and v with zeros and pass scale={problem.head_dim}**-0.5"
            )
        if problem.v_head_dim is not None:
            raise ValueError(
                f"v has head_dim {problem.v_dim} but q and k have {problem.head_dim}: for inputs of e4m3 they must be "
                "equal"
            )
        modes = []
        for name in "qkv":
            inputs[f"{name}_scale"], mode = _checked_scale(name, inputs[f"{name}_scale"], problem)
            modes.append(mode)
        problem = dataclasses.replace(
            problem, out_dtype=self.out_dtype, scales=tuple(modes), values_in_rows=self.values is None,
            accumulate=self.options.accumulate,
        )  # fmt: skip
        out = self.results["out"]
        if out is not None and str(out.dtype) != self.out_dtype:
            raise TypeError(
                f"out is {out.dtype} but out_dtype={self.out_dtype!r}: allocate it with that dtype, or pass "
                "another out_dtype"
            )
        return self.with_memory_checked(qkv, inputs, problem)

    @staticmethod
    def check_values(v: QuantizedValues, options: Options, lengths: Any) -> None:
        """Raises ValueError if values were transposed in another layout or with other ``lengths`` than the call's.
        Lengths on a GPU are not compared."""
        if len(v.shape) == 4 and v.layout != options.layout:
            raise ValueError(
                f"v was quantised with layout={v.layout!r} but layout is {options.layout!r}: they must be equal"
            )
        counts = getattr(v.lengths, "keys", None)
        if counts is None or is_device_array(lengths):
            return
        if lengths is None or counts != tuple(np.asarray(lengths).tolist()):
            packed = len(v.shape) == 3
            cure = "flash_attention_varlen takes it" if packed else "pass the same seqlens_k"
            raise ValueError(
                f"v was quantised with {'packed lengths ' if packed else 'seqlens='}{list(counts)}: {cure}"
            )

    def _form(self, operand: Operand, problem: Problem) -> tuple[tuple[int, ...], Any]:
        shape, dtype = super()._form(operand, problem)
        return shape, problem.out_element.dtype if operand.name == "out" else dtype


class PackedFloat8(Float8Call, PackedForward):
    """A call with inputs of e4m3 over packed sequences."""

    @staticmethod
    def check_values(v: QuantizedValues, options: Options, lengths: Any) -> None:
        counts = getattr(v.lengths, "keys", None)
        known = counts is not None and not is_device_array(lengths)
        if len(v.shape) != 3 or (known and counts != tuple(np.diff(np.atleast_1d(lengths)).tolist())):
            raise ValueError("v was quantised with other cu_seqlens: pass the same as cu_seqlens_k")


def _bytes(name: str, x: Any) -> Any:
    """An array of e4m3 as uint8."""
    if not float8.is_float8(x):
        cure = f"quantise it, {name}8, {name}_scale = cufa.quantize({name}, role={name!r})"
        raise TypeError(
            f"{name} is {x.dtype}; with scales, out_dtype= or accumulate= q, k and v are {' or '.join(float8.DTYPES)}: "
            f"{cure}, or leave these arguments out and pass q, k and v of one other dtype"
        )
    return x.view(np.uint8)


def _checked_scale(name: str, x: Any, problem: Problem) -> tuple[Any, str]:
    """(the scale from :func:`checked_numbers`, its mode of :data:`cufa.problem.float8.MODES`)."""
    argument = f"{name}_scale"
    is_query, lengths = name == "q", problem.lengths
    heads = problem.heads if is_query else problem.kv_heads
    seqlen = problem.seqlen_q if is_query else problem.seqlen_k
    if isinstance(lengths, Packed):
        seqlen = lengths.total_q if is_query else lengths.total_k
    block = float8.block_of(name, problem.head_dim)
    mode = float8.mode_of(argument, x.shape, block, heads, problem.batch, seqlen, lengths)
    if name == "v" and mode == "token":
        raise ValueError(
            f"v_scale has shape {x.shape}, a scale per token; values take one per tensor, head or block: quantise "
            "with per='block'"
        )
    return checked_numbers(argument, x), mode


def checked_numbers(argument: str, x: Any) -> Any:
    """A scale as float32. Raises ValueError unless all numbers of a host array are positive and finite."""
    if x.dtype.kind not in "fiu":
        raise TypeError(
            f"{argument} is {x.dtype}: it takes float32; convert with {argument}.astype('float32')"
        )
    if is_device_array(x):
        if str(x.dtype) != "float32" or not x.flags.c_contiguous:
            raise TypeError(
                f"{argument} is {x.dtype} with strides {x.strides}; on a GPU it must be float32 and contiguous: use "
                f"cupy.ascontiguousarray({argument}, 'float32')"
            )
        return x
    with np.errstate(all="ignore"):  # too large for float32: infinite, and refused below
        found = np.ascontiguousarray(x, np.float32).reshape(x.shape)
    wrong = ~(np.isfinite(found) & (found > 0))
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{argument}{place or ''} is {x[tuple(place)]}: in float32 it must be finite and above 0; for no scale "
            "pass 1"
        )
    return found
