"""Bugs planted in fa2_backward, each of which must be found: by checked mode, or by gradients over the bound. Every
barrier and every wait is taken out as well."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backward_support import NAMES, assert_gradients, make_case
from changed_sources import with_changed
from test_emulate_bugs import ordering_calls

from cufa.build import compiler
from cufa.kernels import TileConfig
from cufa.kernels.backward.fa2 import BackwardConfig
from cufa.problem.mask import CAUSAL, FULL, Band
from cufa.run.emulate.calls import EmulationError, emulate_backward

MAIN, PRODUCTS = "backward/fa2/kernel.cu", "backward/fa2/products.cuh"
DQ, STORE = "backward/fa2/dq.cuh", "backward/fa2/store.cuh"
SCHEDULE, PASSES = "backward/common/schedule.cuh", "backward/common/passes.cuh"
TICKETS = "backward/common/tickets.cuh"
MASK, PRODUCT = "backward/common/mask_by_keys.cuh", "mma/product.cuh"

#: Several tiles each way, ragged; two query heads share keys, and some rows see nothing.
SHAPE = {"heads": 2, "kv_heads": 1, "seqlen_q": 140, "seqlen_k": 150, "head_dim": 64}
#: Small tiles for short runs: warps that have keys of their own, and warps that share them.
ALONE = BackwardConfig(32, 32, num_warps=2, num_stages=2, warp_keys=16)
SHARED = BackwardConfig(32, 32, num_warps=4, num_stages=2, warp_keys=16)
ONE_STAGE = dataclasses.replace(SHARED, num_stages=1)


@dataclasses.dataclass(frozen=True)
class Bug:
    """One wrong place, and the run that must show it."""

    file: str
    old: str
    new: str
    kinds: str = ""
    """Findings, any of which names it; empty: checked mode is quiet, the gradients are wrong."""
    config: TileConfig = SHARED
    case: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What differs from SHAPE, and the options of the scores."""
    deterministic: bool = False


def bug(file: str, old: str, new: str, kinds: str = "", config: TileConfig = SHARED, **case: Any) -> Bug:
    return Bug(file, old, new, kinds, config, case, case.pop("deterministic", False))


BUGS = {
    # The mask, seen from the keys.
    "mask one row early": bug(
        MASK, "begin = rows_begin(band, key) - lane", "begin = rows_begin(band, key) - 1 - lane"
    ),
    "mask ends one row late": bug(
        MASK, "rows_end(band, key) : 0)", "rows_end(band, key) + 1 : 0)", mask=Band(20, 30)
    ),
    "mask as in the forward": bug(
        PRODUCTS,
        "hide_scores_by_keys(S, mask_of_head(), key, row);",
        "hide_scores_by_keys(S, mask_of_head(), row, key);",
    ),
    "mask forgets the part of the queries": bug(
        PRODUCTS,
        "row = tile.q_tile * Br + first + S.lane_column",
        "row = tile.q_tile * Br + S.lane_column",
    ),
    "last query tile lost": bug(MASK, "range.end = (end + BR - 1) / BR;", "range.end = end / BR;", mask=FULL),
    "first query tile lost": bug(MASK, "range.first = begin / BR;", "range.first = (begin + BR - 1) / BR;"),
    "tiles called clear too soon": bug(
        MASK,
        "range.clear_first = (rows_begin(band, last_key)",
        "range.clear_first = (rows_begin(band, first_key)",
    ),
    # dQ.
    "dQ of the last tile lost": bug(MAIN, "(adds_first() || remaining == 0)", "adds_first()"),
    "dQ added twice": bug(MAIN, "if (pending && (adds_first() || remaining == 0))", "if (pending)"),
    "dQ of the late warps in the next tile": bug(
        MAIN,
        "add_dq(IRREGULAR ? before : current.previous(tiles), stage() ^ 1)",
        "add_dq(current, stage() ^ 1)",
    ),
    "dQ from the tile that is being made": bug(
        MAIN, "add_dq(current, stage());", "add_dq(current, stage() ^ 1);", "never-written race"
    ),
    "dQ not zeroed": bug(
        PASSES, "n < STRIP_FLOATS / ACCUMULATOR; ++n", "n < STRIP_FLOATS / ACCUMULATOR - 1; ++n"
    ),
    "dQ past the last strip": bug(DQ, "if (strip + i >= strips) continue;", "", "out-of-range", heads=1),
    "dQ of shared columns added twice": bug(
        DQ, "if (D_TILES % DQ_COLUMN_WARPS != 0 && first_dq_tile", "if (false && first_dq_tile", head_dim=72
    ),
    "dQ not transposed": bug(DQ, "ldmatrix_x4_trans(dS[i], dS_lane", "ldmatrix_x4(dS[i], dS_lane"),
    "dQ not scaled": bug(PASSES, "four[y] * p.scale", "four[y]"),
    "head of the group not counted on": bug(
        SCHEDULE, "QueryTile{head + 1, tiles.first}", "QueryTile{head, tiles.first}"
    ),
    # The order of additions.
    "tickets of two heads counted together": bug(
        TICKETS, "(first_head + tile.head)", "first_head", "deadlock", deterministic=True
    ),
    "ticket never passed on": bug(
        MAIN,
        "        tickets.pass_on(current.previous(tiles).previous(tiles));\n",
        "",
        "deadlock",
        deterministic=True,
    ),
    "tickets not zeroed": bug(
        PASSES,
        "if (DETERMINISTIC && lane == 0",
        "if (false && lane == 0",
        "deadlock never",
        deterministic=True,
    ),
    "turn of all blocks, seen or not": bug(
        SCHEDULE,
        "template tiles<BR, BC, true>(q_tile).end - 1 - k_block",
        "template tiles<BR, BC, false>(q_tile).end - 1 - k_block",
        "deadlock",
        deterministic=True,
    ),
    # Rows.
    "delta not subtracted": bug(PRODUCTS, "dP.at(x / 2, n, x % 2) - D[x % 2]", "dP.at(x / 2, n, x % 2)"),
    "dlse with the wrong sign": bug(PASSES, "delta = of_row - dlse", "delta = of_row + dlse"),
    "LSE in natural units": bug(PASSES, "lse * (ELEMENT_BYTES == 4 ? 1.0f : LOG2_E)", "lse"),
    "rows that see nothing keep LSE = -inf": bug(
        PASSES, "const bool blind = lse == NEG_INF", "const bool blind = false", seqlen_k=90
    ),
    "row numbers of the other stage": bug(
        PRODUCTS,
        "rows_smem + stage * NUMBERS_BYTES + (first",
        "rows_smem + (stage ^ 1) * NUMBERS_BYTES + (first",
        "race never",
    ),
    "one row past the end read": bug(
        MAIN,
        "valid ? sequence.rows() - row : 0",
        "valid ? sequence.rows() - row + 1 : 0",
        "out-of-range",
        heads=1,
    ),
    # Products.
    "V in the place of K": bug(
        PRODUCTS,
        "multiply_keys(WEIGHT_GRADIENTS, dP_rmem, V_smem, dO",
        "multiply_keys(WEIGHT_GRADIENTS, dP_rmem, K_smem, dO",
    ),
    "slope of the cap forgotten": bug(
        PRODUCTS, "slope[n][x] = cap_slope(", "slope[n][x] = 1.0f + 0.0f * (", softcap=1.0
    ),
    "P of the partners from the wrong columns": bug(
        PRODUCTS, "(part + x) % PARTS * PART_QUERIES + c", "(part + x + 1) % PARTS * PART_QUERIES + c"
    ),
    "dS stored before its tile": bug(
        MAIN,
        "dS_keys = dS_smem + stage * TILE_BYTES",
        "dS_keys = dS_smem + (stage ^ 1) * TILE_BYTES",
        "race never",
    ),
    "dK not scaled": bug(STORE, "store(K_smem, dK_rmem, p.scale)", "store(K_smem, dK_rmem, 1.0f)"),
    "dK past the end": bug(
        STORE,
        "PITCH, stored_keys - row, lane);\n  store_tile",
        "PITCH, stored_keys - row + 1, lane);\n  store_tile",
        "out-of-range",
    ),
    "next tile copied over this one": bug(
        MAIN,
        "copy_of(IRREGULAR ? upcoming() : current.next(tiles), stage() ^ 1, remaining",
        "copy_of(IRREGULAR ? upcoming() : current.next(tiles), stage(), remaining",
        "race never copy",
    ),
    "padding of odd head dims not zeroed": bug(
        MAIN, "zero_padding<Bc, ROW_BYTES, PITCH, NUM_THREADS>(V_smem, thread);", "", "never", head_dim=40
    ),
}


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``patch(file, change)``: a copy of the sources with one file changed, used by what is compiled next."""

    def apply(file: str, change):
        monkeypatch.setattr(compiler, "SOURCE_DIR", with_changed(tmp_path, file, change))

    return apply


def found_by(
    config: TileConfig,
    deterministic: bool = False,
    dtype: str = "float16",
    algorithm: str = "fa2",
    **case: Any,
) -> str:
    """Kinds of findings of a checked run, "wrong" where its gradients are."""
    sizes = {name: case.pop(name, size) for name, size in SHAPE.items()}
    scores = {"mask": CAUSAL, **case}
    made = make_case(1, *sizes.values(), dtype, dlse=True, **scores)
    precision = "float32" if dtype == "float32" else None
    how = {"deterministic": deterministic, "precision": precision, "algorithm": algorithm}
    options = {**made.options, **how, "config": config}
    try:
        run = emulate_backward(*made.arrays, mode="checked", trace=False, threads=1, **options)
    except EmulationError as error:
        return " ".join(sorted({f.kind for f in error.findings}))
    kinds = {f.kind for f in run.findings}
    try:
        with np.errstate(invalid="ignore"):
            assert_gradients([run.results[name] for name in NAMES], made, precision)
    except AssertionError:
        kinds.add("wrong")
    return " ".join(sorted(kinds))


def check_planted(patch, planted: Bug, **how: Any) -> None:
    def change(text: str) -> str:
        assert text.count(planted.old) == 1, f"{planted.old!r} occurs {text.count(planted.old)} times"
        return text.replace(planted.old, planted.new)

    patch(planted.file, change)
    found = found_by(planted.config, planted.deterministic, **how, **planted.case)
    assert any(kind in found for kind in (planted.kinds or "wrong").split()), found or "nothing found"


@pytest.mark.parametrize("name", BUGS)
def test_planted(patch, name):
    check_planted(patch, BUGS[name])


@pytest.mark.sampled(fixed=2, dated=1)
@pytest.mark.parametrize(
    ("file", "i"), [(file, i) for file in (MAIN, PRODUCTS, STORE) for i in range(len(ordering_calls(file)))]
)
def test_every_barrier_and_wait_is_missed(patch, file, i):
    """Without any one of them, checked mode finds something in some run."""
    call = ordering_calls(file)[i]
    patch(file, lambda text: text[: call.start()] + ";" + text[call.end() :])
    found = [found_by(config) for config in (SHARED, ALONE, ONE_STAGE)]
    assert any(set(kinds.split()) - {"wrong"} for kinds in found), call[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [SHARED, ALONE, ONE_STAGE], ids=str)
@pytest.mark.parametrize(
    "case",
    [{}, {"mask": FULL}, {"mask": Band(20, 30), "softcap": 1.0}, {"head_dim": 72}, {"head_dim": 40}],
    ids=str,
)
def test_without_a_bug_all_is_quiet(case, config, deterministic):
    assert found_by(config, deterministic, **case) == ""
