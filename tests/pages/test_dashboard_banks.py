"""Machine code, "Which bytes and banks": accesses as the executor saw them, with and without swizzle or padding."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from dashboard_page_support import has, open_page, words

from cufa.dashboard.model import banks
from cufa.dashboard.model.compiled import compiled_problems
from cufa.kernels import KERNELS
from cufa.run.emulate.launch import Execution
from cufa.run.emulate.run import run_plan
from cufa.run.emulate.shared_accesses import Access, Pass

pytestmark = [
    pytest.mark.emulate,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the executor needs a C++ compiler"),
]


def of(kernel: str) -> tuple[Access, ...]:
    spec = KERNELS[kernel]
    config = next(c for c in spec.configs if c.fits(64))
    found = banks.accesses(spec, config, compiled_problems(spec, 64)[0])
    assert not isinstance(found, str), found
    return found


def test_words_and_wavefronts() -> None:
    """Two words of one bank take two wavefronts; one word for all lanes takes one."""
    assert Pass(tuple(range(32)), tuple(4 * n for n in range(32)), 4).wavefronts == 1
    assert Pass(tuple(range(32)), (64,) * 32, 4).wavefronts == 1
    assert Pass((0, 1), (0, 128), 4).wavefronts == 2
    collide = Pass((0, 1), (0, 128), 4)
    assert [next(x and x[1] for x in wave.words) for wave in banks.wavefronts((collide,))] == [0, 1]
    assert "2-way bank conflicts" in banks.sentence((collide,))


@pytest.mark.parametrize(
    ("kernel", "kind"), [("fa2_forward", "ldmatrix"), ("fa3_forward", "wgmma, operand B")]
)
def test_tiles_have_no_conflict_and_would_have_eight(kernel: str, kind: str) -> None:
    """Padding (FA2) and the copy engine's swizzle (FA3) are what keeps 8 rows of a matrix on 32 banks."""
    spec = KERNELS[kernel]
    tiles = [x for x in of(kernel) if x.kind == kind]
    assert tiles
    for access in tiles:
        assert access.wavefronts == len(access.passes)
        off = tuple(banks.in_plain_rows(x, banks.is_swizzled(spec)) for x in access.passes)
        assert all(x.wavefronts == 8 for x in off)
        assert {b - a for x in off for a, b in zip(x.addresses, x.addresses[1:], strict=False)} == {128}


def test_the_swizzle_is_undone_twice() -> None:
    one = next(x for x in of("fa3_forward") if x.kind.startswith("wgmma")).passes[0]
    assert banks.in_plain_rows(banks.in_plain_rows(one, True), True) == one


def test_the_record_agrees_with_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wavefronts of all kept passes, each line's first execution times its executions, equal the counted ones."""
    counted = []

    def run(*arguments: object, **options: object) -> object:
        counted.append(run_plan(*arguments, **options))  # type: ignore[arg-type]
        return counted[-1]

    monkeypatch.setattr("cufa.run.emulate.shared_accesses.run_plan", run)
    banks.accesses.cache_clear()
    found = of("naive")
    total = counted[0].totals
    assert sum(x.times for x in found if x.kind == "ldmatrix") == total["ldmatrix"]
    assert np.isclose(sum(x.times * x.wavefronts for x in found), total["shared_wavefronts"])
    assert counted[0].mode == Execution("counted").mode


@pytest.mark.parametrize("kernel", ["decode_split", "fa2_backward"])
def test_other_operations_are_executed_too(kernel: str) -> None:
    assert any(x.kind in banks.MATRICES for x in of(kernel))


def test_the_page_draws_an_access_with_padding_on_and_off() -> None:
    asked = {"kernel": "fa2_forward", "d": "64", "banks": "1"}
    app = open_page("machine_code")
    has(words(app), "Which bytes and banks", "32 banks of 4 bytes")
    app = open_page("machine_code", **asked)
    has(words(app), "no bank conflict", "padded by 16 bytes", "executed</span>")
    has(words(open_page("machine_code", **asked, layout="off")), "8-way bank conflicts")
