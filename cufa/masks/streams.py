"""Masks of several texts that are concatenated in one stream of tokens, from their lengths.

Keys are the stream, and query i is its token ``i + δ``. With the default diagonal the queries are the last tokens, as
in chunked prefill; if lengths are equal, query i is token i.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ..problem.checks import (
    check_count,
    check_diagonal,
    check_flag,
    check_from_0,
    integers,
    is_device_array,
    module_of,
)
from ..problem.columns import FROM_THE_START, TO_THE_END, Chunks, Columns, columns_of
from ..problem.integers import Integers
from ..problem.mask import Band, Mask
from ..problem.mask_family import as_typed
from ..problem.options import band_of


@as_typed
def documents(
    lengths: Any, causal: bool = True, *, seqlen: int | None = None, diagonal: str | int = "bottom-right"
) -> Mask:
    """A token sees the tokens of its own document; if ``causal``, up to itself.

    Parameters
    ----------
    lengths : integers, (documents,) or (batch, documents)
        Tokens of each document, in order; 0 for no document. A list, NumPy, or int32 on the GPU. Lengths are read when
        the mask is made: for new lengths, make a new mask.
    seqlen : int, optional
        Keys of each sequence. Default: the largest sum of lengths of a sequence. Tokens past the documents see no key
        and are not seen. Required if lengths are on a GPU, where they are not read.
    diagonal : "bottom-right", "top-left" or int
        δ: query i is token i + δ, as for :func:`cufa.masks.causal`.

    Raises TypeError or ValueError naming the argument.

    If each call has different documents, use :func:`cufa.flash_attention_varlen`, which takes their lengths.
    """
    if is_device_array(lengths):
        return _documents_on_gpu(lengths, causal, seqlen, diagonal)
    x, keys, is_causal, band, title = _documents(lengths, causal, seqlen, diagonal)
    if is_device_array(x):  # an array of another library
        return _documents_on_gpu(x, causal, seqlen, diagonal)
    ends, total = _ends(x)
    # Keys past the end are hidden from every row.
    runs = [_per_key(ends, np.full_like(total, FROM_THE_START), x, keys), TO_THE_END]
    if not is_causal:
        runs += [FROM_THE_START, _per_key(ends - x, total, x, keys)]
    return columns_of(band, runs, band.diagonal, title)


def _documents(
    lengths: Any, causal: Any, seqlen: int | None, diagonal: str | int
) -> tuple[Any, int, bool, Band, str]:
    """The arguments of :func:`documents`, checked, and the band and title of its mask."""
    x = integers("lengths", lengths, axes=("(documents,)", "(batch, documents)"))
    seqlen = _stream_length("lengths", x, seqlen)
    causal, diagonal = check_flag("causal", causal), check_diagonal(diagonal)
    band = band_of(causal, None, diagonal)
    return x, seqlen, causal, band, f"{'causal ' if causal else ''}documents ({x.shape[-1]})"


_MOST_CHECKED = 256
_checked: dict[Any, tuple[Any, ...]] = {}


def _documents_on_gpu(lengths: Any, causal: Any, seqlen: int | None, diagonal: str | int) -> Columns:
    """A training step has new lengths of the same shape: arguments are checked once per shape."""
    key = lengths.shape, lengths.dtype, causal, seqlen, diagonal
    plain = type(causal) is bool and type(seqlen) is int and type(diagonal) is str
    found = _checked.get(key) if plain else None
    if found is None:
        _, keys, is_causal, band, title = _documents(lengths, causal, seqlen, diagonal)
        found = band, keys, "causal" if is_causal else "both ways", title
        if plain:
            if len(_checked) >= _MOST_CHECKED:
                _checked.clear()
            _checked[key] = found
    band, keys, form, title = found
    return Columns(band, _runs_on_gpu(lengths, keys, form), band.diagonal, title)


@as_typed
def shared_question(
    question: Any, answers: Any, *, seqlen: int | None = None, diagonal: str | int = "bottom-right"
) -> Mask:
    """A question followed by several answers: causal, and an answer sees the question and itself (preference training).

    Parameters
    ----------
    question : int, or integers (batch,)
        Tokens of the question.
    answers : integers, (answers,) or (batch, answers)
        Tokens of each answer; 0 for no answer. Lists, NumPy, or int32 on the GPU, read when the mask is made.
    seqlen, diagonal
        As for :func:`documents`.

    Raises TypeError or ValueError naming the argument.
    """
    x = integers("answers", answers, axes=("(answers,)", "(batch, answers)"))
    xp = module_of(x)
    is_single = not isinstance(question, (list, tuple)) and getattr(question, "ndim", 0) == 0
    if is_single and not is_device_array(question):
        first = xp.full(x.shape[:-1], check_count("question", question), xp.int32)
    else:
        first = integers("question", question, axes=("(batch,)", "()"))
        if is_device_array(first) != is_device_array(x):
            raise TypeError("question and answers must both be on the host, or both on one GPU")
    if x.ndim == 1 and first.ndim == 1:
        x = xp.broadcast_to(x, (len(first), len(x)))
    if first.ndim and len(first) not in (1, len(x)):
        raise ValueError(f"question has {len(first)} sequences but answers has {len(x)}: they must be equal")
    texts = xp.concatenate([xp.broadcast_to(first, x.shape[:-1])[..., None], x], axis=-1)
    if not is_device_array(x):
        check_from_0("question", np.atleast_1d(first))
        check_from_0("answers", x)
    seqlen = _stream_length("answers", texts, seqlen)
    band, title = band_of(True, None, check_diagonal(diagonal)), f"shared question ({x.shape[-1]} answers)"
    if is_device_array(x):
        return Columns(band, _runs_on_gpu(texts, seqlen, "question"), diagonal, title)
    ends, total = _ends(texts)
    ends[..., :1] = total  # all answers see the question: it ends with the last answer
    end = _per_key(ends, np.full_like(total, FROM_THE_START), texts, seqlen)
    return columns_of(band, [end, TO_THE_END], diagonal, title)


@as_typed
def chunks(size: int, diagonal: str | int = "bottom-right") -> Mask:
    """Causal within chunks of ``size`` tokens (Llama 4): token t sees the tokens from ``t - t % size`` to t.

    It fits any length. δ as for :func:`documents`. Raises TypeError or ValueError naming the argument.
    """
    return Chunks(check_count("size", size, least=1), check_diagonal(diagonal))


def _stream_length(name: str, lengths: Any, seqlen: int | None) -> int:
    """Keys of each sequence: ``seqlen``, or the largest sum of lengths. Raises ValueError naming the argument."""
    if is_device_array(lengths):
        if seqlen is None:
            raise ValueError(f"{name} is on a GPU, where it is not read: pass seqlen=, the number of keys")
        return check_count("seqlen", seqlen)
    check_from_0(name, lengths)
    most = int(lengths.sum(axis=-1, dtype=np.int64).max(initial=0))
    if seqlen is None:
        return check_count(f"the sum of {name}", most)
    if most > check_count("seqlen", seqlen):
        raise ValueError(f"{name} add up to {most:,} tokens, more than seqlen={seqlen:,}")
    return seqlen


def _runs_on_gpu(lengths: Any, seqlen: int, form: str) -> Integers:
    return Integers(_text_runs()(lengths, seqlen, form))


@functools.cache
def _text_runs() -> Any:
    """Imports CuPy once: an import statement costs a microsecond each time it runs."""
    from ..run.cuda.text_runs import text_runs

    return text_runs


def _ends(lengths: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """The end of each text, int32 (…, texts), and of the last text, (…, 1)."""
    return np.cumsum(lengths, axis=-1, dtype=np.int32), lengths.sum(axis=-1, dtype=np.int32, keepdims=True)


def _per_key(text_values: Any, past: Any, lengths: npt.NDArray[np.int32], seqlen: int) -> Any:
    """For each key the value of its text, from ``text_values``, int32 (…, texts); ``past``, (…, 1), for keys past all
    texts."""
    counts = np.append(lengths, seqlen - lengths.sum(axis=-1, keepdims=True), axis=-1)
    numbers = np.append(text_values, past, axis=-1)
    return np.repeat(numbers.ravel(), counts.ravel()).reshape(*lengths.shape[:-1], seqlen)
