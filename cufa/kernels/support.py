"""The matrix of support: the one place that decides whether a kernel serves a problem.

Kernels declare (:class:`~cufa.kernels.base.Kernel`, and what their tiles add in
:class:`~cufa.kernels.config.TileConfig`); :func:`refusal` decides. The table of the README (:func:`table`) and the
lists in the docstrings of the public calls (:func:`summary`) are made from the same declarations. The static_asserts of
kernels refuse the same options: ``tests/kernels/test_support.py`` evaluates them for every combination.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..gpu.architectures import Device
from ..problem.columns import Chunks, Columns
from ..problem.problem import MASK_KINDS, MAX_HEAD_DIM, Problem

if TYPE_CHECKING:
    from .base import Kernel
    from .config import TileConfig

_IRREGULAR_MASKS = {
    "sets": "masks with a prefix, kept keys or global tokens",
    "columns": "masks that hide each key from one run of rows",
    "columns2": "masks that hide each key from two runs of rows",
    "bits": "masks with a bit for each score",
}

_LENGTHS = {"padded": "padded sequences (seqlens_q, seqlens_k)", "packed": "packed sequences (cu_seqlens)"}

_OPTIONS = {
    "alibi": "ALiBi (alibi_slopes)",
    "sink": "a sink",
    "deterministic": "a fixed order of additions (deterministic)",
    "score": "a score function (score, bias)",
    "gradients": "gradients of a score function's arrays",
    "dropout": "dropout",
    "tree": "a tree of new tokens (tree)",
    "invariant": "bits that depend on the sequence alone (invariant)",
    "running": "a running result",
    "float32 gradients": "float32 gradients of 16-bit elements",
    **_LENGTHS,
    "cache": "keys in a cache (cache_seqlens, block_table)",
}

#: Names of options in tables. Invariance goes with fixed splits of a cache, as the docstring of flash_decode says.
_SHORT = {
    "padded": "padded lengths",
    "packed": "packed lengths",
    "cache": "caches",
    "alibi": "ALiBi",
    "sink": "sinks",
    "deterministic": "a fixed order of additions",
    "score": "score functions",
    "gradients": "gradients of their arrays",
    "dropout": "dropout",
    "tree": "trees",
}


_ANY_V_DIM = "; v's may differ"

#: Options that go with split keys.
_SPLIT_OPTIONS = {"alibi", "sink", "score", "dropout", "padded", "packed", "cache", "tree"}


def refusal(
    kernel: Kernel, problem: Problem, capability: int | None = None, config: TileConfig | None = None,
    device: Device | None = None, split_keys: bool = False,
) -> str | None:  # fmt: skip
    """Why a kernel does not serve a problem, as a sentence without its subject, the kernel's name; None if it serves.

    ``capability`` or ``device`` also checks a GPU (``device``: whether any tiles fit), ``config`` one tile config,
    ``split_keys`` keys split over thread blocks.
    """
    reasons = _reasons(kernel, problem, device.arch.capability if device else capability)
    reason = next(reasons, None)
    dims = problem.head_dim, problem.v_dim
    if reason is None and device is not None and not kernel.fitting(kernel.configs, dims[0], device, dims[1]):
        reason = f"has no tiles for head_dim {problem.dims_text} on {device.arch.name}"
    if reason is None and config is not None:
        reason = next(_config_reasons(config, problem), None)
    if reason is None and split_keys:
        reason = next(_split_reasons(kernel, problem), None)
    return reason


def nearest(kernels: Sequence[Kernel], problem: Problem) -> Sequence[Kernel]:
    """The kernels that take the problem's elements: their refusals help most. If there are none, all kernels."""
    return [kernel for kernel in kernels if next(_element_reasons(kernel, problem), None) is None] or kernels


def _element_reasons(kernel: Kernel, problem: Problem) -> Iterator[str]:
    if problem.dtype not in kernel.dtypes:
        yield f"takes {_and(kernel.dtypes)}, not {problem.dtype}"
    k_dtypes = kernel.k_dtypes or (problem.dtype,)
    for name, element in (("keys", problem.k_element), ("values", problem.v_element)):
        if element.name not in k_dtypes:
            yield f"takes {name} of {_and(k_dtypes)}, not {element.name}"


def _reasons(kernel: Kernel, problem: Problem, capability: int | None) -> Iterator[str]:
    if capability is not None and not kernel.runs_on(capability):
        yield f"needs {_architectures(kernel)}"
    yield from _element_reasons(kernel, problem)
    if problem.out_element.name not in (kernel.out_dtypes or (problem.dtype,)):
        yield f"writes {_and(kernel.out_dtypes or (problem.dtype,))}, not {problem.out_element.name}"
    modes = problem.scales or ("",) * len(kernel.scales) * (problem.operation == "decode")
    for name, mode in zip("qkv", modes, strict=False):
        served = kernel.scales.get(name, ("",))
        if mode not in served:
            other = f"per {mode}" if mode and any(served) else _scale(name, (mode,))
            yield f"takes {_scale(name, served)}, not {other}"
    if problem.precision not in kernel.precisions:
        yield f"computes in {_and(kernel.precisions)}, not {problem.precision}"
    if problem.head_dim % kernel.head_dim_multiple:
        yield f"takes head dims that are multiples of {kernel.head_dim_multiple}, not {problem.head_dim}"
    if problem.v_head_dim is not None and not kernel.any_v_dim:
        yield f"takes v of q's head_dim {problem.head_dim}, not of {problem.v_dim}"
    yield from _mask_reasons(kernel, problem)
    for option in _options(problem):
        if option not in kernel.options:
            yield f"takes no {_OPTIONS[option].removeprefix('a ')}"
    if problem.dropped and problem.lengths.in_cache:
        # Lanes share the random bits of 16 queries, but a cached sequence's tiles begin at any position.
        yield "takes dropout with keys in arrays only, where a query's position is its row"
    yield from _gradient_reasons(kernel, problem)
    yield from _memory_reasons(kernel, problem)


def _gradient_reasons(kernel: Kernel, problem: Problem) -> Iterator[str]:
    """Gradients of a score function's arrays."""
    score = problem.score
    if score is None or not score.gradients:
        return
    if any(math.prod(score.shapes[score.place_of(name)]) >= 2**31 for name in score.gradients):
        yield "takes gradients of arrays of fewer than 2^31 elements"
    if kernel.score_derivatives_without_score:
        if score.weights_read_scores:
            yield "takes gradients of arrays only if their derivatives do not depend on the score"
        if problem.softcap is not None and score.has_slope:
            yield "takes a soft cap with gradients of arrays only where the derivative with respect to the score is 1"


def _mask_reasons(kernel: Kernel, problem: Problem) -> Iterator[str]:
    """Every kernel serves band masks. Irregular masks go with the options of ``options_with_irregular_masks`` only."""
    mask, kind = problem.mask, problem.mask.irregular_kind
    if not kind:
        return
    if kind not in kernel.masks:
        yield f"serves band masks, not {_IRREGULAR_MASKS.get(kind, kind)}"
    columns = problem.kernel_mask
    if isinstance(columns, Columns) and columns.band.irregular_kind:
        yield "serves masks that hide keys from runs of rows within a plain band, not within a band with exempt tokens"
    if mask.reads_lengths and not problem.lengths.known:
        yield f"takes {mask}, whose bits the host makes, with lengths on the host only"
    for option in _options(problem):
        if option not in kernel.options_with_irregular_masks:
            yield f"takes {_OPTIONS[option]} with band masks only, not with {mask}"
    if problem.lengths.in_cache and (kind not in ("sets", "columns") or mask.reads_lengths):
        yield f"takes keys in a cache with bands, exempt tokens or chunks, not with {mask}"
    if kernel.chunks_only and kind == "columns" and not isinstance(mask, Chunks):
        yield f"serves chunks, no other {_IRREGULAR_MASKS[kind]}"
    if problem.seqlen_q + problem.seqlen_k >= 2**30:
        yield "takes fewer than 2^30 rows and keys together with an irregular mask"
    most = kernel.most_listed_queries(problem.head_dim)
    if most is not None and problem.seqlen_q > most:
        yield f"takes at most {most:,} queries with an irregular mask"


def _memory_reasons(kernel: Kernel, problem: Problem) -> Iterator[str]:
    if (
        kernel.uses_copy_engine or kernel.aligned_rows or problem.lengths.in_cache
    ) and problem.alignment != 16:
        yield f"needs 16-byte aligned rows, not {problem.alignment}"
    if kernel.uses_copy_engine and not problem.positive_strides:
        yield "needs positive strides"
    cached = problem.operation == "decode" or problem.lengths.in_cache
    if cached and problem.cache.page_size % kernel.page_multiple:
        yield f"reads boxes of {kernel.page_multiple} keys, which pages of {problem.cache.page_size} would cut"
    if not kernel.skip_masked_tiles and problem.seqlen_q + problem.seqlen_k >= 2**31:
        yield "takes fewer than 2^31 rows and keys together"  # positions past the mask are compared as well


def _config_reasons(config: TileConfig, problem: Problem) -> Iterator[str]:
    if config.rows_served and config.block_q not in config.rows_served:
        yield f"has {config.block_q} rows a tile, where {' or '.join(map(str, config.rows_served))} are served"
    if problem.lengths.in_cache and not config.serves_cache(problem.head_dim):
        yield f"is not built for keys in a cache at head_dim {problem.head_dim}"
    if getattr(config, "packed_heads", 1) > 1 and problem.tiles_are_listed:
        yield "has heads that share tiles, which takes band masks over whole arrays"
    options = {*_options(problem)} - {"alibi", "float32 gradients"}
    if config.plain_only and (problem.mask.irregular_kind or problem.softcap is not None or options):
        yield "takes band masks over whole arrays alone, without softcap, sink or a fixed order of additions"


def _split_reasons(kernel: Kernel, problem: Problem) -> Iterator[str]:
    if not kernel.split_configs:
        yield f"{kernel.name} has no config that splits keys"
    for option in _options(problem):
        if option not in _SPLIT_OPTIONS:
            yield f"{kernel.name} splits keys without {_OPTIONS[option].removeprefix('a ')}"
    if problem.accumulate not in ("auto", "row", "tile"):
        yield f"{kernel.name} splits keys with accumulate='row' or 'tile', not {problem.accumulate}"


def _options(problem: Problem) -> Iterator[str]:
    """The options of a problem that not every kernel takes. No public call has "running" or "float32 gradients", and
    no table lists them."""
    if problem.running is not None:
        yield "running"
    if problem.float32_gradients:
        yield "float32 gradients"
    for option in ("alibi", "sink", "deterministic", "invariant", "tree"):
        if getattr(problem, option):
            yield option
    if problem.score is not None:
        yield "score"
        if problem.score.gradients:
            yield "gradients"
    if problem.dropped:
        yield "dropout"
    if problem.lengths.kind in _LENGTHS:
        yield problem.lengths.kind
    if problem.lengths.in_cache:
        yield "cache"


def _scale(name: str, modes: Iterable[str]) -> str:
    """The scale of an operand in words; "": the operand is not e4m3, or the heads of a cache have the scales."""
    named = [*filter(None, modes)]
    return f"{name}_scale per {_and(named)}" if named else f"no {name}_scale per token or block"


def _architectures(kernel: Kernel) -> str:
    return f"sm_{kernel.min_capability}" + (
        " or later" if kernel.max_capability > kernel.min_capability else ""
    )


def _and(words: Iterable[str]) -> str:
    *first, last = [*words] or [""]
    return f"{', '.join(first)} and {last}" if first else last


# --- In words ---------------------------------------------------------------------------------------------


def summary(kernels: Iterable[Kernel]) -> list[str]:
    """The lists in the docstrings of the public calls: one sentence for kernels that serve the same on a GPU."""
    sentences = []
    for names, columns in _alike(kernels):
        gpu, head_dims = columns.pop("GPU"), columns.pop("head dims")
        if head_dims != f"8 to {MAX_HEAD_DIM}, multiples of 8{_ANY_V_DIM}":
            columns["elements"] += f"; head dims {head_dims}"
        sentences.append(f"{_and(names)} ({gpu}): {'; '.join(filter(None, columns.values()))}.")
    return sentences


def table(kernels: Iterable[Kernel]) -> str:
    """The lists as a Markdown table: a part of the README."""
    rows = [{"kernel": ", ".join(names), **columns} for names, columns in _alike(kernels)]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _alike(kernels: Iterable[Kernel]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Names of kernels that serve the same problems, and the texts of their columns."""
    names: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for kernel in (x for x in kernels if not x.ablation):
        names.setdefault(tuple(_columns(kernel).items()), []).append(kernel.name)
    for columns, found in names.items():
        yield found, dict(columns)


def _columns(kernel: Kernel) -> dict[str, str]:
    low = min(config.min_head_dim for config in kernel.configs)
    high = max(config.max_head_dim for config in kernel.configs)
    elements = ", ".join((*kernel.dtypes, *(x for x in kernel.precisions if x == "tf32")))
    any_v_dim = _ANY_V_DIM if kernel.any_v_dim else ""
    return {
        "GPU": _architectures(kernel),
        "elements": elements + (f" over {_and(kernel.k_dtypes)}" if kernel.k_dtypes else ""),
        "head dims": f"{low} to {high}, multiples of {kernel.head_dim_multiple}{any_v_dim}",
        "masks": _masks(kernel),
        "options beside softcap": _options_in_words(kernel),
    }


def _masks(kernel: Kernel) -> str:
    if {*kernel.masks} >= {*MASK_KINDS}:
        return "all masks"
    irregular = [_IRREGULAR_MASKS[kind] for kind in kernel.masks if kind in _IRREGULAR_MASKS]
    if kernel.chunks_only:
        irregular = [x.replace(_IRREGULAR_MASKS["columns"], "chunks") for x in irregular]
    return ", ".join(("band masks", *irregular))


def _options_in_words(kernel: Kernel) -> str:
    any_mask, options = kernel.options_with_irregular_masks, [x for x in kernel.options if x in _SHORT]
    any_mask_options = [_SHORT[x] for x in options if x in any_mask]
    band_options = _and(_SHORT[x] for x in options if x not in any_mask)
    if band_options and any(kind in _IRREGULAR_MASKS for kind in kernel.masks):
        band_options = f"with band masks also {band_options}"
        return "; ".join(filter(None, (_and(any_mask_options), band_options)))
    return _and(filter(None, (*any_mask_options, band_options)))
