"""What all pages can be about at the same time: one problem, the kernel and the tiles that compute it, and a card."""

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
_BETWEEN, _WITHIN = "__", "."  # neither is changed by a browser
_SAMPLE_LENGTH = 4096


@dataclasses.dataclass(frozen=True)
class Subject:
    """A problem, and as much as is known of how it is computed."""

    problem: Problem
    kernel: str | None = None
    """Name in the registry; None: of another library, or nobody's yet."""
    config: TileConfig | None = None
    card: str = ""
    """What links call a card; empty: any."""

    @property
    def spec(self) -> Kernel | None:
        return None if self.kernel is None else KERNELS[self.kernel]


def sample(operation: str) -> Problem:
    """What a page speaks of that was asked for no shape."""
    if OPERATIONS[operation].splits:
        return make_decode(1, 32, 8, 2 * _SAMPLE_LENGTH)
    size = 4, 16, 16, _SAMPLE_LENGTH, _SAMPLE_LENGTH, 128
    return Problem(*size, "bfloat16", CAUSAL, default_scale(128), operation=operation)


def problem_key(problem: Problem) -> str:
    """A problem in one word of a link; :func:`problem_of` reads it. Raises ValueError for one that is too much for
    it."""
    p = problem
    if p.lengths.kind != DENSE.kind:
        raise ValueError(f"Links carry no {p.lengths.kind} sequences.")
    elements = ".".join((p.dtype, p.precision, *((p.k_dtype,) if p.k_dtype else ())))
    parts: list[object] = [p.operation, p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim]
    parts += [elements, _mask_key(p), _NONE if p.softcap is None else f"{p.softcap:g}"]
    if isinstance(p.lengths, Cached):
        parts.append(p.lengths.page_size)
    return _BETWEEN.join(map(str, parts))


def problem_of(text: str) -> Problem:
    """What :func:`problem_key` wrote. Raises ValueError, or KeyError, for anything else."""
    operation, *sizes = text.split(_BETWEEN)[:7]
    elements, mask, softcap, *cache = text.split(_BETWEEN)[7:]
    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim = map(int, sizes)
    dtype, precision, *k_dtype = elements.split(".")
    is_known = all(x in ELEMENTS for x in (dtype, *k_dtype))
    is_cached = OPERATIONS[operation].splits
    if not (
        is_known
        and all(1 <= n <= MAX_SIZE for n in (batch, heads, kv_heads, seqlen_q, seqlen_k))
        and heads % kv_heads == 0
        and head_dim in range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
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
        lengths, of_cache, of_cache, operation=operation,
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
    left, right, diagonal = text.split(_WITHIN)
    sides = [None if side == _NONE else int(side) for side in (left, right)]
    return masks.window(*sides, diagonal if diagonal in DIAGONALS else int(diagonal))
