"""FA3's forward: persistent blocks whose pipeline runs on from item to item. On few thread blocks, so that a small
problem is many items for each: every length around the tiles, items without a tile to visit, what used to stall."""

from __future__ import annotations

import faulthandler
import itertools
import sys

import pytest
from backends import EMULATE, GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import assert_attention, make_inputs, poisoned_like, stalling_lengths

import cufa
from cufa.kernels import KERNELS
from cufa.measure.ladder import ladder
from cufa.problem.mask import Band
from cufa.run.emulate.calls import Execution

SPEC = KERNELS["fa3_forward"]
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
gpu = pytest.mark.gpu


def limit_time():
    """A kernel that hangs cannot be interrupted. It ends its process after two minutes from here: one failed
    test, not a run without end."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


@pytest.fixture(autouse=True)
def no_hang(request):
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if GPU.device.arch.capability != 90:
        pytest.skip("FA3 is made of Hopper's instructions")
    limit_time()
    yield
    faulthandler.cancel_dump_traceback_later()


def execute(inputs, config, causal, blocks):
    """One launch on this many thread blocks."""
    limit_time()
    return GPU.forward(*inputs, causal=causal, algorithm="fa3", config=config, blocks=blocks)


def check(inputs, config, causal, blocks):
    done = execute(inputs, config, causal, blocks)
    assert_attention(done.out, done.lse, *inputs, causal=causal)
    return done


# --- Problems ---------------------------------------------------------------------------------------------

EDGES = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193)


def around_warpgroups_and_tiles(config):
    """Each length with three others: as many queries as keys, more, and fewer; causal rows that see no key."""
    pairs = [(EDGES[i], EDGES[(i + step) % len(EDGES)]) for i in range(len(EDGES)) for step in (0, 3, 7)]
    return [((1, 2, 1, *lengths), "bfloat16", 1 + n % 3) for n, lengths in enumerate(pairs)]


def around_multiples_of_the_tiles(config):
    queries = [n * config.block_q + off for n in (1, 3) for off in (-1, 0, 1)]
    keys = [n * config.block_kv + off for n in (1, 2, config.num_stages + 1) for off in (-1, 0, 1)]
    found = [((1, 1, 1, *x), "float16", 1 + n % 3) for n, x in enumerate(itertools.product(queries, keys))]
    return found[::2]


def rows_that_see_nothing_between_rows_that_do(config):
    """Far more queries than keys: several items in a row have no tile to visit, and the next has again."""
    shape = (1, 3, 3, 5 * config.block_q, config.block_kv + 3)
    return [(shape, "float16", blocks) for blocks in (1, 2, 5)]


def what_used_to_stall(config):
    return [((1, 3, 1, *x), "float16", blocks) for x in stalling_lengths(config) for blocks in (1, 2, 3)]


PROBLEMS = (
    around_warpgroups_and_tiles, around_multiples_of_the_tiles, rows_that_see_nothing_between_rows_that_do,
    what_used_to_stall,
)  # fmt: skip
#: Each tiling at its largest head dim, and at one whose last 64 columns are not all there.
TILINGS = [
    pytest.param(c, d, id=f"{SPEC.name}-{i}-d{d}")
    for i, c in enumerate(SPEC.configs)
    for d in (c.max_head_dim, c.max_head_dim - 24)
]


@gpu
@pytest.mark.sampled(dated=8, pairs=[("problems", "config"), ("problems", "causal")])
@MASKS
@pytest.mark.parametrize("problems", PROBLEMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("config", "head_dim"), TILINGS)
def test_pipelines(problems, config, head_dim, causal):
    for n, (shape, dtype, blocks) in enumerate(problems(config)):
        check(make_inputs(*shape, head_dim, dtype, seed=n), config, causal, blocks)


@pytest.mark.sampled(fixed=1, dated=1)
@pytest.mark.emulate
@pytest.mark.parametrize(
    "config", [c for c in SPEC.configs if c.block_q > 64], ids=lambda c: f"{c.block_q}x{c.block_kv}-d{c.max_head_dim}"
)  # fmt: skip
def test_consumers_pass_over_tiles_at_both_ends(config):
    """Narrow bands over many tiles on one or two persistent blocks: consumers see tiles at different places, some
    see none, some query blocks see none at all. Whatever the order of warps, nothing stalls."""
    masks = [Band(0, 0), Band(20, 5), Band(70, 0, "top-left"), Band(config.block_kv + 9, 3), Band(9, 9, -150)]
    lengths = [(config.block_q + 69, 4 * config.block_kv + 3), (3 * config.block_q - 60, config.block_kv + 7)]
    for n, mask in enumerate(masks):
        inputs = make_inputs(1, 2, 1, *lengths[n % 2], config.max_head_dim)
        outputs = set()
        for blocks, order in ((1, "descending"), (2, 2 * n + 1)):
            how = {"mask": mask, "execution": Execution("plain", order)}
            done = EMULATE.forward(*inputs, algorithm="fa3", config=config, blocks=blocks, **how)
            assert_attention(done.out, done.lse, *inputs, mask=mask)
            outputs.add(done.out.tobytes())
        assert len(outputs) == 1


# --- On a GPU -------------------------------------------------------------------------------------------


@gpu
@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"{SPEC.name}-d{d}")
def test_every_step_of_the_ladder(head_dim, causal):
    """Techniques switched off one by one, on one tiling a head dim; the last grid has a block an item."""
    config = next(c for c in SPEC.configs if c.fits(head_dim))
    lengths = [*stalling_lengths(config), (2 * config.block_q + 5, 9 * config.block_kv + 5), (600, 600)]
    for step in dict.fromkeys(rung.config for rung in ladder("fa3", config)):
        for n, x in enumerate(lengths):
            inputs = make_inputs(1, 3, 1, *x, config.max_head_dim, seed=n)
            first = check(inputs, step, causal, 1)
            for blocks in (2, 999):
                done = execute(inputs, step, causal, blocks)
                assert done.out.tobytes() == first.out.tobytes() and done.lse.tobytes() == first.lse.tobytes()


@gpu
@MASKS
@pytest.mark.parametrize(("config", "head_dim"), TILINGS[::2])
def test_short_items_in_a_row_repeat_bit_for_bit(config, head_dim, causal):
    """Two key tiles an item, several items a block: the next item's Q arrives while this one's is being read.
    A fence missing there spoiled a few rows in a million, in one launch of five."""
    inputs = make_inputs(3, 60, 60, 200, config.block_kv + 2, head_dim, "bfloat16")
    first = check(inputs, config, causal, None)
    for _ in range(29):
        assert execute(inputs, config, causal, None).lse.tobytes() == first.lse.tobytes()


@gpu
@MASKS
def test_side_by_side_on_two_streams(causal, cp):
    """Launches that overlap share nothing."""
    q, k, v = (cp.asarray(x) for x in make_inputs(1, 60, 60, 400, 500, 64))
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


@gpu
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_problem(data):
    draw = data.draw
    config = draw(st.sampled_from(SPEC.configs))
    head_dims = [d for d in (8, 24, 64, 72, 80, 96, 128, 136, 192, 256) if config.fits(d)]
    length, groups, kv_heads = st.integers(1, 400), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape = draw(st.integers(1, 2)), groups * kv_heads, kv_heads, draw(length), draw(length)
    spread = draw(st.sampled_from([0.1, 1.0, 10.0]))
    inputs = make_inputs(
        *shape, draw(st.sampled_from(head_dims)), draw(st.sampled_from(SPEC.dtypes)), spread=spread
    )
    causal, blocks = draw(st.booleans()), st.integers(1, 8)
    done = check(inputs, config, causal, draw(blocks))
    again = execute(inputs, config, causal, draw(blocks))
    assert again.out.tobytes() == done.out.tobytes(), "the grid changes the result"
