"""Random inputs of a case, on the GPU or the CPU. Inputs are never zeros, because power depends on the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..calls.forward import flash_attention
from ..calls.maximum import key_norms
from ..calls.varlen import flash_attention_varlen
from ..plan.operation import OPERATIONS, Operand, Operation
from ..problem.element import ELEMENTS, Element
from ..problem.lengths import Cached, Lengths, Packed, Padded
from ..problem.problem import Problem
from ..problem.score_function import Score
from .distributions import drawn, rounded

_OF_DOUT = 3 << 20
"""Operand number of dout: its seeds differ from those of q, k and v for all seeds below 2**20."""


class Inputs:
    """One set of inputs of a case: its keys and values. Other operands of its contenders are made on demand."""

    def __init__(
        self, problem: Problem, lengths: tuple[int, ...] | None = None, *, on_gpu: bool, seed: int,
        distribution: str = "",
    ) -> None:  # fmt: skip
        self._lengths, self._on_gpu, self._seed = lengths, on_gpu, seed
        self._queries: dict[tuple[tuple[int, ...], str], Any] = {}
        shape = problem.shapes[1]
        if distribution:
            found = drawn(distribution, problem, self._float32)
            q, self._k, self._v = (rounded(found[role], ELEMENTS[problem.dtype]) for role in "qkv")
            self._queries[q.shape, problem.dtype] = q
            return
        self._k = self._normal(shape, problem.k_element, 1)
        self._v = self._normal(problem.shapes[2], problem.v_element, 2)

    def arrays(self, problem: Problem) -> dict[str, Any]:
        """Arrays by role (q, k, v, o, or the operand's name), in canonical axis order; results are newly allocated.
        ``problem`` is the case's, or a contender's variant on the case's keys and values."""
        operation, xp = OPERATIONS[problem.operation], self._module()
        arrays = {"q": self._query(problem), "k": self._k, "v": self._v}
        packed = isinstance(problem.lengths, Packed)
        if packed:
            arrays = {name: as_packed(x) for name, x in arrays.items()}
        for operand in operation.results:
            if isinstance(operand.like, str):
                arrays[role_of(operand)] = xp.empty_like(arrays[role_of(operation.operand(operand.like))])
        if problem.v_head_dim is not None and "o" in arrays:
            arrays["o"] = xp.empty((*arrays["q"].shape[:-1], problem.v_dim), arrays["q"].dtype)
        if problem.out_element.name != problem.q_element.name:
            arrays["o"] = xp.empty(arrays["q"].shape, problem.out_element.storage)
        if problem.seqlen_k < self._k.shape[2] and not packed:
            arrays |= {name: arrays[name][:, :, : problem.seqlen_k] for name in "kv"}
        if isinstance(problem.lengths, Cached):
            arrays |= self._cache(problem, problem.lengths)
        arrays |= {name: xp.asarray(x) for name, x in _lengths(problem.lengths).items()}
        arrays |= {name: xp.asarray(x) for name, x in _score_arrays(problem).items()}
        if problem.alibi:
            arrays["alibi_slopes"] = xp.asarray(np.exp2(-np.linspace(1, 8, problem.heads), dtype=np.float32))
        if "dout" in operation.inputs:
            arrays |= self._forward_results(problem, arrays)
        return arrays

    def _forward_results(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Output and lse of a forward call on these inputs, and a gradient of the output."""
        options = {
            "mask": problem.mask, "softcap": problem.softcap, "scale": problem.scale,
            "precision": None if problem.precision == "native" else problem.precision, "return_lse": True,
            "device": None if self._on_gpu else "cpu", **{name: arrays[name] for name in _lengths(problem.lengths)},
            "alibi_slopes": arrays.get("alibi_slopes"), "score": _score(problem, arrays),
        }  # fmt: skip
        shape = (*self._query_shape(problem)[:3], problem.v_dim)
        dout = self._normal(shape, problem.q_element, _OF_DOUT)
        if not isinstance(problem.lengths, Packed):
            out, lse = flash_attention(*(arrays[name] for name in "qkv"), **options)
            return {"o": out, "lse": lse, "dout": dout}
        out, lse = flash_attention_varlen(*(arrays[name][0].swapaxes(0, 1) for name in "qkv"), **options)
        return {"o": out.swapaxes(0, 1)[None], "lse": lse[None], "dout": as_packed(dout)}

    def _cache(self, problem: Problem, cache: Cached) -> dict[str, Any]:
        xp, found = self._module(), dict[str, Any]()
        if cache.given:
            lengths = self._lengths or (problem.seqlen_k,) * problem.batch
            found["cache_seqlens"] = xp.asarray(np.array(lengths, np.int32))
        if cache.paged:
            shape = (cache.num_pages, problem.kv_heads, cache.page_size, -1)
            found |= {"k": self._k.reshape(shape), "v": self._v.reshape(shape)}
            pages = np.random.default_rng(0).permutation(cache.num_pages).astype(np.int32)
            found["block_table"] = xp.asarray(pages.reshape(problem.batch, cache.max_pages))
        for name, element in (("k_scale", problem.k_element), ("v_scale", problem.v_element)):
            if element.storage != element.name and element.itemsize == 1:
                per_token = (problem.batch, problem.kv_heads, problem.seqlen_k)
                found[name] = xp.ones(per_token if problem.scales else problem.kv_heads, np.float32)
        if problem.softmax_max == "bound" and problem.softcap is None:
            found["key_norms"] = key_norms(
                found.get("k", self._k), block_table=found.get("block_table"), k_scale=found.get("k_scale")
            )
        return found

    def _query_shape(self, problem: Problem) -> tuple[int, ...]:
        """Shape of q. Packed sequences: the dense shape of the case, before packing."""
        batch, seqlen = problem.batch, problem.seqlen_q
        if isinstance(problem.lengths, Packed):
            batch = self._k.shape[0]
            seqlen = problem.lengths.total_q // batch
        return batch, problem.heads, seqlen, problem.head_dim

    def _query(self, problem: Problem) -> Any:
        shape = self._query_shape(problem)
        key = (shape, problem.dtype)
        if key not in self._queries:
            self._queries[key] = self._normal(shape, problem.q_element, 0)
        return self._queries[key]

    def _normal(self, shape: tuple[int, ...], element: Element, operand: int) -> Any:
        make = normal_on_gpu if self._on_gpu else normal_on_cpu
        return make(shape, element, 3 * self._seed + operand)

    def _float32(self, shape: tuple[int, ...], number: int) -> Any:
        """Standard normal. :func:`normal_on_gpu` uses 24 bits of the seed: fewer than 21 tell cases and sets
        apart, the upper bits hold ``number``."""
        operand = number + 3 if number < 0 else number + 1 << 21
        return self._normal(shape, ELEMENTS["float32"], operand)

    def _module(self) -> Any:
        if not self._on_gpu:
            return np
        import cupy

        return cupy


def as_packed(x: Any) -> Any:
    """(batch, heads, seqlen, head_dim) as (1, heads, batch · seqlen, head_dim), in memory as packed sequences lie:
    tokens before heads."""
    batch, heads, seqlen, head_dim = x.shape
    bits = x.view(f"uint{8 * x.itemsize}")  # the copy need not know the type
    tokens = bits.transpose(0, 2, 1, 3).reshape(batch * seqlen, heads, head_dim).view(x.dtype)
    return tokens.swapaxes(0, 1)[None]


def _score_arrays(problem: Problem) -> dict[str, Any]:
    """Arrays of a score function, by operand: normal floats, and sorted integers, as ids of documents are. Also empty
    arrays for the gradients that the problem asks for."""
    found: dict[str, Any] = {}
    if problem.score is not None:
        rng = np.random.default_rng(0)
        for n, (form, shape) in enumerate(
            zip(problem.score.expression.arrays, problem.score.shapes, strict=True)
        ):
            x = rng.standard_normal(shape) if form.kind == "float" else np.sort(rng.integers(0, 8, shape))
            found[f"score{n}"] = x.astype(ELEMENTS[form.dtype].dtype if form.kind == "float" else form.dtype)
            if form.name in problem.score.gradients:
                found[f"dscore{n}"] = np.empty(shape, np.float32)
    return found


def _score(problem: Problem, arrays: Mapping[str, Any]) -> Score | None:
    """The score function of a problem, for a public call."""
    if problem.score is None:
        return None
    forms = problem.score.expression.arrays
    arrays_by_name = {form.name: arrays[f"score{n}"] for n, form in enumerate(forms)}
    return Score(lambda: None, arrays_by_name, problem.score.expression)


def _lengths(lengths: Lengths) -> dict[str, Any]:
    """The arguments that pass known lengths to a call."""
    if isinstance(lengths, Packed):
        sides = ("q", lengths.queries), ("k", lengths.keys)
        return {f"cu_seqlens_{n}": np.cumsum([0, *x], dtype=np.int32) for n, x in sides if x is not None}
    if isinstance(lengths, Padded):
        sides = ("q", lengths.queries), ("k", lengths.keys)
        return {f"seqlens_{n}": np.array(x, np.int32) for n, x in sides if x is not None}
    return {}


def given_to(operation: Operation, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of :meth:`Inputs.arrays` by operand name, in launch order; None for absent operands. If all optional
    operands are absent, they have no entries."""
    optional = (
        operation.optional_operands if any(x.name in arrays for x in operation.optional_operands) else ()
    )
    return {x.name: arrays.get(role_of(x)) for x in (*operation.operands, *optional)}


def role_of(operand: Operand) -> str:
    """q, k, v or o for the operand with this stride in any operation (k_cache has role k); else the operand's name."""
    return operand.stride.removesuffix("_stride") or operand.name


def normal_on_cpu(shape: tuple[int, ...], element: Element, seed: int) -> Any:
    """Standard normal; e4m3 as bytes."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return numbers.astype(element.dtype).view(_storage(element))


def normal_on_gpu(shape: tuple[int, ...], element: Element, seed: int) -> Any:
    """Box-Muller over a hash of the index: cuRAND is not among the packages that cufa asks for."""
    import cupy

    if element.itemsize == 1:
        # The upper byte of a float16, with the top bit of the exponent taken off: small e4m3 numbers.
        halves = normal_on_gpu(shape, ELEMENTS["float16"], seed).view(np.uint16)
        return (halves >> 8).astype(np.uint8) & 0xBF
    bfloat16 = element.name == "bfloat16"
    store = """
        const unsigned bits = __float_as_uint(normal);  // to nearest, ties to even
        x = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;"""
    fill = cupy.ElementwiseKernel(
        "uint32 seed",
        "uint16 x" if bfloat16 else f"{element.name} x",
        """
        unsigned long long h = (static_cast<unsigned long long>(seed) << 40) + i;  // SplitMix64
        h = (h + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
        h ^= h >> 31;
        const float u = ((h >> 40) + 1) * 0x1p-24f, w = (h & 0xffffff) * 0x1p-24f;
        const float normal = sqrtf(-2 * logf(u)) * cospif(2 * w);
        """
        + (store if bfloat16 else "x = normal;"),
        f"cufa_bench_normal_{element.name}",
    )
    x = cupy.empty(shape, np.uint16 if bfloat16 else element.name)
    fill(np.uint32(seed), x)
    return x.view(_storage(element))


def _storage(element: Element) -> Any:
    """The dtype of arrays that hold the element."""
    return element.dtype if element.storage == element.name else np.dtype(element.storage)


def poison(x: Any) -> None:
    """Fill an array with NaN: all bits but the sign are set, without arithmetic in the array's type."""
    bits = 8 * x.itemsize
    x.view(f"uint{bits}")[...] = 2 ** (bits - 1) - 1
