"""What kernels serve: decided by one module, and told by it."""

from __future__ import annotations

import dataclasses

import pytest
from support import changed

import cufa
from cufa import masks
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of, support
from cufa.kernels.support import refusal
from cufa.problem.problem import Problem

CALLS = {
    "forward": cufa.flash_attention,
    "backward": cufa.flash_attention_backward,
    "decode": cufa.flash_decode,
}


@pytest.mark.parametrize("operation", CALLS)
def test_docstrings_say_what_the_declarations_say(operation):
    text = " ".join((CALLS[operation].__doc__ or "").split())
    for sentence in support.summary(kernels_of(operation).values()):
        assert sentence in text


def test_the_table_has_a_row_for_each_kernel_but_the_ablations():
    lines = support.table(KERNELS.values()).splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]
    assert names == [name for name in KERNELS if "noskip" not in name]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("spec", KERNELS.values(), ids=lambda s: s.name)
def test_what_a_kernel_does_not_declare_is_refused(spec):
    """Each option that is taken away is refused by its name, with a sentence that names what the call passed."""
    if spec.operation == "decode":
        pytest.skip("decode has no lengths of these kinds")
    form = {"precision": spec.precisions[0], "operation": spec.operation}
    plain = Problem(1, 1, 1, 8, 8, spec.configs[0].min_head_dim, spec.dtypes[0], **form)
    assert refusal(spec, plain) is None
    for option, word in (("alibi", "ALiBi"), ("sink", "sink"), ("deterministic", "fixed order")):
        asked = dataclasses.replace(plain, **{option: True})
        assert (refusal(spec, asked) is None) == (option in spec.options)
        fewer = changed(spec, options=tuple(x for x in spec.options if x != option))
        assert word in (refusal(fewer, asked) or "")
    for option in spec.options:
        if option in ("alibi", "sink", "deterministic") and "sets" in spec.masks:
            asked = dataclasses.replace(plain, mask=masks.prefix(3), **{option: True})
            assert "with band masks only" in (refusal(spec, asked) or "")
    assert "not float64" in (refusal(spec, dataclasses.replace(plain, dtype="float64")) or "")
    if spec.max_capability == 90:
        assert refusal(spec, plain, device=Device.typical("sm_80")) == "needs sm_90"
