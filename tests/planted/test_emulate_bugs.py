"""Planted bugs: each must be found and named, and clean kernels must be quiet.

First in a small kernel made for it (``planted.cu``), then in the real ones: every barrier and every wait is
taken out, one at a time.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from changed_sources import with_changed
from planted_support import run_planted
from sampling import of_today
from support import make_inputs

from cufa import kernels
from cufa.build import compiler
from cufa.gpu.architectures import Device
from cufa.kernels import Launch
from cufa.plan.planner import fitting_configs
from cufa.problem.mask import Band
from cufa.problem.problem import BAND_KINDS
from cufa.run.emulate.calls import EmulationError, Execution, Finding, emulate

#: Bugs of planted.cu in the order of its enum: the kind of finding that names it, and what its message says.
PLANTED = {
    "none": ("", ""),
    "missing_barrier": ("race", "no barrier orders this access after another thread's: shared offset"),
    "missing_wait": ("copy-not-awaited", "touches data of an asynchronous copy that was not waited for"),
    "wrong_stage": ("race", "no barrier orders this access after another thread's: shared offset"),
    "row_past_the_end": ("out-of-range", "of in, which has 6144"),
    "shared_past_the_end": ("out-of-range", "outside the block's 5376 bytes"),
    "misaligned": ("misaligned", "is not aligned"),
    "divergent_shuffle": ("divergence", "lanes 4-31 wait for shfl"),
    "divergent_ldmatrix": ("divergence", "while other lanes wait at"),
    "divergent_mma": ("divergence", "executed by some lanes of warp"),
    "missing_fence": ("accumulator-touched", "were written before mma_fence()"),
    "skipped_barrier": (
        "deadlock",
        f"warp 0 all lanes wait for the block's barrier at {Path(__file__).with_name('planted.cu')}:",
    ),
    "wrong_barrier_count": ("(barrier|deadlock)", "barrier 1"),
    "never_written": ("never-written", "shared memory that nothing has written"),
    "missing_warp_sync": ("race", "no barrier orders this access after another thread's: shared offset"),
    "plain_access": ("race", "at plain C++ access"),
    "global_race": ("race", "of scratch, block"),
    "shared_output": ("race", "of one launch both touch byte"),
    "copy_in_flight": ("copy-in-flight", "kernel ends with cp.async still in flight"),
    "plain_global_race": ("race", "of one launch both touch byte"),
    "unpadded": ("", ""),  # right, but slow: counted mode's to find
    "structures": ("", ""),
    "structure_race": ("race", "of one launch both touch byte"),
}
_PLACE = re.compile(r"block \(\d,0,0\):? warp \d|warp \d lane \d+|lanes of warp \d")


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``patch(file, change)``: a copy of the sources with one file changed, used by what is compiled next."""

    def apply(file: str, change):
        monkeypatch.setattr(compiler, "SOURCE_DIR", with_changed(tmp_path, file, change))

    return apply


def run(bug: int, mode: str, **options):
    """Two blocks of two warps over three tiles: (out, findings), or (counters, findings)."""
    tiles = np.random.default_rng(0).integers(0, 1 << 12, (3 * 32, 16), np.uint32)
    out, scratch = np.zeros((2, 64), np.uint32), np.zeros((2, 64), np.uint32)
    fields, shared = {"in_": tiles, "out": out, "scratch": scratch, "tiles": 3}, 2 * 32 * 80 + 256
    launch, execution = Launch("planted", (2, 1, 1), 64, shared), Execution(mode, threads=1, **options)
    constants = {"SMEM_BYTES": shared}
    outcome = run_planted("planted.cu", bug, fields, (launch,), execution, constants=constants)
    return outcome.counters["planted"] if mode == "counted" else out, outcome.findings


@pytest.mark.sampled(each="name")
@pytest.mark.parametrize("schedule", ["ascending", "descending", 1])
@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, schedule):
    """Found on every schedule, saying who and where."""
    kind, message = PLANTED[name]
    _, found = run(list(PLANTED).index(name), "checked", schedule=schedule)
    text = "\n".join(map(str, found))
    if not kind:
        assert not found, text
        return
    assert any(re.fullmatch(kind, f.kind) and message in f.message for f in found), text
    assert all(_PLACE.search(f.message) for f in found), text


def test_unpadded_rows_conflict():
    """Counted mode: eight rows of an ldmatrix at a pitch of 64 bytes share two groups of banks;
    at 80 bytes none is shared."""
    clean, _ = run(0, "counted")
    unpadded, _ = run(list(PLANTED).index("unpadded"), "counted")
    matrices, before, after = (
        4 * clean["ldmatrix"].sum(),
        clean["bank_conflicts"].sum(),
        unpadded["bank_conflicts"].sum(),
    )
    assert after >= 3 * matrices > before  # before: of the copies
    assert unpadded["shared_wavefronts"].sum() - clean["shared_wavefronts"].sum() == after - before


def test_numbers_alone_do_not_show_them():
    """A race may compute the right answer: why checked mode exists."""
    clean, _ = run(0, "plain")
    racy, _ = run(list(PLANTED).index("missing_warp_sync"), "plain", schedule="ascending")
    assert (clean != 0).any()
    assert racy.shape == clean.shape
    for schedule in ("descending", 3):
        for copies in ("early", "late"):
            np.testing.assert_array_equal(run(0, "plain", schedule=schedule, copies=copies)[0], clean)


@pytest.mark.parametrize("name", ["skipped_barrier", "divergent_shuffle"])
def test_found_in_plain_mode_too(name):
    """What stops a kernel is reported in every mode."""
    _, found = run(list(PLANTED).index(name), "plain")
    assert kinds(found) <= {"deadlock", "divergence"} and found


def kinds(found) -> set[str]:
    return {f.kind for f in found}


def _runs(kernel: str, dtype: str, head_dims):
    """(algorithm, dtype, config, head dim): what takes a kernel through all of its branches."""
    spec = kernels.KERNELS[kernel]
    sm_90 = Device.typical("sm_90")
    return [
        (spec.algorithm, dtype, config, d) for d in head_dims for config in fitting_configs(spec, d, sm_90)
    ]


RUNS = {
    "forward/fa2/kernel.cu": _runs("fa2_forward", "float16", head_dims=(64, 136, 256)),
    "forward/fa2/store.cuh": _runs("fa2_forward", "float16", head_dims=(64, 136, 256)),
    "forward/fa2_f32/kernel.cu": _runs("fa2_forward_f32", "float32", head_dims=(64, 136)),
    "forward/fa1/kernel.cu": _runs("fa1_forward", "float16", head_dims=(64, 128, 40)),
    "forward/fa1_f32/kernel.cu": _runs("fa1_forward_f32", "float32", head_dims=(64, 136)),
    "forward/naive/kernel.cu": [
        *_runs("naive", "float16", head_dims=(64, 160)),
        *_runs("naive", "float32", head_dims=(64,)),
    ],
}

#: A mask whose tiles are looked up: kernels that serve it have calls in its builds alone.
LOOKED_UP = Band(left=40, right=0, keep=5)


def masks_of(file: str) -> list[dict[str, Band]]:
    """Options of :func:`findings` that take a kernel through the ways in which it finds its tiles."""
    specs = [spec for spec in kernels.KERNELS.values() if spec.source == file]
    spec = specs[0] if specs else None  # None: of a part that all masks share
    beyond = spec is not None and spec.masks != BAND_KINDS
    return [{}, {"mask": LOOKED_UP}] if beyond else [{}]


#: Calls that order threads or wait for copies. (mma_fence is for this executor alone.)
_ORDERING = re.compile(r"\b(?:block_sync|warp_sync|bar_sync|group\.sync|cp_async_wait<[^>;]*>)\([^;]*\);")


def replace(old: str, new: str):
    """A change of exactly one place."""

    def change(text: str) -> str:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        return text.replace(old, new)

    return change


def findings(algorithm="fa2", dtype="float16", config=None, head_dim=64, **options):
    """What two small runs of the kernel as a GPU runs it say. In the second one most rows see no key. Causal, unless
    a mask is given."""
    found: tuple[Finding, ...] = ()
    for seqlen_q, seqlen_k in ((140, 300), (150, 17)):
        q, k, v = make_inputs(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype)
        options = {"causal": "mask" not in options, "mode": "checked", "trace": False, **options}
        try:
            found += emulate(q, k, v, algorithm=algorithm, config=config, **options).findings
        except EmulationError as error:
            found += error.findings
    return found


def path_of(file: str) -> str:
    return file


def ordering_calls(file: str) -> list[re.Match[str]]:
    """Every barrier and wait in a kernel, but those of trace builds and those that bind the compiler."""
    text = (compiler.SOURCE_DIR / path_of(file)).read_text(encoding="utf-8")
    calls = []
    for match in _ORDERING.finditer(text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        commented = "//" in text[line_start : match.start()]
        traced = text[:line_start].rstrip().endswith("if constexpr (TRACE) {")
        for_compiler = "keeps the compiler from" in text[match.end() :].split("\n")[0]
        if not (commented or traced or for_compiler):
            calls.append(match)
    return calls


@pytest.mark.sampled(fixed=4, dated=1)
@pytest.mark.parametrize(
    ("file", "i"), [(file, i) for file in RUNS for i in range(len(ordering_calls(file)))]
)
def test_every_barrier_and_wait_is_missed(patch, file, i):
    """Without any one of them, checked mode finds something in some run: none is superfluous, none unseen."""
    call = ordering_calls(file)[i]
    patch(path_of(file), lambda text: text[: call.start()] + ";" + text[call.end() :])
    for mask, run in itertools.product(masks_of(file), RUNS[file]):
        if findings(*run, **mask):
            return
    line = call.string.count("\n", 0, call.start()) + 1
    pytest.fail(
        f"line {line}: nothing found without {call[0]}: it is superfluous, or the checks are blind to it"
    )


@pytest.mark.parametrize("file", RUNS)
def test_clean_kernels_are_quiet(file):
    for algorithm, dtype, config, head_dim in of_today(RUNS[file], f"quiet {file}"):
        for mask in masks_of(file):
            assert findings(algorithm, dtype, config, head_dim, **mask) == ()


def test_divergent_shuffle(patch):
    patch(
        "shared/softmax.cuh",
        replace("x = fmaxf(x, shfl_xor(x, 1));", "if (threadIdx.x % 32 < 16) x = fmaxf(x, shfl_xor(x, 1));"),
    )
    found = findings()
    assert kinds(found) == {"divergence"}
    assert "all 32 lanes must reach it together" in found[0].message


def test_row_past_the_end(patch):
    """One row too many is read: in poisoned memory, whatever lies there on a GPU."""
    patch("mma/copy.cuh", lambda text: text.replace("< valid_rows", "<= valid_rows"))
    found = findings()
    assert "out-of-range" in kinds(found)
    assert any("of k, which" in f.message for f in found)
    assert any(
        re.search(r"block \(\d+,\d+,\d+\) warp \d+ lane \d+ at mma/copy.cuh:\d+", f.message) for f in found
    )


@pytest.mark.parametrize("file", RUNS)
def test_bank_conflicts_of_real_kernels(file):
    """None where rows are whole multiples of 128 bytes; else some copies cross a row's end in one pass."""
    for algorithm, dtype, config, head_dim in of_today(RUNS[file], f"conflicts {file}"):
        inputs = make_inputs(1, 2, 1, 140, 200, head_dim, dtype)
        totals = emulate(*inputs, algorithm=algorithm, config=config, mode="counted").totals
        assert totals["bank_conflicts"] <= (0 if head_dim % 32 == 0 else 0.1 * totals["shared_wavefronts"])
