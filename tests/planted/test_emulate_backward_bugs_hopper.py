"""Bugs planted in the backward kernels of Hopper, each of which must be found: by checked mode, or by gradients over
the bound. What the kernels share with fa2_backward is in test_emulate_backward_bugs.py; the kernel of wide heads has
test_emulate_backward_bugs_wide.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_emulate_backward_bugs import Bug, bug, check_planted, found_by, patch

from cufa.kernels import KERNELS
from cufa.problem.mask import FULL, Band

__all__ = ["patch"]

NARROW64, NARROW128 = "backward/fa3_narrow64/kernel.cu", "backward/fa3_narrow128/kernel.cu"
CONSUMER = "backward/fa3_common/narrow_consumer.cuh"
BLOCK, GRADIENTS = "backward/fa3_common/block.cuh", "backward/fa3_common/gradients.cuh"
SUMS, PASSES = "backward/fa3_common/sums.cuh", "backward/common/passes.cuh"
MEMORY, ITEMS = "backward/fa3_common/narrow_memory.cuh", "backward/fa3_common/items.cuh"

#: Tiles of 128 and of 64 query rows: several of each, ragged, of two items, which one block takes, from the last tile
#: of one to the first of the next; and a thread block for each item, which adds by the copy engine.
LONG, SHORT = (x for x in KERNELS["fa3_backward"].configs if x.persistent and not x.bulk_add)
LONG_EACH, SHORT_EACH = (dataclasses.replace(x, persistent=False, bulk_add=True) for x in (LONG, SHORT))
#: Not linked: K of two items takes turns.
RUNNING_ON = next(x for x in KERNELS["fa3_backward"].configs if x.persistent and x.bulk_add)


def short(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, SHORT, head_dim=72, **case)


def short_each(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, SHORT_EACH, **{"head_dim": 72, **case})


def running_on(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, RUNNING_ON, **{"head_dim": 104, **case})


def long_each(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, LONG_EACH, **case)


def long(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, LONG, **case)


BUGS = {
    # Hand-overs between ordinary accesses, wgmma and the copy engine.
    "dS without a fence of who reads it": long(
        CONSUMER, "    if constexpr (!DQ_FIRST) async_proxy_fence();  // dS", "    // dS", "proxy-fence"
    ),
    "dS without a fence of who stores it": short(
        CONSUMER, "    if constexpr (DQ_FIRST) async_proxy_fence();\n", "", "proxy-fence"
    ),
    "dS without a barrier of the warp": short(
        CONSUMER, "    warp_sync();  // all lanes have stored\n", "", "race never-written proxy-fence"
    ),
    "dO given back before a fence": long(
        NARROW64,
        "    begin_dq<false>();  // also fences this warp's reads of D\n    smem.dO_ring.release(n, lane);\n",
        "    smem.dO_ring.release(n, lane);\n    begin_dq<false>();\n",
        "proxy-fence",
    ),
    "V held before it is there": running_on(
        CONSUMER,
        "    wait_full(smem.rings.V, kv);\n    hold(V_rmem, smem.V);\n",
        "    hold(V_rmem, smem.V);\n    wait_full(smem.rings.V, kv);\n",
        "race never-written copy-not-awaited",
    ),
    "of V a step too few": running_on(
        GRADIENTS, "for (int k = HELD; k < K_STEPS", "for (int k = HELD + 1; k < K_STEPS", head_dim=120
    ),
    "a row of V held twice": short(
        CONSUMER, "warp * 16 + lane % 16, lane / 16)", "warp * 16 + lane % 15, lane / 16)"
    ),
    "dQ staged without a fence": long_each(
        SUMS,
        "  async_proxy_fence();\n  warp_sync();  // all lanes",
        "  warp_sync();  // all lanes",
        "proxy-fence",
    ),
    "dQ staged where the copy engine still reads": short_each(
        CONSUMER,
        "      if (lane == 0) bulk_wait_read();\n      if constexpr (IS_PERSISTENT)",
        "      if constexpr (IS_PERSISTENT)",
        "copy-not-awaited",
    ),
    "record read without a fence": long(
        ITEMS,
        "    async_proxy_fence();  // the descriptor has been read",
        "    // the descriptor has been read",
        "proxy-fence",
        kv_heads=2,
    ),
    "Q given back while dK reads it": long(
        CONSUMER,
        "    await<0>(KEY_GRADIENTS);\n    log.enter(NOTHING);\n    wgmma_registers(dK_rmem);\n"
        "    wgmma_registers(dS_rmem);\n    smem.Q_ring.release(n, lane);\n",
        "    smem.Q_ring.release(n, lane);\n    await<0>(KEY_GRADIENTS);\n"
        "    wgmma_registers(dK_rmem);\n    wgmma_registers(dS_rmem);\n",
        "race copy-not-awaited",
    ),
    "K given back before the last dQ": running_on(
        CONSUMER,
        "    await<0>(QUERY_GRADIENTS);\n    enter(ADD);\n    wgmma_registers(dK_rmem);\n"
        "    wgmma_registers(dV_rmem);\n    smem.rings.K.release(kv, lane);\n",
        "    smem.rings.K.release(kv, lane);\n    await<0>(QUERY_GRADIENTS);\n"
        "    wgmma_registers(dK_rmem);\n    wgmma_registers(dV_rmem);\n",
        "race copy-not-awaited",
    ),
    "dS never given back": long(
        CONSUMER,
        "    smem.dS_ring.release(dS_number(), lane);\n    float* const",
        "    float* const",
        "deadlock",
    ),
    "products of dK before a fence": short(
        NARROW128,
        "    } else {\n      begin_products();\n    }\n    issue_dk();",
        "    }\n    issue_dk();",
        "wgmma-fence",
    ),
    # Results.
    "dQ of the last tile lost": long(
        CONSUMER,
        "    smem.rings.K.release(kv, lane);\n    add_dq<LAST>();\n",
        "    smem.rings.K.release(kv, lane);\n",
        "wrong deadlock",
    ),
    "dQ added to the tile at hand": short(
        CONSUMER,
        "    pending_tile = block.workspace_tile(tile);\n",
        "    pending_tile = block.workspace_tile(NEXT == NEXT_TILE ? block.next(tile) : tile);\n",
    ),
    "dQ of the wrong half of K": short(
        CONSUMER, "K_of(pending_kv) + consumer * NEXT_COLUMNS", "K_of(pending_kv)"
    ),
    "dQ of the columns left, but for eight": short_each(
        MEMORY,
        "D_TILES - (CONSUMERS - 1) * DQ_TILES;",
        "D_TILES - (CONSUMERS - 1) * DQ_TILES - 1;",
        head_dim=80,
    ),
    "mask as in the forward": long(
        GRADIENTS,
        "first_key = block.first_key() + key, row = block.q_tile(tile) * Br + S.lane_column(lane);",
        "row = block.first_key() + key, first_key = block.q_tile(tile) * Br + S.lane_column(lane);",
    ),
    "mask left out at the diagonal": short(
        BLOCK,
        "return tile.q_tile < ITEM_FIELD(clear_first) ||",
        "return false ||",
        seqlen_q=200,
        seqlen_k=250,
    ),
    "delta not subtracted": short(GRADIENTS, "dP.at(r, t, 0) += u32_as_float(numbers.x);", ""),
    "numbers of another tile": short(
        CONSUMER,
        "smem.delta + smem.dO_ring.stage(n) * NUMBERS_BYTES",
        "smem.delta + smem.dO_ring.stage(n + 1) * NUMBERS_BYTES",
        "wrong never-written race copy-not-awaited",
    ),
    "slope of the cap forgotten": long_each(
        GRADIENTS, "s = SOFTCAP ? P[e] * cap_slope(s) : P[e];", "s = P[e];", softcap=1.0
    ),
    # From the last tile of an item to the first one of the next.
    "dV of the item before kept": long(CONSUMER, "    clear(dV_rmem);\n  }\n", "  }\n"),
    "dK of the item before kept": long(CONSUMER, "    clear(dK_rmem);\n  }\n", "  }\n"),
    "dV stored as the next item's": long(
        CONSUMER,
        "      store_dv(block);\n      block.item = at(item + 1).item;\n",
        "      block.item = at(item + 1).item;\n      store_dv(block);\n",
    ),
    "first tile of the item before": long(
        CONSUMER,
        "      block.item = at(item + 1).item;\n    }\n",
        "      tile = block.first();\n      block.item = at(item + 1).item;\n    }\n",
        seqlen_q=300,
        seqlen_k=500,
    ),
    "next K before it is there": long(
        CONSUMER,
        "take_keys(kv + 1);",
        "hold(K_rmem, smem.K_of(kv + 1));",
        "race never-written copy-not-awaited",
    ),
    "next V before it is there": long(
        CONSUMER,
        "    kv = uniform(kv + 1);\n    take_values();\n",
        "    kv = uniform(kv + 1);\n    hold(V_rmem, smem.V);\n",
        "race copy-not-awaited",
    ),
    "V given back while dP reads it": long(
        NARROW64,
        "    wgmma_registers(dV_rmem);\n    if constexpr (!IN_HALVES)",
        "    if constexpr (NEXT != NEXT_TILE) smem.rings.V.release(kv, lane);\n"
        "    wgmma_registers(dV_rmem);\n    if constexpr (!IN_HALVES)",
        "race copy-not-awaited barrier deadlock",
    ),
    "first S of an item with the K before": long(
        CONSUMER, "issue_scores(n + 1, kv + (NEXT == NEXT_ITEM),", "issue_scores(n + 1, kv,"
    ),
    "last dQ of an item with the next K": long(
        CONSUMER, "smem.K_of(pending_kv) + consumer", "smem.K_of(kv) + consumer"
    ),
    "K of the item before never given back": long(
        CONSUMER, "    smem.rings.K.release(pending_kv, lane);\n", "", "deadlock", heads=4, kv_heads=4
    ),
    "the next K awaited where the one before lies": long(
        CONSUMER,
        "pending_kv != kv || !smem.rings.has(item + 1)",
        "!smem.rings.has(item + 1)",
        "deadlock",
        heads=4,
        kv_heads=4,
        seqlen_q=100,
    ),
    "heads of the group not counted": long(
        BLOCK, "u32(p.heads / p.kv_heads) * u32(tiles.end - tiles.first)", "u32(tiles.end - tiles.first)"
    ),
    # The order of additions.
    "turn passed on before the addition is done": short_each(
        SUMS,
        "      bulk_wait();  // the sums are in memory, not only read from shared memory\n",
        "",
        "unordered-sum",
        deterministic=True,
    ),
    "turn not awaited": short_each(
        SUMS, "      await_ticket(at.block, at.tile);\n", "", "unordered-sum", deterministic=True
    ),
    "turn never passed on": short_each(
        SUMS, "      pass_ticket(at.block, at.tile);\n", "", "deadlock", deterministic=True
    ),
    "turn of all key blocks, seen or not": short_each(
        "backward/common/schedule.cuh",
        "template tiles<BR, BC, true>(q_tile).end - 1 - k_block",
        "template tiles<BR, BC, false>(q_tile).end - 1 - k_block",
        "deadlock",
        deterministic=True,
    ),
    "phase of the other adder's tile taken for this one's": long_each(
        SUMS,
        "      staged.wait_empty(at.n);  // the",
        "      // the",
        "race never-written wrong",
        deterministic=True,
    ),
    "staged dQ added before it is there": short_each(
        SUMS, "      staged.wait_full(at.n);\n", "", "race never-written", deterministic=True
    ),
    "staged dQ given back while it is read": long_each(
        SUMS,
        "      bulk_wait_read();\n      staged.release(at.n, 0);\n      bulk_wait();",
        "      staged.release(at.n, 0);\n      bulk_wait();",
        "race copy-not-awaited",
        deterministic=True,
    ),
    "dQ staged over the one before": long_each(
        CONSUMER, "      handover.wait_empty(n - 1);\n", "", "copy-not-awaited race", deterministic=True
    ),
}


@pytest.mark.sampled(fixed=5, dated=2)
@pytest.mark.parametrize("name", BUGS)
def test_planted(patch, name):
    check_planted(patch, BUGS[name], algorithm="fa3")


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [(LONG, 64), (SHORT, 72), (LONG_EACH, 64), (SHORT_EACH, 72), (RUNNING_ON, 104)],
    ids=str,
)
@pytest.mark.parametrize(
    "case", [{}, {"mask": FULL}, {"mask": Band(20, 30), "softcap": 1.0}, {"deterministic": True}], ids=str
)
def test_without_a_bug_all_is_quiet(case, config, head_dim):
    if config.persistent:
        case = {name: x for name, x in case.items() if name not in ("softcap", "deterministic")}
    assert found_by(config, algorithm="fa3", head_dim=head_dim, **case) == ""
