"""Bugs planted in the backward kernel of wide heads on Hopper, whose thread blocks work in pairs; each must be found:
by checked mode, or by gradients over the bound. What it shares with that of narrow heads is in
test_emulate_backward_bugs_hopper.py."""

from __future__ import annotations

from typing import Any

import pytest
from test_emulate_backward_bugs import Bug, bug, check_planted, found_by, patch

from cufa.kernels import KERNELS
from cufa.problem.mask import FULL, Band

__all__ = ["patch"]

WIDE, PAIR = "backward/fa3_pair/kernel.cu", "backward/fa3_pair/memory.cuh"
ITEMS = "backward/fa3_common/items.cuh"
BLOCK, GRADIENTS = "backward/fa3_common/block.cuh", "backward/fa3_common/gradients.cuh"
SUMS, PASSES = "backward/fa3_common/sums.cuh", "backward/common/passes.cuh"

#: Three atoms of 64 columns and two buffers of dS; four and one.
THREE, FOUR = KERNELS["fa3_backward_wide"].configs


def wide(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, FOUR, head_dim=256, **case)


def three(file: str, old: str, new: str, kinds: str = "", **case: Any) -> Bug:
    return bug(file, old, new, kinds, THREE, head_dim=136, **case)


BUGS = {
    # Hand-overs within a block.
    "P read before it is there": wide(
        WIDE, "    wait_full(smem.P_ring(), n, WAIT_TURN);\n", "", "race never-written"
    ),
    "P over dS that is still read": wide(
        WIDE, "    wait_empty(smem.P_ring(), n);\n", "", "race copy-not-awaited"
    ),
    "P over dS that is still read, two buffers": three(
        WIDE, "    wait_empty(smem.P_ring(), n);\n", "", "race copy-not-awaited", seqlen_q=300
    ),
    "P of another lane": wide(
        WIDE, "(warp * 2 + lane % 2) ^ (row % 8);", "(warp * 2 + lane % 2) ^ (row % 4);", "race wrong"
    ),
    "dS over P that a lane still reads": wide(
        WIDE, "    warp_sync();  // all lanes have read P, which dS replaces\n", "", "race"
    ),
    "dS without a fence": wide(
        WIDE,
        "    async_proxy_fence();\n    warp_sync();  // all lanes have stored\n",
        "    warp_sync();\n",
        "proxy-fence",
    ),
    "dS without a barrier of the warp": wide(
        WIDE,
        "    async_proxy_fence();\n    warp_sync();  // all lanes have stored\n",
        "    async_proxy_fence();\n",
        "race never-written proxy-fence",
    ),
    "dS multiplied before it is there": wide(
        WIDE, "    smem.dS_ring().wait_full(number);\n", "", "race never-written copy-not-awaited proxy-fence"
    ),
    # Hand-overs between blocks.
    "dS sent before it is there": wide(
        PAIR, "      smem.dS_ring().wait_full(at.n);\n", "", "race never-written proxy-fence"
    ),
    "dS of the other block multiplied before it is there": wide(
        WIDE, "    smem.sent_ring().wait_full(number);\n", "", "race never-written copy-not-awaited"
    ),
    "half of dS sent": wide(
        PAIR, "smem.own_ds(at.n), DS_PART_BYTES,", "smem.own_ds(at.n), DS_PART_BYTES / 2,", "deadlock"
    ),
    "dS sent to the block itself": wide(
        PAIR, "return cluster_rank() ^ 1;", "return cluster_rank();", "wrong deadlock race barrier copy-not-awaited"
    ),
    "dS sent over the other block's own": wide(
        PAIR, "cluster_address(smem.sent_ds(at.n), to)", "cluster_address(smem.own_ds(at.n), to)",
        "race never-written copy-not-awaited",
    ),
    "the other block not told": wide(
        WIDE,
        "      mbarrier_arrive_cluster_relaxed(cluster_address(empty, other_rank()));\n",
        "",
        "deadlock",
    ),
    "the other block not waited for": wide(
        PAIR,
        "dS_ring().init(4, 2 * 4 * CONSUMERS);",
        "dS_ring().init(4, 4 * CONSUMERS);",
        "barrier race copy-not-awaited deadlock",
    ),
    "told of dS before it has been read": wide(
        WIDE,
        "    wgmma_wait<0>();\n    if (TRACE_INSIDE && any) log.enter(QUERY_GRADIENTS | LANDED);\n"
        "    wgmma_registers(dQ_rmem);\n    if (any && lane == 0) {\n",
        "    if (any && lane == 0) {\n",
        "race copy-not-awaited wrong wgmma-fence",
    ),
    "a block ends before the other has told it": wide(
        WIDE,
        "    for (int i = 0; i < DS_STAGES; ++i) smem.dS_ring().wait_empty(count + i);\n",
        "",
        "block-not-running",
    ),
    "a block ends before the other has told it of the last tile": three(
        WIDE,
        "    for (int i = 0; i < DS_STAGES; ++i) smem.dS_ring().wait_empty(count + i);\n",
        "    smem.dS_ring().wait_empty(count);\n",
        "block-not-running",
    ),
    "barriers that the other block may not find initialised": wide(
        WIDE, "  cluster_arrive();\n  cluster_wait();  // both", "  block_sync();  // both",
        "race block-not-running",
    ),
    "K of the other block not awaited": wide(
        ITEMS, "K.init(KEY_GROUPS + PAIRED,", "K.init(KEY_GROUPS,", "barrier race never-written copy-not-awaited"
    ),
    # Results.
    "the block's own keys for the other's": wide(
        PAIR, "return block.first_key() ^ GROUP_KEYS;", "return block.first_key();"
    ),
    "columns of the other block's K exchanged": wide(
        WIDE, "smem.other_K + (VALUES ? 0 : ATOM_BYTES)", "smem.other_K + (VALUES ? ATOM_BYTES : 0)"
    ),
    "columns of the other rank": three(
        WIDE, "const int first = first_column(VALUES, cluster_rank()) / 8;",
        "const int first = first_column(VALUES, other_rank()) / 8;",
        "wrong unordered-sum race out-of-range",
    ),
    "half atoms from their beginning": three(WIDE, "column % ATOM_COLUMNS * 2;", "0;"),
    "dQ of the block's own keys alone": wide(
        WIDE, "::issue_dq<GROUP_KEYS, true, COLUMNS / 8>", "::issue_dq<GROUP_KEYS, false, COLUMNS / 8>"
    ),
    "dQ of the last tile lost": wide(WIDE, "    add_dq(n, pending_tiles[0]);\n", "", "wrong"),
    "dQ asked for of the tile at hand": three(WIDE, "issue_dq(n - LATE);", "issue_dq(n);", "wrong", seqlen_q=300),
    "dQ added where the tile before has it": three(
        WIDE, "    pending_tiles[LATE] = pending_tiles[0];\n",
        "    pending_tiles[LATE] = block.workspace_tile(tile);\n", "wrong", seqlen_q=300
    ),
    "dQ of the last tile but one lost": three(
        WIDE, "      if (n > 0) add_dq(n - 1, pending_tiles[1]);\n", "", "wrong", seqlen_q=300
    ),
    "scores of the second tile not awaited": three(
        WIDE, "await<FIRST_TILE ? 0 : 1>(GRADIENT);", "await<1>(GRADIENT);", "wgmma-fence wrong"
    ),
    "keys of the first block in both": wide(
        BLOCK, "blockIdx.x % CLUSTER * BLOCK_KEYS : 0;", "0 : 0;", "wrong race"
    ),
    "dP begins with nothing": wide(
        GRADIENTS, "dP_rmem[2 * i] = u32_as_float(numbers.x);", "dP_rmem[2 * i] = 0.0f;"
    ),
    "dP begins anew": wide(WIDE, "Element, !VALUES>", "Element, false>"),
    "dK not scaled": wide(WIDE, "gradient_rmem, p.scale, first_key", "gradient_rmem, 1.0f, first_key"),
    # The order of additions.
    "dQ added before its turn": wide(
        WIDE,
        "    if constexpr (DETERMINISTIC) handover.wait_full(number);\n",
        "",
        "unordered-sum deadlock",
        deterministic=True,
    ),
    "turn passed on while warps still add": wide(
        SUMS, "      handover.wait_empty(at.n + 1);\n", "", "unordered-sum deadlock", deterministic=True
    ),
    "turn passed on by lanes that have added": wide(
        WIDE, "      warp_sync();  // all lanes have added\n", "", "unordered-sum", deterministic=True
    ),
    "consumers told of a turn that is not theirs": wide(
        SUMS,
        "return ld_acquire_gpu(ticket_counter(block, tile, rank)) == ticket_of(block, tile);",
        "return true;",
        "unordered-sum",
        deterministic=True,
    ),
    "turns of both blocks counted together": wide(
        SUMS, "block.workspace_tile(tile)) + rank;", "block.workspace_tile(tile));", "unordered-sum deadlock",
        deterministic=True,
    ),
    "turns of the second block not zeroed": wide(
        PASSES, "vec2{0, 0}", "u32(0)", "deadlock never", deterministic=True
    ),
}  # fmt: skip


@pytest.mark.sampled(fixed=5, dated=2)
@pytest.mark.parametrize("name", BUGS)
def test_planted(patch, name):
    check_planted(patch, BUGS[name], algorithm="fa3")


@pytest.mark.sampled(fixed=4, dated=2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("config", "head_dim"), [(THREE, 160), (FOUR, 248)], ids=str)
@pytest.mark.parametrize("case", [{}, {"mask": FULL}, {"mask": Band(20, 30), "softcap": 1.0}], ids=str)
def test_without_a_bug_all_is_quiet(case, config, head_dim, deterministic):
    assert found_by(config, deterministic, algorithm="fa3", head_dim=head_dim, **case) == ""
