"""Operands of calls: each has a place among all operands, and a pointer in the parameters of every kernel that takes
them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import cufa
from cufa.calls import float8
from cufa.kernels import KERNELS
from cufa.kernels.support import refusal
from cufa.plan.dense import FORWARD
from cufa.plan.operation import OPERATIONS, SCALES
from cufa.problem.lengths import DENSE, Cached, Packed, Padded
from cufa.problem.options import Options
from cufa.problem.problem import Problem

BIAS = cufa.score(lambda s, b, h, i, j, table: s + table[j], table=np.zeros(8, np.float32))
CACHE = Cached(page_size=16, max_pages=4, num_pages=4, given=True, new_tokens=1)
#: Options of kernels: fields of the problem, and the operands that calls pass.
OPTIONS = {
    "alibi": ({"alibi": True}, ["alibi_slopes"]),
    "sink": ({"sink": True}, ["sink"]),
    "padded": ({"lengths": Padded((8,), (8,))}, ["seqlens_q", "seqlens_k"]),
    "packed": ({"lengths": Packed(8, 8, (8,), (8,))}, ["cu_seqlens_q", "cu_seqlens_k"]),
    "cache": (
        {"lengths": Padded((8,), (8,), cache=CACHE)},
        ["cache_seqlens", "block_table", "k_new", "v_new"],
    ),
    "tree": ({"tree": "parents"}, ["tree"]),
    "score": ({"score": BIAS.change()}, ["score0"]),
    "gradients": ({"score": BIAS.change(("table",))}, ["score0", "dscore0"]),
    "dropout": ({"dropped": 64}, ["seed"]),
    "running": ({"running": (0, 8, 0, 8)}, ["running", "running_lse"]),
    "norms": ({"softmax_max": "bound"}, ["key_norms"]),
    "maxima": ({"softmax_max": "heads"}, ["softmax_max"]),
}
#: No call passes both.
APART = [
    *itertools.combinations(("padded", "packed", "cache"), 2),
    *itertools.product(("cache", "running"), ("score", "dropout")),
    *(("cache", "running"), ("score", "gradients"), ("norms", "maxima"), ("score", "norms")),
]


def problems(kernel):
    """(problem, names of its optional operands), of every combination of options that the kernel serves."""
    decode = kernel.operation == "decode"
    plain = Problem(
        1, 1, 1, 8, 64, max(kernel.configs[0].min_head_dim, 16), kernel.dtypes[0], cufa.masks.causal(), 0.25,
        precision=kernel.precisions[0], operation=kernel.operation, lengths=CACHE if decode else DENSE,
        scales=tuple(kernel.scales[x][-1] for x in "qkv") if kernel.scales else (),
        out_dtype=next(iter(kernel.out_dtypes), None),
        **dict.fromkeys(("k_dtype", "v_dtype"), next(iter(kernel.k_dtypes), None)),
    )  # fmt: skip
    scales = {x.name for x in SCALES if kernel.scales and not decode}
    asked = [x for x in OPTIONS if x in (*kernel.options, *["norms", "maxima"] * decode)]
    for chosen in itertools.chain(*(itertools.combinations(asked, n) for n in range(len(asked) + 1))):
        if any({*pair} <= {*chosen} for pair in APART):
            continue
        if "tree" in chosen and "cache" not in chosen and not decode:
            continue
        problem = dataclasses.replace(plain, **{k: v for x in chosen for k, v in OPTIONS[x][0].items()})
        if refusal(kernel, problem) is None:
            gradients = {"dsink"} if kernel.operation == "backward" and "sink" in chosen else set()
            yield problem, scales | gradients | {name for x in chosen for name in OPTIONS[x][1]}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_launch_takes_every_operand_of_a_call(kernel):
    """A launch writes what the operand list has at each of :meth:`Operation.optional_places`."""
    operation = OPERATIONS[kernel.operation]
    found = [*problems(kernel)]
    assert found
    for problem, names in found:
        params = operation.params_of(problem)
        given = operation.in_order(dict.fromkeys(operation.inputs) | {name: name for name in names})
        pointers = {given[place]: at for place, at in operation.optional_places(params) if place < len(given)}
        for name in names:
            assert pointers.get(name) == params.offset(operation.operand(name).field), (name, problem)


@pytest.mark.parametrize("kind", [float8.Float8Call, float8.PackedFloat8])
def test_scales_of_e4m3_stand_at_their_places(monkeypatch, kind):
    """In a call, and in the operand list by which a later call is found: whichever optional operands it passes."""
    packed = kind is float8.PackedFloat8
    x, ones = np.zeros((4, 2, 64) if packed else (1, 2, 4, 64), np.uint8), np.ones(2, np.float32)
    ends = np.array([0, 4] if packed else [4], np.int32)
    looked_up = []
    monkeypatch.setattr(float8, "find", lambda _, given, __: (None, None, looked_up.append(given)))
    for alibi, sink, lengths in itertools.product((None, ones), (None, ones), (None, ends)):
        if packed and lengths is None:
            continue
        named = {"q": x, "k": x, "v": x, "out": None, "lse": None, "alibi_slopes": alibi, "sink": sink}
        named |= dict.fromkeys(("seqlens_q", "seqlens_k"), None if packed else lengths)
        named |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), lengths) if packed else {}
        scales = [np.full((), n, np.float32) for n in (1, 2, 3)]
        call = kind.of([*named.values()], scales, None, ("out",), Options())
        named |= dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        given = {name for name, x in named.items() if x is not None}
        assert given == {name for name, x in call.inputs.items() if x is not None}
        assert all(call.inputs[name] is named[name] for name in given - {*"qkv"})
        kind.warm_result([*named.values()][:-3], scales, None, None, ())
        expected = FORWARD.in_order(named)
        assert all(a is b for a, b in zip(looked_up.pop(), expected, strict=True))
