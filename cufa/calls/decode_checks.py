"""Checks of a decoding call before anything runs. Lengths and block tables on a GPU are not read: kernels clamp
them."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..gpu.architectures import Device
from ..problem import float8
from ..problem.checks import as_array, is_device_array
from ..problem.mask import CAUSAL
from ..problem.problem import Problem
from . import arrays, maximum, optional_operands
from .cache_checks import check_integers, check_lengths, check_slots, check_written_cache, tree_operand
from .call import Call
from .dispatch import plan_for
from .shapes import FORWARD_DTYPES, make_decode_problem

CACHES = ("k_cache", "v_cache")
_BIG = ("q", "k_cache", "v_cache", "k_new", "v_new")
_EIGHT_BITS = ("uint8", "float8_e4m3fn")
_FLOAT8 = "float8_e4m3"

Array = arrays.Array


def check_gpu_serves(problem: Problem) -> None:
    """Raises ValueError for a head dim of e4m3 that the kernels do not serve: they read 16 bytes of a row at a time."""
    if problem.k_element.name == _FLOAT8 and problem.head_dim % 16:
        raise ValueError(
            f"head_dim is {problem.head_dim} (last axis of q); with an 8-bit cache the GPU takes multiples "
            f"of 16: pad q and the caches with zeros and pass scale={problem.head_dim}**-0.5"
        )


class DecodeCall(Call):
    """Inputs are arrays on one device, or None. Lengths, block table and scales may be host arrays in a call on a
    GPU."""

    name = "decode"

    may_be_none = ("cache_seqlens", "block_table", "k_new", "v_new", "k_scale", "v_scale")

    @staticmethod
    def to_array(name: str, x: Any) -> Array:
        """Lengths, tables and scales may be plain numbers."""
        if name in _BIG:
            array = as_array(name, x)
            return array.view(np.uint8) if str(array.dtype) == "float8_e4m3fn" else array
        if not isinstance(x, (numbers.Number, list, tuple)):
            return as_array(name, x)
        try:
            return np.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} is no array of numbers: {error}") from error

    @staticmethod
    def may_move(name: str, x: Array, q: Array) -> bool:
        """Small host arrays are copied to the GPU of the other arrays."""
        return name not in _BIG and is_device_array(q) and isinstance(x, np.ndarray)

    def gpu_serves(self, device: Device) -> bool:
        """Whether the call can be planned for this GPU. If not, the CPU path names the reason."""
        try:
            _, problem = self.check(on_gpu=True)
            plan_for(problem, device, self.options)
        except (TypeError, ValueError):
            return False
        return True

    def check(self, on_gpu: bool) -> tuple[DecodeCall, Problem]:
        """The call with lengths, block table and scales as kernels read them, and its problem."""
        shapes = {name: None if x is None else x.shape for name, x in self.inputs.items()}
        cache_dtypes = {n: str(self.inputs[n].dtype) for n in _BIG[1:] if self.inputs[n] is not None}
        q = self.inputs["q"]
        module = "cupy" if is_device_array(q) else "numpy"
        fine = np.ndim(self.inputs["k_scale"]) > 1
        names = dtypes(str(q.dtype), cache_dtypes, on_gpu=on_gpu, module=module, quantizes=fine)
        quantize_new = fine and cache_dtypes.get("k_new") == names[0] != names[1]
        problem = make_decode_problem(shapes, *names, self.options, quantize_new)
        if on_gpu:
            check_gpu_serves(problem)
        for name in _BIG:
            if self.inputs[name] is not None:
                arrays.check_last_axis(name, self.inputs[name])
                arrays.check_address(name, self.inputs[name])
        inputs = dict(self.inputs)
        if problem.cache.new_tokens == 0:
            inputs["k_new"] = inputs["v_new"] = None
        inputs["cache_seqlens"] = check_integers("cache_seqlens", inputs["cache_seqlens"], (problem.batch,))
        inputs["block_table"] = check_integers(
            "block_table", inputs["block_table"], (problem.batch, problem.cache.max_pages)
        )
        problem = self._with_scales(inputs, problem)
        inputs, problem = optional_operands.check(inputs, problem)
        maximum.check(inputs, problem)
        problem = _with_tree(inputs, problem)
        check_lengths(problem, inputs["cache_seqlens"], inputs["block_table"])
        check_slots(problem, inputs["cache_seqlens"], inputs["block_table"])
        call = dataclasses.replace(self, inputs=inputs)
        call.check_results(problem)
        return call, problem

    def _with_scales(self, inputs: dict[str, Any], problem: Problem) -> Problem:
        """The problem with the modes of its scales. Sets the scales in ``inputs`` as kernels read them."""
        modes = []
        for name in ("k_scale", "v_scale"):
            x, mode = inputs[name], ""
            if np.ndim(x) > 1 and problem.k_element.name == _FLOAT8:
                mode = scale_mode(x.shape, inputs["k_cache"].shape, problem, self.options.layout, name)
                _check_fine_scale(
                    name, x, on_device=is_device_array(inputs["q"]), writes=problem.cache.quantize_new
                )
            else:
                inputs[name] = _scales(name, x, problem)
            modes.append(mode)
        if modes[0] != modes[1]:
            named = [f"per {mode or 'head'}" for mode in modes]
            raise ValueError(
                f"k_scale is {named[0]} and v_scale {named[1]}: pass both per head, block or token"
            )
        return dataclasses.replace(problem, scales=("", *modes)) if modes[0] else problem

    @classmethod
    def check_memory(cls, given: Mapping[str, Any]) -> None:
        """If k_new is given, the call also writes to the caches, to key_norms, and to scales per token or block."""
        super().check_memory(given)
        if given["k_new"] is not None:
            scales = ("k_scale", "v_scale") if np.ndim(given["k_scale"]) > 1 else ()
            norms = ("key_norms",) if given.get("key_norms") is not None else ()
            for name in (*CACHES, *scales, *norms):
                check_written_cache(name, {other: x for other, x in given.items() if x is not None})

    @property
    def written(self) -> tuple[str, ...]:
        if self.inputs["k_new"] is None:
            return ()
        norms = ("key_norms",) if self.inputs.get("key_norms") is not None else ()
        return (*CACHES, *norms, *("k_scale", "v_scale") * (np.ndim(self.inputs["k_scale"]) > 1))

    def finish_on_host(self, problem: Problem) -> None:
        if problem.cache.new_tokens and not problem.empty:
            from ..run.cpu import decode as cpu_decode

            cpu_decode.append(self.arrays({}))


def _with_tree(inputs: dict[str, Any], problem: Problem) -> Problem:
    """The problem with the kind of its tree. Sets the tree in ``inputs`` as kernels read it; None for one token."""
    tree = inputs.get("tree")
    if tree is None:
        return problem
    if problem.mask != CAUSAL or problem.alibi or problem.score is not None:
        what = "alibi_slopes" if problem.alibi else f"mask {problem.mask}"
        what = what if problem.score is None else "score= or bias="
        raise ValueError(
            f"tree with {what}: the tree is the mask of new tokens and takes no other mask and no ALiBi; leave one out"
        )
    tokens = (problem.seqlen_q,) * (2 if tree.ndim == 3 else 1)
    words = f"(batch{', tokens' * len(tokens)})"
    inputs["tree"], kind = tree_operand(tree, (problem.batch, *tokens), words)
    if problem.seqlen_q == 1:
        inputs["tree"] = None
        return problem
    return dataclasses.replace(problem, tree=kind)


def dtypes(
    q: str, cache: Mapping[str, str], *, on_gpu: bool, module: str = "numpy", quantizes: bool = False
) -> tuple[str, str]:
    """(dtype, cache_dtype) of the problem, from the names of the dtypes of q and of k_cache, v_cache and new tokens
    (``cache``). ``quantizes``: an 8-bit cache also takes new tokens in q's dtype."""
    served = FORWARD_DTYPES[:2] if on_gpu else FORWARD_DTYPES
    if q not in served:
        where, cure = ("GPU", "float16") if on_gpu else ("CPU", "float32")
        other = ", or compute on the CPU with device='cpu'" if on_gpu and module == "numpy" else ""
        raise TypeError(
            f"q is {q}; decoding on the {where} takes {', '.join(served)}: convert with "
            f"q.astype({module}.{cure}){other}"
        )
    k_cache = cache["k_cache"]
    eight_bits = k_cache in _EIGHT_BITS
    if not eight_bits and k_cache != q:
        raise TypeError(
            f"k_cache is {k_cache} but q is {q}: it must be the same, or uint8 that holds float8_e4m3; "
            + _cure_of_cache(k_cache, q, served)
        )
    new = {cache.get("k_new"), cache.get("v_new")}
    for name, dtype in cache.items():
        if quantizes and eight_bits and new == {q} and name in ("k_new", "v_new"):
            continue
        if dtype != k_cache:
            cure = f"convert with {name}.astype(k_cache.dtype)"
            if eight_bits:
                cure = "quantise it as the cache was: (x / scale) as float8_e4m3, viewed as uint8"
                cure += f"; with scales per token or block, new tokens may be {q}" * (name[1:] == "_new")
            raise TypeError(f"{name} is {dtype} but k_cache is {k_cache}: {cure}")
    return q, _FLOAT8 if eight_bits else q


def _cure_of_cache(k_cache: str, q: str, served: tuple[str, ...]) -> str:
    if k_cache in served:
        return "convert q with q.astype(k_cache.dtype)"
    if k_cache in ("fp8", _FLOAT8):  # a name given to plan_decode
        return "such a cache is called 'uint8'"
    if k_cache.endswith("8") or "float8" in k_cache:
        return (
            f"bits of float8_e4m3 can be viewed with k_cache.view('uint8'); other 8-bit dtypes must be "
            f"converted: k_cache.astype({q!r}), or (k / k_scale) as float8_e4m3"
        )
    return f"convert the cache with k_cache.astype({q!r})"


def scale_mode(
    shape: tuple[int, ...], cache: tuple[int, ...], problem: Problem, layout: str, name: str = "k_scale"
) -> str:
    """ "block" or "token", by the shapes of a scale and of the cache."""
    cache = cache if layout == "bhsd" else (cache[0], cache[2], cache[1], cache[3])
    shapes = float8.cache_scale_shapes(cache, problem.cache.paged, problem.head_dim)
    for mode, (known, _) in shapes.items():
        if shape == known:
            return mode
    raise ValueError(
        f"{name} has shape {shape}; it takes a scale per head ({problem.kv_heads},), per block {shapes['block'][0]} or "
        f"per token {shapes['token'][0]}, whatever the layout"
    )


def _check_fine_scale(name: str, x: Array, *, on_device: bool, writes: bool) -> None:
    """Raises TypeError or ValueError unless kernels can read a scale per block or token in place."""
    if is_device_array(x) != on_device:
        raise TypeError(
            f"{name} has shape {x.shape}: scales of tokens or blocks must be where the cache is: "
            "kernels read them in place"
        )
    if str(x.dtype) != "float32" or not x.flags.c_contiguous:
        raise TypeError(
            f"{name} of shape {x.shape} is {x.dtype}{'' if x.flags.c_contiguous else ' with strides'}: scales of "
            "tokens or blocks are read in place; pass float32, C-contiguous"
        )
    if writes and isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(
            f"{name} is read-only, but the scales of k_new are written to it: pass a writeable array"
        )


def _scales(name: str, x: Array, problem: Problem) -> Array:
    """The scale per head as kernels read it: float32 (kv_heads,) for an 8-bit cache, None for other caches."""
    eight_bits = problem.k_element.name == _FLOAT8
    if x is None:
        if eight_bits:
            raise ValueError(
                f"{name} is missing: a uint8 cache holds float8_e4m3 times a float32 scale for each of the "
                f"{problem.kv_heads} key/value heads; for no scale pass {name}=1"
            )
        return None
    if not eight_bits:
        raise ValueError(
            f"{name} goes with a cache of uint8 (float8_e4m3); this cache is {problem.k_element.name}"
        )
    shape = (problem.kv_heads,)
    on_device = is_device_array(x)
    if not on_device and x.ndim == 0:
        x = np.broadcast_to(x, shape)
    words = "(kv_heads,), or one number on the host"
    optional_operands.check_small(name, x, "float32", "fiu", (shape,), words)
    if not on_device:
        with np.errstate(all="ignore"):  # too large for float32: infinite, and refused below
            given, x = x, np.ascontiguousarray(x, np.float32)
        if not np.isfinite(x).all():
            raise ValueError(f"{name} must be finite in float32, but holds {given[~np.isfinite(x)][0]}")
    if name == "k_scale" and not on_device and (x < 0).any():
        raise ValueError(f"k_scale must be at least 0, but holds {x[x < 0][0]}; to negate scores, negate q")
    return x
