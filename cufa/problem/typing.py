"""Types of the public calls, for type checkers. Signatures write every keyword out. Overloads, which say what a call
returns, take the keywords from here; tests/rooms/test_typing.py compares the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from .mask import Mask
from .score_function import Score

Layout = Literal["bhsd", "bshd"]
Algorithm = Literal["auto", "fa3", "fa2", "fa2_noskip", "fa1", "naive"]
DecodeSchedule = Literal["auto", "fixed", "balanced"]
Precision = Literal["float32", "tf32"]
Accumulate = Literal["tile", "row"] | int
OutDtype = Literal["bfloat16", "float16", "float32"]
Place = Literal["cpu", "cuda"]
Off = Literal[False]
On = Literal[True]

Array = TypeVar("Array", bound=npt.NDArray[Any])
AnyMask: TypeAlias = Mask | npt.NDArray[np.bool_]
Lse: TypeAlias = npt.NDArray[np.floating[Any]]
Three: TypeAlias = tuple[Array, Array, Array]
Four: TypeAlias = tuple[Array, Array, Array, Lse]


class _Scores(TypedDict, total=False):
    """How scores are made and masked."""

    window: tuple[int | None, int | None] | None
    mask: AnyMask | None
    softcap: float | None
    scale: float | None
    alibi_slopes: Any


class _Choices(_Scores, total=False):
    causal: bool
    algorithm: Algorithm
    precision: Precision | None


class _Dense(TypedDict, total=False):
    seqlens_q: Any
    seqlens_k: Any
    layout: Layout


class _Packed(_Choices, total=False):
    sink: Any
    dropout: float | None
    seed: Any
    bias: Any


class PackedOperatorOptions(_Packed, total=False):
    """Keywords of :func:`cufa.torch.attention_varlen` except deterministic and return_lse."""

    score: Callable[..., Any] | None
    arrays: Mapping[str, Any] | None


class OperatorOptions(PackedOperatorOptions, _Dense, total=False):
    """Keywords of attention in :mod:`cufa.torch` and :mod:`cufa.jax` except deterministic and return_lse."""

    num_splits: int | None


class PackedOptions(_Packed, total=False):
    """Keywords of :func:`cufa.flash_attention_varlen` except return_lse, where the result has q's dtype."""

    score: Score | None
    out: Any
    lse: Any
    device: Place | None
    cache_seqlens: Any
    block_table: Any
    k_new: Any
    v_new: Any
    tree: Any
    invariant: bool
    num_splits: int | None


class ForwardOptions(PackedOptions, _Dense, total=False):
    """Keywords of :func:`cufa.flash_attention` except return_lse, where the result has q's dtype."""


class _Scaled(TypedDict, total=False):
    """Scales of inputs in float8_e4m3, and the dtype of their result."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_dtype: OutDtype | None
    accumulate: Accumulate | None


class ScaledPackedOptions(PackedOptions, _Scaled, total=False):
    """Keywords of :func:`cufa.flash_attention_varlen` except return_lse."""


class ScaledOptions(ForwardOptions, _Scaled, total=False):
    """Keywords of :func:`cufa.flash_attention` except return_lse."""


class PackedBackwardOptions(_Choices, total=False):
    """Keywords of :func:`cufa.flash_attention_varlen_backward` except sink."""

    score: Score | None
    bias: Any
    gradients: tuple[str, ...] | dict[str, Any]
    dropout: float | None
    seed: Any
    dlse: Any
    deterministic: bool
    dq: Any
    dk: Any
    dv: Any
    dsink: Any
    device: Place | None


class BackwardOptions(PackedBackwardOptions, _Dense, total=False):
    """Keywords of :func:`cufa.flash_attention_backward` except sink."""


class DecodeOptions(_Scores, total=False):
    """Keywords of :func:`cufa.flash_decode` except return_lse."""

    sink: Any
    out: Any
    device: Place | None
    cache_seqlens: Any
    block_table: Any
    k_new: Any
    v_new: Any
    k_scale: Any
    v_scale: Any
    layout: Layout
    num_splits: int | None
    schedule: DecodeSchedule
    softmax_max: Any
    key_norms: Any
    score: Score | None
    bias: Any
    invariant: bool
    tree: Any
    shared_prefix: tuple[Any, Any] | None
