"""What kernels serve: decided by one module, and told by it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from support import changed

import cufa
from cufa import masks
from cufa.build.compiler import SOURCE_DIR, choices, config_file, included_files
from cufa.gpu.architectures import Device
from cufa.kernels import KERNELS, kernels_of, support
from cufa.kernels.support import refusal
from cufa.problem.lengths import DENSE, LENGTH_KINDS, Cached, Packed, Padded
from cufa.problem.problem import MASK_KINDS, Problem

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


def test_the_readmes_table_has_all_kernels_but_the_ablations():
    table = support.table(KERNELS.values())
    lines = table.splitlines()
    names = [name for line in lines[2:] for name in line.split(" | ")[0].removeprefix("| ").split(", ")]
    assert names == [name for name in KERNELS if "noskip" not in name]
    assert len({line.count("|") for line in lines}) == 1
    assert table in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("spec", [x for x in KERNELS.values() if not x.ablation], ids=lambda s: s.name)
def test_the_table_names_global_tokens_where_they_are_served(spec):
    dtypes = {"out_dtype": next(iter(spec.out_dtypes), None)}
    dtypes |= dict.fromkeys(("k_dtype", "v_dtype"), next(iter(spec.k_dtypes), None))
    problem = Problem(
        1, 1, 1, 8, 64, max(spec.configs[0].min_head_dim, spec.head_dim_multiple), spec.dtypes[0],
        mask=masks.global_window(2, 4, 0),
        precision=spec.precisions[0], operation=spec.operation, **dtypes,
        lengths=Cached() if spec.operation == "decode" else DENSE,
    )  # fmt: skip
    if spec.scales and spec.operation == "decode":
        problem = dataclasses.replace(problem, scales=("", "token", "token"))
    said = support.table([spec])
    assert ("all masks" in said or "global tokens" in said) == (refusal(spec, problem) is None)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=lambda s: s.name)
def test_what_a_kernel_does_not_declare_is_refused(spec):
    """Each option that is taken away is refused by its name, with a sentence that names what the call passed."""
    if spec.operation == "decode":
        pytest.skip("decode has no lengths of these kinds")
    form = {"precision": spec.precisions[0], "operation": spec.operation}
    form["out_dtype"] = next(iter(spec.out_dtypes), None)
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
            assert (refusal(spec, asked) is None) == (option in spec.options_with_irregular_masks)
            fewer = changed(spec, options_with_irregular_masks=())
            assert "with band masks only" in (refusal(fewer, asked) or "")
    assert "not float64" in (refusal(spec, dataclasses.replace(plain, dtype="float64")) or "")
    if spec.max_capability == 90:
        assert refusal(spec, plain, device=Device.typical("sm_80")) == "needs sm_90"


def test_decode_kernels_serve_chunks_and_no_other_runs_of_rows():
    spec = kernels_of("decode")["decode_split"]
    problem = Problem(1, 1, 1, 1, 8, 64, "float16", masks.chunks(3), lengths=Cached(), operation="decode")
    assert refusal(spec, problem) is None
    other = dataclasses.replace(problem, mask=masks.evict([5] * 8))
    assert "serves chunks, no other masks that hide" in (refusal(spec, other) or "")


_ASSERTION = re.compile(r"static_assert\((.*?),\s*\"", re.DOTALL)
_WORDS = {
    *("not", "and", "or", "LENGTHS_KIND", "DENSE", "PACKED", "RAGGED", "IRREGULAR", "LISTED"),
    *("ALIBI", "SINK", "DETERMINISTIC", "SPLIT_KEYS", "SKIP_MASKED_TILES"),
}
_MASKS = dict(
    zip(
        MASK_KINDS,
        (
            masks.full(),
            masks.causal(),
            masks.window(3, 3),
            masks.prefix(3),
            masks.evict([5] * 8),
            masks.columns([0] * 8, [1] * 8, [3] * 8, [4] * 8),
            masks.from_dense(np.indices((8, 8)).sum(axis=0) % 2 == 0),
        ),
        strict=True,
    )
)
_LENGTHS = DENSE, Padded((8,), (8,)), Packed(8, 8, (8,), (8,))


@pytest.mark.parametrize(
    "spec", [x for x in KERNELS.values() if x.operation != "decode"], ids=lambda spec: spec.name
)
def test_static_asserts_say_what_is_refused(spec):
    """Of the options that go with a mask: a build is refused by a static_assert, or lacks the choice, exactly where
    :func:`cufa.kernels.support.refusal` refuses the problem."""
    text = "\n".join(
        (SOURCE_DIR / x).read_text(encoding="utf-8")
        for source in spec.sources
        for x in included_files(source)
    )
    conditions = [x for x in map(_in_python, _ASSERTION.findall(text)) if {*re.findall(r"\w+", x)} <= _WORDS]
    declared = choices(config_file(spec.source))
    form = {"precision": spec.precisions[0], "operation": spec.operation}
    form["out_dtype"] = next(iter(spec.out_dtypes), None)
    plain = Problem(1, 1, 1, 8, 8, spec.configs[0].min_head_dim, spec.dtypes[0], **form)
    flags = [(False, True)] * 3 + [(False, True) if spec.split_configs else (False,)]
    for kind, lengths, *chosen in itertools.product(spec.masks, _LENGTHS, *flags):
        *options, split = chosen
        on = dict(zip(("alibi", "sink", "deterministic"), options, strict=True))
        problem = dataclasses.replace(plain, mask=_MASKS[kind], lengths=lengths, **on)
        irregular, ragged = bool(problem.mask.irregular_kind), lengths.ragged
        values = {name.upper(): value for name, value in on.items()} | {
            "SPLIT_KEYS": split, "SKIP_MASKED_TILES": spec.skip_masked_tiles, "DENSE": 0, "PACKED": 2,
            "LENGTHS_KIND": LENGTH_KINDS.index(lengths.kind), "RAGGED": ragged,
            "IRREGULAR": irregular, "LISTED": irregular or ragged,
        }  # fmt: skip
        wanted = [name.upper() for name, value in on.items() if value] + ["LENGTHS"] * ragged
        builds = {*wanted} <= {*declared} and all(eval(x, {}, values) for x in conditions)
        assert builds == (refusal(spec, problem, split_keys=split) is None), (problem, split)


def _in_python(condition: str) -> str:
    condition = re.sub(r"is_irregular\(MASK_KIND\)", "IRREGULAR", condition)
    return re.sub(r"!(?!=)", " not ", condition.replace("&&", " and ").replace("||", " or ")).strip()
