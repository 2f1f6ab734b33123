"""Gradients that are shares of a sum: float32, and rounded the bits of a call that rounds them itself."""

from __future__ import annotations

import numpy as np
import pytest
from backends import EMULATE, GPU
from planted_runs import small_batches
from support import changed, make_inputs

import cufa
from cufa import masks
from cufa.calls.dispatch import with_memory
from cufa.calls.shares import gradient_shares, share_call
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS
from cufa.kernels.support import refusal
from cufa.plan.planner import make_plan
from cufa.problem.options import Options

NAMES = "dq", "dk", "dv"
BACKENDS = [
    pytest.param(EMULATE, id="emulate", marks=pytest.mark.emulate),
    pytest.param(GPU, id="gpu", marks=pytest.mark.gpu),
]
FA2, FA3, PAIR = (KERNELS[name] for name in ("fa2_backward", "fa3_backward", "fa3_backward_wide"))
PADDED = masks.window(50, 0)
#: (kernel, config, head dims of q and v, mask, float32 gradients).
CASES = [
    *((FA3, c, (d, d), masks.causal(), NAMES) for c, d in zip(FA3.configs, (64, 128, 40, 80, 128), strict=True)),
    *((PAIR, c, (d, 128), masks.causal(), NAMES) for c, d in zip(PAIR.configs, (192, 256), strict=True)),
    *((FA2, c, (d, d), masks.causal(), NAMES) for c, d in zip(FA2.configs, (24, 128, 96), strict=False)),
    (FA3, FA3.configs[1], (128, 72), masks.documents([100, 77]), ("dk", "dv")),
    (FA2, FA2.configs[1], (72, 128), masks.documents([100, 77]), ("dk", "dv")),
    (FA3, FA3.configs[1], (72, 72), PADDED, NAMES),
    (FA2, FA2.configs[1], (72, 72), PADDED, NAMES),
]  # fmt: skip


def operands(dims, dtype="bfloat16"):
    q, k, _ = make_inputs(1, 6, 3, 150, 177, dims[0], dtype)
    dout, v, _ = make_inputs(1, 6, 3, 150, 177, dims[1], dtype, seed=5)
    return {"dout": dout, "q": q, "k": k, "v": v}


def gradients(backend, kernel, config, given, options, float32):
    """By a plan for these tiles: dq, dk and dv in arrays that held NaN. Persistent blocks convert some of dq."""
    dtypes = {name: np.float32 if name in float32 else given["q"].dtype for name in NAMES}
    found = {name: backend.poisoned(given[name[1]].shape, dtypes[name]) for name in NAMES}
    arrays = {name: backend.array(x) for name, x in given.items()} | found
    call, problem = share_call(arrays, options, float32).check(on_gpu=True)
    arrays = call.arrays(call.allocate(problem, backend.poisoned))
    with small_batches():
        plan = make_plan(with_memory(problem, arrays), backend.device, kernel.algorithm, config)
        assert plan.spec is kernel
        backend.run(plan, arrays, False, None)
    return {name: backend.host(x) for name, x in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kernel", "config", "dims", "mask", "float32"), CASES, ids=lambda x: getattr(x, "name", None)
)
def test_rounded_they_are_the_bits_of_another_call(backend, kernel, config, dims, mask, float32):
    """dk and dv are sums in a fixed order, dq where ``deterministic`` asks for it; else it is compared."""
    if backend is GPU and GPU.device.arch != Device.typical("sm_90").arch:
        pytest.skip("fa3_backward needs sm_90")
    given, fixed = operands(dims), not getattr(config, "persistent", False)
    out, lse = cufa.flash_attention(
        given["q"], given["k"], given["v"], mask=mask, return_lse=True, device="cpu"
    )  # without padding: in padded cases any finite out and lse serve
    given |= {"out": out, "lse": lse}
    if mask is PADDED:
        given |= {"seqlens_q": np.array([100], np.int32), "seqlens_k": np.array([130], np.int32)}
    options = Options(mask, deterministic=fixed)
    shares = gradients(backend, kernel, config, given, options, float32)
    rounded = gradients(backend, kernel, config, given, options, ())
    for name, x in shares.items():
        if name not in float32:
            assert (x.view(np.int16) == rounded[name].view(np.int16)).all()
            continue
        assert x.dtype == np.float32 and not (x.astype("bfloat16") == x).all()
        if fixed or name != "dq":
            assert (x.astype("bfloat16").view(np.int16) == rounded[name].view(np.int16)).all(), name
        else:
            np.testing.assert_allclose(x, rounded[name].astype(np.float32), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_calls(device):
    """The call allocates float32 results, also from the host, and again on the short cut."""
    given = operands((64, 64))
    wide = {name: x.astype(np.float64) for name, x in given.items()}
    out, lse = cufa.flash_attention(wide["q"], wide["k"], wide["v"], return_lse=True)
    exact = cufa.flash_attention_backward(*wide.values(), out, lse)
    given |= {"out": out.astype(given["q"].dtype), "lse": lse.astype(np.float32)}
    for _ in range(2):
        found = gradient_shares(given, Options(), ("dk", "dv"), device)
        assert [str(x.dtype) for x in found] == ["bfloat16", "float32", "float32"]
        for x, y in zip(found, exact, strict=True):
            assert np.linalg.norm(x.astype(np.float64) - y) < 0.006 * np.linalg.norm(y)


def test_a_result_of_another_dtype_is_refused():
    given = operands((64, 64))
    given |= {"out": given["dout"], "lse": np.zeros((1, 6, 150), np.float32), "dk": np.zeros_like(given["k"])}
    with pytest.raises(TypeError, match="dk is bfloat16"):
        gradient_shares(given, Options(), ("dk", "dv"), "cpu")


def test_a_kernel_without_float32_gradients_refuses():
    given = operands((64, 64)) | {"out": operands((64, 64))["dout"], "lse": np.zeros((1, 6, 150), np.float32)}
    _, problem = share_call(given, Options(), NAMES).check(on_gpu=True)
    assert "in float32" in str(problem) and type(problem).from_json(problem.as_json()) == problem
    assert refusal(FA3, problem) is None
    fewer = changed(FA3, options=tuple(x for x in FA3.options if x != "float32 gradients"))
    assert refusal(fewer, problem) == "takes no float32 gradients of 16-bit elements"
