"""``cufa.torch``: values and gradients against float64, every option, ``torch.compile``, on the CPU and on a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from backward_support import Case, assert_gradients
from support import assert_attention, make_inputs

import cufa

torch = pytest.importorskip("torch", reason="needs PyTorch")
from cufa.problem.typing import OperatorOptions, PackedOperatorOptions  # noqa: E402
from cufa.torch import _text, attention, attention_varlen  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = ["float16", "bfloat16", "float32"]
OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": (7, 0)},
    {"mask": cufa.masks.documents([30, 40])},
    {"softcap": 5.0, "scale": 0.3},
]


def tensor(x: np.ndarray, device: str = "cpu") -> Any:
    return torch.from_numpy(x.astype(np.float32)).to(device, getattr(torch, str(x.dtype)))


def array(x: Any, dtype: Any) -> np.ndarray:
    return x.detach().cpu().float().numpy().astype(dtype)


def inputs(dtype: str, seqlen: int = 70) -> tuple[np.ndarray, ...]:
    """dout, q, k, v."""
    q, k, v = make_inputs(2, 4, 2, seqlen, seqlen, 32, dtype)
    return make_inputs(2, 4, 2, seqlen, seqlen, 32, dtype, seed=1)[0], q, k, v


def check(
    arrays: tuple[np.ndarray, ...], options: dict[str, Any], device: str, call: Any = attention
) -> None:
    q = arrays[1]
    dout, *qkv = (tensor(x, device) for x in arrays)
    for x in qkv:
        x.requires_grad_()
    out = call(*qkv, **options)
    out.backward(dout)
    exact, lse = cufa.attention_reference(*arrays[1:], return_lse=True, **options)
    assert_attention(array(out, q.dtype), None, *arrays[1:], **options)
    case = Case(*arrays, exact.astype(q.dtype), lse.astype(np.float32), None, options)
    assert_gradients([array(x.grad, q.dtype) for x in qkv], case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options, dtype, device):
    check(inputs(dtype), options, device)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_whole(device):
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for options in OPTIONS:
        check(inputs("bfloat16"), options, device, compiled)


def test_compiled_anew_for_another_mask():
    compiled = torch.compile(
        lambda q, mask: attention(q, q, q, mask=mask), fullgraph=True, backend="aot_eager"
    )
    q = torch.randn(1, 2, 8, 16)
    for mask in (
        cufa.masks.prefix(2),
        cufa.masks.prefix(5),
        cufa.masks.documents([3, 5]),
        cufa.masks.documents([4, 4]),
    ):
        assert torch.equal(compiled(q, mask), attention(q, q, q, mask=mask))


def test_compiled_for_changing_numbers():
    compiled = torch.compile(
        lambda q, scale, window: attention(q, q, q, scale=scale, window=window),
        fullgraph=True,
        backend="aot_eager",
    )
    q = torch.randn(1, 2, 8, 16)
    for scale, window in ((0.25, (3, 0)), (0.5, (4, 1)), (0.75, (None, 2))):
        assert torch.equal(compiled(q, scale, window), attention(q, q, q, scale=scale, window=window))


def test_a_mask_with_many_numbers_reaches_the_gradients():
    seqlen = 10_000  # more numbers than a mask writes as JSON
    rows = np.minimum(np.arange(seqlen) + np.random.default_rng(0).integers(1, seqlen, seqlen), seqlen)
    q = torch.randn(1, 1, seqlen, 8, requires_grad=True)
    attention(q, q, q, mask=cufa.masks.evict(rows)).sum().backward()
    assert torch.isfinite(q.grad).all()


def test_numpy_scalars_algorithms_of_the_forward_and_slopes():
    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    attention(q, q, q, algorithm="fa1", scale=np.float32(0.5), window=(np.int64(3), 0)).sum().backward()
    assert q.grad.abs().sum() > 0
    with pytest.raises(TypeError, match="alibi_slopes requires grad"):
        attention(q, q, q, alibi_slopes=torch.ones(1, requires_grad=True))


def test_gradients_of_values_lse_and_sink_in_float64():
    q = torch.randn(1, 2, 5, 8, dtype=torch.double, requires_grad=True)
    sink = torch.randn(2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, sink: attention(q, q, q, sink=sink, softcap=2.0, return_lse=True), (q, sink)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_are_those_alone(device):
    dtype, near = (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 1e-5)
    x = torch.randn(12, 2, 16, device=device, dtype=dtype, requires_grad=True)
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    packed = attention_varlen(x, x, x, lengths, lengths, causal=True)
    parts = [x[a:b].transpose(0, 1)[None] for a, b in ((0, 5), (5, 12))]
    alone = torch.cat([attention(y, y, y, causal=True)[0].transpose(0, 1) for y in parts])
    torch.testing.assert_close(packed, alone, atol=near, rtol=near)
    weights = torch.randn_like(packed)
    (got,), (expected,) = (
        torch.autograd.grad((y * weights).sum(), x, retain_graph=True) for y in (packed, alone)
    )
    torch.testing.assert_close(got, expected, atol=near, rtol=near)


@pytest.mark.parametrize("device", DEVICES)
def test_layout_and_lengths(device):
    q = torch.randn(2, 9, 4, 16, device=device, dtype=torch.bfloat16)
    lengths = torch.tensor([9, 3], dtype=torch.int32, device=device)
    out, lse = attention(q, q, q, layout="bshd", seqlens_k=lengths, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 9)
    short = q[1:, :3].transpose(1, 2)
    torch.testing.assert_close(
        out[1:].transpose(1, 2), attention(q[1:].transpose(1, 2), short, short), atol=2e-2, rtol=0
    )


def test_the_operators_follow_torchs_rules():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    options = {"causal": True, "mask": None, "algorithm": "auto", "return_lse": True, "layout": "bhsd"}
    for arrays in ([], [torch.randn(1, 2, 1, 5, requires_grad=True)]):
        names = ["bias"] * len(arrays)
        text = _text(
            False,
            **{**options, "score": None, "arrays": names},
        )
        given = (q, q, q, *[None] * 7, arrays, False, *[None] * 5, text)
        torch.library.opcheck(torch.ops.cufa.attention.default, given)


@pytest.mark.parametrize("seed", [7, 2**64 - 1, torch.tensor([7, 3])], ids=str)
def test_dropout_is_cufas(seed):
    q, k = (torch.randn(1, 2, n, 8, dtype=torch.float64, requires_grad=True) for n in (9, 20))
    given = {"dropout": 0.3, "seed": seed if isinstance(seed, int) else seed.numpy()}
    out = attention(q, k, k, dropout=0.3, seed=seed)
    expected = cufa.attention_reference(*(x.detach().numpy() for x in (q, k, k)), **given)
    np.testing.assert_allclose(out.detach().numpy(), expected, atol=1e-14)
    torch.autograd.gradcheck(lambda q, k: attention(q, k, k, dropout=0.3, seed=seed), (q, k))


def relative(s, b, h, i, j, table, factor):
    return s * factor[h] + table[h, np.clip(j - i, -3, 3) + 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_score_functions_arrays(compiled, device):
    """An array with requires_grad has a gradient. Another function, or other numbers, reuse nothing of a call."""
    make = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    q, dout = (torch.randn(2, 4, 70, 32, **make) for _ in range(2))
    table, factor = torch.randn(4, 7, device=device, requires_grad=True), torch.rand(4, device=device)

    def steeper(s, b, h, i, j, table, factor):
        return s * factor[h] + 2 * table[h, np.clip(j - i, -3, 3) + 3]

    def call(q, table, factor, function):
        return attention(q, q, q, causal=True, score=function, arrays={"table": table, "factor": factor})

    made = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    host = {"table": array(table, np.float32), "factor": array(factor, np.float32)}
    x = q.float().cpu().numpy()
    for function in (relative, steeper, relative):
        (found,) = torch.autograd.grad(made(q, table, factor, function), table, dout)
        exact = cufa.attention_reference_backward(
            dout.float().cpu().numpy(), x, x, x, causal=True, score=cufa.score(function, **host),
            gradients=("table",),
        )[3]  # fmt: skip
        near = {"atol": 0.05 * np.abs(exact).max()} if device == "cuda" else {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(array(found, np.float64), exact, **near)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_arrays_and_of_a_bias_in_float64(packed):
    make = {"dtype": torch.double, "requires_grad": True}
    q, table, bias = (torch.randn(shape, **make) for shape in ((1, 2, 5, 8), (2, 7), (1, 2, 1, 5)))
    arrays = {"factor": torch.rand(2, **make), "table": table}
    lengths = torch.tensor([0, 2, 5], dtype=torch.int32)

    def call(q, table, factor, bias):
        if packed:
            x, given = q[0].transpose(0, 1), {"arrays": {"factor": factor, "table": table}}
            return attention_varlen(x, x, x, lengths, lengths, score=relative, return_lse=True, **given)
        return attention(q, q, q, bias=bias) + attention(
            q, q, q, score=relative, arrays={"factor": factor, "table": table}
        )

    inputs = q, table, arrays["factor"], bias.detach() if packed else bias
    assert torch.autograd.gradcheck(call, inputs)


def test_scores_that_are_refused():
    q = torch.randn(1, 2, 5, 8)
    made = cufa.score(lambda s, b, h, i, j: s)
    for options, error, words in (
        ({"score": made}, TypeError, "score is Score: pass the function itself"),
        ({"arrays": {}}, ValueError, "arrays= is given, but score is None"),
        ({"score": relative, "bias": q}, ValueError, "score= and bias= both change scores"),
        ({"bias": q[0]}, ValueError, r"bias is float32 of shape \(2, 5, 8\)"),
        ({"score": relative, "arrays": {"s": q}}, ValueError, "s= cannot be an array of a score function"),
    ):
        with pytest.raises(error, match=words):
            attention(q, q, q, **options)


def test_a_wrong_argument_is_named():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="they must be equal"):
        attention(q, q[..., :4], q)


def test_the_array_api_takes_bfloat16_and_refuses_gradients():
    q = torch.randn(1, 2, 5, 8).bfloat16()
    out = cufa.flash_attention(q, q, q, device="cpu")
    np.testing.assert_array_equal(out, array(attention(q, q, q), out.dtype))
    with pytest.raises(TypeError, match=r"q requires grad.* use cufa\.torch\.attention"):
        cufa.flash_attention(q.requires_grad_(), q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True])
def test_captured_in_a_cuda_graph(sinks):
    """Results of replays stay in the graph's own memory: nothing that others allocate meanwhile comes in between."""
    cp = pytest.importorskip("cupy")
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q, dout = torch.randn(2, 8, 300, 64, requires_grad=True, **make), torch.randn(2, 8, 300, 64, **make)
    sink = torch.zeros(8, device="cuda", requires_grad=True) if sinks else None
    inputs = [q] if sink is None else [q, sink]

    def step():
        out, lse = attention(q, q, q, causal=True, sink=sink, deterministic=True, return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), inputs, (dout, torch.ones_like(lse)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    others = [cp.full(n, cp.nan, cp.float32) for n in (8, 512, 4800, 300 * 64) for _ in range(20)]
    for seed in range(3):
        with torch.no_grad():
            q.copy_(torch.randn(2, 8, 300, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        found = [x.clone() for x in captured]
        assert all(torch.equal(x, y) for x, y in zip(found, step(), strict=True))
    assert all(bool(cp.isnan(x).all()) for x in others)


@pytest.mark.gpu
def test_kernels_run_on_torchs_stream():
    q = torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    expected = attention(q, q, q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        doubled = q * 1.0
        got = attention(doubled, doubled, doubled)
    stream.synchronize()
    assert torch.equal(got, expected)


def test_masks_and_dtypes_of_pytorch_are_answered_with_ours():
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(
        TypeError, match=r"mask must be made by cufa\.masks.*from_dense makes one of booleans"
    ):
        attention(q, q, q, mask=torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"v is torch\.float32 but q is torch\.bfloat16: convert with v\.to"):
        attention(q.bfloat16(), q.bfloat16(), q)
    with pytest.raises(ValueError, match=r"a batch of one is q\[None\]"):
        attention(q[0], q[0], q[0])


def test_keywords_of_others_are_answered_and_ours_are_typed():
    with pytest.raises(TypeError, match=r"attention takes no is_causal: causal=True"):
        attention(None, None, None, is_causal=True)
    for call, options in ((attention, OperatorOptions), (attention_varlen, PackedOperatorOptions)):
        parameters = inspect.signature(call).parameters.values()
        keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
        assert keywords == {*options.__annotations__, "deterministic", "return_lse"}
