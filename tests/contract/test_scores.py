"""Score functions: a function in NumPy is the reference, the CPU path and part of kernels, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
from support import make_inputs, written_out

import cufa
from cufa import masks

RNG = np.random.default_rng(5)
TABLE = RNG.standard_normal((4, 40)).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.1, 0.3], np.float32)
IDS = np.sort(RNG.integers(0, 3, (2, 45)), axis=1)


def relative(s, b, h, i, j, table):
    return s + table[h, np.clip(j - i, -20, 19) + 20]


def buckets(s, b, h, i, j, table):
    """T5's: exact for near keys, logarithmic for far ones."""
    far = 8 + (np.log(np.maximum(np.abs(j - i), 1) / 8) * 3).astype(int)
    return s + 2 * table[h, np.where(np.abs(j - i) < 8, np.abs(j - i), np.minimum(far, 15))]


def alibi(s, b, h, i, j, slopes, delta):
    return s - slopes[h] * np.abs(i + delta - j)


def capped(s, b, h, i, j):
    return 3 * np.tanh(s / 3)


def nearly_linear(s, b, h, i, j):
    """All arguments of the tangent are near 0."""
    return 30 * np.tanh(s / 30)


def documents(s, b, h, i, j, ids):
    return np.where(ids[b, i % 45] == ids[b, j % 45], s, -np.inf)


def scaled(s, b, h, i, j, slopes):
    return s * slopes[h] + slopes[(h + 1) % 4] * 0.5


#: (score function, its arrays, arrays with gradients)
SCORES = {
    "relative": (relative, {"table": TABLE}, ("table",)),
    "buckets": (buckets, {"table": TABLE.astype(np.float16)}, ("table",)),
    "alibi": (alibi, {"slopes": SLOPES}, ("slopes",)),
    "capped": (capped, {}, ()),
    "nearly linear": (nearly_linear, {}, ()),
    "documents": (documents, {"ids": IDS}, ()),
    "scaled": (scaled, {"slopes": SLOPES}, ("slopes",)),
}


def made(name):
    function, arrays, gradients = SCORES[name]
    return cufa.score(function, **arrays), gradients


OPTIONS = [
    {},
    {"causal": True},
    {"mask": masks.prefix([3, 9]), "softcap": 2.0},
    {"window": (7, 2), "sink": RNG.standard_normal(4), "alibi_slopes": SLOPES},
    {"causal": True, "seqlens_q": np.array([20, 33]), "seqlens_k": np.array([45, 11])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_the_cpu_path_is_the_reference(name, options):
    """One row of ``OPTIONS`` over several tiles."""
    lengths = (300, 290) if options == {"causal": True} else (33, 45)
    q, k, v = make_inputs(2, 4, 2, *lengths, 8, "float64")
    score, gradients = made(name)
    out, lse = cufa.flash_attention(q, k, v, score=score, return_lse=True, device="cpu", **options)
    exact, exact_lse = cufa.attention_reference(q, k, v, score=score, return_lse=True, **options)
    np.testing.assert_allclose(out, exact, atol=1e-12)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-12)
    dout = RNG.standard_normal(q.shape)
    more = {"score": score, "gradients": gradients, **options}
    found = cufa.flash_attention_backward(dout, q, k, v, out, lse, device="cpu", **more)
    expected = cufa.attention_reference_backward(dout, q, k, v, **more)
    assert len(found) == len(expected) == 3 + ("sink" in options) + len(gradients)
    for x, exact in zip(found, expected, strict=True):
        assert x.shape == exact.shape
        np.testing.assert_allclose(x, exact, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "built_in"), [("alibi", {"alibi_slopes": SLOPES}), ("capped", {"softcap": 3.0})]
)
def test_what_is_built_in_is_the_same_as_a_score_function(name, built_in):
    q, k, v = make_inputs(2, 4, 2, 33, 45, 8, "float64")
    dout, score = RNG.standard_normal(q.shape), made(name)[0]
    results = []
    for options in ({"score": score}, built_in):
        out, lse = cufa.attention_reference(q, k, v, causal=True, return_lse=True, **options)
        results.append((out, lse, *cufa.attention_reference_backward(dout, q, k, v, causal=True, **options)))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("name", ["relative", "scaled"])
def test_gradients_of_arrays_are_finite_differences(name):
    q, k, v = make_inputs(2, 4, 2, 9, 7, 8, "float64")
    function, arrays, (of,) = SCORES[name]
    arrays = {n: x.astype(np.float64) for n, x in arrays.items()}
    dout = RNG.standard_normal(q.shape)
    score = cufa.score(function, **arrays)
    found = cufa.attention_reference_backward(dout, q, k, v, score=score, gradients=(of,), softcap=4.0)[-1]
    for index in [(0, 20), (3, 14), (1, 25)] if name == "relative" else [(0,), (3,)]:
        moved = []
        for step in (1e-5, -1e-5):
            changed = arrays[of].copy()
            changed[index] += step
            out = cufa.attention_reference(q, k, v, score=cufa.score(function, **{of: changed}), softcap=4.0)
            moved.append((out * dout).sum())
        np.testing.assert_allclose((moved[0] - moved[1]) / 2e-5, found[index], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(2, 4, 33, 45), (1, 4, 1, 45), (1, 1, 33, 45)])
def test_a_bias_broadcasts_and_has_a_gradient(shape):
    q, k, v = make_inputs(2, 4, 2, 33, 45, 8, "float64")
    bias, dout = RNG.standard_normal(shape), RNG.standard_normal(q.shape)
    out, lse = cufa.flash_attention(q, k, v, causal=True, bias=bias, return_lse=True, device="cpu")
    exact = written_out(q, k, v, bias=bias, seen=masks.causal().dense(33, 45))
    np.testing.assert_allclose(out, exact[0], atol=1e-12)
    *_, found = cufa.flash_attention_backward(
        dout, q, k, v, out, lse, causal=True, bias=bias, gradients=("bias",), device="cpu"
    )
    expected = cufa.attention_reference_backward(
        dout, q, k, v, causal=True, bias=np.broadcast_to(bias, (2, 4, 33, 45)), gradients=("bias",)
    )[-1]
    axes = tuple(n for n, size in enumerate(shape) if size != expected.shape[n])
    np.testing.assert_allclose(found, expected.sum(axis=axes, keepdims=True), atol=1e-10)


def test_a_dict_of_gradients_names_the_arrays_that_receive_them():
    q, k, v = make_inputs(1, 2, 1, 9, 12, 16, "float32")
    arrays = {"table": np.ones((2, 5), np.float32), "factor": np.ones(2, np.float32)}
    change = cufa.score(lambda s, b, h, i, j, table, factor: s * factor[h] + table[h, j % 5], **arrays)
    out, lse = cufa.flash_attention(q, k, v, score=change, return_lse=True, device="cpu")
    for given, call in (
        ((q, q, k, v, out, lse), cufa.flash_attention_backward),
        (
            (*(x[0].swapaxes(0, 1) for x in (q, q, k, v, out)), lse[0], [0, 9], [0, 12]),
            cufa.flash_attention_varlen_backward,
        ),
    ):
        options = {"score": change, "device": "cpu"}
        right = call(*given, **options, gradients=("factor", "table"))[3:]
        into = {"factor": np.full(2, np.nan, np.float32), "table": np.full((2, 5), np.nan, np.float32)}
        found = call(*given, **options, gradients=into)[3:]
        for x, y, z in zip(found, into.values(), right, strict=True):
            assert x is y
            np.testing.assert_array_equal(x, z)
        with pytest.raises(ValueError, match=r"gradients\['factor'\] must be an array of factor's shape"):
            call(*given, **options, gradients={"factor": into["table"]})


def test_packed_sequences_are_numbered_and_count_from_their_own_begin():
    q, k, v = make_inputs(1, 4, 2, 40, 40, 8, "float64")
    begins = np.array([0, 13, 40])
    q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
    score, gradients = made("documents")[0], ("table",)
    for score, gradients in (made("documents"), made("alibi")):
        out, lse = cufa.flash_attention_varlen(
            q, k, v, begins, begins, score=score, return_lse=True, device="cpu"
        )
        np.testing.assert_allclose(
            out, cufa.attention_varlen_reference(q, k, v, begins, begins, score=score), atol=1e-12
        )
        more = {"score": score, "gradients": gradients}
        found = cufa.flash_attention_varlen_backward(
            out, q, k, v, out, lse, begins, begins, device="cpu", **more
        )
        expected = cufa.attention_varlen_reference_backward(out, q, k, v, begins, begins, **more)
        for x, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, exact, atol=1e-10)


KERNELS = [
    *(("forward", algorithm, name) for algorithm in ("fa3", "fa2", "naive") for name in SCORES),
    *(("backward", "fa3", name) for name in SCORES if name != "scaled"),
    *(("backward", "fa2", name) for name in SCORES),
]


@pytest.mark.emulate
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("operation", "algorithm", "name"), KERNELS)
@pytest.mark.parametrize("options", OPTIONS[1:5], ids=["causal", "prefix", "window", "padded"])
def test_kernels_compute_what_the_function_says(operation, algorithm, name, options):
    """Executed from the source that a GPU runs, without a finding."""
    if algorithm == "naive":
        options = {"causal": True}
    elif "sink" in options:
        options = {"window": (7, 2), "alibi_slopes": SLOPES}
    q, k, v = make_inputs(2, 4, 2, 33, 45, 16, "float16")
    score, gradients = made(name)
    given = {"score": score, "algorithm": algorithm, "mode": "checked", **options}
    reference = {"score": score, **options}
    if operation == "forward":
        done = cufa.emulate(q, k, v, **given)
        exact, exact_lse = cufa.attention_reference(q, k, v, return_lse=True, **reference)
        assert not done.findings
        assert_scores(done.out, exact)
        seen = np.isfinite(exact_lse)
        np.testing.assert_allclose(done.lse[seen], exact_lse[seen], atol=2e-3)
        return
    dout = make_inputs(2, 4, 2, 33, 45, 16, "float16")[0] * np.float16(0.5)
    out, lse = cufa.attention_reference(q, k, v, return_lse=True, **reference)
    done = cufa.emulate_backward(
        dout, q, k, v, out.astype(np.float16), lse.astype(np.float32), gradients=gradients, **given
    )
    assert not done.findings
    expected = cufa.attention_reference_backward(dout, q, k, v, gradients=gradients, **reference)
    for x, exact in zip(done.results.values(), expected, strict=True):
        assert_scores(x, exact)


def assert_scores(found, exact, dtype="float16", cancelled=0.0):
    """Within a few roundings to 11 bits (bfloat16: 8) of the largest value, and of ``cancelled``, the size of terms
    whose sum may be 0."""
    share = 5e-2 if dtype == "bfloat16" else 6e-3
    largest = max(abs(exact).max(), cancelled, 1e-3)
    np.testing.assert_allclose(found.astype(np.float64), exact, atol=share * largest)


SEEN = np.random.default_rng(6).random((2, 2, 300, 450)) < 0.4
COMPOSED = {
    "alibi": {"window": (60, 9), "alibi_slopes": SLOPES},
    "cap": {"causal": True, "softcap": 2.0},
    "all": {"window": (200, 0), "alibi_slopes": SLOPES, "softcap": 2.0, "sink": SLOPES},
    "padded": {"causal": True, "seqlens_q": np.int32([150, 300]), "seqlens_k": np.int32([333, 40])},
    "packed": {"causal": True, "alibi_slopes": SLOPES},
    "columns": {"mask": masks.documents([100, 350])},
    "two runs": {"mask": masks.documents([100, 350], causal=False)},
    "bits": {"mask": SEEN},
    "prefix": {"mask": masks.prefix([30, 90]), "softcap": 3.0},
}  # fmt: skip
_NAMES = [*SCORES]
ON_GPU = [
    (operation, algorithm, _NAMES[(n + 2 * m) % len(_NAMES)], composed, *dims)
    for operation, algorithm in (
        ("forward", "fa3"), ("backward", "fa3"), ("forward", "fa2"), ("backward", "fa2"), ("forward", "naive"),
    )
    for n, composed in enumerate(COMPOSED)
    for m, dims in enumerate(
        [(64, 64, "float16"), (128, 128, "bfloat16"), (128, 64, "float16"), (256, 256, "bfloat16")]
    )
]  # fmt: skip
ON_GPU += [
    ("forward", "naive", name, composed, 64, 64, "float32")
    for name, composed in (
        ("relative", "cap"),
        ("alibi", "columns"),
        ("documents", "bits"),
        ("scaled", "prefix"),
    )
]


def served(operation, algorithm, name, composed, dim, v_dim, dtype):
    """What the kernels do not take: see test_support.py."""
    if algorithm == "naive":
        return composed not in ("alibi", "all", "padded", "packed")
    of_arrays = (operation, algorithm) == ("backward", "fa3") and bool(SCORES[name][2])
    return not of_arrays or (name != "scaled" and dim != 256)


@pytest.mark.gpu
@pytest.mark.sampled(each="composed", fixed=2, dated=2)
@pytest.mark.parametrize(
    ("operation", "algorithm", "name", "composed", "dim", "v_dim", "dtype"),
    [x for x in ON_GPU if served(*x)],
)
def test_a_gpu_computes_what_the_function_says(cp, operation, algorithm, name, composed, dim, v_dim, dtype):
    options, (score, gradients) = dict(COMPOSED[composed]), made(name)
    q, k, v = make_inputs(2, 4, 2, 300, 450, dim, dtype)
    v = v[..., :v_dim]
    calls = [
        cufa.flash_attention, cufa.flash_attention_backward, cufa.attention_reference,
        cufa.attention_reference_backward,
    ]  # fmt: skip
    if composed == "packed":
        begins = [np.int32([0, 170, 300])] * 2
        q, k, v = (x[0, :, :300].swapaxes(0, 1) for x in (q, k, v))
        calls = [
            cufa.flash_attention_varlen, cufa.flash_attention_varlen_backward, cufa.attention_varlen_reference,
            cufa.attention_varlen_reference_backward,
        ]  # fmt: skip
    else:
        begins = []
    forward, backward, reference, reference_backward = calls
    options |= {"score": score}
    exact, exact_lse = reference(q, k, v, *begins, return_lse=True, **options)
    there = {n: cp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    there["algorithm"] = algorithm
    if operation == "forward":
        out, lse = forward(*map(cp.asarray, (q, k, v, *begins)), return_lse=True, **there)
        seen = np.isfinite(exact_lse)
        assert_scores(out.get(), exact, dtype)
        np.testing.assert_allclose(lse.get()[seen], exact_lse[seen], atol=5e-3)
        return
    dout = (exact / max(abs(exact).max(), 1)).astype(q.dtype)
    given = dout, q, k, v, exact.astype(q.dtype), exact_lse.astype(np.float32), *begins
    found = backward(*map(cp.asarray, given), gradients=gradients, **there)
    expected = reference_backward(dout, q, k, v, *begins, gradients=gradients, **options)
    # An element may add up whole rows of dS, which cancel but for the rounding of O in O · dO, a tenth of the share.
    rows = 0.1 * np.sqrt((dout * exact).sum(axis=-1).size) * abs((dout * exact).sum(axis=-1)).max()
    for n, (x, of) in enumerate(zip(found, expected, strict=True)):
        assert_scores(x.get(), of, dtype, cancelled=rows if n > 2 else 0.0)


WRONG = [
    ({"score": relative}, "made by cufa.score"),
    ({"score": made("relative")[0], "bias": TABLE[None, :, None]}, "add the bias in the score function"),
    ({"bias": TABLE}, "bias is float32 of shape"),
    ({"bias": np.zeros((1, 3, 33, 45))}, "bias has shape"),
    ({"score": cufa.score(lambda s, b, h, i, j, t: s + t[h, i + 50], t=TABLE)}, "outside axis 1"),
    ({"score": cufa.score(lambda s, b, h, i, j, t: s + t[-1, i], t=TABLE)}, "do not count from the end"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_bad_input_is_named(options, says):
    q, k, v = make_inputs(2, 4, 2, 33, 45, 8, "float32")
    with pytest.raises((TypeError, ValueError), match=says):
        cufa.flash_attention(q, k, v, device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gradients": "table"}, "tuple of names"),
        ({"gradients": ("tables",)}, "names 'tables'"),
        ({"gradients": ("ids",), "score": made("documents")[0]}, "has no gradient"),
        ({"gradients": ("table", "table")}, "twice"),
        ({"gradients": ("t",), "score": cufa.score(lambda s, b, h, i, j, t: np.where(t[h] > 0, s, 0.0), t=SLOPES)},
         "no derivative"),
    ],
)  # fmt: skip
def test_gradients_that_are_not_there_are_named(options, says):
    q, k, v = make_inputs(2, 4, 2, 33, 45, 8, "float32")
    with pytest.raises((TypeError, ValueError), match=says):
        cufa.flash_attention_backward(
            q, q, k, v, q, np.zeros((2, 4, 33), np.float32), device="cpu",
            **{"score": made("relative")[0], **options},
        )  # fmt: skip


def test_kernels_refuse_what_they_do_not_serve_before_a_launch():
    score, gradients = made("scaled")
    shape = {"device": "sm_90", "score": score, "gradients": gradients}
    with pytest.raises(ValueError, match="takes gradients of arrays only if their derivatives do not"):
        cufa.plan_backward((1, 4, 64, 64), algorithm="fa3", **shape)
    assert cufa.plan_backward((1, 4, 64, 64), **shape).spec.name == "fa2_backward"  # its weights read scores
    assert cufa.plan((1, 4, 64, 64), device="sm_90", score=score).spec.name == "fa3_forward"
    padded = {"device": "sm_90", "score": score, "seqlens_k": [60]}
    assert cufa.plan((1, 4, 64, 64), **padded).spec.name == "fa3_forward"
    plan = cufa.plan((1, 4, 64, 64), device="sm_90", score=score)
    assert "score" in str(plan)
    assert type(plan.problem).from_json(plan.problem.as_json()) == plan.problem
