"""Masks by the rows that each key is hidden from. Rows are counted from 0, as queries are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..problem.booleans import mask_of_booleans
from ..problem.checks import as_array, check_diagonal, check_flag, integers, is_device_array, module_of, shown
from ..problem.columns import FROM_THE_START, TO_THE_END, columns_of
from ..problem.mask import FULL, Band, Mask
from ..problem.mask_family import as_typed
from ..problem.options import band_of
from ..problem.where import Where
from ..problem.where import where as where_of

_AXES = ("(seqlen_k,)", "(batch, seqlen_k)", "(batch, kv_heads, seqlen_k)")


@as_typed
def columns(
    lo1: Any, hi1: Any, lo2: Any = None, hi2: Any = None, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, diagonal: str | int = "bottom-right",
) -> Mask:  # fmt: skip
    """Key j is hidden from rows ``lo1[j] <= i < hi1[j]`` and ``lo2[j] <= i < hi2[j]``, in addition to a causal mask or
    a window.

    Parameters
    ----------
    lo1, hi1, lo2, hi2 : integers, (seqlen_k,), (batch, seqlen_k) or (batch, kv_heads, seqlen_k)
        NumPy, or int32 on the GPU. Where lo >= hi nothing is hidden. Axes of size 1 are shared. The arrays are copied:
        later changes do not reach the mask.
    causal, window, diagonal
        The mask's band, as for :func:`cufa.flash_attention` and :func:`cufa.masks.window`. Rows of lo and hi are
        counted from 0, whatever the diagonal.

    Raises TypeError or ValueError naming the argument.

    >>> import cufa
    >>> cufa.masks.columns([0, 2, 0], [0, 3, 1]).dense(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 1],
           [1, 0, 1]])
    """
    if (lo2 is None) != (hi2 is None):
        here, missing = ("lo2", "hi2") if hi2 is None else ("hi2", "lo2")
        raise ValueError(f"{here} came without {missing}: a run of rows has both ends")
    given = {"lo1": lo1, "hi1": hi1, **({} if lo2 is None else {"lo2": lo2, "hi2": hi2})}
    runs = {name: integers(name, x, _AXES) for name, x in given.items()}
    shape = _one_shape(runs)
    x = runs["lo1"]
    band = band_of(check_flag("causal", causal), window, check_diagonal(diagonal))
    title = f"{band}, columns of {shape[-1]:,} keys"
    return columns_of(
        band, [_spread(run, len(shape)) for run in runs.values()], "top-left", title, module_of(x)
    )


@as_typed
def evict(rows: Any, diagonal: str | int = "bottom-right") -> Mask:
    """Causal; key j is hidden from row ``rows[j]`` on, as after eviction from a cache.

    ``rows`` is (seqlen_k,), (batch, seqlen_k) or (batch, kv_heads, seqlen_k), integers: NumPy, or int32 on the GPU.
    ``rows`` is copied: for new rows, make a new mask. Rows are counted from 0; ``diagonal`` is the causal mask's δ, as
    for :func:`cufa.masks.causal`.

    Raises TypeError or ValueError naming the argument.
    """
    x = integers("rows", rows, _AXES)
    band = Band(right=0, diagonal=check_diagonal(diagonal))
    return columns_of(band, [x, TO_THE_END], "top-left", f"eviction of {x.shape[-1]:,} keys", module_of(x))


@as_typed
def from_flashmask(startend_row_indices: Any, causal: bool) -> Mask:
    """The mask that Paddle's ``flashmask_attention`` takes (Wang et al., 2024, arXiv 2410.01359).

    ``startend_row_indices`` is int32, (batch, 1 or kv_heads, seqlen_k, n), NumPy or on the GPU, and copied. Key j is
    hidden

    - causal, n = 1: from row LTS on,
    - causal, n = 2: from rows LTS ≤ i < LTE,
    - not causal, n = 2: from row LTS on, and from rows i < UTE,
    - not causal, n = 4: from rows LTS ≤ i < LTE and UTS ≤ i < UTE,

    and when causal, above the bottom-right diagonal.

    Raises TypeError or ValueError naming the argument.
    """
    name = "startend_row_indices"
    x = integers(name, startend_row_indices, ("(batch, 1 or kv_heads, seqlen_k, n)",))
    forms = {(True, 1), (True, 2), (False, 2), (False, 4)}
    form = check_flag("causal", causal), x.shape[-1]
    if form not in forms:
        served = " or ".join(str(n) for flag, n in sorted(forms) if flag == form[0])
        raise ValueError(
            f"{name} has shape {x.shape}: with causal={causal} its last axis, the vectors of each key, is {served}"
        )
    vectors = [x[..., n] for n in range(form[1])]
    if form == (True, 1):
        vectors = [vectors[0], TO_THE_END]
    elif form == (False, 2):
        vectors = [vectors[0], TO_THE_END, FROM_THE_START, vectors[1]]
    title = f"{'causal ' if causal else ''}flashmask of {x.shape[-2]:,} keys"
    return columns_of(Band(right=0) if causal else FULL, vectors, "top-left", title, module_of(x))


@as_typed
def from_dense(seen: Any) -> Mask:
    """The mask of a boolean matrix: query i sees key j where ``seen[..., i, j]`` is True.

    ``seen`` is (seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k) or (batch, kv_heads, seqlen_q, seqlen_k): NumPy, or on
    the GPU, from which it is copied. A call must have the matrix's seqlen_q and seqlen_k. Row i and column j keep their
    meaning in sequences shortened by ``seqlens_q`` and ``seqlens_k``, as under ``diagonal="top-left"``. For packed
    sequences, the matrix has the longest sequence's rows and keys: each sequence reads the first ones, and ALiBi
    measures from the sequence's own diagonal.

    The result is the cheapest form that holds the matrix: the narrowest band around all visible scores; within it up to
    two runs of rows that each key is hidden from; or one bit for each score. ALiBi measures distances from the band's
    diagonal: key ``i + seqlen_k - seqlen_q`` if the band contains it, or if the form is bits.

    Raises TypeError for other arrays, and ValueError for another number of axes.

    >>> import cufa
    >>> str(cufa.masks.from_dense(cufa.masks.window(3, 0).dense(9, 9)))
    'window (3, 0) top-left'
    """
    x = as_array("seen", seen)
    return mask_of_booleans(x.get() if is_device_array(x) else x, "seen")


def _one_shape(runs: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the runs. Raises TypeError or ValueError unless they fit together; axes of batch and heads may be
    1."""
    longest = max(x.ndim for x in runs.values())
    shapes = {name: _spread(x, longest).shape for name, x in runs.items()}
    first: tuple[int, ...] = shapes["lo1"]
    for name, shape in shapes.items():
        if is_device_array(runs[name]) != is_device_array(runs["lo1"]):
            raise TypeError(
                f"{name} is {shown(runs[name])} but lo1 is {shown(runs['lo1'])}: move one to the other's place"
            )
        fits = all(1 in (m, n) or m == n for m, n in zip(shape[:-1], first[:-1], strict=True))
        if not fits or shape[-1] != first[-1]:
            raise ValueError(
                f"{name} has shape {runs[name].shape} but lo1 has {runs['lo1'].shape}: they must be equal"
            )
    return first


def _spread(x: Any, axes: int) -> Any:
    """``x`` with ``axes`` axes: an axis of heads is inserted into (batch, seqlen_k)."""
    if x.ndim == axes:
        return x
    return x.reshape(*(x.shape[:1] if x.ndim == 2 else (1,)), *(1,) * (axes - 2), x.shape[-1])


def where(function: Callable[..., Any], *, within: Mask | None = None, **arrays: Any) -> Where:
    """The mask that a function in NumPy defines: query i sees key j where the function is True.

    >>> import cufa
    >>> import numpy as np
    >>> near = cufa.masks.where(lambda b, h, i, j: np.abs(i // 3 - j // 3) + np.abs(i % 3 - j % 3) <= 1)
    >>> near.dense(3, 9).astype(int)
    array([[1, 1, 0, 1, 0, 0, 0, 0, 0],
           [1, 1, 1, 0, 1, 0, 0, 0, 0],
           [0, 1, 1, 0, 0, 1, 0, 0, 0]])

    Parameters
    ----------
    function : callable
        ``function(b, h, i, j, **arrays)``, of sequence b, query head h, query i and key j, returns a boolean. An
        argument named ``delta`` is given seqlen_k - seqlen_q. It is called once, with symbols: what :func:`cufa.score`
        says of functions and of arrays holds here.
    within : Mask
        A query sees a key only if it sees the key under this mask, too: ``where(function) & within``.
    arrays : array
        At most 4 arrays that the function reads, by name; arrays of ``within`` count.

    Returns
    -------
    Mask
        Its bits, one per score, are made in one launch at the first call of new lengths, and kept with the mask. If
        values of its arrays change, call ``refresh()``. ``&``, ``|`` and ``~`` combine functions with each other, with
        bands, and with masks of runs that all heads share. Rows and keys keep their meaning in sequences that
        ``seqlens_q`` and ``seqlens_k`` shorten; a GPU takes these lengths as arrays of the function, which tests
        ``(i < m[b]) & (j < n[b])``. :func:`cufa.flash_attention_varlen` takes functions too. Calls with a cache of
        pages, with e4m3 or on several GPUs, and ``flash_decode`` do not.

    Raises
    ------
    TypeError, ValueError
        For a function that branches on an index, or returns no boolean.
    """
    found = where_of(function, arrays)
    return found if within is None else found & within  # type: ignore[return-value]
