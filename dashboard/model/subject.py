"""The common subject of pages: a problem, its kernel and tiles, and a card."""

from __future__ import annotations

import dataclasses

from cufa import masks
from cufa.dashboard.link import said
from cufa.dashboard.model import mask_settings
from cufa.kernels import KERNELS, Kernel, TileConfig
from cufa.measure.decode_cases import make_decode
from cufa.plan.operation import OPERATIONS
from cufa.problem.element import ELEMENTS
from cufa.problem.lengths import DENSE, Cached
from cufa.problem.mask import CAUSAL, DIAGONALS, Band, Mask
from cufa.problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MAX_SIZE, Problem, default_scale

_NONE = "none"
_BETWEEN, _WITHIN = "__", "."  # browsers change neither
_SAMPLE_LENGTH = 4096


@dataclasses.dataclass(frozen=True)
class Subject:
    """A problem, and its kernel, tiles and card if known."""

    problem: Problem
    kernel: str | None = None
    """Name in the registry; None: another library, or not chosen."""
    config: TileConfig | None = None
    card: str = ""
    """Name of the card in links; empty: any card."""

    @property
    def spec(self) -> Kernel | None:
        return None if self.kernel is None else KERNELS[self.kernel]


def sample(operation: str) -> Problem:
    """Default problem of a page."""
    if OPERATIONS[operation].split_selects_kernel:
        return make_decode(1, 32, 8, 2 * _SAMPLE_LENGTH)
    size = 4, 16, 16, _SAMPLE_LENGTH, _SAMPLE_LENGTH, 128
    return Problem(*size, "bfloat16", CAUSAL, default_scale(128), operation=operation)


def problem_key(problem: Problem) -> str:
    """A problem as one parameter of a link; :func:`problem_of` reads it. Raises ValueError for a problem that links
    cannot carry."""
    p = problem
    if p.lengths.kind != DENSE.kind:
        raise ValueError(f"Links cannot carry {p.lengths.kind} sequences.")
    if p.score is not None:
        raise ValueError("Links cannot carry a score function.")
    elements = ".".join((p.dtype, p.precision, *((p.k_dtype,) if p.k_dtype else ())))
    head_dims = ".".join(map(str, (p.head_dim, *((p.v_head_dim,) if p.v_head_dim else ()))))
    parts: list[object] = [p.operation, p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, head_dims]
    parts += [elements, _mask_key(p), _NONE if p.softcap is None else f"{p.softcap:g}"]
    if isinstance(p.lengths, Cached):
        parts.append(p.lengths.page_size)
    return _BETWEEN.join(map(str, parts))


def problem_of(text: str) -> Problem:
    """The problem of a :func:`problem_key`. Raises ValueError or KeyError for other text."""
    operation, *sizes, head_dims = text.split(_BETWEEN)[:7]
    elements, mask, softcap, *cache = text.split(_BETWEEN)[7:]
    batch, heads, kv_heads, seqlen_q, seqlen_k = map(int, sizes)
    head_dim, *v_head_dim = map(int, head_dims.split("."))
    dtype, precision, *k_dtype = elements.split(".")
    is_known = all(x in ELEMENTS for x in (dtype, *k_dtype))
    is_cached = OPERATIONS[operation].split_selects_kernel
    if not (
        is_known
        and all(1 <= n <= MAX_SIZE for n in (batch, heads, kv_heads, seqlen_q, seqlen_k))
        and heads % kv_heads == 0
        and all(n in range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP) for n in (head_dim, *v_head_dim))
        and precision in ("native", "float32", "tf32")
        and len(cache) == is_cached
    ):
        raise ValueError(text)
    cap = None if softcap == _NONE else float(softcap)
    if cap is not None and not cap > 0:
        raise ValueError(text)
    lengths = DENSE
    if is_cached:
        page_size = int(cache[0])
        pages = -(-seqlen_k // page_size) if page_size else 0
        lengths = Cached(page_size, pages, batch * pages)
    of_cache, shown = (k_dtype[0] if k_dtype else None), _mask_of(mask, seqlen_k)
    return Problem(
        batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, shown, default_scale(head_dim), cap, precision,
        lengths, of_cache, of_cache, operation=operation, v_head_dim=v_head_dim[0] if v_head_dim else None,
    )  # fmt: skip


def _mask_key(problem: Problem) -> str:
    mask = problem.mask
    if mask.irregular_kind:
        return _WITHIN.join(said(value) for value in mask_settings.settings(problem).values())
    assert isinstance(mask, Band)
    sides = (_NONE if side is None else str(side) for side in (mask.left, mask.right))
    return _WITHIN.join((*sides, str(mask.diagonal)))


def _mask_of(text: str, seqlen_k: int) -> Mask:
    kind, *values = text.split(_WITHIN)
    if kind in mask_settings.KINDS:
        return mask_settings.mask_of(kind, values, seqlen_k)
    *sides, diagonal = text.split(_WITHIN)
    left, right = (None if side == _NONE else int(side) for side in sides)
    return masks.window(left, right, diagonal if diagonal in DIAGONALS else int(diagonal))
