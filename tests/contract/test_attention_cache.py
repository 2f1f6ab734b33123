"""Attention over a cache for any number of queries: pages or contiguous, with append, many queries beside one."""

from __future__ import annotations

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, MARKS, backends
from cache_support import HEADS, KV_HEADS, MIXED, assert_attention_of, cache_case
from support import DTYPES

import cufa
from cufa import masks
from cufa.problem.tree import ancestors

SINK = np.linspace(-1, 3, HEADS).astype(np.float32)
_TOKENS = max(new for _, new in MIXED)
PARENTS = np.full((len(MIXED), _TOKENS), -1, np.int32)
for _place in np.ndindex(PARENTS.shape):
    PARENTS[_place] = np.random.default_rng(_place).integers(-1, max(_place[1], 1))
PARENTS[:, 0] = -1


def _capped(s, b, h, i, j, delta, table):
    """Of the sequence, too: the numbers of queries and keys count within the call, and delta leads to its own."""
    return 20 * np.tanh(s / 20) + table[h, np.clip(i + delta - j, 0, 39)]


OPTIONS = {
    "causal": {"causal": True},
    "full": {"window": (None, None)},
    "window, sink": {"window": (33, 0), "sink": SINK},
    "ALiBi, softcap": {
        "causal": True,
        "alibi_slopes": np.linspace(0.1, 0.7, HEADS).astype(np.float32),
        "softcap": 9.0,
    },
    "tree, sink": {"tree": PARENTS, "sink": SINK},
    "tree of booleans": {"tree": ancestors(PARENTS), "softcap": 9.0},
    "tree of 64 tokens": {"tree": ancestors(np.pad(PARENTS, ((0, 0), (0, 64 - _TOKENS)), constant_values=3))},
    "chunks, sink": {"mask": masks.chunks(50), "sink": SINK},
    "streaming of each": {"mask": masks.streaming(np.array([4, 0, 9, 500, 200]), 9), "softcap": 9.0},
    "global of each": {"mask": masks.global_window(np.array([60, 3, 0, 7, 710]), 9, 5)},
    "prefix": {"mask": masks.prefix(100), "alibi_slopes": np.linspace(0.1, 0.7, HEADS).astype(np.float32)},
    "score": {
        "causal": True,
        "score": cufa.score(_capped, table=np.linspace(-1, 1, 4 * 40).reshape(4, 40)),
        "sink": SINK,
    },
}
CASES = [
    # backend, algorithm, dtype, head dim, page size, options
    *[(CPU, "fa2", "float32", 16, size, name) for size in (0, 1, 16) for name in OPTIONS],
    (CPU, "naive", "bfloat16", 16, 7, "causal"),
    (EMULATE, "fa3", "float16", 64, 16, "window, sink"),
    (EMULATE, "fa3", "bfloat16", 128, 8, "causal"),
    (EMULATE, "fa3", "float16", 64, 0, "ALiBi, softcap"),
    (EMULATE, "fa2", "float16", 64, 7, "window, sink"),
    (EMULATE, "fa2", "bfloat16", 136, 0, "causal"),
    (EMULATE, "fa3", "float16", 64, 64, "tree, sink"),
    (EMULATE, "fa2", "float16", 64, 16, "tree of booleans"),
    (EMULATE, "fa3", "bfloat16", 128, 16, "tree of booleans"),
    (EMULATE, "fa3", "float16", 256, 0, "tree of 64 tokens"),
    (EMULATE, "fa3", "float16", 64, 16, "score"),
    (EMULATE, "fa2", "bfloat16", 64, 7, "score"),
    *[
        (GPU, algorithm, dtype, head_dim, size, name)
        for algorithm in ("fa3", "fa2")
        for dtype, head_dim in (("float16", 64), ("bfloat16", 128), ("float16", 192), ("bfloat16", 256))
        for size in (0, 8, 16, 48, 64, 256)
        for name in OPTIONS
    ],
]


def _call(backend, operands, **options):
    given = {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in operands.items()}
    if backend is EMULATE:
        done = cufa.emulate(**given, **options, mode="checked", trace=False)
        assert not done.findings, "\n".join(map(str, done.findings))
        return done.out, given
    packed = "cu_seqlens_q" in operands
    call = cufa.flash_attention_varlen if packed else cufa.flash_attention
    options = {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return backend.host(call(**given, **options, device=backend.call_device)), given


@pytest.mark.sampled(on="gpu", fixed=12, dated=6)
@pytest.mark.parametrize(
    ("backend", "algorithm", "dtype", "head_dim", "page_size", "name"),
    [pytest.param(*x, id="-".join(map(str, x)), marks=MARKS[x[0].name]) for x in CASES],
)
def test_each_sequence_is_a_call_of_its_own(backend, algorithm, dtype, head_dim, page_size, name):
    """Against the reference; on a GPU, without splits, a sequence has the same bits alone and beside others. (Not under
    irregular masks, whose builds may differ.)"""
    same_bits = backend is not CPU and "mask" not in OPTIONS[name]
    case, options = cache_case(page_size, head_dim, dtype), OPTIONS[name]
    operands = {name: np.array(x) for name, x in case.operands.items()}
    how = {"algorithm": algorithm, "num_splits": None if backend is EMULATE else 1}
    out, after = _call(backend, operands, **how, **options)
    assert_attention_of(case, out, **options)
    if backend is EMULATE:
        return
    padded, _ = _call(backend, case.padded(), **how, **options)
    case.operands.update(
        k=backend.host(after["k"]), v=backend.host(after["v"])
    )  # the new tokens are there now
    for b, (_, new) in enumerate(MIXED):
        beside = out[case.queries(b)]
        assert not same_bits or padded[b, :, :new].swapaxes(0, 1).tobytes() == beside.tobytes()
        if new:
            own = {name: x[b : b + 1] if name == "tree" else x for name, x in options.items()}
            if "mask" in own:
                own["mask"] = own["mask"].at(b, 0)
            alone, _ = _call(backend, case.alone(b), **how, **own)
            atol = 0 if same_bits else 1e-5 if backend is CPU else 0.04
            np.testing.assert_allclose(alone.astype(float), beside.astype(float), atol=atol)


@pytest.mark.parametrize(
    ("backend", "algorithm", "page_size", "name"),
    [
        pytest.param(*x, id="-".join(map(str, x)), marks=MARKS[x[0].name])
        for backend in (EMULATE, GPU)
        for x in (
            (backend, "fa3", 16, "causal"),
            (backend, "fa3", 0, "score"),
            (backend, "fa3", 64, "tree, sink"),
            (backend, "fa2", 7, "window, sink"),
            (backend, "fa3", 16, "chunks, sink"),
            (backend, "fa3", 0, "global of each"),
            (backend, "fa2", 7, "streaming of each"),
            (backend, "fa2", 16, "score"),
            (backend, "fa2", 0, "ALiBi, softcap"),
        )
    ],
)
def test_keys_in_splits(backend, algorithm, page_size, name):
    """More splits than most sequences have tiles; and the same bits in every run."""
    case = cache_case(page_size, 64, "float16")
    found = [
        _call(backend, case.padded(), algorithm=algorithm, num_splits=5, **OPTIONS[name])[0] for _ in range(2)
    ]
    assert found[0].tobytes() == found[1].tobytes()
    packed = np.zeros_like(case.operands["q"])
    for b, (_, new) in enumerate(MIXED):
        packed[case.queries(b)] = found[0][b, :, :new].swapaxes(0, 1)
        assert not found[0][b, :, new:].any()
    assert_attention_of(case, packed, **OPTIONS[name])
    operands = {name: np.array(x) for name, x in case.operands.items()}
    of_packed, _ = _call(backend, operands, algorithm=algorithm, num_splits=5, **OPTIONS[name])
    assert_attention_of(case, of_packed, **OPTIONS[name])


@pytest.mark.parametrize(("algorithm", "page_size"), [("fa3", 16), ("fa2", 7)])
@backends("emulate")
def test_exempt_tokens_and_chunks(backend, algorithm, page_size):
    case = cache_case(page_size, 64, "float16")
    for name in ("chunks, sink", "streaming of each", "global of each", "prefix"):
        operands = {name: np.array(x) for name, x in case.operands.items()}
        out, _ = _call(backend, operands, algorithm=algorithm, **OPTIONS[name])
        assert_attention_of(case, out, **OPTIONS[name])


def test_other_masks_over_a_cache_are_refused():
    shapes = {"q": (2, 4, 8, 64), "k": (9, 2, 16, 64), "v": (9, 2, 16, 64), "block_table": (2, 4)}
    refused = {
        "for each key": masks.evict([5] * 64),
        "tokens or chunks": masks.chunks(9) & masks.window(3, 0),
    }
    for error, mask in refused.items():
        with pytest.raises(ValueError, match=error):
            cufa.plan(**shapes, cache_seqlens=np.array([3, 60], np.int32), mask=mask, device="sm_90")


@backends("gpu")
def test_a_warm_call_reads_lengths_and_table_again(backend):
    case = cache_case(16, 64, "float16")
    given = {name: backend.array(x) for name, x in case.operands.items()}
    for _ in range(2):
        out = cufa.flash_attention_varlen(**given, causal=True)
        assert_attention_of(case, backend.host(out))
    given["cache_seqlens"][:] = given["cache_seqlens"] - 1
    given["block_table"][:] = given["block_table"][::-1].copy()
    assert not (cufa.flash_attention_varlen(**given, causal=True) == out).all()


def _given(**changes):
    x = np.zeros
    pages = {"k": x((5, 2, 4, 16), np.float32), "v": x((5, 2, 4, 16), np.float32)}
    return {"q": x((2, 4, 3, 16), np.float32), **pages, "block_table": [[0, 1, 2], [3, 4, 0]], **changes}


_NEW = {x: np.zeros((2, 2, 3, 16), np.float32) for x in ("k_new", "v_new")}
_FROZEN = np.zeros((5, 2, 4, 16), np.float32)
_FROZEN.flags.writeable = False
BAD = [
    (
        {"seqlens_k": [3, 3], "cache_seqlens": [3, 3]},
        ValueError,
        r"seqlens_k and cache_seqlens or block_table both say",
    ),
    ({"block_table": None, "cache_seqlens": [1, 1]}, ValueError, r"k has batch 5 but there are 2 sequences"),
    ({"block_table": [[0, 1]]}, ValueError, r"block_table has shape \(1, 2\) but q has batch 2"),
    ({"block_table": [[0, 9], [3, 4]]}, ValueError, r"block_table\[0, 1\] is 9, but k has 5 pages; sequence 0"),
    ({"block_table": [[0.5], [1]]}, TypeError, r"block_table is float64: it takes int32"),
    ({"cache_seqlens": [10, 1], **_NEW}, ValueError, r"cache_seqlens\[0\] is 10 and k_new appends 3.*4 columns"),
    ({"cache_seqlens": [9, 9], **_NEW, "seqlens_q": [3, 3]}, ValueError, r"appends a token of k_new to slot 1 of page"),
    (_NEW, ValueError, r"k_new came without cache_seqlens"),
    ({**_NEW, "v_new": None, "cache_seqlens": [1, 1]}, ValueError, r"v_new is missing"),
    ({**_NEW, "k_new": np.zeros((2, 2, 2, 16), np.float32), "cache_seqlens": [1, 1]}, ValueError,
     r"k_new has shape \(2, 2, 2, 16\).*\(2, 2, 3, 16\)"),
    ({**_NEW, "k": _FROZEN, "cache_seqlens": [1, 1]}, ValueError, r"k is read-only, but k_new"),
    ({"k": np.zeros((5, 2, 4, 16), np.uint8), "k_scale": 1.0, "v_scale": 1.0}, TypeError, r"cufa\.flash_decode"),
    ({"tree": [[-1, 0, 1]]}, ValueError, r"tree has shape \(1, 3\): it takes parents, \(2, tokens\)"),
    ({"tree": [[-1, 0], [-1, 0]]}, ValueError, r"tree has 2 tokens for up to 3 queries"),
    ({"tree": [[-1, 0, 3], [-1] * 3]}, ValueError, r"tree\[0, 2\] is 3: a parent is a token before"),
    ({"tree": [[-1] * 3] * 2, "window": (5, 0)}, ValueError, r"tree and mask window .* both say"),
    ({"tree": [[-1] * 3] * 2, "alibi_slopes": [1.0] * 4}, ValueError, r"tree with alibi_slopes"),
    ({"tree": [[0.5] * 3] * 2}, TypeError, r"tree is float64: it takes int32"),
    ({"k": np.zeros((5, 3, 4, 16), np.float32)}, ValueError, r"v has shape .* but k has"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_errors_name_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        cufa.flash_attention(**_given(**changes), device="cpu")


def test_what_kernels_refuse_is_said_and_the_rest_planned():
    packed = {
        "q": np.zeros((9, 4, 64), DTYPES["float16"]),
        "cu_seqlens_q": [0, 8, 9],
        "cache_seqlens": [5, 4],
    }
    k = np.zeros((6, KV_HEADS, 12, 64), DTYPES["float16"])
    with pytest.raises(ValueError, match="boxes of 8 keys, which pages of 12 would cut"):
        cufa.emulate(**packed, k=k, v=k, block_table=[[0, 1], [2, 3]], algorithm="fa3")
    with pytest.raises(ValueError, match="keys in a cache"):
        cufa.emulate(**packed, k=k, v=k, block_table=[[0, 1], [2, 3]], algorithm="fa2_noskip")
    with pytest.raises(ValueError, match=r"cu_seqlens_k and cache_seqlens or block_table both"):
        cufa.flash_attention_varlen(**packed, k=k, v=k, cu_seqlens_k=[0, 1, 2], block_table=[[0], [1]])
    out = cufa.flash_attention_varlen(
        **packed, k=k, v=k, block_table=[[0, 1], [2, 3]], mask=masks.streaming(2, 5), device="cpu"
    )
    assert out.shape == (9, 4, 64)


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_plan_says_what_a_call_does(page_size):
    """From arrays, and from shapes."""
    found = dict(cache_case(page_size, 64, "float16").padded())
    kept = "q", "k", "v", "k_new", "v_new", "block_table", "cache_seqlens", "seqlens_q"
    given = {name: found[name] for name in kept if name in found}
    shapes = {name: x if "seqlens" in name else x.shape for name, x in given.items()}
    plan = cufa.plan(**given, tree=PARENTS, device="sm_90")
    assert plan.spec.name == "fa3_forward" and plan.problem.tree and plan.problem.cache.page_size == page_size
    assert [x.entry for x in plan.launches] == ["append", "fa3_forward"]
    of_shapes = cufa.plan(**shapes, tree=PARENTS.shape, dtype="float16", device="sm_90")
    assert of_shapes.launches == plan.launches and of_shapes.problem.lengths == plan.problem.lengths
    with pytest.raises(ValueError, match="invariant=True without cache"):
        cufa.plan(found["q"], invariant=True)
    with pytest.raises(TypeError, match="float8_e4m3"):
        cufa.plan(**shapes, dtype="float8_e4m3", device="sm_90")
