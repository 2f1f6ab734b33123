"""Shapes and dtypes of a call: checked against each other, and stated as a Problem. No array is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..problem import float8
from ..problem.checks import check_choice, check_sizes, is_device_array
from ..problem.lengths import Cached
from ..problem.mask import Mask
from ..problem.options import Options, check_scale, resolve_precision
from ..problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, Problem
from ..problem.where import Where
from .arrays import Array

LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}
AXES = {"bhsd": "(batch, heads, seqlen, head_dim)", "bshd": "(batch, seqlen, heads, head_dim)"}

#: Elements of q. float64 is for the CPU only; in decoding so is float32.
FORWARD_DTYPES = ("float16", "bfloat16", "float32", "float64")

#: Most query tokens per sequence of a decoding call.
MAX_TOKENS = 16

#: Most tokens of one sequence, cached or new: kernels add both numbers with 32 bits.
MAX_CAPACITY = 2**30 - 1

PAGE_AXES = {
    "bhsd": "(num_pages, kv_heads, page_size, head_dim)",
    "bshd": "(num_pages, page_size, kv_heads, head_dim)",
}

Shape = tuple[int, ...]


def dtype_name(arrays: dict[str, Array], on_gpu: bool) -> str:
    """The dtype that q, k and v share. Raises TypeError when they differ or it is not served."""
    (first, q), *others = arrays.items()
    name = str(q.dtype)
    supported = [d for d in FORWARD_DTYPES if not (on_gpu and d == "float64")]
    if name not in supported:
        module = "cupy" if is_device_array(q) else "numpy"
        cure = f".astype({module}.float32)"
        if name == "float64":
            cure += ", or .astype(ml_dtypes.bfloat16) for the tensor cores' full speed"
        raise TypeError(
            f"{first} is {name}; attention on the {'GPU' if on_gpu else 'CPU'} takes {', '.join(supported)}: "
            f"convert with {first}{cure}"
        )
    for other, x in others:
        if x.dtype != q.dtype:
            raise TypeError(
                f"{other} is {x.dtype} but {first} is {name}: convert with {other}.astype({first}.dtype)"
            )
    return name


def asked_dtype(dtype: Any) -> str:
    """The name of a dtype given as a name, a NumPy dtype or a scalar type (ml_dtypes.bfloat16); else the value's
    text."""
    if isinstance(dtype, str):
        return dtype
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def make_problem(
    shapes: Sequence[tuple[int, ...]], dtype: str, options: Options, first: Any = None
) -> Problem:
    """Check the shapes of q, k and v and the options, and state the problem. The bits of a mask function are made where
    the array ``first`` is.

    Raises ValueError naming the argument.
    """
    layout = options.layout
    check_layout(layout)
    q_shape, k_shape, v_shape = (
        four_axes(name, shape, AXES[layout], layout) for name, shape in zip("qkv", shapes, strict=True)
    )
    check_but_last("v", shapes[2], "k", shapes[1])
    (batch, heads, seqlen_q, head_dim), (k_batch, kv_heads, seqlen_k, _) = q_shape, k_shape
    if k_batch != batch:
        raise ValueError(f"k has batch {k_batch} but q has {batch}: they must be equal (layout {layout!r})")
    _check_heads(q_shape, "k", k_shape, f"layout {layout!r} reads the shapes as {AXES[layout]}")
    mask = options.mask
    if isinstance(mask, Where):
        mask = mask.bound(batch, heads, kv_heads, seqlen_q, seqlen_k, bits_on_gpu(first))
    check_mask(mask, batch, kv_heads, seqlen_q, seqlen_k, heads)
    if heads == kv_heads > _MOST_HEADS and max(seqlen_q, seqlen_k) <= _FEW_TOKENS:
        other = next(x for x in LAYOUTS if x != layout)
        warnings.warn(
            f"q has shape {shapes[0]}: layout={layout!r} reads {heads:,} heads of {seqlen_q:,} tokens. If its axes are "
            f"{AXES[other]}, pass layout={other!r}",
            stacklevel=1,  # Python shows a warning once per place and text
        )
    return Problem(
        batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, mask=mask,
        scale=check_scale(options.scale, head_dim), softcap=options.softcap,
        precision=resolve_precision(dtype, options.precision), deterministic=options.deterministic,
        v_head_dim=_own_v_dim("v", v_shape[3], head_dim),
        score=None if options.score is None else options.score.change(options.gradients),
        dropped=options.dropped,
    )  # fmt: skip


def bits_on_gpu(x: Any) -> Any:
    """The number of an array's GPU, and the function that makes bits of masks there; None for a host array."""
    if not is_device_array(x):
        return None
    from ..run.cuda.mask_bits import words

    return x.data.device_id, words


#: More heads than the first number and at most the second number of tokens: probably the array has the other layout.
_MOST_HEADS, _FEW_TOKENS = 256, 128


def check_mask(
    mask: Mask, batch: int, kv_heads: int, seqlen_q: int | None = None, seqlen_k: int | None = None, heads: int = 0,
    packed: bool = False,
) -> None:  # fmt: skip
    """Raises ValueError if the mask does not fit. Lengths and ``packed`` as for :meth:`Mask.misfit`. ``heads``: query
    heads, between which bits may differ."""
    if mask.irregular_kind == "bits" and mask.spread[1] == heads:
        kv_heads = heads
    misfit = mask.misfit(batch, kv_heads, seqlen_q, seqlen_k, packed)
    if misfit is not None:
        raise ValueError(f"mask, {mask}, {misfit}")


def check_layout(layout: str) -> None:
    check_choice("layout", layout, {name: f"{name!r} {axes}" for name, axes in AXES.items()})


def check_head_dim(head_dim: int, name: str = "q") -> None:
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        cure = ""
        if 0 < head_dim < MAX_HEAD_DIM:
            cure = f": pad q, k and v with zeros and pass scale={head_dim}**-0.5"
            cure = cure if name == "q" else f": pad {name} with zeros, and cut them off the output"
        raise ValueError(
            f"head_dim is {head_dim} (last axis of {name}); it must be a multiple of {HEAD_DIM_STEP} from "
            f"{HEAD_DIM_STEP} to {MAX_HEAD_DIM}{cure}"
        )


def _own_v_dim(name: str, v_dim: int, head_dim: int) -> int | None:
    """``Problem.v_head_dim`` for values of head dim ``v_dim``."""
    if v_dim == head_dim:
        return None
    check_head_dim(v_dim, name)
    return v_dim


def _check_heads(q: Shape, name: str, k: Shape, reading: str) -> None:
    """Raises ValueError unless heads and head dims of the shapes q and k, (batch, heads, seqlen, head_dim), fit
    together."""
    (_, heads, _, head_dim), (_, kv_heads, _, k_head_dim) = q, k
    if k_head_dim != head_dim:
        raise ValueError(f"{name} has head_dim {k_head_dim} but q has {head_dim}: they must be equal")
    check_head_dim(head_dim)
    if (heads > 0 and kv_heads == 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"q has {heads} heads and {name} has {kv_heads}: query heads must be a multiple of key/value "
            f"heads ({reading})"
        )


def check_but_last(name: str, shape: Shape | None, other: str, expected: Shape | None) -> None:
    """Raises ValueError unless all axes but the last are equal."""
    if shape is None or expected is None or len(shape) != len(expected) or shape[:-1] != expected[:-1]:
        raise ValueError(
            f"{name} has shape {shape} but {other} has {expected}: all axes but the last must be equal"
        )


def check_equal(name: str, shape: Shape | None, other: str, expected: Shape | None) -> None:
    if shape != expected:
        raise ValueError(f"{name} has shape {shape} but {other} has {expected}: they must be equal")


def check_rows(name: str, shape: tuple[int, ...], expected: tuple[int, ...], layout: str) -> None:
    """Raises ValueError unless ``shape`` is lse's shape: one number per query."""
    if shape == expected:
        return
    hint, words = "", "(heads, total_q)" if len(expected) == 2 else "(batch, heads, seqlen_q)"
    if len(expected) == 3 and shape == (expected[0], expected[2], expected[1]):
        hint = f"; layout={layout!r} does not change this order: use {name}.swapaxes(1, 2) and make that contiguous"
    raise ValueError(f"{name} has shape {shape}; it takes one number per query, {words} = {expected}{hint}")


def make_decode_problem(
    shapes: Mapping[str, Shape | None],
    dtype: str,
    cache_dtype: str,
    options: Options,
    quantize_new: bool = False,
) -> Problem:
    """Check the shapes of a call's arrays (None for an array left out), and state the problem. ``quantize_new``: new
    tokens have ``dtype``, and the cache has another dtype."""
    layout = options.layout
    check_layout(layout)
    table = shapes["block_table"]
    axes = AXES[layout] if table is None else PAGE_AXES[layout]
    q_shape, k_shape = (
        four_axes(name, shapes[name], of, layout) for name, of in (("q", AXES[layout]), ("k_cache", axes))
    )
    check_but_last("v_cache", shapes["v_cache"], "k_cache", shapes["k_cache"])
    assert shapes["v_cache"] is not None
    v_dim = shapes["v_cache"][3]
    if cache_dtype == float8.NAME != dtype and v_dim != k_shape[3]:
        raise ValueError(
            f"v_cache has head_dim {v_dim} but k_cache has {k_shape[3]}: in a cache of e4m3 they must be equal"
        )
    (batch, heads, tokens, head_dim), (outer, kv_heads, length, _) = q_shape, k_shape
    _check_heads(q_shape, "k_cache", k_shape, f"layout {layout!r} reads its shape as {axes}")
    if not 1 <= tokens <= MAX_TOKENS:
        cure = (
            "for more use cufa.flash_attention(…, causal=True)" if tokens else "without a token make no call"
        )
        raise ValueError(
            f"q has {tokens} tokens per sequence (layout {layout!r}); decoding takes 1 to {MAX_TOKENS}: {cure}"
        )
    if table is None and outer != batch:
        raise ValueError(
            f"k_cache has batch {outer} but q has {batch}: they must be equal, unless block_table names "
            "the pages of each sequence"
        )
    if table is not None:
        table = check_table(table, batch, num_pages=outer, page_size=length, axes=axes)
    capacity = length if table is None else table[1] * length
    check_mask(options.mask, batch, kv_heads)
    new_tokens = _new_tokens(shapes, (batch, kv_heads, head_dim), v_dim, layout)
    if max(capacity, new_tokens) > MAX_CAPACITY:
        what = "block_table" if table is not None and new_tokens < capacity else "k_cache"
        raise ValueError(
            f"{what} has room for {capacity:,} tokens per sequence, and k_new {new_tokens:,}: kernels count up "
            f"to {MAX_CAPACITY:,}; pass only the part, or the columns, that are used"
        )
    lengths = Cached(
        page_size=0 if table is None else length,
        max_pages=0 if table is None else table[1],
        num_pages=0 if table is None else outer,
        given=shapes["cache_seqlens"] is not None,
        new_tokens=new_tokens,
        quantize_new=quantize_new and new_tokens > 0,
    )
    return Problem(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=tokens, seqlen_k=capacity, head_dim=head_dim,
        dtype=dtype, mask=options.mask, scale=check_scale(options.scale, head_dim), softcap=options.softcap,
        lengths=lengths, k_dtype=None if cache_dtype == dtype else cache_dtype,
        v_dtype=None if cache_dtype == dtype else cache_dtype, operation="decode",
        v_head_dim=_own_v_dim("v_cache", v_dim, head_dim),
        softmax_max=options.softmax_max, invariant=options.invariant,
        score=None if options.score is None else options.score.change(),
    )  # fmt: skip


def check_table(
    table: Shape, batch: int, *, num_pages: int, page_size: int, axes: str, name: str = "k_cache"
) -> Shape:
    """Check the shape of block_table against the pages' shape, and return it as Python integers."""
    table = check_sizes("block_table", table)
    if len(table) != 2 or table[0] != batch:
        raise ValueError(
            f"block_table has shape {table} but q has batch {batch}: it must be (batch, max_pages)"
        )
    if page_size == 0:
        raise ValueError(f"{name} has pages of 0 tokens: with a block_table its shape is {axes}")
    if num_pages == 0 and batch and table[1]:
        raise ValueError(
            f"{name} has no pages, but block_table, {table}, has room for {table[1]} per sequence: "
            "allocate pages, or pass a block_table of 0 columns"
        )
    return table


def four_axes(name: str, shape: Shape | None, axes: str, layout: str) -> Shape:
    """The shape in the order (batch or pages, heads, tokens, head_dim). Raises ValueError unless it has four axes."""
    if shape is None or len(shape) != 4:
        cure = f"; a batch of one is {name}[None]" if shape is not None and len(shape) == 3 else ""
        raise ValueError(f"{name} has shape {shape}; layout {layout!r} takes four axes {axes}{cure}")
    shape = check_sizes(name, shape)
    return tuple(shape[i] for i in LAYOUTS[layout])


def _new_tokens(shapes: Mapping[str, Shape | None], sizes: Shape, v_dim: int, layout: str) -> int:
    if shapes["k_new"] is None and shapes["v_new"] is None:
        return 0
    for missing, other in (("k_new", "v_new"), ("v_new", "k_new")):
        if shapes[missing] is None:
            raise ValueError(f"{other} came without {missing}: new keys and values are appended together")
    k_new = shapes["k_new"]
    assert k_new is not None
    like = "k_new" if v_dim == sizes[2] else "k_new, with v_cache's last axis,"
    check_equal("v_new", shapes["v_new"], like, (*k_new[:-1], v_dim))
    batch, heads, tokens, head_dim = four_axes("k_new", shapes["k_new"], AXES[layout], layout)
    if (batch, heads, head_dim) != sizes:
        raise ValueError(
            f"k_new has shape {shapes['k_new']} for batch {sizes[0]}, {sizes[1]} key/value heads, head_dim "
            f"{sizes[2]}: layout {layout!r} takes {AXES[layout]} with those"
        )
    if shapes["cache_seqlens"] is None:
        raise ValueError("k_new came without cache_seqlens, which says where in the cache to append it")
    return tokens
