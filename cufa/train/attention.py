"""Self-attention as a layer of thinc: one forward call, and the callback that takes gradients back through it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from thinc.api import Model, Ragged, glorot_uniform_init, registry, to_numpy
from thinc.types import Floats3d
from thinc.util import get_width, is_numpy_array, is_xp_array, partial

from ..calls.backward import flash_attention_backward
from ..calls.forward import flash_attention
from ..calls.shapes import check_head_dim
from ..problem.checks import check_count, check_flag
from ..problem.dropout import resolve_dropout
from ..problem.mask import Mask
from ..problem.options import check_scale, check_softcap, resolve_mask, resolve_precision

Array = Any  # numpy.ndarray or cupy.ndarray
Sequences = TypeVar("Sequences", Floats3d, Ragged)

_PROJECTIONS = ("Wq", "Wk", "Wv")


def SelfAttention(
    nO: int | None = None, nI: int | None = None, *, heads: int, kv_heads: int | None = None,
    head_dim: int | None = None, causal: bool = False, window: Sequence[int | None] | None = None,
    mask: Mask | None = None, softcap: float | None = None, scale: float | None = None,
    precision: str | None = None, deterministic: bool = False, dropout: float | None = None,
    seed: int | None = None, init_W: Callable[..., Any] | None = None,
) -> Model[Sequences, Sequences]:  # fmt: skip
    """Multi-head self-attention: ``Y = attention(X Wqᵀ, X Wkᵀ, X Wvᵀ) Woᵀ`` per sequence, without biases.

    >>> layer = SelfAttention(heads=8, kv_heads=2, causal=True).initialize(X)  # doctest: +SKIP
    >>> Y, backprop = layer(X, is_train=True)  # doctest: +SKIP
    >>> dX = backprop(dY)  # and layer.get_grad("Wq"), ...  # doctest: +SKIP

    Takes float32 on thinc's NumpyOps, which compute on the CPU, or CupyOps, in one of two forms, and returns the same
    form (on ``NumpyOps(use_blis=False)`` also float64):

    - Floats3d, (batch, seqlen, nI): sequences of one length. Every position is a token.
    - Ragged: data of shape (tokens, nI) and the sequences' lengths. A token sees its own sequence only.
      Projections take all tokens at once; attention is one call per run of adjacent sequences of equal length, so
      that batches sorted by length take few calls. Lengths on the GPU are copied to the host.

    For Padded and lists of sequences, thinc's ``with_ragged(SelfAttention(...))`` makes them Ragged and back: padding
    is never seen. Nothing else is copied. The callback keeps q, k and v, but no scores.

    Parameters
    ----------
    nO, nI : int, optional
        Width of a token's result and of its input. Default: nI from the sample at initialisation, nO = nI.
    heads, kv_heads : int
        Query heads, a multiple of the key/value heads that they share (GQA, MQA). Default: kv_heads = heads.
    head_dim : int, optional
        A multiple of 8 up to 256. Default: nI / heads.
    causal, window, mask, softcap, scale, precision
        As for :func:`cufa.flash_attention`.
    deterministic : bool
        As for :func:`cufa.flash_attention_backward`.
    dropout : float, optional
        Probability of dropping a weight of attention, in calls with ``is_train`` only. It is the layer's attribute
        "dropout_rate", which thinc's ``set_dropout_rate`` changes.
    seed : int, optional
        Needed with dropout; every layer takes its own. The layer counts its calls beside the seed, on the GPU where X
        is: each call drops other weights, also the replays of a CUDA graph.
    init_W : callable(ops, shape), optional
        thinc's initialiser of Wq (heads · head_dim, nI), Wk and Wv (kv_heads · head_dim, nI) and Wo
        (nO, heads · head_dim). Default: ``glorot_uniform_init``.

    Raises
    ------
    TypeError, ValueError
        The message names the argument: an option here, a width or head_dim at initialisation, X in a call.

    thinc's configuration knows the layer as ``@layers = "cufa.SelfAttention.v1"``.
    """
    heads = check_count("heads", heads, least=1)
    kv_heads = heads if kv_heads is None else check_count("kv_heads", kv_heads, least=1)
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}: query heads share them evenly"
        )
    if head_dim is not None:
        check_head_dim(check_count("head_dim", head_dim, least=1))
    check_scale(scale, 8 if head_dim is None else head_dim)
    resolve_precision("float32", precision)
    _, first_seed = resolve_dropout(dropout, seed)
    options = {
        "mask": resolve_mask(causal, tuple(window) if isinstance(window, list) else window, mask),
        "softcap": check_softcap(softcap),
        "scale": scale,
        "precision": precision,
    }
    return Model(
        "self_attention",
        partial(_forward, options, check_flag("deterministic", deterministic)),
        init=partial(_init, glorot_uniform_init if init_W is None else init_W),
        dims={"nO": nO, "nI": nI, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        params=dict.fromkeys((*_PROJECTIONS, "Wo")),
        attrs={} if dropout is None else {"dropout_rate": dropout, "dropout_seed": first_seed},
    )


registry.layers.register("cufa.SelfAttention.v1", func=SelfAttention)


def _init(
    init_W: Callable[..., Any], model: Model[Any, Any], X: Sequences | None = None, Y: Sequences | None = None
) -> None:
    if X is not None:
        model.set_dim("nI", get_width(X))
    if Y is not None:
        model.set_dim("nO", get_width(Y))
    heads, width = model.get_dim("heads"), model.get_dim("nI")
    if not width:  # thinc's width of an array without tokens
        raise ValueError(
            "X has no tokens, so that its width is not known: initialize with a sample that has some"
        )
    if not model.has_dim("nO"):
        model.set_dim("nO", width)
    if not model.has_dim("head_dim"):
        if width % heads:
            raise ValueError(f"nI={width} is not a multiple of heads={heads}: pass head_dim")
        check_head_dim(width // heads)
        model.set_dim("head_dim", width // heads)
    queries, keys = (model.get_dim(name) * model.get_dim("head_dim") for name in ("heads", "kv_heads"))
    for name, rows in zip(_PROJECTIONS, (queries, keys, keys), strict=True):
        model.set_param(name, init_W(model.ops, (rows, width)))
    model.set_param("Wo", init_W(model.ops, (model.get_dim("nO"), queries)))


def _forward(
    options: dict[str, Any], deterministic: bool, model: Model[Any, Any], X: Sequences, is_train: bool
) -> tuple[Sequences, Callable[[Sequences], Sequences]]:
    tokens = _tokens(X)
    if tokens.shape[1] != model.get_dim("nI"):
        raise ValueError(
            f"X has width {tokens.shape[1]}, but the layer was made for nI={model.get_dim('nI')}"
        )
    runs = [run.view for run in _runs(X)]
    gemm, empty_like = model.ops.gemm, model.ops.xp.empty_like
    how = {**options, "layout": "bshd", "device": "cpu" if is_numpy_array(tokens) else None}

    def by_heads(x: Array) -> Array:
        head_dim = model.get_dim("head_dim")
        return x.reshape(len(x), x.shape[1] // head_dim, head_dim)

    def flat(x: Array) -> Array:
        return x.reshape(len(x), x.shape[1] * x.shape[2])

    q, k, v = (by_heads(gemm(tokens, model.get_param(name), trans2=True)) for name in _PROJECTIONS)
    out = empty_like(q)
    drops = _drops(model, len(runs)) if is_train else [{}] * len(runs)
    lse = [
        flash_attention(run(q), run(k), run(v), out=run(out), return_lse=True, **how, **drop)[1]
        for run, drop in zip(runs, drops, strict=True)
    ]
    attended = flat(out)

    def backprop(dY: Sequences) -> Sequences:
        result_gradient = _tokens(dY)
        model.inc_grad("Wo", gemm(result_gradient, attended, trans1=True))
        dout = by_heads(gemm(result_gradient, model.get_param("Wo")))
        gradients = dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
        for run, lse_of_run, drop in zip(runs, lse, drops, strict=True):
            flash_attention_backward(
                run(dout), run(q), run(k), run(v), run(out), lse_of_run,
                dq=run(dq), dk=run(dk), dv=run(dv), deterministic=deterministic, **how, **drop,
            )  # fmt: skip
        dX = None
        for name, gradient in zip(_PROJECTIONS, gradients, strict=True):
            rows = flat(gradient)
            model.inc_grad(name, gemm(rows, tokens, trans1=True))
            part = gemm(rows, model.get_param(name))
            dX = part if dX is None else model.ops.xp.add(dX, part, out=dX)
        return _like(X, dX)

    return _like(X, gemm(attended, model.get_param("Wo"), trans2=True)), backprop


def _drops(model: Model[Any, Any], runs: int) -> list[dict[str, Any]]:
    """Dropout of each attention call of a step: the seed, and numbers that no earlier call had. They are counted on the
    layer's device, so that a CUDA graph counts on when it is replayed."""
    rate, xp = model.attrs.get("dropout_rate"), model.ops.xp
    if not rate:
        return [{}] * runs
    state = model.attrs["dropout_seed"]
    if is_numpy_array(state) or not isinstance(
        state, xp.ndarray
    ):  # of another device, or read-only from bytes
        state = model.attrs["dropout_seed"] = xp.array(to_numpy(state))
    seeds = xp.repeat(state[None], runs, axis=0)
    seeds[:, 1] += xp.arange(runs, dtype=seeds.dtype)
    state[1:] += runs
    return [{"dropout": rate, "seed": seed} for seed in seeds]


class _Run(NamedTuple):
    """Neighbouring sequences of one length."""

    start: int
    batch: int
    seqlen: int

    def view(self, x: Array) -> Array:
        """(tokens, heads, head_dim) as (batch, seqlen, heads, head_dim), over the same memory."""
        tokens = x[self.start : self.start + self.batch * self.seqlen]
        return tokens.reshape(self.batch, self.seqlen, *x.shape[1:])


def _runs(X: Any) -> Iterator[_Run]:
    if not isinstance(X, Ragged):
        yield _Run(0, *X.shape[:2])
        return
    start, lengths = 0, to_numpy(X.lengths).tolist()
    if sum(lengths) != len(X.data):
        raise ValueError(f"X has lengths that add up to {sum(lengths)}, but {len(X.data)} tokens")
    if min(lengths, default=0) < 0:
        raise ValueError(f"X has a sequence of length {min(lengths)}: a length is at least 0")
    for seqlen, same in itertools.groupby(lengths):
        batch = len(list(same))
        if seqlen:
            yield _Run(start, batch, seqlen)
        start += batch * seqlen


def _tokens(X: Any) -> Array:
    """(tokens, width), over the same memory."""
    if isinstance(X, Ragged):  # without tokens, the width is in data_shape
        return X.data if X.data.size else X.data.reshape(0, math.prod(X.data_shape[1:]))
    if not is_xp_array(X) or X.ndim != 3:
        shape = f" of shape {X.shape}" if is_xp_array(X) else ""
        raise TypeError(
            f"X must be Floats3d (batch, seqlen, width) or Ragged, not {type(X).__qualname__}{shape}; for lists of "
            "sequences and Padded, use thinc's with_ragged(SelfAttention(...))"
        )
    batch, seqlen, width = X.shape
    return X.reshape(batch * seqlen, width)


def _like(X: Any, tokens: Array) -> Any:
    return (
        Ragged(tokens, X.lengths) if isinstance(X, Ragged) else tokens.reshape(*X.shape[:2], tokens.shape[1])
    )
