"""FA3 where the producer lists tiles: few persistent blocks, many items, any order of warps and copies, on masks that
are looked up and on packed and padded lengths; and bugs planted in its waits, its lookups and the end of sequences,
each of which must be noticed."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import numpy as np
import pytest
from lengths_support import packed, padded
from sampling import of_today
from support import assert_attention, forward_operands, make_inputs, make_problem, plan_with_blocks
from test_emulate_mutants import plant

from cufa import masks
from cufa.calls.arrays import make_problem as shaped
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import Band, Mask
from cufa.problem.options import Options
from cufa.run.emulate.calls import Emulation, EmulationError, Execution, emulate, run_plan
from cufa.schedule.schedule import Schedule

SPEC = KERNELS["fa3_forward"]
CONFIGS = pytest.mark.parametrize(
    ("config", "head_dim"),
    [pytest.param(c, c.max_head_dim, id=f"{i}-d{c.max_head_dim}") for i, c in enumerate(SPEC.configs)],
)
MAKE = {"packed": packed, "padded": padded}


def examples(seqlen_q: int, seqlen_k: int) -> dict[str, Mask]:
    rng = np.random.default_rng(seqlen_q + seqlen_k)
    cuts = np.sort(rng.integers(0, seqlen_k + 1, 3))
    lengths = np.diff([0, *cuts, seqlen_k]).tolist()
    rows = rng.integers(0, seqlen_q + 1, (4, 1, 2, seqlen_k)).astype(np.int32)
    return {
        "prefix": masks.prefix(seqlen_k // 3),
        "streaming": masks.streaming(3, 40),
        "documents": masks.documents(lengths),
        "documents both ways": masks.documents(lengths, causal=False),
        "evicted": masks.evict(rng.integers(0, seqlen_q + 1, seqlen_k).astype(np.int32)),
        "half of all scores": half(seqlen_k),
        "two runs of heads": Columns(Band(right=5), Integers(rows)),
        "nothing for the first rows": Band(None, -seqlen_q // 2, "top-left", prefix=0, keep=1),
    }


def half(seqlen_k: int) -> Mask:
    """Keys are hidden from runs of half of the rows: query blocks see much, then less, then much again, and between
    tiles that all of a block see there are some that some do not."""
    first = np.arange(seqlen_k, dtype=np.int32) % (seqlen_k // 2 + 1)
    return masks.columns(first, first + seqlen_k // 2)


def gaps(config: TileConfig, seqlen_k: int) -> Mask:
    """The first 64 rows see every second tile, the next 64 the others, and those behind them all; all see the last."""
    tile = np.arange(seqlen_k) // config.block_kv
    hidden = np.where(tile == tile[-1], 0, 64).astype(np.int32)
    first = np.where(tile % 2 == 0, 0, 64).astype(np.int32)
    return masks.columns(first, first + hidden)


def check(
    mask: Mask, config: TileConfig, lengths: tuple[int, int], head_dim: int, runs, seed: int = 0
) -> None:
    """Each of ``runs``, (blocks, execution), gives the same bits, and the right ones."""
    inputs, outputs = make_inputs(2, 4, 2, *lengths, head_dim, "bfloat16", seed=seed), []
    problem = make_problem(*inputs, mask=mask)
    for blocks, execution in runs:
        given = forward_operands(*inputs)
        run = run_plan(plan_with_blocks(problem, config, blocks), given, execution, trace=False)
        assert not run.findings, "\n".join(map(str, run.findings))
        outputs.append(run.out.tobytes() + run.lse.tobytes())
    assert_attention(run.out, run.lse, *inputs, mask=mask)
    assert len(set(outputs)) == 1


@CONFIGS
def test_items_run_on_from_one_to_the_next(config, head_dim):
    """In checked mode: what one item leaves behind is not what the next one reads."""
    lengths = 2 * config.block_q + 70, 3 * config.block_kv + 5
    for name in of_today(list(examples(*lengths)), f"lists {config}", fixed=0):
        runs = [(1, Execution("checked", "descending")), (2, Execution("checked", 3))]
        check(examples(*lengths)[name], config, lengths, head_dim, runs)


@pytest.mark.parametrize("seed", range(6))
@CONFIGS
def test_random_persistent_grids(config, head_dim, seed):
    rng = random.Random(f"lists {config} {seed}")
    lengths = rng.randint(1, 520), rng.randint(1, 700)
    mask = rng.choice(list(examples(*lengths).values()))
    copies = rng.choice(["early", "late"])
    orders = [(rng.randint(1, 3), order) for order in ("ascending", "descending", seed)]
    check(mask, config, lengths, head_dim, [(n, Execution("plain", x, copies)) for n, x in orders], seed)


@pytest.mark.parametrize("kind", MAKE)
@CONFIGS
def test_lengths_in_any_order(config, head_dim, kind):
    """Sequences of every length, on all configs, whichever warp runs next."""
    names = of_today(["empty ones", "one query", "equal", "whole tiles"], f"lists {config} {kind}", fixed=0)
    for lengths in names:
        for options in ("causal", "window, softcap"):
            ragged(kind, lengths, options, Execution("checked", len(lengths)), config, head_dim)


def ragged(kind, lengths, options, execution, config=None, head_dim=64) -> Emulation:
    case = MAKE[kind](lengths, options, head_dim, "float16")

    def on_few_blocks(*arguments, **request):
        plan = make_plan(*arguments, **request)
        (launch,) = plan.launches
        return dataclasses.replace(plan, launches=(dataclasses.replace(launch, grid=(2, 1, 1)),))

    with mock.patch("cufa.run.emulate.calls.make_plan", on_few_blocks):
        result = emulate(
            *case.forward,
            **case.lengths,
            **case.options,
            algorithm="fa3",
            config=config,
            mode=execution.mode,
            schedule=execution.schedule,
        )
    assert not result.findings, "\n".join(map(str, result.findings))
    for name, x in result.results.items():
        case.check(name, np.asarray(x))
    return result


@pytest.mark.parametrize(
    "mask", [half(1200), masks.shared_question(100, (500, 600)), masks.prefix(50), masks.causal()], ids=str
)
def test_the_longest_query_blocks_are_begun_first(mask):
    """By one persistent block: as the order says, which is that of the tiles visited."""
    config = SPEC.configs[0]
    inputs = make_inputs(1, 4, 2, 1200, 1200, 64, "bfloat16")
    problem, given = make_problem(*inputs, mask=mask), forward_operands(*inputs)
    plan = plan_with_blocks(problem, config, 1)
    order = SPEC.order(problem, plan.schedule, dataclasses.replace(plan.device, num_sms=1), config)
    of_groups = plan.schedule.visits[order.q_block].reshape(
        -1, plan.schedule.num_q_blocks * plan.heads_per_group
    )
    assert (np.diff(of_groups) <= 0).all()
    run = run_plan(plan, given, Execution("plain"))
    by_start = run.records[np.argsort(run.records["start_ns"], kind="stable")]
    np.testing.assert_array_equal(by_start["q_block"], order.q_block)
    np.testing.assert_array_equal(by_start["head"], order.head)
    assert_attention(run.out, run.lse, *inputs, mask=mask)


def test_an_order_is_given_only_where_the_host_knows_one_of_all_heads():
    mask, config = half(1200), SPEC.configs[0]
    problem = make_problem(*make_inputs(2, 4, 2, 1200, 1200, 64, "bfloat16"), mask=mask)
    order = plan_with_blocks(problem, config, 2).block_order
    visits = Schedule.of(problem, config.block_q, config.block_kv, True).visits
    assert (
        sorted(order.values.tolist()) == list(range(len(visits)))
        and (np.diff(visits[order.values]) <= 0).all()
    )
    values = np.repeat(mask.intervals.values, 2, axis=1)  # the same, said of each sequence
    for other in (masks.causal(), masks.evict(np.full(1200, 1200)), Columns(mask.band, Integers(values))):
        assert plan_with_blocks(dataclasses.replace(problem, mask=other), config, 2).block_order is None


@pytest.mark.parametrize(("rows", "blocks"), [(60, 1), (60, 3), (300, 1), (300, 2), (300, 40)])
def test_the_next_launch_begins_with_the_first_item(rows, blocks):
    """What says which item is the next is left as it was found, however many blocks ask."""
    q, k, v = make_inputs(1, 1, 1, rows, 200, 64, "float16")
    mask = masks.evict(np.full(200, rows // 2, np.int32))
    given = forward_operands(q, k, v)
    plan = plan_with_blocks(make_problem(q, k, v, mask=mask), SPEC.configs[0], blocks)
    run = run_plan(plan, given, Execution("checked"), launches=2)
    assert not run.findings, "\n".join(map(str, run.findings))
    assert_attention(run.out, run.lse, q, k, v, mask=mask)


def test_a_block_that_sees_no_tile_reads_none():
    """Its K and V are zeros that the copy engine makes up: what is in the keys reaches nothing."""
    config = SPEC.configs[1]
    q, k, v = make_inputs(1, 2, 1, 2 * config.block_q, config.block_kv + 40, 64, "float16")
    k[...] = v[...] = np.nan
    hidden = np.zeros((2, 1, 1, config.block_kv + 40), np.int32)
    hidden[1] = 2 * config.block_q
    problem = make_problem(q, k, v, mask=Columns(Band(), Integers(hidden)))
    given = forward_operands(q, k, v)
    run = run_plan(plan_with_blocks(problem, config, 1), given, Execution("checked"))
    assert not run.findings
    assert not given["out"].any() and np.isneginf(given["lse"]).all()
    assert not run.records["tiles_visited"].any()


ITEMS = "forward/fa3/persistent_items.cuh"
LIST, PRODUCER, KERNEL = "forward/fa3/tile_list.cuh", "forward/fa3/lister.cuh", "forward/fa3/kernel.cu"
CONSUMER, TILES = "forward/fa3/consumer_items.cuh", "forward/fa3/tiles.cuh"
MASKED, RAGGED = "documents both ways", "packed"

#: (file, what is there, what is planted, what shows it), by what is wrong.
PLANTED = {
    "the list is read before it is written": (PRODUCER, "    list.wait_full();\n", "", MASKED),
    "an entry is overwritten while it is read": (
        PRODUCER,
        "    list.wait_empty();\n    write_shared(smem.list + 16 * list.stage, entry",
        "    write_shared(smem.list + 16 * list.stage, entry",
        MASKED,
    ),
    "entries are not given back": (PRODUCER, "    list.release(lane);\n", "", MASKED),
    "entries are given back by one loader for both": (
        "forward/fa3/memory.cuh",
        "list_ring().init(1, 2);",
        "list_ring().init(1, 1);",
        MASKED,
    ),
    "an entry without an end": (
        PRODUCER,
        "if (last) st_shared_u32(marks, ld_shared_u32(marks) | LAST_TILE);",
        "",
        MASKED,
    ),
    "records of items are too few": (
        "forward/fa3/memory.cuh",
        "LISTED ? 4 + LIST_STAGES : 4",
        "LISTED ? 2 : 4",
        MASKED,
    ),
    "lanes read an item that is not there yet": (
        PRODUCER,
        "      warp_sync();  // all lanes read it\n",
        "",
        MASKED,
    ),
    "consumers are not told": (PRODUCER, "      write_shared(smem.tile(K_ring.stage), entry.tile);\n", "", MASKED),
    "consumers are told while they read": (
        PRODUCER, "      K_ring.wait_empty(inside, entry.tile.tile);\n", "", MASKED,
    ),
    "a tile's buffer is given back while lanes read": (
        TILES,
        "    warp_sync();  // all lanes have read the tile's descriptor before one of them gives the buffer back\n",
        "",
        "one consumer",
    ),
    "a consumer that sees nothing waits for more": (
        TILES,
        "return listed.seen(consumer.consumer) || listed.last();",
        "return listed.seen(consumer.consumer);",
        "two runs of heads",
    ),
    "rows of another consumer": (LIST, "lane_id() * GROUP_ROWS, end", "(lane_id() ^ 1) * GROUP_ROWS, end", MASKED),
    "a consumer's tile is called clear": (
        LIST,
        "(is.every ? SEEN | CLEAR_TILE : SEEN) << 2",
        "(SEEN | CLEAR_TILE) << 2",
        MASKED,
    ),
    "the second consumer is forgotten": (LIST, "      marks |= shfl_xor(marks, 1);\n", "", MASKED),
    "runs that hide a warp's last rows are passed over": (
        "forward/irregular_scores.cuh", "row + 8 >= x.least_lo", "row >= x.least_lo", MASKED,
    ),
    "an item left out": (ITEMS, "index = gridDim.x + shfl", "index = gridDim.x + 1 + shfl", "taken"),
    "the next launch begins with the last item": (
        ITEMS, "if (taken == total - 1) atomic_add", "if (taken == total) atomic_add", "taken",
    ),
    "runs of another item": (
        CONSUMER,
        "hide<Tag::value>(fragment_view(S_rmem), p, descriptor,",
        "hide<Tag::value>(fragment_view(S_rmem), p, smem.item(0),",
        "two runs of heads",
    ),
    "blocks that see nothing see the first keys": (
        PRODUCER,
        "if (tile.stands_for_none()) return {tile, LENGTHS_KIND == PACKED ? p.total_k : p.seqlen_k, Bc};",
        "",
        "nothing visible",
    ),
    "the tail of V is not cleared": (
        PRODUCER,
        "        clear_rows<Bc, HEAD_DIM>(tile, entry.existing, lane);\n",
        "",
        RAGGED,
    ),
    "the tail of V but for a row": (
        PRODUCER,
        "clear_rows<Bc, HEAD_DIM>(tile, entry.existing, lane);",
        "clear_rows<Bc, HEAD_DIM>(tile, entry.existing + 1, lane);",
        RAGGED,
    ),
    "a key too many is cleared": (
        PRODUCER,
        "clear_rows<Bc, HEAD_DIM>(tile, entry.existing, lane);",
        "clear_rows<Bc, HEAD_DIM>(tile, entry.existing - 1, lane);",
        RAGGED,
    ),
    "zeros without a fence": (PRODUCER, "        async_proxy_fence();\n", "", RAGGED),
    "zeros that not all lanes have written": (
        PRODUCER,
        "      warp_sync();  // all lanes have read the list, and written their zeros\n",
        "",
        RAGGED,
    ),
    "zeros in a tile that has not landed": (
        PRODUCER,
        "        mbarrier_wait(smem.tail_full, tail_parity);\n",
        "",
        RAGGED,
    ),
    "the first phase of the tail for all": (PRODUCER, "        tail_parity ^= 1;\n", "", RAGGED),
    "keys of the sequence before": (PRODUCER, "first_key_of(descriptor) + row", "row", RAGGED),
    "rows of the sequence before": (
        PRODUCER,
        "row += int(read_sequence(reader.descriptor()).first_row());",
        "",
        RAGGED,
    ),
    "rows behind a sequence are written": (
        "forward/fa3/consumer.cuh",
        "stored = row < sequence.stored_rows();",
        "stored = true;",
        RAGGED,
    ),
    "rows behind a sequence are no zeros": (
        "forward/fa3/consumer.cuh",
        "    if (!exists) {  // rows past the end may hold NaN\n",
        "    if (false) {\n",
        "padded",
    ),
    "values in front of a tile that is not seen count again": (KERNEL, "P_rmem[i] = 0;", "{}", "gaps"),
    "a tile that is not seen is not given back": (
        KERNEL,
        "    K_ring.release(lane);\n    K_ring.advance();\n    begin_slot();\n",
        "    K_ring.advance();\n    begin_slot();\n",
        "gaps",
    ),
    "the order of another block": (
        ITEMS, "p.block_order + rest / members", "p.block_order + rest % members", "half of all scores",
    ),
    "the mask of another item": (
        CONSUMER,
        "hide<Tag::value>(fragment_view(S_rmem), p, descriptor,",
        "hide<Tag::value>(fragment_view(S_rmem), p, smem.item(0),",
        RAGGED,
    ),
}  # fmt: skip


def show(what: str) -> None:
    """What notices a planted bug: two items and more of a block, of three consumers where a config has them."""
    config = SPEC.configs[-1 if what == "one consumer" else 0]  # without turns, and without Q in registers
    lengths = 2 * config.block_q + 70, 4 * config.block_kv + 5
    if what in MAKE:
        for schedule in ("ascending", "descending", 5):
            for names in (("equal", "causal"), ("one query", "full")):
                ragged(what, *names, Execution("checked", schedule), SPEC.configs[1])
        return
    if what == "taken":
        try:
            test_the_next_launch_begins_with_the_first_item(300, 1)
        except RuntimeError as error:
            if "counters that are not zero" in str(error):  # and not that it does not compile
                raise AssertionError(str(error)) from error
            raise
        return
    if what == "nothing visible":
        test_a_block_that_sees_no_tile_reads_none()
        return
    shown = {
        **examples(*lengths),
        "gaps": gaps(config, lengths[1]),
        "one consumer": masks.documents([70, lengths[1] - 70]),
    }
    runs = [(1, Execution("checked", schedule)) for schedule in ("ascending", "descending", 5)]
    check(shown[what], config, lengths, config.max_head_dim, runs)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(tmp_path, monkeypatch, bug):
    """Each is found by a wrong result, a finding, or a deadlock."""
    file, old, new, what = PLANTED[bug]
    plant(tmp_path, monkeypatch, file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        show(what)


@pytest.mark.parametrize("what", dict.fromkeys(x[-1] for x in PLANTED.values()))
def test_without_a_bug_nothing_shows(what):
    show(what)


@pytest.mark.parametrize("mask", [masks.evict(np.full(2048, 2048, np.int32)), masks.prefix(1)], ids=str)
def test_heads_go_in_groups_as_under_a_band(mask):
    """Also where another launch comes first: heads one by one would leave thread blocks idle a fifth of the time."""
    shapes = [(2, 32, 2048, 128), (2, 8, 2048, 128), (2, 8, 2048, 128)]
    device = Device.typical("sm_90")
    found = [make_plan(shaped(shapes, "bfloat16", Options(x)), device) for x in (mask, Band(right=0))]
    assert {plan.spec for plan in found} == {SPEC}
    of_mask, of_band = (plan.heads_per_group for plan in found)
    assert of_mask == of_band > 8
