"""The contract of irregular masks, forward and backward: sets of keys that a band does not hide, and runs of rows that
each key is hidden from. Results against float64; the tiles that each block visits and tests are the schedule's.

Masks live on the host or on a GPU; a call that a kernel does not serve is refused in words.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU, backends
from backward_support import assert_gradients, expected, make_case, near
from sampling import of_today
from support import assert_attention, assert_tiles, make_inputs

import cufa
from cufa import masks
from cufa.calls import shapes
from cufa.kernels import KERNELS, Kernel, TileConfig, kernels_of
from cufa.kernels.support import refusal
from cufa.plan.planner import fitting_configs
from cufa.problem.bits import Bits
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import CAUSAL, Band, Mask
from cufa.problem.options import Options
from cufa.problem.problem import BAND_KINDS, Problem

FORWARD, BACKWARD = (
    [spec for spec in kernels_of(operation).values() if spec.masks != BAND_KINDS]
    for operation in ("forward", "backward")
)
SPECS = [*FORWARD, *BACKWARD]
VARIANTS = [
    pytest.param(s, d, p, id=f"{s.name}-{d}-{p}")
    for s in SPECS
    for d in s.dtypes
    for p in s.precisions
    if (p == "native") == (d != "float32")
]
LENGTHS = ((1, 1), (7, 200), (63, 65), (64, 64), (127, 7), (200, 127), (65, 300))


def columns(
    seed: int, keys: int, rows: int, runs: int, spread: tuple[int, int] = (1, 1), band: Band | None = None
) -> Columns:
    """Runs that hide much, some of them empty, some of all rows, in blocks of keys that are alike and one by one."""
    rng = np.random.default_rng(seed)
    lo = rng.integers(-5, rows + 5, (runs, *spread, keys))
    hi = lo + rng.integers(-3, rows, lo.shape)
    alike = rng.integers(1, 100)
    lo[..., : keys // 2], hi[..., : keys // 2] = (
        x[..., : keys // 2 : alike].repeat(alike, -1)[..., : keys // 2] for x in (lo, hi)
    )
    hidden = slice(keys // 3, keys // 3 + max(keys // 4, 1))
    lo[0, ..., hidden], hi[0, ..., hidden] = -1, 2 * rows
    return Columns(band or Band(), Integers(np.stack([lo, hi], 1).reshape(2 * runs, *spread, keys)))


def bits(seed: int, rows: int, keys: int, spread: tuple[int, int]) -> Bits:
    """Scores one by one, among them rectangles of which every score is visible, or none."""
    rng = np.random.default_rng(seed)
    seen = rng.random((*spread, rows, keys)) < 0.3
    seen[..., : rows // 2, : 2 * keys // 3], seen[..., rows // 2 :, keys // 3 :] = True, False
    return Bits.of(seen)


def examples(seqlen_q: int, seqlen_k: int) -> dict[str, Mask]:
    """Of 2 sequences and 2 key/value heads. Kept keys and windows are wider than a small tile and end within one: of
    tiles that are never clear, no test sees what makes them clear."""
    rng = np.random.default_rng(seqlen_q + 7 * seqlen_k)
    cut = int(rng.integers(0, seqlen_k + 1))
    lengths = [cut, 0, seqlen_k - cut]
    return {
        "prefix": masks.prefix(70),
        "prefix of each": masks.prefix(np.array([1, seqlen_k])),
        "streaming": Band(20, 0, "top-left", keep=130),
        "global": masks.global_window(5, 200, 3),
        "sets beyond the ends": Band(2, 3, diagonal=-90, prefix=1, keep=500, global_tokens=400),
        "documents": masks.documents(lengths),
        "documents both ways": masks.documents(lengths, causal=False),
        "chunks": masks.chunks(50),
        "evicted": masks.evict(rng.integers(0, seqlen_q + 1, seqlen_k).astype(np.int32)),
        "one run, of heads": columns(1, seqlen_k, seqlen_q, 1, (1, 2)),
        "one run, of sequences, in a window": columns(2, seqlen_k, seqlen_q, 1, (2, 1), Band(30, 9)),
        "two runs, of both": columns(3, seqlen_k, seqlen_q, 2, (2, 2), Band(right=4, diagonal="top-left")),
        "bits": bits(4, seqlen_q, seqlen_k, (1, 1)),
        "bits, of both": bits(5, seqlen_q, seqlen_k, (2, 2)),
    }


def smallest(spec: Kernel, head_dim: int = 64) -> TileConfig:
    fitting = fitting_configs(spec, near(spec, head_dim), EMULATE.device)
    return min(fitting, key=lambda c: c.block_q * c.block_kv)


def execute(
    backend, spec, mask, seqlen_q, seqlen_k, *, dtype=None, precision=None, softcap=None, head_dim=64, trace=True,
    **how,
):  # fmt: skip
    """One call of 2 sequences of 4 heads that share keys in pairs, at the head dim that the kernel serves nearest to
    this one: right, with the tiles of the schedule."""
    dtype = dtype or spec.dtypes[0]
    precision = (precision or spec.precisions[0]) if dtype == "float32" else None
    case = make_case(2, 4, 2, seqlen_q, seqlen_k, near(spec, head_dim), dtype, mask=mask, softcap=softcap)
    how |= {"algorithm": spec.algorithm, "precision": precision, "trace": trace}
    if spec.operation == "backward":
        done = backend.backward(*case.arrays, **case.options, **how)
        assert_gradients(done.gradients, case, precision)
    else:
        inputs = case.q, case.k, case.v
        done = backend.forward(*inputs, **case.options, **how)
        assert_attention(done.out, done.lse, *inputs, precision=precision, **case.options)
        assert not done.out[np.isneginf(done.lse)].any(), "rows that see no key are zero"
    if trace:
        assert done.plan.spec is spec
        assert_tiles(done.plan, done.records)
    return done


# --- Results ----------------------------------------------------------------------------------------------

NAMES = tuple(examples(1, 1))


@pytest.mark.parametrize("algorithm", ["fa2", "fa2_noskip", "fa1", "naive"])
@pytest.mark.parametrize("name", NAMES)
def test_numpy(name, algorithm):
    """Forward, and for FA2 also gradients. Keys that no query sees may hold NaN, and their values inf."""
    for lengths in LENGTHS:
        case = make_case(2, 4, 2, *lengths, 8, "float64", mask=examples(*lengths)[name])
        hidden = ~np.broadcast_to(case.seen, (2, 4, *lengths)).reshape(2, 2, -1, lengths[1]).any(axis=2)
        k, v = (np.where(hidden[..., None], bad, x) for bad, x in ((np.nan, case.k), (np.inf, case.v)))
        done = CPU.forward(case.q, *((k, v) if algorithm == "fa2" else (case.k, case.v)), algorithm=algorithm,
                           **case.options)  # fmt: skip
        np.testing.assert_allclose(done.out, case.out, atol=1e-12)
        np.testing.assert_allclose(done.lse, case.lse, atol=1e-12)
        if algorithm == "fa2":
            found = CPU.backward(*case.arrays, **case.options).gradients
            for x, exact in zip(found, expected(case), strict=True):
                np.testing.assert_allclose(x, exact, atol=1e-11)


#: Of 50 keys, for up to 2 sequences and 3 key/value heads.
MADE = [
    lambda to: masks.prefix(to(np.array([3, 40]))),
    lambda to: masks.streaming(to(np.array([2, 9])), 5),
    lambda to: masks.global_window(to(np.array([0, 4])), 3, 3),
    lambda to: masks.documents(to(np.array([10, 0, 40])), seqlen=50),
    lambda to: masks.documents(to(np.array([[10, 20, 20], [30, 5, 0]])), causal=False, seqlen=50),
    lambda to: masks.shared_question(5, to(np.array([[20, 25], [30, 2]])), seqlen=50),
    lambda to: masks.shared_question(to(np.array([5, 9])), to(np.array([[20, 25], [30, 2]])), seqlen=50),
    lambda to: masks.evict(to(np.arange(100).reshape(2, 50))),
    lambda to: masks.evict(to(np.arange(300).reshape(2, 3, 50) % 61)),
    lambda to: masks.columns(to(np.arange(50)), to(np.arange(50) + 7), causal=True),
    lambda to: masks.columns(
        to(np.arange(150).reshape(1, 3, 50) % 47), to(np.arange(100).reshape(2, 1, 50) % 53)
    ),
    lambda to: masks.from_flashmask(to(np.arange(2 * 3 * 50 * 4).reshape(2, 3, 50, 4) % 50), causal=False),
    lambda to: masks.from_flashmask(to(np.arange(2 * 50).reshape(2, 1, 50, 1)), causal=True),
]


@pytest.mark.parametrize("make", MADE)
def test_a_mask_for_each_sequence_and_head(make):
    """As calls of one sequence and head: of the reference, and the scores that are counted."""
    mask = make(lambda x: x.astype(np.int32))
    case = make_case(2, 6, 3, 17, 50, 8, "float64", mask=mask)
    gradients, visible = expected(case), 0
    for b, h in np.ndindex(2, 3):
        of_keys, of_queries = (slice(b, b + 1), slice(h, h + 1)), (slice(b, b + 1), slice(2 * h, 2 * h + 2))
        alone = mask.at(b, h)
        assert alone.spread == (1, 1)
        np.testing.assert_array_equal(mask.dense(17, 50, b, h), alone.dense(17, 50))
        visible += 2 * alone.visible_scores(17, 50)
        q, dout, k, v = case.q[of_queries], case.dout[of_queries], case.k[of_keys], case.v[of_keys]
        np.testing.assert_allclose(
            case.out[of_queries], cufa.attention_reference(q, k, v, mask=alone), atol=1e-12
        )
        exact = cufa.attention_reference_backward(dout, q, k, v, mask=alone)
        for found, x, part in zip(gradients, exact, (of_queries, of_keys, of_keys), strict=True):
            np.testing.assert_allclose(found[part], x, atol=1e-11)
    plan = cufa.plan(case.q, case.k, mask=mask, device="cpu")
    assert plan.problem.all_visible_scores == visible and plan.problem.flops == 4 * 8 * visible
    assert "visited" in str(plan)


DECODED = [
    masks.causal(), masks.window(9, 0), masks.streaming(4, 9), masks.streaming([4, 0, 90], 9),
    masks.prefix(20), masks.global_window(20, 9, 0), masks.chunks(32),
]  # fmt: skip


@pytest.mark.parametrize("mask", DECODED, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 3}, {"schedule": "balanced"}], ids=str)
def test_decoding_under_masks(mask, tokens, options):
    """As the last rows of a dense call."""
    q, k, v = make_inputs(3, 4, 2, tokens, 700, 8, "float64")
    lengths = [tokens, 64, 700]
    found = cufa.flash_decode(
        q, k, v, cache_seqlens=lengths, mask=mask, return_lse=True, device="cpu", **options
    )
    exact = cufa.decode_reference(q, k, v, cache_seqlens=lengths, mask=mask, return_lse=True)
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        dense = cufa.attention_reference(q[one], k[one, :, :n], v[one, :, :n], mask=mask.at(b, 0))
        np.testing.assert_allclose(found[0][one], dense, atol=1e-12)


KINDS = (("float16", None), ("bfloat16", None), ("float32", "float32"), ("float32", "tf32"))


@pytest.mark.emulate
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_lengths(spec, name):
    for lengths in of_today(LENGTHS, f"masks beyond {spec.name} {name}", fixed=3):
        execute(EMULATE, spec, examples(*lengths)[name], *lengths, config=smallest(spec))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", BACKWARD, ids=lambda s: s.name)
@backends("gpu")
def test_gradients_of_each_kernel(backend, spec, name):
    """Whichever "auto" takes."""
    for head_dim in sorted({near(spec, x) for x in (64, 128, 256)}):
        for lengths in ((200, 127), (65, 300), (450, 600)):
            mask, how = examples(*lengths)[name], {"dtype": spec.dtypes[-1], "head_dim": head_dim}
            execute(backend, spec, mask, *lengths, trace=False, **how)


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["streaming", "global", "documents", "two runs, of both"])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_elements(spec, dtype, precision, name):
    execute(EMULATE, spec, examples(150, 200)[name], 150, 200, dtype=dtype, precision=precision)


def to_gpu(mask: Mask) -> Mask:
    """The same mask with its numbers on the GPU."""
    if isinstance(mask, Columns):
        return dataclasses.replace(mask, intervals=Integers(GPU.array(mask.intervals.values)))
    names = ("prefix", "keep", "global_tokens") if isinstance(mask, Band) else ()
    sets = {name: getattr(mask, name) for name in names}
    there = {n: Integers(GPU.array(x.values)) for n, x in sets.items() if isinstance(x, Integers)}
    return dataclasses.replace(mask, **there)


@pytest.mark.sampled(fixed=16, dated=8)
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
@backends("gpu")
def test_results(backend, name, head_dim, dtype, precision):
    """Forward and backward, with numbers on the host and on the GPU."""
    for lengths in ((200, 127), (65, 300), (450, 600), (1, 513), (513, 64)):
        mask = examples(*lengths)[name]
        case = make_case(2, 4, 2, *lengths, head_dim, dtype, mask=mask)
        inputs = case.q, case.k, case.v
        for given in (mask, to_gpu(mask)):
            done = backend.forward(*inputs, mask=given, precision=precision)
            assert_attention(done.out, done.lse, *inputs, mask=mask, precision=precision)
        assert_gradients(
            backend.backward(*case.arrays, **case.options, precision=precision).gradients, case, precision
        )


def refuses(spec: Kernel, config: TileConfig, softcap: float | None = None) -> bool:
    """Whether these tiles of the kernel are not for irregular masks."""
    form = {"precision": spec.precisions[0], "operation": spec.operation}
    problem = Problem(1, 1, 1, 8, 8, 64, spec.dtypes[0], masks.prefix(1), 1.0, softcap, **form)
    return refusal(spec, problem, config=config) is not None


CONFIGS = [
    pytest.param(s, c, id=f"{s.name}-{i}")
    for s in SPECS
    for i, c in enumerate(s.configs)
    if c.fits(max(64, c.min_head_dim)) and not refuses(s, c)
]


@pytest.mark.emulate
@pytest.mark.parametrize(("spec", "config"), CONFIGS)
def test_tilings(spec, config):
    """At a head dim of each, with a cap that bends most scores. A mask of each kind is a build of its own."""
    how = {"head_dim": max(64, config.min_head_dim), "config": config}
    how["softcap"] = None if refuses(spec, config, 0.7) else 0.7
    kinds = "sets beyond the ends", "evicted", "two runs, of both"
    for name in of_today(kinds, f"kinds {spec.name} {config}", fixed=0):
        execute(EMULATE, spec, examples(140, 270)[name], 140, 270, **how)


@pytest.mark.emulate
@pytest.mark.parametrize("seed", range(16))
def test_random_descriptors(seed):
    """Sets and runs of any kind: what is skipped holds no visible score, or the result would be wrong."""
    rng = random.Random(seed)
    spec = SPECS[seed % len(SPECS)]
    seqlen_q, seqlen_k = rng.randint(1, 300), rng.randint(1, 300)
    left, right = (rng.choice([None, rng.randint(0, 150)]) for _ in range(2))
    diagonal = rng.choice(["bottom-right", "top-left", rng.randint(-200, 200)])
    prefix, keep, global_tokens = (rng.choice([0, 1, rng.randint(0, 200)]) for _ in range(3))
    if seed % 2:
        mask: Mask = Band(left, right, diagonal, prefix, keep, global_tokens or 1)
    else:
        spread = rng.choice([1, 2]), rng.choice([1, 2])
        mask = columns(seed, seqlen_k, seqlen_q, rng.choice([1, 2]), spread, Band(left, right, diagonal))
    execute(EMULATE, spec, mask, seqlen_q, seqlen_k, config=smallest(spec))


@pytest.mark.emulate
def test_runs_that_cover_a_tile_exactly_or_all_but_a_row():
    """Skipped when the rows of a block are all hidden; visited when one of them is not, or when two runs cover it
    between them. Clear when a run ends at its first row."""
    spec = KERNELS["fa2_forward"]
    config = smallest(spec)
    block_q, block_kv = config.block_q, config.block_kv
    cases = {
        ((block_q, 2 * block_q),): 0,
        ((block_q, 2 * block_q - 1),): 1,
        ((block_q + 1, 2 * block_q),): 1,
        ((0, block_q),): 2,
        ((2 * block_q, 3 * block_q),): 2,
        ((block_q, block_q),): 2,
        ((block_q, 3 * block_q // 2), (3 * block_q // 2, 2 * block_q)): 1,
    }
    for runs, kind in cases.items():
        vectors = np.zeros((2 * len(runs), 1, 1, 3 * block_kv), np.int32)
        for n, (lo, hi) in enumerate(runs):
            for vector, end in ((2 * n, lo), (2 * n + 1, hi)):
                vectors[vector, ..., block_kv : 2 * block_kv] = end
        mask = Columns(Band(), Integers(vectors))
        done = execute(EMULATE, spec, mask, 3 * block_q, 3 * block_kv, config=config)
        record = next(x for x in done.records if x["q_block"] == 1)
        assert done.plan.schedule.classes[1, 1] == kind
        assert (record["tiles_visited"], record["tiles_clear"]) == (2 + (kind > 0), 2 + (kind == 2))


@pytest.mark.emulate
def test_hidden_keys_are_not_read():
    """NaN in the keys and values of tiles that are skipped reaches nothing."""
    q, k, v = make_inputs(1, 2, 1, 200, 256, 64, "float16")
    runs = np.array([64 * [0] + 64 * [0] + 128 * [9], 128 * [500] + 128 * [0]])
    mask = Columns(Band(), Integers(runs[:, None, None]))
    clean = EMULATE.forward(q, k, v, mask=mask, algorithm="fa2")
    k[:, :, :128], v[:, :, :128] = np.nan, np.nan
    again = EMULATE.forward(q, k, v, mask=mask, algorithm="fa2")
    np.testing.assert_array_equal(again.out, clean.out)


# --- Tiles, uploads, streams on a GPU ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [s for s in SPECS if s.name != "naive"], ids=lambda s: s.name)
@backends("gpu")
def test_tiles_are_those_of_the_schedule(backend, spec, name):
    execute(backend, spec, examples(900, 1100)[name], 900, 1100)


@pytest.mark.gpu
def test_numbers_on_the_host_are_uploaded_once(monkeypatch, cp):
    from cufa.run.cuda import mask_uploads

    copies = []
    copy = mask_uploads._copy
    monkeypatch.setattr(mask_uploads, "_copy", lambda *args: copies.append(args) or copy(*args))
    mask = examples(64, 64)["evicted"]
    for length in (64, 64):
        for dtype in (cp.float16, cp.float32):
            q, k, v = (cp.asarray(x, dtype) for x in make_inputs(2, 4, 2, length, 64, 64, "float32"))
            cufa.flash_attention(q, k, v, mask=mask)
    assert len(copies) == 1


@pytest.mark.gpu
def test_a_graph_replays_with_numbers_that_changed(cp):
    """What is least and greatest in each block is found anew by every replay."""
    inputs = make_inputs(1, 2, 2, 300, 300, 64, "float16")
    q, k, v = (cp.asarray(x) for x in inputs)
    rows = np.random.default_rng(0).integers(0, 300, (4, 300)).astype(np.int32)
    numbers = cp.asarray(np.stack([rows[0], np.full(300, 2**31 - 1)]).astype(np.int32))[:, None, None]
    mask = Columns(CAUSAL, Integers(numbers))
    out = cp.empty_like(q)
    cufa.flash_attention(q, k, v, mask=mask, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cufa.flash_attention(q, k, v, mask=mask, out=out)
        graph = stream.end_capture()
    for of_call in rows[1:]:
        numbers[0, 0, 0] = cp.asarray(of_call)
        cp.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_attention(cp.asnumpy(out), None, *inputs, mask=masks.evict(of_call))


@pytest.mark.gpu
def test_streams_share_an_upload(cp):
    """Calls of one mask on several streams, the first of which waits for other work."""
    inputs = make_inputs(2, 4, 2, 200, 256, 64, "float16")
    mask = examples(200, 256)["two runs, of both"]
    outs = []
    for _ in range(3):
        with cp.cuda.Stream(non_blocking=True) as stream:
            busy = cp.ones((4000, 4000), cp.float32)
            for _ in range(20):
                busy *= 1.0001
            outs.append(cufa.flash_attention(*(cp.asarray(x) for x in inputs), mask=mask))
            stream.synchronize()
    for out in outs:
        assert_attention(cp.asnumpy(out), None, *inputs, mask=mask)


# --- Masks on a GPU, and what is refused ------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("make", MADE)
def test_a_mask_made_on_the_gpu_is_the_one_made_on_the_host(cp, make):
    there, here = make(lambda x: cp.asarray(x.astype(np.int32))), make(lambda x: x.astype(np.int32))
    assert not there.known and there != here and "on a GPU" in str(there)
    assert there.on_host() == here and there.spread == here.spread
    with pytest.raises(ValueError, match=r"on a GPU.*mask\.on_host\(\)"):
        there.dense(50, 50)


@pytest.mark.gpu
def test_calls_on_the_gpu_say_what_they_do_not_serve(cp):
    q, k, v = (cp.asarray(x) for x in make_inputs(2, 4, 2, 50, 50, 64, "float16"))
    mask = masks.evict(cp.arange(50, dtype=cp.int32))
    for options, word in (
        ({"mask": mask, "algorithm": "fa1"}, "band masks, not masks that hide each key"),
        ({"mask": masks.prefix(3), "algorithm": "fa1"}, "band masks, not masks with a prefix"),
        ({"sink": np.ones(4)}, "no sink"),
        ({"sink": cp.ones(4, np.float32), "seqlens_k": cp.ones(2, np.int32)}, "no sink"),
        ({"alibi_slopes": cp.ones(4, np.float32)}, "no ALiBi"),
        ({"seqlens_k": cp.ones(2, np.int32)}, "no padded sequences"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=word):
                cufa.flash_attention(q, k, v, **{"algorithm": "fa1", **options})
    packed = (x[0].swapaxes(0, 1) for x in (q, k, v))
    cu = cp.array([0, 20, 50], np.int32)
    with pytest.raises(ValueError, match="no packed sequences"):
        cufa.flash_attention_varlen(*packed, cu, cu, algorithm="fa1")
    assert "at most" in str(cufa.plan((2, 4, 50, 64), mask=mask, device="cpu"))


@pytest.mark.gpu
def test_numbers_on_the_gpu_are_of_the_kernels_types(cp):
    q, k, v = (cp.asarray(x) for x in make_inputs(2, 4, 2, 50, 50, 64, "float16"))
    for options, message in (
        ({"sink": cp.ones(4)}, "sink is float64; on a GPU it must be float32"),
        ({"seqlens_k": cp.ones(2, np.int64)}, "seqlens_k is int64; on a GPU it must be int32"),
    ):
        with pytest.raises(TypeError, match=message):
            cufa.flash_attention(q, k, v, **options)
    with pytest.raises(TypeError, match=r"rows is int64; on a GPU it must be int32"):
        masks.evict(cp.arange(50))
    with pytest.raises(ValueError, match=r"lengths is on a GPU.*pass seqlen="):
        masks.documents(cp.array([20, 30], np.int32))


@pytest.mark.gpu
def test_numpy_arrays_go_to_the_cpu_where_no_kernel_serves(cp):
    """And not to the GPU that is there; asked for it, the call says why not."""
    q, k, v = make_inputs(2, 4, 2, 50, 50, 64, "float64")
    options = {"mask": masks.prefix(3)}
    out = cufa.flash_attention(q, k, v, **options)
    np.testing.assert_array_equal(out, cufa.flash_attention(q, k, v, device="cpu", **options))
    with pytest.raises(TypeError, match="q is float64"):
        cufa.flash_attention(q, k, v, device="cuda", **options)
    with pytest.raises(ValueError, match=r"are on a GPU.*mask\.on_host\(\)"):
        cufa.flash_attention(q, k, v, mask=masks.evict(cp.arange(50, dtype=cp.int32)), device="cpu")


@pytest.mark.parametrize("name", ["prefix", "documents", "two runs, of both", "bits"])
def test_which_kernels_take_a_mask(name):
    mask, shape, wide = examples(65, 65)[name], (2, 2, 65, 64), (2, 2, 65, 136)
    assert cufa.plan(shape, mask=mask, device="sm_90").spec.name == "fa3_forward"
    assert cufa.plan_backward(shape, mask=mask, device="sm_90").spec.name == "fa3_backward"
    assert cufa.plan_backward(wide, mask=mask, device="sm_90").spec.name == "fa3_backward_wide"
    assert cufa.plan_backward(shape, mask=mask, device="sm_80").spec.name == "fa2_backward"
    with pytest.raises(ValueError, match=r"fa1_forward serves band masks, not masks .*Fix: the CPU"):
        cufa.plan(wide, mask=mask, algorithm="fa1", device="sm_90")
    fixed = cufa.plan_backward(shape, mask=mask, deterministic=True, device="sm_80")
    assert fixed.spec.name == "fa2_backward"


def test_masks_that_decoding_does_not_take():
    q, k, v = make_inputs(3, 4, 2, 1, 70, 64, "float16")
    wrong = (
        masks.full(),
        masks.window(3, 1),
        masks.causal("top-left"),
        masks.documents([70]),
        masks.chunks(3, 5),
    )
    for mask in wrong:
        with pytest.raises(ValueError, match="the queries of a decoding call are the last tokens") as refused:
            cufa.flash_decode(q, k, v, mask=mask)
        assert "global_window(tokens, left, 0)" in str(refused.value)
    with pytest.raises(ValueError, match=r"mask=causal and window=\(3, 0\) both say"):
        cufa.flash_decode(q, k, v, mask=masks.causal(), window=(3, 0))
    with pytest.raises(ValueError, match="is of 2 sequences but k has 3"):
        cufa.flash_decode(q, k, v, mask=masks.streaming([1, 2], 3))


def test_what_is_refused_is_refused_in_words():
    within_sets = dataclasses.replace(columns(0, 64, 64, 1), band=Band(right=0, prefix=3))
    problem = shapes.make_problem([(1, 1, 64, 64)] * 3, "float16", Options(within_sets))
    assert "within a plain band" in (KERNELS["fa2_forward"].refuses(problem) or "")
    problem = dataclasses.replace(problem, mask=columns(0, 64, 64, 1))
    many = dataclasses.replace(problem, seqlen_q=2**20)
    assert "at most 524,288 queries" in (KERNELS["fa3_backward"].refuses(many) or "")
    assert KERNELS["fa3_backward"].refuses(dataclasses.replace(many, seqlen_q=2**19)) is None
    wide = dataclasses.replace(many, head_dim=136, seqlen_q=2**17)
    assert KERNELS["fa3_backward_wide"].refuses(wide) is None
    refusal = KERNELS["fa3_backward_wide"].refuses(dataclasses.replace(wide, seqlen_q=2**17 + 1))
    assert "at most 131,072 queries" in (refusal or "")
    widest = dataclasses.replace(many, head_dim=200, seqlen_q=24 * 1024)
    assert KERNELS["fa3_backward_wide"].refuses(widest) is None
    refusal = KERNELS["fa3_backward_wide"].refuses(dataclasses.replace(widest, seqlen_q=24 * 1024 + 1))
    assert "at most 24,576 queries" in (refusal or "")
    assert "masks that hide each key from one run of rows" in (KERNELS["fa1_forward"].refuses(problem) or "")
