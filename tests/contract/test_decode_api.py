"""flash_decode on NumPy arrays: results, plans, and an answer to everything that can be wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from decode_support import FLOAT8, make_case
from support import OnlyDLPack, poisoned_like

import cufa
from cufa.calls import dispatch
from cufa.gpu.architectures import Device
from cufa.kernels import kernels_of
from cufa.kernels.decode import items
from cufa.plan.planner import make_plan

pytestmark = pytest.mark.usefixtures("on_cpu")


# --- Results ----------------------------------------------------------------------------------------------


def test_a_decode_loop():
    """Prompt by flash_attention, then token by token, equals flash_attention over all of it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, h, 40, 32)).astype(np.float32) for h in (4, 2, 2))
    expected = cufa.flash_attention(q, k, v, causal=True)
    caches = [np.full((2, 2, 64, 32), np.nan, np.float32) for _ in "kv"]
    caches[0][:, :, :25], caches[1][:, :, :25] = k[:, :, :25], v[:, :, :25]
    for n in range(25, 40):
        one = slice(n, n + 1)
        out = cufa.flash_decode(
            q[:, :, one], *caches, cache_seqlens=n, k_new=k[:, :, one], v_new=v[:, :, one]
        )
        np.testing.assert_allclose(out, expected[:, :, one], rtol=1e-4, atol=1e-5)


def test_out_is_written_and_returned():
    case = make_case([33], dtype="float32")
    arrays, options = case.arguments()
    out = poisoned_like(case.q)
    assert cufa.flash_decode(*arrays, **options, out=out) is out
    case.check(out)
    around = np.full((1, 4, 3, 20), np.nan, np.float32)
    view = around[:, :, 1:2, 2:18]
    assert cufa.flash_decode(*arrays, **options, out=view) is view
    case.check(view)
    assert np.isnan(around).sum() == around.size - view.size


def test_without_lengths_the_whole_cache_counts():
    case = make_case([33, 33], capacity=33, dtype="float32")
    case.options["cache_seqlens"] = None
    arrays, options = case.arguments()
    case.check(*cufa.flash_decode(*arrays, **options, return_lse=True))
    np.testing.assert_array_equal(
        cufa.flash_decode(*arrays, num_splits=1),
        cufa.flash_decode(*arrays, cache_seqlens=33, num_splits=1, schedule="fixed"),
    )


@pytest.mark.parametrize("form", [list, tuple, np.int64, np.uint8, np.int16])
def test_lengths_and_tables_of_any_integers(form):
    case = make_case([33, 0, 7], page_size=16, dtype="float32", capacity=40)
    case.options["block_table"] = np.where(case.options["block_table"] < 100, case.options["block_table"], 0)
    arrays, options = case.arguments()
    for name in ("cache_seqlens", "block_table"):
        x = np.maximum(options[name], 0)
        options[name] = form(x.tolist()) if form in (list, tuple) else x.astype(form)
    case.check(cufa.flash_decode(*arrays, **options))


def test_wild_entries_beyond_32_bits():
    case = make_case([33, 0, 7], page_size=16)
    table = case.options["block_table"].astype(np.int64)
    table[(table < 0) | (table > 100)] = 2**62
    case.options["block_table"] = table
    arrays, options = case.arguments()
    case.check(cufa.flash_decode(*arrays, **options))


def test_float8_arrays_and_one_scale_for_all():
    case = make_case([50], fp8=True, dtype="float32")
    case.options |= {"k_scale": np.full(2, 0.5, np.float32), "v_scale": np.full(2, 2, np.float32)}
    (q, k, v), options = case.arguments()
    options |= {"k_scale": 0.5, "v_scale": 2}
    case.check(cufa.flash_decode(q, k.view(FLOAT8), v.view(FLOAT8), **options))


@pytest.mark.parametrize("zero", ["batch", "heads", "capacity", "max_pages"])
def test_nothing_to_do(zero):
    batch, heads, capacity = (0 if zero == n else m for n, m in (("batch", 2), ("heads", 4), ("capacity", 9)))
    q = np.ones((batch, heads, 1, 8), np.float32)
    k = np.ones((batch, heads, capacity, 8), np.float32)
    options = {}
    if zero == "max_pages":
        options["block_table"] = np.zeros((batch, 0), np.int32)
    out, lse = cufa.flash_decode(q, k, k, return_lse=True, **options)
    assert out.shape == q.shape and lse.shape == (batch, heads, 1)
    assert (out == 0).all() and np.isneginf(lse).all()


def test_new_tokens_may_be_none_at_all():
    case = make_case([33], dtype="float32")
    nothing = np.empty((1, 2, 0, 16), np.float32)
    arrays, options = case.arguments()
    case.check(cufa.flash_decode(*arrays, **options, k_new=nothing, v_new=nothing))


def test_a_batch_of_none_may_be_appended_to():
    """NumPy gives empty arrays strides of 0."""
    empty, new = np.empty((0, 2, 40, 16), np.float32), np.empty((0, 2, 1, 16), np.float32)
    q, lengths = np.empty((0, 2, 1, 16), np.float32), np.empty(0, np.int32)
    options = {"cache_seqlens": lengths, "k_new": new, "v_new": new.copy(), "out": np.empty_like(q)}
    assert cufa.flash_decode(q, empty, empty.copy(), **options) is options["out"]


def test_dlpack_producers():
    case = make_case([33, 5], page_size=16, dtype="float32")
    arrays, options = case.arguments()
    for name in ("cache_seqlens", "block_table"):
        options[name] = OnlyDLPack(options[name])
    case.check(cufa.flash_decode(*map(OnlyDLPack, arrays), **options))


# --- Plans ------------------------------------------------------------------------------------------------


def test_a_plan_from_shapes_prints_what_would_run_and_why():
    text = str(cufa.plan_decode((1, 32, 1, 128), (1, 8, 131072, 128), device="sm_90"))
    for part in ("batch 1", "heads 32/8", "131,072", "float16", "sm_90", "splits", "because", "launch"):
        assert part in text
    assert "NumPy" in str(cufa.plan_decode((1, 32, 1, 128), (1, 8, 131072, 128), device="cpu"))


def test_a_plan_of_numpys_integers_prints_as_that_of_pythons():
    shapes = {
        "q": (2, 32, 1, 128),
        "k_cache": (99, 8, 64, 128),
        "block_table": (2, 40),
        "k_new": (2, 8, 1, 128),
    }
    of_numpy = {name: tuple(map(np.int64, shape)) for name, shape in shapes.items()}
    for device in ("cpu", "sm_80", "sm_90"):
        for schedule in ("fixed", "balanced"):
            how = {"device": device, "schedule": schedule, "cache_seqlens": True}
            text = str(cufa.plan_decode(**of_numpy, num_splits=np.int64(3), **how))
            assert text == str(cufa.plan_decode(**shapes, num_splits=3, **how)) and "np." not in text


@pytest.mark.parametrize("device", [None, "sm_80", "sm_90"])
def test_a_kernel_that_is_none_is_refused_with_the_names_of_all(device):
    problem = cufa.plan_decode((2, 8, 1, 64), (2, 8, 1000, 64), device="cpu").problem
    device = None if device is None else Device.typical(device)
    for name in ("nope", "fa2_forward"):
        with pytest.raises(ValueError, match=f"kernel='{name}' .*decode_split_tma.*decode_balanced_fp8"):
            make_plan(problem, device, kernel=name)


def test_on_the_cpu_a_kernels_name_says_which_schedule():
    problem = cufa.plan_decode((2, 8, 1, 64), (2, 8, 1000, 64), device="cpu").problem
    for name, spec in kernels_of("decode").items():
        planned = make_plan(problem, None, kernel=name)
        assert planned.split.kind == planned.spec.algorithm == spec.algorithm and planned.device is None


def test_a_plan_from_arrays_is_the_calls():
    case = make_case([70, 3, 300], tokens=2, new=2, page_size=16, fp8=True, dtype="bfloat16")
    for layout in ("bhsd", "bshd"):
        (q, k, v), options = case.arguments(layout)
        given = {n: options[n] for n in ("cache_seqlens", "block_table", "k_new")}
        problem = cufa.plan_decode(q, k, v, **given, layout=layout, device="sm_90").problem
        assert (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q) == (3, 4, 2, 2)
        cache = problem.cache
        assert (problem.seqlen_k, cache.page_size, cache.max_pages) == (320, 16, 20)
        assert (cache.new_tokens, problem.lengths.ragged, problem.head_dim) == (2, True, 16)
        assert (problem.dtype, problem.k_element.name) == ("bfloat16", "float8_e4m3")


def test_the_plan_of_a_call_is_what_runs(monkeypatch):
    case = make_case([700, 33], page_size=16)
    arrays, options = case.arguments()
    ran = []
    make = dispatch.plan_for
    monkeypatch.setattr(dispatch, "plan_for", lambda *a, **k: ran.append(make(*a, **k)) or ran[-1])
    for how in ({}, {"num_splits": 3}, {"schedule": "balanced", "num_splits": 5}):
        cufa.flash_decode(*arrays, **options, **how)
        del options["layout"]
        planned = cufa.plan_decode(*arrays, **options, **how)
        options["layout"] = "bhsd"
        assert ran[0] == planned
        ran.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "sm_75"}, "sm_75 is not supported"),
        ({"device": "tpu"}, "'tpu' is not known"),
        ({"dtype": "float32", "device": "sm_90"}, "q is float32; decoding on the GPU takes float16, bfloat16"),
        ({"dtype": "int8"}, "q is int8"),
        ({"dtype": "bfloat16", "cache_dtype": "float16"}, "k_cache is float16 but q is bfloat16"),
        ({"num_splits": -1}, "num_splits=-1"),
        ({"q": (1, 8, 1, 72), "k_cache": (1, 8, 9, 72), "cache_dtype": "uint8", "device": "sm_90"},
         "head_dim is 72.*multiples of 16: pad"),
        ({"cache_dtype": "uint8", "device": "sm_80"},
         r"over float8_e4m3 on A100 \(sm_80\).*decode_split_fp8 needs sm_89 or later"),
        ({"schedule": "fair"}, "schedule='fair'"),
        ({"q": (1, 32, 1.0, 128)}, r"q has shape .*: sizes are integers, not float"),
        ({"k_cache": (1, 8, -4, 128)}, r"k_cache has shape .*: a size is at least 0"),
        ({"k_cache": (1, 8, True, 128)}, "sizes are integers, not bool"),
        ({"k_cache": (1, 8, 2**30, 128)}, "k_cache has room for 1,073,741,824 tokens"),
        ({"k_cache": (1, 8, 2**40, 128)}, "k_cache has shape .*32 bits"),
        ({"k_cache": (9, 8, 16, 128), "block_table": (1, -1)}, "block_table has shape .*at least 0"),
        ({"cache_dtype": "fp8"}, "k_cache is fp8 .*is called 'uint8'"),
        ({"q": (70000, 8, 1, 64), "k_cache": (70000, 8, 1, 64), "device": "sm_90", "schedule": "fixed"},
         "grid of .*70000.*65,535: pass fewer sequences"),
        ({"q": (700, 8, 1, 64), "k_cache": (700, 8, 2**29, 64), "device": "sm_90"},
         "batch 700 .*23,488,102,400 tiles.*2,147,483,647"),
        ({"k_new": (1, 8, 1, 128)}, "k_new came without cache_seqlens"),
    ],
)  # fmt: skip
def test_a_plan_says_what_it_cannot_do(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cufa.plan_decode(**{"q": (1, 32, 1, 128), "k_cache": (1, 8, 4096, 128), **options})


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90"])
@pytest.mark.parametrize("schedule", ["auto", "fixed", "balanced"])
def test_no_more_splits_than_tiles(schedule, device):
    def plan(asked):
        return cufa.plan_decode(
            (2, 8, 1, 64), (2, 8, 1000, 64), num_splits=asked, schedule=schedule, device=device
        )

    most = plan(2**40)
    tiles = -(-1000 // most.config.block_kv)
    assert most.num_splits == (tiles if schedule != "balanced" else tiles * items(most.problem, most.config))
    assert plan(most.num_splits).num_splits == most.num_splits
    assert any("num_splits is reduced to" in x for x in most.reasons)
    assert not any("as many as" in x for x in plan(most.num_splits).reasons)


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90"])
@pytest.mark.parametrize("schedule", ["auto", "fixed", "balanced"])
@pytest.mark.parametrize(
    ("batch", "heads", "capacity"), [(0, 8, 100), (2, 0, 100), (2, 8, 0)], ids=["batch", "heads", "capacity"]
)
def test_a_plan_of_nothing_has_no_launch(batch, heads, capacity, schedule, device):
    """As calls of such shapes return zeros without one."""
    planned = cufa.plan_decode(
        (batch, heads, 1, 64), (batch, heads, capacity, 64), schedule=schedule, device=device
    )
    assert planned.launches == () and planned.workspace == 0 and "without a launch" in str(planned)


def test_an_empty_list_of_lengths():
    nothing = np.empty((0, 8, 5, 64), np.float32)
    assert cufa.flash_decode(nothing[:, :, :1], nothing, nothing, cache_seqlens=[]).shape == (0, 8, 1, 64)


FINE = [(mode, page_size) for mode in ("block", "token") for page_size in (0, 16)]


@pytest.mark.parametrize(("mode", "page_size"), FINE)
def test_appended_tokens_get_scales(mode, page_size):
    """A token's largest magnitude is 448; a block has room for 8 times that of the tokens that begin it."""
    case = make_case([4, 20], new=4, fp8=mode, page_size=page_size, dtype="float16", head_dim=32)
    (q, k, v), options = case.arguments()
    k, k_scale = k.copy(), options["k_scale"].copy()
    new = options["k_new"]
    cufa.flash_decode(q, k, v.copy(), **options | {"k_scale": k_scale, "v_scale": options["v_scale"].copy()})
    for b, begun in enumerate((0, 16)):  # 16: a page that the call begins, but a block that it continues
        for i, (at, slot) in enumerate(case.places(b, range(begun, begun + 4))):
            largest = np.abs(new[b, :, i] if mode == "token" else new[b]).astype(np.float32).max(axis=-1)
            largest = largest if mode == "token" else largest.max(axis=-1)
            found = (
                k_scale[at, :, slot] if mode == "token" else k_scale.reshape(*k_scale.shape[:2], -1)[at, :, 0]
            )
            if mode == "token" or begun == 0 or page_size:
                np.testing.assert_allclose(found, largest * (1 if mode == "token" else 8) / 448, rtol=1e-6)
            else:
                np.testing.assert_array_equal(found, options["k_scale"][at, :, 0])
            numbers = k[at, :, slot].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            bound = np.maximum(np.abs(new[b, :, i].astype(np.float32)) / 16, found[:, None] * 2.0**-9)
            assert (np.abs(numbers * found[:, None] - new[b, :, i]) <= bound).all()


@pytest.mark.parametrize("per", ["block", "token"])
def test_quantized_keys_and_values_are_a_cache(per):
    """Decoding takes the scales of cufa.quantize."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 2, 500, 64), np.float32)
    v *= np.linspace(0.1, 9, 500, dtype=np.float32)[:, None]
    q = rng.standard_normal((2, 4, 1, 64), np.float32)
    exact = cufa.attention_reference(q, k, v)
    (k8, k_scale), (v8, v_scale) = (cufa.quantize(x, role=role, per=per) for role, x in (("k", k), ("v", v)))
    caches, scales = (k8.view(np.uint8), v8.rows().view(np.uint8)), {"k_scale": k_scale, "v_scale": v_scale}
    out = cufa.flash_decode(q, *caches, **scales)
    np.testing.assert_allclose(out, cufa.decode_reference(q, *caches, **scales), atol=1e-4)
    assert np.abs(out - exact).max() < 0.1 * np.abs(exact).max()
    shapes = {"k_scale": k_scale.shape, "k_new": (2, 2, 1, 64), "cache_seqlens": True}
    plan = cufa.plan_decode(q.shape, k.shape, cache_dtype="uint8", device="sm_90", **shapes)
    assert plan.spec.name == "decode_split_tma_fp8_scaled" and plan.launches[0].entry == "decode_append"
    assert f"scales per {per}" in str(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k_scale": np.ones((2, 2, 7), np.float32)},
            r"k_scale has shape \(2, 2, 7\).*per token \(2, 2, 25\)",
        ),
        ({"k_scale": np.ones((2, 2, 25))}, "k_scale of shape .* is float64.*pass float32"),
        ({"v_scale": np.ones(2, np.float32)}, "k_scale is per token and v_scale per head"),
        (
            {"k_new": np.ones((2, 2, 1, 16), np.float32)},
            "k_new is float32 but k_cache is uint8.*may be float16",
        ),
    ],
)
def test_scales_of_tokens_that_are_refused(change, message):
    case = make_case([20, 3], new=1, fp8="token", capacity=25)
    arrays, options = case.arguments()
    with pytest.raises((TypeError, ValueError), match=message):
        cufa.flash_decode(*arrays, **options | change)
