"""What tests of the backward share: inputs with their out and lse, the unfused computation in the inputs' dtype that
errors are compared with, and the bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from support import TF32_EPSILON, make_inputs, once, reference, rounded_to, seen, weights_same_dtype

from cufa import attention_reference_backward
from cufa.kernels import Kernel
from cufa.problem.scores import softcap_derivative, softcapped

NAMES = ("dq", "dk", "dv")


def serves(spec: Kernel, head_dim: int) -> bool:
    """Some config of the kernel is for this head dim."""
    return any(config.fits(head_dim) for config in spec.configs)


def near(spec: Kernel, head_dim: int) -> int:
    """The head dim that the kernel serves nearest to this one."""
    served = (x for x in range(8, 257, 8) if serves(spec, x))
    return min(served, key=lambda x: abs(x - head_dim))


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one backward call in "bhsd", with the options that the forward had."""

    dout: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray | None
    scores: dict[str, Any]
    """causal, window, mask, softcap, scale."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The positional arguments of a call."""
        return self.dout, self.q, self.k, self.v, self.out, self.lse

    @property
    def seen(self) -> np.ndarray:
        """Every score that the mask lets through, (seqlen_q, seqlen_k); where it differs, of each sequence and head."""
        masks = {name: x for name, x in self.scores.items() if name in ("causal", "window", "mask")}
        return seen(self.q, self.k, **masks)

    @property
    def options(self) -> dict[str, Any]:
        return self.scores if self.dlse is None else {**self.scores, "dlse": self.dlse}


def make_case(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int,
    dtype: str = "float16", *, seed: int = 0, spread: float = 1.0, dlse: bool = False, **scores: Any,
) -> Case:  # fmt: skip
    """Normal inputs; out and lse are the float64 reference's, rounded as a kernel rounds them."""
    q, k, v = make_inputs(
        batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, seed=seed, spread=spread
    )
    rng = np.random.default_rng(seed + 1000)
    dout = rng.standard_normal(q.shape).astype(q.dtype)
    out, lse = reference(q, k, v, return_lse=True, **scores)
    of_lse = np.float64 if dtype == "float64" else np.float32
    of_loss = rng.standard_normal(lse.shape).astype(of_lse) if dlse else None
    return Case(dout, q, k, v, out.astype(q.dtype), lse.astype(of_lse), of_loss, scores)


@once
def expected(case: Case) -> tuple[np.ndarray, ...]:
    return attention_reference_backward(case.dout, case.q, case.k, case.v, **case.options)


@once
def unfused_same_dtype(case: Case) -> tuple[np.ndarray, ...]:
    """What a framework's own operations give."""
    product, rounded, wide = rounded_to(case.q.dtype)
    group, dtype = case.q.shape[1] // case.k.shape[1], case.q.dtype
    how = {"softcap": None, "scale": None, **case.scores}
    scale = wide(case.q.shape[-1] ** -0.5 if how["scale"] is None else how["scale"])
    q, dout = case.q.astype(wide), case.dout.astype(wide)
    k, v = (np.repeat(x, group, axis=1).astype(wide) for x in (case.k, case.v))
    with np.errstate(all="ignore"):
        p, capped = weights_same_dtype(case.q, case.k, **how)
        dp = rounded(product(dout, v.swapaxes(-1, -2)))
        of_lse = 0 if case.dlse is None else case.dlse[..., None]
        ds = rounded(p * (dp - (p * dp).sum(-1, keepdims=True) + of_lse))
        if how["softcap"] is not None:
            ds = rounded(ds * softcap_derivative(capped, how["softcap"]))
        ds = rounded(ds * scale)
        dq, dk, dv = product(ds, k), product(ds.swapaxes(-1, -2), q), product(p.swapaxes(-1, -2), dout)

    def of_group(x: np.ndarray) -> np.ndarray:
        heads = rounded(x)
        return heads.reshape(len(x), case.k.shape[1], group, *x.shape[2:]).sum(axis=2).astype(dtype)

    return dq.astype(dtype), of_group(dk), of_group(dv)


def assert_gradients(got: Any, case: Case, precision: str | None = None) -> dict[str, float]:
    """Max error of each at most twice that of the unfused computation, and rounding; returns the errors over that
    bound. (The rule of FlashAttention's own tests.)"""
    errors = {}
    exacts, computed, parts = expected(case), unfused_same_dtype(case), _rounding_of_parts(case, precision)
    for name, x, exact, unfused, small in zip(NAMES, got, exacts, computed, parts, strict=True):
        assert x.shape == exact.shape and x.dtype == case.q.dtype, name
        bound = 2 * _largest(unfused.astype(np.float64) - exact) + _rounding(exact, x.dtype) + small
        error = _largest(x.astype(np.float64) - exact)
        assert error <= bound, f"{name}: max error {error:.3e} over the bound {bound:.3e}"
        errors[name] = error / bound if bound else 0.0
    assert_nothing_where_nothing_is_seen(got, case)
    return errors


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def _rounding(exact: np.ndarray, dtype: np.dtype) -> float:
    """What a result near 0.3 is rounded by, twice."""
    moved = (exact.astype(dtype) + dtype.type(0.3)).astype(dtype) - dtype.type(0.3)
    return 2 * _largest(moved.astype(np.float64) - exact)


@once
def _rounding_of_parts(case: Case, precision: str | None) -> list[float]:
    """What rounding LSE, scores and sums in float32 (float64 for float64; tf32 where that is asked for) may change: the
    unfused computation may be lucky, and needs no LSE. One part in 2^24 of all that is added up, its sign aside, and of
    a weight as many as its score's terms and LSE are large."""
    group = case.q.shape[1] // case.k.shape[1]
    q, dout, out = (x.astype(np.float64) for x in (case.q, case.dout, case.out))
    k, v = (np.repeat(x, group, axis=1).astype(np.float64) for x in (case.k, case.v))
    scale = case.scores.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse = case.lse[..., None].astype(np.float64)
    there = case.seen & ~np.isneginf(lse)
    s = scale * q @ k.swapaxes(-1, -2)
    s = s if case.scores.get("softcap") is None else softcapped(s, case.scores["softcap"])
    p = np.where(there, np.exp(np.where(there, s - lse, 0)), 0)
    terms = scale * np.abs(q) @ np.abs(k).swapaxes(-1, -2)
    unit = 2.0**-53 if case.q.dtype == np.float64 else 2.0**-24
    products = TF32_EPSILON if precision == "tf32" else unit
    parts = unit * np.abs(lse[np.isfinite(lse)]).max(initial=0) + products * (4 + terms[there].max(initial=0))
    of_lse = 0 if case.dlse is None else np.abs(case.dlse[..., None])
    ds = np.abs(dout) @ np.abs(v).swapaxes(-1, -2) + np.abs(dout * out).sum(-1, keepdims=True) + of_lse
    ds = scale * p * ds
    sums = ds @ np.abs(k), ds.swapaxes(-1, -2) @ np.abs(q), p.swapaxes(-1, -2) @ np.abs(dout)
    return [parts * factor * _largest(x) for factor, x in zip((1, group, group), sums, strict=True)]


def assert_nothing_where_nothing_is_seen(got: Any, case: Case) -> None:
    """Queries that see no key and keys that no query sees: exactly 0."""
    visible = np.broadcast_to(case.seen, (*case.q.shape[:3], case.k.shape[2]))
    dq, dk, dv = got
    assert (dq[~visible.any(axis=-1)] == 0).all()
    by_group = visible.reshape(*case.k.shape[:2], -1, case.k.shape[2])
    for x in (dk, dv):
        assert (x[~by_group.any(axis=2)] == 0).all()
