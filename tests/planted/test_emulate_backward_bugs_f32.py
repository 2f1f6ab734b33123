"""Bugs planted in fa2_backward_f32, each of which must be found: by checked mode, or by gradients over the bound. What
it shares with the 16-bit kernel (mask, passes, turns) has its bugs in test_emulate_backward_bugs.py."""

from __future__ import annotations

import dataclasses

import pytest
from test_emulate_backward_bugs import bug as planted
from test_emulate_backward_bugs import check_planted, found_by, patch  # noqa: F401  (patch is a fixture)
from test_emulate_bugs import ordering_calls

from cufa.kernels.backward.fa2 import BackwardConfig
from cufa.problem.mask import FULL, Band

MAIN, PAIRS = "backward/fa2_f32/kernel.cu", "mma/half_pair.cuh"
SHAPE = "backward/fa2_f32/shape.cuh"

#: Warps that share keys, and warps that have keys of their own.
SHARED = BackwardConfig(32, 32, num_warps=4, warp_keys=16)
ALONE = BackwardConfig(32, 32, num_warps=2, warp_keys=16)


def bug(old: str, new: str, kinds: str = "", file: str = MAIN, config: BackwardConfig = SHARED, **case):
    return planted(file, old, new, kinds, config, **case)


BUGS = {
    # Pairs and their units.
    "small halves of P and dS lost": bug(
        "n * OCTET_BYTES + LO_OFFSET, lo);", "n * OCTET_BYTES + LO_OFFSET, 0);"
    ),
    "small halves of rows lost": bug(
        "OCTET_BYTES + LO_OFFSET, lo);", "OCTET_BYTES + LO_OFFSET, vec4{0, 0, 0, 0});", file=PAIRS
    ),
    "one of three products lost": bug(
        "if (product == 1) mma_m16n8k16_f16(D[n][i], A_hi[i], B[n][2], B[n][3]);", "", file=PAIRS
    ),
    "S without the units of its queries": bug("*= query_unit * key_unit[e / 2]", "*= key_unit[e / 2]"),
    "S with the units of other keys": bug(
        "*= query_unit * key_unit[e / 2]", "*= query_unit * key_unit[0]", spread=8.0
    ),
    "P_SCALE left in dV": bug("dO_unit / P_SCALE)", "dO_unit)"),
    "dS in its own warp's unit": bug(
        "unit_of_largest(redux_max(ld_shared_u32(largest_smem + lane_id() % NUM_WARPS * 4)))",
        "unit_of_largest(largest)",
    ),
    "dS unit of the first warp": bug("largest_smem + lane_id() % NUM_WARPS * 4", "largest_smem"),
    "dQ without the unit of dS": bug(
        "const float factor = dS_unit * largest_unit(K_smem", "const float factor = largest_unit(K_smem"
    ),
    "dK with the unit of dO": bug(
        "accumulate(dK_rmem, Q_smem, dS_unit * Q_unit)",
        "accumulate(dK_rmem, Q_smem, dS_unit * dO_unit)",
        spread=8.0,
    ),
    "dS for dQ as it was for dK": bug(
        "return ld_shared_f32(unit_address<PITCH>(K_smem + Share().keys() * PITCH, r)) * K_factor * dS_scale;",
        "return ld_shared_f32(unit_address<PITCH>(Q_smem + Share().queries() * PITCH, r % S_TILES))"
        " * Q_factor * dS_scale;",
        spread=8.0,
    ),
    # Rows.
    "log-sum-exp taken for one in log2": bug("lse = natural * LOG2_E;", "lse = natural;", file=SHAPE),
    "what log2 loses added, not taken away": bug(
        "factor = fmaf(-LN_2,", "factor = fmaf(300.0f * LN_2,", file=SHAPE, spread=8.0
    ),
    "delta not subtracted": bug("s * (dp - D[e % 2]) * slope", "s * dp * slope"),
    "slope of the cap forgotten": bug("SOFTCAP ? cap_slope(s) : 1.0f", "1.0f", softcap=1.0),
    "slope of the cap from P": bug(
        "const float slope = SOFTCAP ? cap_slope(s) : 1.0f;\n        s = exponent[e % 2].weight(s, p.scale_log2);",
        "s = exponent[e % 2].weight(s, p.scale_log2);\n        const float slope = SOFTCAP ? cap_slope(s) : 1.0f;",
        softcap=1.0,
    ),
    "row numbers past the end read": bug(
        "row < p.seqlen_q);\n    }\n    cp_async_commit",
        "true);\n    }\n    cp_async_commit",
        "out-of-range",
        heads=1,
    ),
    # Places.
    "mask forgets the part of the queries": bug(
        "tile.q_tile * Br + int(Share().queries())", "tile.q_tile * Br"
    ),
    "next dO copied over this one": bug(
        "block_sync();  // all warps have written their largest dS, and have read dO and P\n    copy_next_do();",
        "copy_next_do();\n    block_sync();",
        "race copy",
    ),
    "dQ past the last strip": bug(
        "if (strip + i < workspace.strips) add", "add", "out-of-range", heads=1, seqlen_q=130
    ),
    "dQ of shared columns added twice": bug(
        "if (share.others_dq(share.first_dq_tile() + n0 + n)) continue;", "", head_dim=72
    ),
    "dK past the end": bug("if (row >= p.seqlen_k) continue;", "", "out-of-range"),
    "dV scaled": bug("store(p.dv, p.dv_stride, dV_rmem, 1.0f)", "store(p.dv, p.dv_stride, dV_rmem, p.scale)"),
    # Turns.
    "turn never passed on": bug(
        "if (DETERMINISTIC && thread_id() == 0) tickets.pass_on(tile);", "", "deadlock", deterministic=True
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted(patch, name):  # noqa: F811
    check_planted(patch, BUGS[name], dtype="float32")


@pytest.mark.parametrize("i", range(len(ordering_calls("backward/fa2_f32/kernel.cu"))))
def test_every_barrier_and_wait_is_missed(patch, i):  # noqa: F811
    """Without any one of them, checked mode finds something in some run."""
    call = ordering_calls("backward/fa2_f32/kernel.cu")[i]
    patch(MAIN, lambda text: text[: call.start()] + ";" + text[call.end() :])
    found = [found_by(config, dtype="float32") for config in (SHARED, ALONE)]
    assert any(set(kinds.split()) - {"wrong"} for kinds in found), call[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [SHARED, dataclasses.replace(ALONE, block_q=16)], ids=str)
@pytest.mark.parametrize(
    "case",
    [{}, {"spread": 8.0}, {"mask": FULL}, {"mask": Band(20, 30), "softcap": 1.0}, {"head_dim": 72}],
    ids=str,
)
def test_without_a_bug_all_is_quiet(case, config, deterministic):
    assert found_by(config, deterministic, "float32", **case) == ""
