"""FA3 on a GPU over awkward problems: every length around its tiles, pipelines that run over many items, what
used to stall, strides, and anything else that hypothesis thinks of.

Most runs take few thread blocks, so that a small problem is many items for each of them.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    assert_attention,
    forward_operands,
    make_inputs,
    make_problem,
    plan_with_blocks,
    poisoned_like,
    stalling_lengths,
)

import cufa
from cufa.kernels import KERNELS
from cufa.measure.ladder import ladder

pytestmark = pytest.mark.gpu

SPEC = KERNELS["fa3_forward"]
#: Each tiling at its largest head dim, and at one whose last 64 columns are not all there.
CONFIGS = pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        pytest.param(c, d, id=f"{SPEC.name}-{i}-d{d}")
        for i, c in enumerate(SPEC.configs)
        for d in (c.max_head_dim, c.max_head_dim - 24)
    ],
)
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPES = pytest.mark.parametrize("dtype", SPEC.dtypes, ids=lambda dtype: f"{SPEC.name}-{dtype}")


def limit_time():
    """A kernel that hangs cannot be interrupted. It ends its process after two minutes from here: one failed
    test, not a run without end."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


@pytest.fixture(autouse=True)
def no_hang():
    limit_time()
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def cp():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("fa3 is made of Hopper's instructions")
    return cupy


@pytest.fixture(scope="module")
def execute(cp):
    """(q, k, v, config, causal, blocks) → out, lse: one launch on so many thread blocks."""
    from cufa.run.cuda import backend as cuda

    def run(q, k, v, config, causal, blocks):
        plan = plan_with_blocks(make_problem(q, k, v, causal), config, blocks)
        given = forward_operands(*(cp.asarray(x) for x in (q, k, v)), cp)
        binding = cuda.Binding(cuda.prepare(plan), given)
        limit_time()
        binding.launch(cuda.addresses(given))
        return cp.asnumpy(given["out"]), cp.asnumpy(given["lse"])

    return run


def check(execute, inputs, config, causal, blocks):
    out, lse = execute(*inputs, config, causal, blocks)
    assert_attention(out, lse, *inputs, causal=causal)


EDGES = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193)


@pytest.mark.sampled(dated=2)
@MASKS
@CONFIGS
def test_lengths_around_warpgroups_and_tiles(execute, config, head_dim, causal):
    """Each with three others: as many queries as keys, more, and fewer; causal rows that see no key."""
    pairs = [(EDGES[i], EDGES[(i + step) % len(EDGES)]) for i in range(len(EDGES)) for step in (0, 3, 7)]
    for n, (seqlen_q, seqlen_k) in enumerate(pairs):
        inputs = make_inputs(1, 2, 1, seqlen_q, seqlen_k, head_dim, "bfloat16", seed=n)
        check(execute, inputs, config, causal, 1 + n % 3)


@pytest.mark.sampled(dated=2)
@MASKS
@CONFIGS
def test_lengths_around_multiples_of_the_tiles(execute, config, head_dim, causal):
    queries = [n * config.block_q + off for n in (1, 3) for off in (-1, 0, 1)]
    keys = [n * config.block_kv + off for n in (1, 2, config.num_stages + 1) for off in (-1, 0, 1)]
    for n, (seqlen_q, seqlen_k) in list(enumerate(itertools.product(queries, keys)))[::2]:
        inputs = make_inputs(1, 1, 1, seqlen_q, seqlen_k, head_dim, "float16", seed=n)
        check(execute, inputs, config, causal, 1 + n % 3)


@pytest.mark.sampled(dated=2)
@MASKS
@CONFIGS
def test_what_used_to_stall(execute, config, head_dim, causal):
    for n, (seqlen_q, seqlen_k) in enumerate(stalling_lengths(config)):
        inputs = make_inputs(1, 3, 1, seqlen_q, seqlen_k, head_dim, seed=n)
        first, first_lse = execute(*inputs, config, causal, 1)
        assert_attention(first, first_lse, *inputs, causal=causal)
        for blocks in (1, 2, 3):
            out, lse = execute(*inputs, config, causal, blocks)
            assert out.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()


@MASKS
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (193, 384), (64, 257)])
def test_more_items_than_multiprocessors(cp, seqlen_q, seqlen_k, causal):
    """The planner's own choice, on problems of the kind that used to stall."""
    host = make_inputs(1, 400, 400, seqlen_q, seqlen_k, 64)
    q, k, v = (cp.asarray(x) for x in host)
    out = poisoned_like(q, cp)
    cufa.flash_attention(q, k, v, causal=causal, algorithm="fa3", out=out)
    some = slice(0, 400, 57)
    assert_attention(cp.asnumpy(out[:, some]), None, *(x[:, some] for x in host), causal=causal)
    assert not bool(cp.isnan(out).any())


@pytest.mark.sampled(dated=2)
@MASKS
@CONFIGS
def test_random_grids(execute, config, head_dim, causal):
    rng = random.Random(f"{config} {head_dim} {causal}")
    for seed in range(10):
        heads, seqlen_q, seqlen_k = rng.randint(1, 6), rng.randint(1, 600), rng.randint(1, 900)
        inputs = make_inputs(1, heads, rng.choice([1, heads]), seqlen_q, seqlen_k, head_dim, seed=seed)
        check(execute, inputs, config, causal, rng.randint(1, 7))


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"{SPEC.name}-d{d}")
def test_every_step_of_the_ladder(execute, head_dim, causal):
    """Techniques switched off one by one, on one tiling a head dim; the last grid has a block an item."""
    config = next(c for c in SPEC.configs if c.fits(head_dim))
    lengths = [*stalling_lengths(config), (2 * config.block_q + 5, 9 * config.block_kv + 5), (600, 600)]
    for step in dict.fromkeys(rung.config for rung in ladder("fa3", config)):
        for n, (seqlen_q, seqlen_k) in enumerate(lengths):
            inputs = make_inputs(1, 3, 1, seqlen_q, seqlen_k, config.max_head_dim, seed=n)
            first, lse = execute(*inputs, step, causal, 1)
            assert_attention(first, lse, *inputs, causal=causal)
            for blocks in (2, 999):
                assert execute(*inputs, step, causal, blocks)[0].tobytes() == first.tobytes()


@CONFIGS
def test_rows_that_see_nothing_between_rows_that_do(execute, config, head_dim):
    """Far more queries than keys: several items in a row have no tile to visit, and the next has again."""
    for blocks in (1, 2, 5):
        inputs = make_inputs(1, 3, 3, 5 * config.block_q, config.block_kv + 3, head_dim)
        check(execute, inputs, config, True, blocks)


@MASKS
@pytest.mark.parametrize(
    ("config", "head_dim"),
    [pytest.param(c, c.max_head_dim, id=f"{SPEC.name}-{i}") for i, c in enumerate(SPEC.configs)],
)
def test_short_items_in_a_row_repeat_bit_for_bit(cp, config, head_dim, causal):
    """Two key tiles an item, several items a block: the next item's Q arrives while this one's is being read.
    A fence missing there spoiled a few rows in a million, in one launch of five."""
    from cufa.plan.planner import make_plan
    from cufa.run.cuda import backend as cuda

    host = make_inputs(3, 60, 60, 200, config.block_kv + 2, head_dim, "bfloat16")
    given = forward_operands(*(cp.asarray(x) for x in host), cp)
    plan = make_plan(make_problem(*host, causal), cuda.current_device(), "fa3", config)
    binding, out = cuda.Binding(cuda.prepare(plan), given), given["out"]
    lse = [cp.empty(out.shape[:3], cp.float32) for _ in range(30)]
    for x in lse:
        binding.launch(cuda.addresses({**given, "lse": x}))
    assert all(bool((x.view("int32") == lse[0].view("int32")).all()) for x in lse)
    assert_attention(cp.asnumpy(out), cp.asnumpy(lse[0]), *host, causal=causal)


@MASKS
@DTYPES
def test_grouped_heads(cp, dtype, causal):
    """32 query heads on 4 key/value heads, by index."""
    host = make_inputs(2, 32, 4, 200, 333, 128, dtype)
    q, k, v = (cp.asarray(x) for x in host)
    out, lse = cufa.flash_attention(q, k, v, causal=causal, algorithm="fa3", return_lse=True)
    assert_attention(cp.asnumpy(out), cp.asnumpy(lse), *host, causal=causal)
    alone = cufa.flash_attention(q, k, v, causal=causal, algorithm="fa3")
    assert bool((alone.view("int16") == out.view("int16")).all()), "asking for the LSE changes the result"


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256], ids=lambda d: f"{SPEC.name}-d{d}")
def test_strides(cp, head_dim):
    """q, k and v interleaved in one array, in both layouts, with NaN wherever they are not; out likewise."""
    b, s, h = 2, 150, 3
    packed = cp.full((b, s + 7, 3, h, head_dim + 16), cp.nan, cp.float16)
    views = [packed[:, 3 : s + 3, i, :, 8 : 8 + head_dim] for i in range(3)]
    host = make_inputs(b, h, h, s, s, head_dim, layout="bshd")
    for view, x in zip(views, host, strict=True):
        view[...] = cp.asarray(x)
    target = cp.full((b, h, s + 5, head_dim + 8), 7, cp.float16)
    out = target[:, :, 2 : s + 2, :head_dim]
    for causal in (False, True):
        out[...] = cp.nan
        _, lse = cufa.flash_attention(
            *views,
            causal=causal,
            layout="bshd",
            algorithm="fa3",
            return_lse=True,
            out=out.transpose(0, 2, 1, 3),
        )
        turned = [x.transpose(0, 2, 1, 3) for x in host]
        assert_attention(cp.asnumpy(out), cp.asnumpy(lse), *turned, causal=causal)
        out[...] = 7
        assert bool((target == 7).all()), "wrote outside of out"


@MASKS
def test_side_by_side_on_two_streams(cp, causal):
    """Launches that overlap share nothing."""
    host = make_inputs(1, 60, 60, 400, 500, 64)
    q, k, v = (cp.asarray(x) for x in host)
    expected = cufa.flash_attention(q, k, v, causal=causal, algorithm="fa3").get()
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    outs = [[poisoned_like(q, cp) for _ in range(20)] for _ in streams]
    cp.cuda.Device().synchronize()
    for i in range(20):
        for stream, targets in zip(streams, outs, strict=True):
            with stream:
                cufa.flash_attention(q, k, v, causal=causal, algorithm="fa3", out=targets[i])
    cp.cuda.Device().synchronize()
    for out in itertools.chain(*outs):
        assert out.get().tobytes() == expected.tobytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_problem(execute, data):
    config = data.draw(st.sampled_from(SPEC.configs))
    head_dims = [d for d in (8, 24, 64, 72, 80, 96, 128, 136, 192, 256) if config.fits(d)]
    groups, kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    inputs = make_inputs(
        data.draw(st.integers(1, 2)),
        groups * kv_heads,
        kv_heads,
        data.draw(st.integers(1, 400)),
        data.draw(st.integers(1, 400)),
        data.draw(st.sampled_from(head_dims)),
        data.draw(st.sampled_from(SPEC.dtypes)),
        spread=data.draw(st.sampled_from([0.1, 1.0, 10.0])),
    )
    causal, blocks = data.draw(st.booleans()), data.draw(st.integers(1, 8))
    out, lse = execute(*inputs, config, causal, blocks)
    assert_attention(out, lse, *inputs, causal=causal)
    again, _ = execute(*inputs, config, causal, data.draw(st.integers(1, 8)))
    assert again.tobytes() == out.tobytes(), "the grid changes the result"
