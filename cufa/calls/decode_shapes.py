"""The shapes of a call, checked against each other and turned into the problem that they state."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.lengths import Cached
from ..problem.options import Options
from ..problem.problem import Problem
from . import arrays

#: Most query tokens of one call.
MAX_TOKENS = 16

#: Most tokens of one sequence, cached or new: their sum is a number of 32 bits in the kernels.
MAX_CAPACITY = 2**30 - 1

PAGE_AXES = {
    "bhsd": "(num_pages, kv_heads, page_size, head_dim)",
    "bshd": "(num_pages, page_size, kv_heads, head_dim)",
}

Shape = tuple[int, ...]


def make_problem(
    shapes: Mapping[str, Shape | None],
    dtype: str,
    cache_dtype: str,
    options: Options,
) -> Problem:
    """Check the shapes of a call's arrays (None for those left out), and state the problem."""
    layout = options.layout
    arrays.check_layout(layout)
    table = shapes["block_table"]
    axes = arrays.AXES[layout] if table is None else PAGE_AXES[layout]
    q_shape, k_shape = (
        _four_axes(name, shapes[name], of, layout)
        for name, of in (("q", arrays.AXES[layout]), ("k_cache", axes))
    )
    if shapes["v_cache"] != shapes["k_cache"]:
        raise ValueError(
            f"v_cache has shape {shapes['v_cache']} but k_cache has {shapes['k_cache']}: they must be equal"
        )
    batch, heads, tokens, head_dim = q_shape
    outer, kv_heads, length, k_head_dim = k_shape
    if k_head_dim != head_dim:
        raise ValueError(f"k_cache has head_dim {k_head_dim} but q has {head_dim}: they must be equal")
    arrays.check_head_dim(head_dim)
    arrays.check_heads(heads, "k_cache", kv_heads, f"layout {layout!r} reads its shape as {axes}")
    if not 1 <= tokens <= MAX_TOKENS:
        cure = (
            "for more use cufa.flash_attention(…, causal=True)"
            if tokens
            else "without one leave out the call"
        )
        raise ValueError(
            f"q has {tokens} tokens per sequence (layout {layout!r}); decoding takes 1 to {MAX_TOKENS}: {cure}"
        )
    if table is None and outer != batch:
        raise ValueError(
            f"k_cache has batch {outer} but q has {batch}: they must be equal, unless block_table says which "
            "pages are whose"
        )
    if table is not None:
        table = _check_table(table, batch, num_pages=outer, page_size=length, axes=axes)
    capacity = length if table is None else table[1] * length
    arrays.check_mask(options.mask, batch, kv_heads, None)
    new_tokens = _new_tokens(shapes, (batch, kv_heads, head_dim), layout)
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
    )
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=tokens,
        seqlen_k=capacity,
        head_dim=head_dim,
        dtype=dtype,
        mask=options.mask,
        scale=arrays.check_scale(options.scale, head_dim),
        softcap=options.softcap,
        lengths=lengths,
        k_dtype=None if cache_dtype == dtype else cache_dtype,
        v_dtype=None if cache_dtype == dtype else cache_dtype,
        operation="decode",
    )


def _check_table(table: Shape, batch: int, *, num_pages: int, page_size: int, axes: str) -> Shape:
    """The shape of block_table, beside that of the pages."""
    table = arrays.check_sizes("block_table", table)
    if len(table) != 2 or table[0] != batch:
        raise ValueError(
            f"block_table has shape {table} but q has batch {batch}: it must be (batch, max_pages)"
        )
    if page_size == 0:
        raise ValueError(f"k_cache has pages of 0 tokens: with a block_table its shape is {axes}")
    if num_pages == 0 and batch and table[1]:
        raise ValueError(
            f"k_cache has no pages, but block_table, {table}, has room for {table[1]} per sequence: "
            "allocate pages, or pass a block_table of 0 columns"
        )
    return table


def _four_axes(name: str, shape: Shape | None, axes: str, layout: str) -> Shape:
    """In the order (batch or pages, heads, tokens, head_dim)."""
    if shape is None or len(shape) != 4:
        raise ValueError(f"{name} has shape {shape}; layout {layout!r} takes four axes {axes}")
    shape = arrays.check_sizes(name, shape)
    return tuple(shape[i] for i in arrays.LAYOUTS[layout])


def _new_tokens(shapes: Mapping[str, Shape | None], sizes: Shape, layout: str) -> int:
    if shapes["k_new"] is None and shapes["v_new"] is None:
        return 0
    for missing, other in (("k_new", "v_new"), ("v_new", "k_new")):
        if shapes[missing] is None:
            raise ValueError(f"{other} came without {missing}: new keys and values are appended together")
    if shapes["v_new"] != shapes["k_new"]:
        raise ValueError(
            f"v_new has shape {shapes['v_new']} but k_new has {shapes['k_new']}: they must be equal"
        )
    batch, heads, tokens, head_dim = _four_axes("k_new", shapes["k_new"], arrays.AXES[layout], layout)
    if (batch, heads, head_dim) != sizes:
        raise ValueError(
            f"k_new has shape {shapes['k_new']} for batch {sizes[0]}, {sizes[1]} key/value heads, head_dim "
            f"{sizes[2]}: layout {layout!r} takes {arrays.AXES[layout]} with those"
        )
    if shapes["cache_seqlens"] is None:
        raise ValueError("k_new came without cache_seqlens, which says where in the cache to append it")
    return tokens
