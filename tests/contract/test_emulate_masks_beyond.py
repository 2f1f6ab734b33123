"""Masks beyond bands in the kernels that serve them, executed on a CPU in checked mode: results against float64, and
how many tiles each block visits and tests against the schedule."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from backward_support import NAMES, assert_gradients, make_case, near
from sampling import of_today
from support import assert_attention, forward_operands, make_inputs

from cufa import masks
from cufa.calls.shapes import make_problem
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, Kernel, TileConfig, kernels_of
from cufa.kernels.support import refusal
from cufa.plan.planner import fitting_configs, make_plan
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import Band, Mask
from cufa.problem.options import Options, resolve_mask
from cufa.problem.problem import BAND_KINDS, Problem
from cufa.run.emulate.calls import Emulation, EmulationError, Execution, emulate_backward, run_plan

DEVICE = Device.typical("sm_90")
CHECKED = Execution("checked")
SPECS = [spec for spec in kernels_of("forward").values() if spec.masks != BAND_KINDS]
BACKWARD = [spec for spec in kernels_of("backward").values() if spec.masks != BAND_KINDS]
VARIANTS = [
    pytest.param(s, d, p, id=f"{s.name}-{d}-{p}")
    for s in (*SPECS, *BACKWARD)
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


def examples(seqlen_q: int, seqlen_k: int) -> dict[str, Mask]:
    """Of 2 sequences and 2 key/value heads."""
    rng = np.random.default_rng(seqlen_q + 7 * seqlen_k)
    cut = int(rng.integers(0, seqlen_k + 1))
    lengths = [cut, 0, seqlen_k - cut]
    return {
        "prefix": masks.prefix(70),
        "prefix of each": masks.prefix(np.array([1, seqlen_k])),
        "streaming": masks.streaming(3, 20),
        "global": masks.global_window(5, 10, 3),
        "sets beyond the ends": Band(2, 3, diagonal=-90, prefix=1, keep=500, global_tokens=400),
        "documents": masks.documents(lengths),
        "documents both ways": masks.documents(lengths, causal=False),
        "chunks": masks.chunks(50),
        "evicted": masks.evict(rng.integers(0, seqlen_q + 1, seqlen_k).astype(np.int32)),
        "one run, of heads": columns(1, seqlen_k, seqlen_q, 1, (1, 2)),
        "one run, of sequences, in a window": columns(2, seqlen_k, seqlen_q, 1, (2, 1), Band(30, 9)),
        "two runs, of both": columns(3, seqlen_k, seqlen_q, 2, (2, 2), Band(right=4, diagonal="top-left")),
    }


def smallest(spec: Kernel, head_dim: int = 64) -> TileConfig:
    return min(fitting_configs(spec, near(spec, head_dim), DEVICE), key=lambda c: c.block_q * c.block_kv)


def run(
    spec: Kernel,
    mask: Mask,
    seqlen_q: int,
    seqlen_k: int,
    *,
    dtype: str | None = None,
    precision: str | None = None,
    softcap: float | None = None,
    head_dim: int = 64,
    config: TileConfig | None = None,
    execution: Execution = CHECKED,
) -> Emulation:
    """One run of 2 sequences of 4 heads that share keys in pairs."""
    dtype = dtype or spec.dtypes[0]
    q, k, v = make_inputs(2, 4, 2, seqlen_q, seqlen_k, head_dim, dtype)
    problem = make_problem(
        [x.shape for x in (q, k, v)],
        dtype,
        Options(resolve_mask(False, None, mask), softcap, None, precision if dtype == "float32" else None),
    )
    plan = make_plan(problem, DEVICE, spec.algorithm, config)
    assert plan.spec is spec
    given = forward_operands(q, k, v)
    result = run_plan(plan, given, execution)
    assert not result.findings, "\n".join(map(str, result.findings))
    scores = {"mask": mask, "softcap": softcap}
    assert_attention(given["out"], given["lse"], q, k, v, precision=precision, **scores)
    unseen = np.isneginf(given["lse"])
    assert not given["out"][unseen].any(), "rows that see no key are zero"
    assert_tally(result)
    return result


def run_backward(
    spec: Kernel,
    mask: Mask,
    seqlen_q: int,
    seqlen_k: int,
    *,
    dtype: str | None = None,
    precision: str | None = None,
    softcap: float | None = None,
    head_dim: int = 64,
    config: TileConfig | None = None,
    execution: Execution = CHECKED,
) -> Emulation:
    """Likewise of the backward, at the head dim that it serves nearest to this one."""
    dtype = dtype or spec.dtypes[0]
    head_dim = near(spec, head_dim)
    case = make_case(2, 4, 2, seqlen_q, seqlen_k, head_dim, dtype, mask=mask, softcap=softcap)
    precision = precision if dtype == "float32" else None
    result = emulate_backward(
        *case.arrays,
        **case.options,
        algorithm=spec.algorithm,
        precision=precision,
        config=config,
        mode=execution.mode,
        schedule=execution.schedule,
    )
    assert result.plan.spec is spec
    assert not result.findings, "\n".join(map(str, result.findings))
    assert_gradients([result.results[name] for name in NAMES], case, precision)
    assert_tally(result)
    return result


def execute(spec: Kernel, *arguments, **options) -> Emulation:
    return (run_backward if spec.operation == "backward" else run)(spec, *arguments, **options)


def assert_tally(result: Emulation) -> None:
    """Of each block as many visited and as many clear tiles as the schedule says, the first of each where it says.
    (naive has no tiles to count.)"""
    plan = result.plan
    if plan.spec.name == "naive":
        return
    group = plan.problem.group_size
    found = {(int(x["batch"]), int(x["head"]), int(x["q_block"])): x for x in result.records}
    blocks = 0
    for part in plan.problem.parts:
        schedule = plan.schedule_of(part.problem)
        of_heads = part.kv_heads if schedule.by_keys else part.heads
        heads = plan.problem.kv_heads if schedule.by_keys else plan.problem.kv_heads * group
        for batch in range(plan.problem.batch)[part.batch]:
            for head in range(heads)[of_heads]:
                for block, classes in enumerate(schedule.classes):
                    record = found[batch, head, block]
                    visited, clear = np.flatnonzero(classes > 0), np.flatnonzero(classes == 2)
                    assert record["tiles_visited"] == len(visited), (batch, head, block)
                    assert record["tiles_clear"] == len(clear), (batch, head, block)
                    assert record["tiles_skipped"] == len(classes) - len(visited)
                    assert record["first_tile"] == (visited[0] if len(visited) else 0)
                    assert record["first_clear"] == (clear[0] if len(clear) else 0)
                    blocks += 1
    assert blocks == len(result.records)


@pytest.mark.parametrize("name", examples(1, 1))
@pytest.mark.parametrize("spec", [*SPECS, *BACKWARD], ids=lambda s: s.name)
def test_lengths(spec, name):
    for lengths in of_today(LENGTHS, f"masks beyond {spec.name} {name}", fixed=3):
        execute(spec, examples(*lengths)[name], *lengths, config=smallest(spec))


@pytest.mark.parametrize("name", ["streaming", "global", "documents", "two runs, of both"])
@pytest.mark.parametrize(("spec", "dtype", "precision"), VARIANTS)
def test_elements(spec, dtype, precision, name):
    execute(spec, examples(150, 200)[name], 150, 200, dtype=dtype, precision=precision)


def refuses(spec: Kernel, config: TileConfig, softcap: float | None = None) -> bool:
    """Whether these tiles of the kernel are not for masks beyond a band."""
    form = {"precision": spec.precisions[0], "operation": spec.operation}
    problem = Problem(1, 1, 1, 8, 8, 64, spec.dtypes[0], masks.prefix(1), 1.0, softcap, **form)
    return refusal(spec, problem, config=config) is not None


CONFIGS = [
    pytest.param(s, c, id=f"{s.name}-{i}")
    for s in (*SPECS, *BACKWARD)
    for i, c in enumerate(s.configs)
    if c.fits(max(64, c.min_head_dim)) and not refuses(s, c)
]


@pytest.mark.parametrize(("spec", "config"), CONFIGS)
def test_tilings(spec, config):
    """At a head dim of each, with a cap that bends most scores. A mask of each kind is a build of its own."""
    head_dim = max(64, config.min_head_dim)
    softcap = None if refuses(spec, config, 0.7) else 0.7
    kinds = "sets beyond the ends", "evicted", "two runs, of both"
    for name in of_today(kinds, f"kinds {spec.name} {config}", fixed=0):
        execute(spec, examples(140, 270)[name], 140, 270, head_dim=head_dim, config=config, softcap=softcap)


@pytest.mark.parametrize("seed", range(16))
def test_random_descriptors(seed):
    """Sets and runs of any kind: what is skipped holds no visible score, or the result would be wrong."""
    rng = random.Random(seed)
    served = [*SPECS, *BACKWARD]
    spec = served[seed % len(served)]
    seqlen_q, seqlen_k = rng.randint(1, 300), rng.randint(1, 300)
    left, right = (rng.choice([None, rng.randint(0, 150)]) for _ in range(2))
    diagonal = rng.choice(["bottom-right", "top-left", rng.randint(-200, 200)])
    prefix, keep, global_tokens = (rng.choice([0, 1, rng.randint(0, 200)]) for _ in range(3))
    if seed % 2:
        mask: Mask = Band(left, right, diagonal, prefix, keep, global_tokens or 1)
    else:
        spread = rng.choice([1, 2]), rng.choice([1, 2])
        mask = columns(seed, seqlen_k, seqlen_q, rng.choice([1, 2]), spread, Band(left, right, diagonal))
    execute(spec, mask, seqlen_q, seqlen_k, config=smallest(spec))


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
    for runs, expected in cases.items():
        vectors = np.zeros((2 * len(runs), 1, 1, 3 * block_kv), np.int32)
        for n, (lo, hi) in enumerate(runs):
            vectors[2 * n, ..., block_kv : 2 * block_kv], vectors[2 * n + 1, ..., block_kv : 2 * block_kv] = (
                lo,
                hi,
            )
        result = run(spec, Columns(Band(), Integers(vectors)), 3 * block_q, 3 * block_kv, config=config)
        record = next(x for x in result.records if x["q_block"] == 1)
        assert result.plan.schedule.classes[1, 1] == expected
        assert (record["tiles_visited"], record["tiles_clear"]) == (2 + (expected > 0), 2 + (expected == 2))


def test_hidden_keys_are_not_read():
    """NaN in the keys and values of tiles that are skipped reaches nothing."""
    q, k, v = make_inputs(1, 2, 1, 200, 256, 64, "float16")
    mask = Columns(
        Band(), Integers(np.array([64 * [0] + 64 * [0] + 128 * [9], 128 * [500] + 128 * [0]])[:, None, None])
    )
    problem = make_problem(
        [x.shape for x in (q, k, v)],
        "float16",
        Options(mask),
    )
    given = forward_operands(q, k, v)
    clean = run_plan(make_plan(problem, DEVICE, "fa2"), given, CHECKED)
    poisoned = forward_operands(
        q, *(np.concatenate([np.full_like(x[:, :, :128], np.nan), x[:, :, 128:]], 2) for x in (k, v))
    )
    again = run_plan(make_plan(problem, DEVICE, "fa2"), poisoned, CHECKED)
    assert not clean.findings and not again.findings
    np.testing.assert_array_equal(poisoned["out"], given["out"])


LOOKED_UP, HOPPER = "shared/irregular_mask.cuh", "backward/fa3_common/block.cuh"
SCORES = "forward/irregular_scores.cuh"
BY_KEYS = "backward/common/mask_by_keys.cuh"
WIDE, LOADER = "backward/fa3_pair/kernel.cu", "backward/fa3_common/loader.cuh"

#: (file, what is there, what is planted, kernel, mask that shows it), by what is wrong.
PLANTED = {
    "the band's right edge misses a tile": (
        LOOKED_UP, "some = left <= end - 1 + last,", "some = left < end - 1 + last,", "fa2_forward", "edge"
    ),
    "a tile that is hidden but for a row is skipped": (
        LOOKED_UP, "end <= x.least_hi);", "end - 1 <= x.least_hi);", "fa2_forward", "covered but for a row"
    ),
    "a tile that is wholly hidden is visited": (
        LOOKED_UP, "end <= x.least_hi);", "end < x.least_hi);", "fa2_forward", "covered"
    ),
    "a tile whose last row is hidden is called clear": (
        LOOKED_UP, "end > x.least_lo);", "end - 1 > x.least_lo);", "fa2_forward", "last row"
    ),
    "a run ends a row late": (
        SCORES, "if (past + 8 * r < length[e])", "if (past + 8 * r <= length[e])", "fa2_forward", "two runs, of both"
    ),
    "a run ends a row late, by keys": (
        BY_KEYS, "- lo[run] >= length[run];", "- lo[run] > length[run];", "fa2_backward", "two runs, of both"
    ),
    "runs of another head": (
        LOOKED_UP, "(mask.heads > 1 ? kv_head : 0)", "(0)", "fa2_forward", "one run, of heads"
    ),
    "runs of another sequence": (
        LOOKED_UP, "(mask.sequences > 1 ? batch : 0)", "(0)", "fa2_backward", "one run, of sequences, in a window"
    ),
    "the extremes of the first run for both": (
        LOOKED_UP, "workspace.extremes_of(number + run, block)", "workspace.extremes_of(number, block)", "fa2_forward",
        "documents both ways",
    ),
    "rows of runs are not shifted": (
        LOOKED_UP, "i64(given_lo) - p.mask.run_shift", "i64(given_lo)", "fa2_forward", "shifted"
    ),
    "empty runs count": (
        LOOKED_UP, "if (given_lo < given_hi) {", "if (true) {", "fa2_forward", "empty within a tile"
    ),
    "the prefix of another sequence": (
        LOOKED_UP, "numbers + batch * all", "numbers", "fa2_forward", "prefix of each"
    ),
    "kept keys are forgotten": (
        SCORES, "min(mask.keep - key, end)", "0", "fa2_forward", "streaming"
    ),
    "kept keys are forgotten, by keys": (
        BY_KEYS, " || (Looked::SETS && j < mask.keep)", "", "fa2_backward", "streaming"
    ),
    "global rows see no more than others, by keys": (
        BY_KEYS, " || (Looked::SETS && row < exempt)", "", "fa2_backward", "global rows alone"
    ),
    "tiles of global rows are skipped": (
        LOOKED_UP, "some || left < prefix || top < exempt", "some || left < prefix", "fa2_forward", "global rows alone"
    ),
    "K of another tile is copied": (
        "forward/fa2/kernel.cu", "K_stream.skip(walked.tile() - 1 - next.tile(), k_stride);", "", "fa2_forward",
        "one run, of heads",
    ),
    "dQ of another tile": (
        "backward/fa2/kernel.cu", "add_dq(IRREGULAR ? before", "add_dq(IRREGULAR ? current", "fa2_backward",
        "documents",
    ),
    "Q by its place in the list": (
        LOADER, "block.row_in_arrays() + at.block.q_tile(at.tile) * Br;",
        "block.row_in_arrays() + at.tile.q_tile * Br;",
        "fa3_backward", "first rows",
    ),
    "gradients of queries by their place in the list": (
        HOPPER, "+ u32(q_tile(tile));", "+ u32(tile.q_tile);", "fa3_backward", "first rows"
    ),
    "the mask of a place in the list": (
        "backward/fa3_common/gradients.cuh", "row = block.q_tile(tile) * Br", "row = tile.q_tile * Br", "fa3_backward",
        "first rows but one",
    ),
    "a listed tile is clear whatever it is": (
        HOPPER, "listed(tile.q_tile).masked() || extends_past_end()", "extends_past_end()",
        "fa3_backward", "first rows but one"
    ),
    "the list of the key block before": (
        HOPPER, "p, item.k_block, item.batch, item.kv_head, tile);",
        "p, max(item.k_block - 1, 0), item.batch, item.kv_head, tile);", "fa3_backward",
        "first rows",
    ),
    "runs that nobody has prepared": (
        WIDE, "  prepare_mask<MASK_KIND>(p,", "  prepare_mask<MASK_CAUSAL>(p,", "fa3_backward_wide", "first rows"
    ),
    "a list made by one thread": (
        WIDE, "LOOKED_UP ? thread / 32 == 1 : thread == 32", "thread == 32", "fa3_backward_wide", "first rows"
    ),
}  # fmt: skip
#: What Hopper's kernels share is planted in both.
IN_KERNELS = [
    (bug, kernel)
    for bug, (*_, named, _) in PLANTED.items()
    for kernel in ((named, "fa3_backward_wide") if named == "fa3_backward" else (named,))
]


def _shown(config: TileConfig) -> dict[str, Mask]:
    """Masks that show one bug each, for tiles of this size."""
    rows, keys = config.block_q, config.block_kv

    def one_tile(lo: int, hi: int) -> Columns:
        vectors = np.zeros((2, 1, 1, 300), np.int32)
        vectors[0, ..., keys : 2 * keys], vectors[1, ..., keys : 2 * keys] = lo, hi
        return Columns(Band(), Integers(vectors))

    return {
        **examples(200, 300),
        "covered": one_tile(rows, 2 * rows),
        "first rows": one_tile(0, rows),
        "first rows but one": one_tile(0, rows + 1),
        "covered but for a row": one_tile(rows, 2 * rows - 1),
        "last row": one_tile(2 * rows - 1, 2 * rows),
        "empty within a tile": one_tile(rows + 5, rows + 5),
        "edge": Band(None, 1, "top-left", prefix=1),
        "shifted": masks.chunks(100),
        "global rows alone": Band(0, 0, "top-left", global_tokens=3),
    }


@pytest.mark.parametrize(("bug", "kernel"), IN_KERNELS)
def test_planted(plant, bug, kernel):
    """Each is found by what the tests above compare."""
    file, old, new, _, mask = PLANTED[bug]
    spec = KERNELS[kernel]
    config = smallest(spec)
    if "dQ" in bug:  # warps that add behind a tile: with two stages, and keys that warps share
        config = next(c for c in spec.configs if c.num_stages == 2 and c.shared_keys)
    head_dim = max(64, config.min_head_dim)
    options = {"config": config, "head_dim": head_dim, "execution": Execution()}
    if bug in of_today(list(PLANTED), "masks beyond clean", fixed=0, dated=2):
        execute(spec, _shown(config)[mask], 200, 300, **options)
    plant(file, old, new)
    with pytest.raises((AssertionError, EmulationError)):
        execute(spec, _shown(config)[mask], 200, 300, **options)


def test_what_is_refused_is_refused_in_words():
    within_sets = dataclasses.replace(columns(0, 64, 64, 1), band=Band(right=0, prefix=3))
    for mask, words in ((within_sets, "within a plain band"),):
        problem = make_problem(
            [(1, 1, 64, 64)] * 3,
            "float16",
            Options(mask),
        )
        assert words in (KERNELS["fa2_forward"].refuses(problem) or "")
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
