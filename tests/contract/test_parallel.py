"""Attention over several ranks: every scheme, mask, placement and option gives what one array gives, forward and
backward, on virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_attention, make_inputs

import cufa
import cufa.parallel as par
from cufa import masks
from cufa.calls.dispatch import with_memory
from cufa.calls.shares import share_call
from cufa.gpu.architectures import Device
from cufa.parallel import compute, decode
from cufa.plan.planner import make_plan
from cufa.problem.options import Options
from cufa.run.emulate.calls import Execution, run_plan

SEQLEN = 300
RNG = np.random.default_rng(3)
RUNS = [RNG.integers(0, SEQLEN, (2, 1, SEQLEN)) for _ in range(4)]
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(70, 0),
    "both-sides": masks.window(30, 40),
    "top-left": masks.causal("top-left"),
    "diagonal": masks.window(50, 20, diagonal=-17),
    "prefix": masks.prefix(45),
    "streaming": masks.streaming(5, 40),
    "global": masks.global_window(9, 30, 0),
    "documents": masks.documents([100, 0, 37, 163]),
    "not-causal": masks.documents([100, 37, 163], causal=False),
    "chunks": masks.chunks(64),
    "evict": masks.evict(np.minimum(np.arange(SEQLEN) + 50, SEQLEN)),
    "columns": masks.columns(*RUNS),
}
SCHEMES = [
    ("contiguous", "auto"), ("contiguous", "ulysses"), ("contiguous", "allgather"), ("contiguous", "2d"),
    ("zigzag", "auto"), ("zigzag", "zigzag"), ("zigzag", "ulysses"), ("zigzag", "allgather"), ("heads", "auto"),
    ([80, 0, 1, 219], "allgather"), ([0, 300], "ulysses"), ([7, 93, 200], "2d"),
]  # fmt: skip


def spread(group, placement):
    """Functions that distribute and collect."""
    if isinstance(placement, list):
        placement = par.Placement.of_lengths(placement)
    return (
        placement,
        lambda x: par.distribute(x, group, placement),
        lambda x: par.collect(x, group, placement),
    )


def operands(heads=4, kv_heads=2, seqlen_q=SEQLEN, seqlen_k=SEQLEN, head_dim=16, batch=2):
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, batch, heads, seqlen_q, head_dim))
    k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k, head_dim))
    return q, k, v, dout


def check(group, placement, scheme, q, k, v, dout, **options):
    placement, cut, whole = spread(group, placement)
    expected, rows = cufa.attention_reference(q, k, v, return_lse=True, **options)
    dlse = np.where(np.isfinite(rows), np.random.default_rng(2).standard_normal(rows.shape), 0)
    gradients = cufa.attention_reference_backward(dout, q, k, v, dlse=dlse, **options)
    if placement == "heads":
        for name in ("sink", "alibi_slopes"):
            if name in options:
                options[name] = np.split(options[name], group.size, axis=-1)
    options |= {"group": group, "placement": placement, "scheme": scheme, "device": "cpu"}
    parts = [cut(x) for x in (q, k, v)]
    out, lse = par.flash_attention(*parts, return_lse=True, **options)
    np.testing.assert_allclose(whole(out), expected, atol=1e-11)
    np.testing.assert_allclose(whole(lse), rows, atol=1e-11)
    found = par.flash_attention_backward(cut(dout), *parts, out, lse, dlse=cut(dlse), **options)
    for x, y in zip(found, gradients, strict=True):
        if x[0].ndim == 4:
            np.testing.assert_allclose(whole(x), y, atol=1e-10)
        elif placement == "heads":  # dsink of the rank's own heads
            np.testing.assert_allclose(np.concatenate(x), y, atol=1e-10)
        else:  # dsink: the whole sum on every rank
            for of_rank in x:
                np.testing.assert_allclose(of_rank, y, atol=1e-10)


@pytest.mark.sampled(fixed=24, dated=12)
@pytest.mark.parametrize("option", ["none", "sink", "alibi", "softcap"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("placement", "scheme"), SCHEMES, ids=lambda x: str(x).replace(", ", "+"))
@pytest.mark.parametrize("mask", MASKS)
def test_ranks_together_compute_attention(mask, placement, scheme, ranks, option):
    if isinstance(placement, list):
        ranks = len(placement)
    if placement == "heads" and (mask == "columns" or ranks > 2):
        pytest.skip("with placement 'heads' masks are those of the local heads")
    options = {"none": {}, "softcap": {"softcap": 3.0}, "alibi": {"alibi_slopes": RNG.random(4)}}
    options["sink"] = {"sink": RNG.standard_normal(4)}
    check(par.Group(virtual=ranks), placement, scheme, *operands(), mask=MASKS[mask], **options[option])


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (8, 1), (8, 2), (2, 2), (5, 5)])
@pytest.mark.parametrize("scheme", ["ulysses", "2d", "heads"])
def test_heads_that_the_ranks_do_not_divide(heads, kv_heads, scheme):
    """Uneven shares, ranks without heads, and key/value heads that several ranks share."""
    placement = "heads" if scheme == "heads" else "contiguous"
    heads = kv_heads if scheme == "heads" else heads
    for ranks in (2, 4):
        inputs = operands(heads, kv_heads, 40, 40, batch=1)
        check(par.Group(virtual=ranks), placement, scheme, *inputs, causal=True)


@pytest.mark.parametrize("scheme", ["ulysses", "allgather", "zigzag"])
def test_other_lengths_of_keys(scheme):
    group, placement = par.Group(virtual=3), "zigzag" if scheme == "zigzag" else "contiguous"
    for seqlen_q, seqlen_k in ((7, 130), (130, 7), (1, 2)):
        inputs = operands(2, 2, seqlen_q, seqlen_k, batch=1)
        for options in ({}, {"causal": True}, {"window": (3, 1)}):
            check(group, placement, scheme, *inputs, **options)


@pytest.mark.parametrize(("placement", "scheme"), [("contiguous", "auto"), ("zigzag", "zigzag")])
def test_padding_may_hold_nan(placement, scheme):
    q, k, v, _ = operands(seqlen_q=90, seqlen_k=90)
    lengths = np.array([61, 0])
    for b, n in enumerate(lengths):
        for x in (q, k, v):
            x[b, :, n:] = np.nan
    group = par.Group(virtual=2)
    _, cut, whole = spread(group, placement)
    found, lse = par.flash_attention(
        cut(q), cut(k), cut(v), group=group, placement=placement, scheme=scheme, causal=True, seqlens=lengths,
        return_lse=True, device="cpu",
    )  # fmt: skip
    expected = cufa.attention_reference(q, k, v, causal=True, seqlens_q=lengths, seqlens_k=lengths)
    np.testing.assert_allclose(whole(found), expected, atol=1e-12)
    assert (whole(lse)[1] == -np.inf).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_rings_round_once(dtype, ranks):
    """Partial results are float32: many ranks are as exact as one call."""
    inputs = make_inputs(1, 2, 2, 256, 256, 32, dtype)
    group = par.Group(virtual=ranks)
    _, cut, whole = spread(group, "zigzag")
    out, lse = par.flash_attention(
        *map(cut, inputs), group=group, placement="zigzag", causal=True, return_lse=True, device="cpu"
    )
    assert_attention(whole(out), whole(lse), *inputs, causal=True)


def test_heads_and_ulysses_have_the_bits_of_one_array():
    inputs = make_inputs(1, 4, 4, 96, 96, 32, "float32")
    expected = cufa.flash_attention(*inputs, causal=True, device="cpu")
    for placement in ("heads", "contiguous"):
        group = par.Group(virtual=2)
        _, cut, whole = spread(group, placement)
        found = [
            par.flash_attention(
                *map(cut, inputs), group=group, placement=placement, causal=True, device="cpu"
            )
            for _ in range(2)
        ]
        for x in found:
            np.testing.assert_array_equal(whole(x), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_documents_that_stay_whole_and_documents_that_are_cut(ranks, causal):
    lengths = [100, 0, 37, 163]
    placement, mask = par.Placement.documents(lengths, ranks), masks.documents(lengths, causal=causal)
    check(par.Group(virtual=ranks), placement, "auto", *operands(), mask=mask)
    check(par.Group(virtual=ranks), placement, "auto", *operands(), mask=mask, sink=RNG.standard_normal(4))


def test_layout_bshd():
    inputs = [x.swapaxes(1, 2) for x in make_inputs(2, 4, 2, 64, 64, 16, "float32")]
    group = par.Group(virtual=2)
    parts = [par.distribute(x, group, "zigzag", "bshd") for x in inputs]
    out = par.flash_attention(
        *parts, group=group, placement="zigzag", causal=True, layout="bshd", device="cpu"
    )
    expected = cufa.attention_reference(*inputs, causal=True, layout="bshd")
    np.testing.assert_allclose(par.collect(out, group, "zigzag", "bshd"), expected, atol=1e-5)


@pytest.mark.parametrize(("placement", "scheme"), [("contiguous", "auto"), ("zigzag", "zigzag")])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_wherever_they_begin(placement, scheme, causal):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 200, 4, 16))
    k, v = rng.standard_normal((2, 200, 2, 16))
    starts, group = [0, 50, 50, 130, 190], par.Group(virtual=3)
    expected = cufa.attention_varlen_reference(q, k, v, starts, starts, causal=causal)
    gradients = cufa.attention_varlen_reference_backward(dout, q, k, v, starts, starts, causal=causal)

    def cut(x):
        return [part[0] for part in par.distribute(x[None], group, placement, "bshd")]

    def whole(x):
        return par.collect([part[None] for part in x], group, placement, "bshd")[0]

    options = {"group": group, "placement": placement, "scheme": scheme, "causal": causal, "device": "cpu"}
    parts = [cut(x) for x in (q, k, v)]
    out, lse = par.flash_attention_varlen(*parts, starts, return_lse=True, **options)
    np.testing.assert_allclose(whole(out), expected, atol=1e-12)
    found = par.flash_attention_varlen_backward(cut(dout), *parts, out, lse, starts, **options)
    for x, y in zip(found, gradients, strict=True):
        np.testing.assert_allclose(whole(x), y, atol=1e-11)


@pytest.mark.parametrize("scheme", ["zigzag", "allgather"])
@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=pytest.mark.emulate)])
def test_the_error_of_gradients_is_that_of_one_rank(monkeypatch, scheme, executed):
    """Shares are float32, travel as such, and are added in float32: the sum is rounded once, as one rank's result."""
    arrays = [
        *make_inputs(1, 1, 1, 512, 512, 64, "bfloat16"),
        make_inputs(1, 1, 1, 512, 512, 64, "bfloat16", seed=5)[0],
    ]
    wide = [x.astype(np.float64) for x in arrays]
    out, lse = cufa.flash_attention(*wide[:3], causal=True, return_lse=True)
    exact = cufa.flash_attention_backward(wide[3], *wide[:3], out, lse, causal=True)
    arrays += out.astype(arrays[0].dtype), lse.astype(np.float32)
    if executed:
        monkeypatch.setattr(compute, "flash_attention_backward", executed_backward)
        monkeypatch.setattr(compute, "gradient_shares", executed_shares)
    errors = {}
    for ranks in (1, 2, 8, 16):
        group = par.Group(virtual=ranks)
        q, k, v, dout, o, stats = (par.distribute(x, group, "zigzag") for x in arrays)
        found = par.flash_attention_backward(
            dout, q, k, v, o, stats, group=group, placement="zigzag", scheme=scheme, causal=True
        )
        whole = [par.collect(x, group, "zigzag").astype(np.float64) for x in found]
        errors[ranks] = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(whole, exact, strict=True)]
    for ranks in (2, 8, 16):
        assert np.all(np.array(errors[ranks]) < 1.02 * np.array(errors[1])), errors


def executed_backward(*arrays, mask, **more):
    names = ("dout", "q", "k", "v", "out", "lse")
    return executed_shares(dict(zip(names, arrays, strict=True)) | more, Options(mask), (), None)


def executed_shares(given, options, float32, device):
    call, problem = share_call(given, options, float32).check(on_gpu=True)
    results = call.allocate(problem, np.empty)
    arrays = call.arrays(results)
    plan = make_plan(with_memory(problem, arrays), Device.typical("sm_80"), "fa2")
    run_plan(plan, arrays, Execution("plain"), False)
    return tuple(results.values())


def test_lengths_on_the_first_gpu_are_passed_on(monkeypatch):
    """The decode kernel clamps lengths itself: the first rank launches nothing for them."""
    monkeypatch.setattr(decode, "is_device_array", lambda x: True)
    monkeypatch.setattr(decode, "_holder", lambda: lambda *numbers: "launched")
    lengths = np.array([3, 9], np.int32)
    assert decode.held_by(0, [4, 4], None, lengths) is lengths
    for rank, interleave, x in ((1, None, lengths), (0, 2, lengths), (0, None, lengths.astype(np.int64))):
        assert decode.held_by(rank, [4, 4], interleave, x) == "launched"


@pytest.mark.parametrize("interleave", [None, 1, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decoding_over_a_spread_cache(interleave, tokens):
    rng = np.random.default_rng(0)
    for ranks, sink in ((1, None), (2, rng.standard_normal(4)), (5, None)):
        capacity = 32 * ranks
        q = rng.standard_normal((3, 4, tokens, 16))
        k, v = rng.standard_normal((2, 3, 2, capacity, 16))
        lengths = np.array([capacity, max(tokens, capacity // 3 + 1), tokens])
        expected, rows = cufa.decode_reference(q, k, v, cache_seqlens=lengths, sink=sink, return_lse=True)
        owner = np.arange(capacity) // (interleave or 32) % ranks
        caches = [[np.ascontiguousarray(x[:, :, owner == r]) for r in range(ranks)] for x in (k, v)]
        out, lse = par.flash_decode(
            [q] * ranks, *caches, group=par.Group(virtual=ranks), cache_seqlens=lengths, interleave=interleave,
            sink=sink, return_lse=True, device="cpu",
        )  # fmt: skip
        for x, y in zip(out, lse, strict=True):
            np.testing.assert_allclose(x, expected, atol=1e-12)
            np.testing.assert_allclose(y, rows, atol=1e-12)


HEADS = [np.zeros((1, n, 48, 16)) for n in (1, 2)]


@pytest.mark.parametrize("option", ["sink", "alibi_slopes"])
def test_sinks_and_slopes_may_be_a_list_by_rank(option):
    inputs, values = operands(4, 4, 60, 60, batch=2), RNG.random(4)
    group = par.Group(virtual=2)
    check(group, "heads", "auto", *inputs, causal=True, **{option: values})  # its own heads for each rank
    parts = [par.distribute(x, group) for x in inputs[:3]]
    one, other = (
        par.flash_attention(*parts, group=group, causal=True, device="cpu", **{option: x})
        for x in (values, [values, values])
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"scheme": "zigzag"}, r"takes placement 'zigzag' or 'documents', not 'contiguous'.*distribute"),
        ({"scheme": "ring"}, "'allgather'"),
        ({"placement": "striped"}, "'zigzag'"),
        ({"placement": "zigzag"}, r"parts of 16, 32 tokens.*has 24, 24.*distribute"),
        ({"mask": masks.documents([9])}, "9 keys but k has 48"),
        ({"seqlens": [3, 3]}, r"\(batch,\)"),
        ({"group": 2}, "cufa.parallel.Group"),
        ({"q": np.zeros((1, 2, 48, 16))}, "list of 2 local parts"),
        ({"k": [np.zeros((1, 3, 16, 16)), np.zeros((1, 2, 32, 16))]}, "v of rank 0"),
        ({"softcap": -1.0}, "softcap"),
        ({"sink": np.zeros(4)}, r"sink of rank 0 has shape \(4,\).*takes 2 values"),
        ({"alibi_slopes": [np.zeros(2), np.zeros(1)]}, r"alibi_slopes of rank 1.*takes 2 values"),
        (
            {"sink": np.zeros(2), "placement": "heads", "q": HEADS, "k": HEADS, "v": HEADS},
            "sink.*list of 2 local parts",
        ),
        ({"mask": masks.from_dense(np.random.default_rng(0).random((48, 48)) < 0.5)}, "at most two runs"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_errors_name_the_cure(change, error):
    parts = [np.zeros((1, 2, n, 16)) for n in (16, 32)]
    given = {"q": parts, "k": parts, "v": parts, "group": par.Group(virtual=2), "device": "cpu"} | change
    with pytest.raises((ValueError, TypeError), match=error):
        par.flash_attention(**given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fixed_order_is_asked_for_with_a_boolean(dtype):
    """Shares in float32 and other gradients come from different calls."""
    parts = [np.zeros((1, 2, n, 16), dtype) for n in (16, 32)]
    given = dict.fromkeys(("dout", "q", "k", "v", "out"), parts)
    given["lse"] = [np.zeros((1, 2, n), np.float32) for n in (16, 32)]
    with pytest.raises(TypeError, match="deterministic must be True or False, not 'no'"):
        par.flash_attention_backward(**given, group=par.Group(virtual=2), deterministic="no", device="cpu")


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "prefix"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sink": np.linspace(-1, 1, 4)}, {"softcap": 3.0, "scale": 0.3, "alibi_slopes": np.linspace(0, 1, 4)},
     {"layout": "bshd"}],
    ids=lambda x: "+".join(x),
)  # fmt: skip
def test_keys_from_the_host_in_pieces(mask, options):
    q, k, v = (x.swapaxes(1, 2) if "layout" in options else x for x in operands(batch=1)[:3])
    options = {"mask": MASKS[mask], "return_lse": True, **options}
    expected, rows = cufa.attention_reference(q, k, v, **options)
    out, lse = par.flash_attention_from_host(q, k, v, piece=77, **options)
    np.testing.assert_allclose(out, expected, atol=1e-11)
    np.testing.assert_allclose(lse, rows, atol=1e-11)


def test_kernels_without_running_results_merge(monkeypatch):
    """Where no kernel joins a running result, a plain call and a merge do the same."""

    def refuses(*args, **options):
        raise ValueError("takes no running result")

    q, k, v = make_inputs(1, 2, 2, 40, 30, 16, "float32")
    expected = [np.zeros_like(q), np.full_like(q, 0.5), np.full(q.shape[:3], 2.0, np.float32)]
    found = [x.copy() for x in expected]
    options = {"alibi_slopes": None, "device": "cpu"}
    compute.attend(q, k, v, *expected, (5, 20, 10, 40), Options(), **options)
    monkeypatch.setattr(compute, "attend", refuses)
    monkeypatch.setattr(compute, "_unserved", set())
    compute.attend_or_merge(q, k, v, *found, (5, 20, 10, 40), Options(), **options)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
