"""Everything goes with everything: random compositions against float64, on the CPU and by executed kernels. (On a GPU:
:func:`compositions.compare` with thousands of numbers.)"""

from __future__ import annotations

import pytest
from compositions import Composition, compare, composition

import cufa


def split(it: Composition):
    """Positional arguments after the arrays, and keywords."""
    lengths = [it.options[f"cu_seqlens_{x}"] for x in "qk"] if it.build.lengths == "packed" else []
    return lengths, {x: y for x, y in it.options.items() if not x.startswith("cu_")}


def on_cpu(it: Composition):
    lengths, options = split(it)
    call = cufa.flash_attention_varlen if lengths else cufa.flash_attention
    return call(it.q, it.k, it.v, *lengths, return_lse=True, device="cpu", **options)


def back_on_cpu(it: Composition, out, lse):
    lengths, options = split(it)
    call = cufa.flash_attention_varlen_backward if lengths else cufa.flash_attention_backward
    order = {"deterministic": it.build.deterministic, "gradients": it.gradients}
    return call(it.dout, it.q, it.k, it.v, out, lse, *lengths, device="cpu", **order, **options)


@pytest.mark.parametrize("number", range(0, 8 * 60, 9))
def test_on_the_cpu(number):
    it = composition(number, [8, 16, 24, 40], 70)
    assert not (wrong := compare(it, on_cpu, back_on_cpu)), f"{wrong}: {it}"


@pytest.mark.emulate
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(0, 8 * 300, 9))
def test_executed_kernels(number):
    """What no kernel serves is refused before anything runs."""
    it = composition(number, [16, 40, 64, 72, 128, 192], 200)
    algorithm = ("fa3", "fa2")[number % 2 or it.build.dtype == "float32"]

    def forward(it: Composition):
        options = dict(it.options, algorithm=algorithm, mode="checked", precision=it.build.precision)
        if number // 9 % 3 == 0 and it.build.dtype != "float32":
            options["num_splits"] = 2
        done = cufa.emulate(it.q, it.k, it.v, **options)
        assert not done.findings
        return done.results["out"], done.results["lse"]

    def backward(it: Composition, out, lse):
        order = {"deterministic": it.build.deterministic, "gradients": it.gradients}
        options = dict(it.options, algorithm=algorithm, mode="checked", precision=it.build.precision)
        done = cufa.emulate_backward(it.dout, it.q, it.k, it.v, out, lse, **order, **options)
        assert not done.findings
        return done.results.values()

    try:
        wrong = compare(it, forward, backward)
    except ValueError as refused:
        assert "no kernel runs" in str(refused)  # noqa: PT017
        pytest.skip("no kernel serves it")
    assert not wrong, f"{wrong}: {it}"
