"""Bugs planted in the backward kernels of Hopper, each of which must be found: by checked mode, or by gradients over
the bound. What the kernels share with fa2_backward is in test_emulate_backward_bugs.py; the kernel of wide heads has
test_emulate_backward_bugs_wide.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_emulate_backward_bugs import Bug, bug, check_planted, found_by, patch

from cufa.core.mask import FULL, Band
from cufa.kernels import KERNELS
from cufa.kernels.fa3_backward import TRANSPOSED

__all__ = ["patch"]

NARROW = "kernels/fa3_backward.cu"
CONSUMER = "tiles/backward_consumer.cuh"
BLOCK, GRADIENTS = "tiles/backward_block.cuh", "tiles/backward_gradients.cuh"
SUMS, PASSES = "tiles/backward_sums.cuh", "tiles/backward_passes.cuh"
MEMORY, WORKSPACE = "tiles/backward_pipeline.cuh", "tiles/backward_workspace.cuh"

#: Tiles of 128 and of 64 query rows: several of each, ragged, of two items, which one block takes.
LONG, SHORT = KERNELS["fa3_backward"].configs[:2]
#: dQ transposed: added from registers, and staged.
STAGED = TRANSPOSED
RED = dataclasses.replace(STAGED, bulk_add=False)

#: What a build that looks inside says when products have landed.
LANDED_DK = "    INSIDE(inside.landed(KEY_GRADIENTS, finished); inside.enter(NOTHING);)\n"
LANDED_DQ = "    INSIDE(inside.landed(QUERY_GRADIENTS, NO_TILE); inside.enter(ADD, NO_TILE);)\n"


def short(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, SHORT, head_dim=72, **case)


def red(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    """Of 104 columns: consumers have different numbers of them, and the last accumulators are half full."""
    return bug(file, old, new, kinds, RED, head_dim=104, **case)


def staged(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, STAGED, head_dim=104, **case)


def long(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, LONG, **case)


BUGS = {
    # Hand-overs between ordinary accesses, wgmma and the copy engine.
    "dS without a fence of who reads it": long(
        NARROW, "    if constexpr (DP_FIRST) async_proxy_fence();  // dS", "    // dS", "proxy-fence"
    ),
    "dS without a fence of who stores it": short(
        CONSUMER, "    if constexpr (!DP_FIRST) async_proxy_fence();\n", "", "proxy-fence"
    ),
    "dS without a barrier of the warp": short(
        CONSUMER, "    warp_sync();  // all lanes have stored\n", "", "race never-written proxy-fence"
    ),
    "dO given back before a fence": long(
        NARROW,
        "    if constexpr (DP_FIRST) begin_dq();\n    dO_turns.release(n, lane);\n",
        "    dO_turns.release(n, lane);\n    if constexpr (DP_FIRST) begin_dq();\n",
        "proxy-fence",
    ),
    "V held before it is there": staged(
        NARROW,
        "    mbarrier_wait(smem.items.V_full, (items - 1) & 1);\n    hold(V_rmem, smem.V);\n",
        "    hold(V_rmem, smem.V);\n    mbarrier_wait(smem.items.V_full, (items - 1) & 1);\n",
        "race never-written copy-not-awaited",
    ),
    "of V a step too few": staged(
        GRADIENTS, "for (int k = HELD; k < K_STEPS", "for (int k = HELD + 1; k < K_STEPS"
    ),
    "a row of V held twice": short(
        CONSUMER, "warp * 16 + lane % 16, lane / 16)", "warp * 16 + lane % 15, lane / 16)"
    ),
    "dQ staged without a fence": long(
        SUMS,
        "  async_proxy_fence();\n  warp_sync();  // all of it",
        "  warp_sync();  // all of it",
        "proxy-fence",
    ),
    "dQ staged where the copy engine still reads": short(
        CONSUMER,
        "      if (lane == 0) bulk_wait_read();\n      if constexpr (RUNS_ON)",
        "      if constexpr (RUNS_ON)",
        "copy-not-awaited",
    ),
    "record read without a fence": long(
        BLOCK,
        "    async_proxy_fence();  // it has been read",
        "    // it has been read",
        "proxy-fence",
        kv_heads=2,
    ),
    "Q given back while dK reads it": long(
        NARROW,
        f"    wgmma_wait<0>();\n{LANDED_DK}    wgmma_registers(dK_rmem);\n"
        "    wgmma_registers(dS_rmem);\n    Q_turns.release(n, lane);\n",
        f"    Q_turns.release(n, lane);\n    wgmma_wait<0>();\n{LANDED_DK}"
        "    wgmma_registers(dK_rmem);\n    wgmma_registers(dS_rmem);\n",
        "race copy-not-awaited",
    ),
    "K given back before the last dQ": long(
        NARROW,
        f"    wgmma_wait<0>();\n{LANDED_DQ}    wgmma_registers(dK_rmem);\n"
        "    wgmma_registers(dV_rmem);\n    smem.items.keys.release(0, lane);\n",
        f"    smem.items.keys.release(0, lane);\n    wgmma_wait<0>();\n{LANDED_DQ}"
        "    wgmma_registers(dK_rmem);\n    wgmma_registers(dV_rmem);\n",
        "race copy-not-awaited",
    ),
    "dS never given back": long(
        CONSUMER,
        "    dS_turns.release(n - 1 + items, lane);\n    float* const",
        "    float* const",
        "deadlock",
    ),
    "products of dK before a fence": short(
        NARROW,
        "    if constexpr (!MORE && !DP_FIRST) wgmma_fence();\n",
        "",
        "wgmma-fence",
    ),
    # Results.
    "dQ of the last tile lost": long(
        NARROW,
        "    smem.items.keys.release(0, lane);\n    add_dq();\n",
        "    smem.items.keys.release(0, lane);\n",
        "wrong deadlock",
    ),
    "dQ added to the tile at hand": short(
        NARROW,
        "    before = block.place(tile);\n    if constexpr (MORE) {\n      tile = block.next(tile);",
        "    if constexpr (MORE) {\n      tile = block.next(tile);\n      before = block.place(tile);",
    ),
    "dQ of the wrong half of K": short(CONSUMER, "smem.K + consumer * NEXT_COLUMNS", "smem.K"),
    "mask as in the forward": long(
        GRADIENTS,
        "first_key = block.first_key() + key, row = block.q_tile(tile) * Br + S.lane_column(lane);",
        "row = block.first_key() + key, first_key = block.q_tile(tile) * Br + S.lane_column(lane);",
    ),
    "mask left out at the diagonal": short(
        BLOCK,
        "return tile.q_tile < word(6) ||",
        "return false ||",
        seqlen_q=200,
        seqlen_k=250,
    ),
    "delta not subtracted": short(GRADIENTS, "dP.at(r, t, 0) += u32_as_float(numbers.x);", ""),
    "numbers of another tile": short(
        CONSUMER,
        "smem.delta + dO_turns.stage(n) * NUMBERS_BYTES",
        "smem.delta + dO_turns.stage(n + 1) * NUMBERS_BYTES",
        "wrong never-written race copy-not-awaited",
    ),
    "slope of the cap forgotten": long(
        GRADIENTS, "s = SOFTCAP ? P[e] * cap_slope(s) : P[e];", "s = P[e];", softcap=1.0
    ),
    "gradients of the item before kept": long(
        NARROW, "dK_rmem[x] = dV_rmem[x] = 0.0f;", "if (i == 0) dK_rmem[x] = dV_rmem[x] = 0.0f;"
    ),
    "heads of the group not counted": long(
        BLOCK, "u32(p.heads / p.kv_heads) * u32(tiles.end - tiles.first)", "u32(tiles.end - tiles.first)"
    ),
    # dQ transposed.
    "dQ^T of keys in another order": red(
        GRADIENTS,
        "mn_major_step(k % 4), b_k = b + k_major_step<QUERIES>(k);",
        "mn_major_step(k % 4), b_k = b + k_major_step<QUERIES>(k ^ 1);",
    ),
    "dQ^T of half of the keys": red(
        GRADIENTS,
        "a_k = a + descriptor_step(k / 4 * KEY_TILE_BYTES) + mn_major_step(k % 4), b_k = b + k_major_step<QUERIES>(k);",
        "a_k = a + mn_major_step(k % 4), b_k = b + k_major_step<QUERIES>(k);",
    ),
    "dQ^T of a warp that has no columns, added": red(
        MEMORY,
        "return (consumer * 4 + warp) * 16 < HEAD_DIM ? DQ_TILES : 0;",
        "return DQ_TILES;",
        "out-of-range never-written race wrong unordered-sum",
    ),
    "dQ^T of a warp's half columns lost": red(
        MEMORY, "(consumer * 4 + warp) * 16 < HEAD_DIM ?", "(consumer * 4 + warp + 1) * 16 <= HEAD_DIM ?"
    ),
    "dQ^T of the other consumer's columns": staged(
        MEMORY, "(consumer * 4 + warp) * (DQ_TILES * ACCUMULATOR);", "warp * (DQ_TILES * ACCUMULATOR);"
    ),
    "dQ^T staged in part": staged(
        MEMORY,
        "bulk_add_f32(dq_of_warp(p, tile, 0, 0), dQ, TILE_DQ_FLOATS * 4);",
        "bulk_add_f32(dq_of_warp(p, tile, 0, 0), dQ, TILE_DQ_FLOATS * 2);",
        deterministic=True,
    ),
    "dQ^T converted as if strips lay in one piece": red(
        WORKSPACE, "i % TILE_STRIPS * (2 * ACCUMULATOR);", "i % TILE_STRIPS * STRIP_FLOATS;"
    ),
    "dQ^T converted with queries exchanged": red(
        PASSES, "half * 8 + pair * 2 + query;", "half * 8 + pair + query * 4;"
    ),
    "dQ^T not scaled": staged(
        PASSES, "d[column][1] = u32_as_float(v.y) * p.scale;", "d[column][1] = u32_as_float(v.y);"
    ),
    "numbers of rows over the last columns of dQ^T": red(
        WORKSPACE,
        "TILE_FLOATS + TILE_DQ_FLOATS + i % TILE_STRIPS",
        "TILE_FLOATS + BLOCK_Q * HEAD_DIM + i % TILE_STRIPS",
        "wrong never-written race",
    ),
    # The order of additions.
    "turn passed on before the addition is done": short(
        SUMS, "      bulk_wait();  // added, and not only read\n", "", "unordered-sum", deterministic=True
    ),
    "turn not awaited": short(
        SUMS, "      await_turn(at.block, at.tile);\n", "", "unordered-sum", deterministic=True
    ),
    "turn never passed on": short(
        SUMS, "      pass_turn_on(at.block, at.tile);\n", "", "deadlock", deterministic=True
    ),
    "turn of all key blocks, seen or not": short(
        "tiles/backward_schedule.cuh",
        "template tiles<BR, BC, true>(q_tile).end - 1 - k_block",
        "template tiles<BR, BC, false>(q_tile).end - 1 - k_block",
        "deadlock",
        deterministic=True,
    ),
    "phase of the other adder's tile taken for this one's": long(
        SUMS,
        "      turns.wait_empty(at.n);  // what",
        "      // what",
        "race never-written wrong",
        deterministic=True,
    ),
    "staged dQ added before it is there": short(
        SUMS, "      turns.wait_full(at.n);\n", "", "race never-written", deterministic=True
    ),
    "staged dQ given back while it is read": long(
        SUMS,
        "      bulk_wait_read();\n      turns.release(at.n, 0);\n      bulk_wait();",
        "      turns.release(at.n, 0);\n      bulk_wait();",
        "race copy-not-awaited",
        deterministic=True,
    ),
    "dQ staged over the one before": long(
        CONSUMER, "      dQ_handover.wait_empty(n - 1);\n", "", "copy-not-awaited race", deterministic=True
    ),
}


@pytest.mark.sampled(fixed=5, dated=2)
@pytest.mark.parametrize("name", BUGS)
def test_planted(patch, name):
    check_planted(patch, BUGS[name], algorithm="fa3")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("config", "head_dim"), [(LONG, 64), (SHORT, 72), (RED, 104), (STAGED, 104)], ids=str
)
@pytest.mark.parametrize("case", [{}, {"mask": FULL}, {"mask": Band(20, 30), "softcap": 1.0}], ids=str)
def test_without_a_bug_all_is_quiet(case, config, head_dim, deterministic):
    if config.dq_transposed:
        case = {name: x for name, x in case.items() if name != "softcap"}
    assert found_by(config, deterministic, algorithm="fa3", head_dim=head_dim, **case) == ""
