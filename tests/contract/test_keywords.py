"""Keywords of other libraries: every call names cufa's own word for them."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import cufa
from cufa.calls.keywords import _ANSWERS, unknown_keyword

CALLS = [
    cufa.flash_attention, cufa.flash_attention_backward, cufa.flash_attention_varlen,
    cufa.flash_attention_varlen_backward, cufa.flash_decode, cufa.plan, cufa.plan_backward,
    cufa.plan_decode,
]  # fmt: skip


def refused(call, **keywords) -> str:
    q = np.ones((1, 2, 4, 8), np.float32)
    positional = [x for x in inspect.signature(call).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    with pytest.raises(TypeError) as error:
        call(*[q] * len(positional), **keywords)
    return str(error.value)


@pytest.mark.parametrize(
    ("call", "name", "answer"),
    [
        (cufa.flash_attention, "attn_mask", "mask=cufa.masks.from_dense"),
        (cufa.flash_attention, "is_causal", 'mask=cufa.masks.causal("top-left")'),
        (cufa.flash_attention, "softmax_scale", "scale="),
        (cufa.flash_attention_backward, "cache_seqlens", "cufa.flash_decode"),
        (cufa.flash_attention, "seqused_k", "seqlens_k="),
        (cufa.flash_attention_varlen, "max_seqlen_q", "leave it out"),
        (cufa.flash_attention_varlen, "layout", "(tokens, heads, head_dim)"),
        (cufa.flash_attention_backward, "window_size", "window=(left, right)"),
        (cufa.flash_decode, "causal", "leave it out"),
        (cufa.flash_decode, "k", "k_new="),
        (cufa.flash_decode, "seqused_k", "cache_seqlens="),
        (cufa.flash_decode, "page_table", "block_table="),
        (cufa.flash_attention, "attn_bias", "bias="),
        (cufa.flash_attention_backward, "score_mod", "score=cufa.score"),
        (cufa.plan, "dropout_p", "dropout="),
        (cufa.flash_decode, "dropout", "leave it out"),
        (cufa.plan_decode, "sm_scale", "scale="),
    ],
)
def test_another_librarys_word_is_answered_with_ours(call, name, answer):
    said = refused(call, **{name: None})
    assert said.startswith(f"{call.__name__} takes no {name}: ") and answer in said


@pytest.mark.parametrize("call", CALLS)
def test_a_slip_of_the_pen_and_an_unknown_word(call):
    assert "did you mean softcap=?" in refused(call, sofcap=1.0)
    assert "it takes q, " in refused(call, xyzzy=1).replace("dout, q", "q")


def operator(q, k, v, *, alibi_slopes=None, softcap=None):
    """With the keywords of :mod:`cufa.torch`, which may not be installed."""


def test_every_answer_is_given_by_some_call():
    for names, _, answer in _ANSWERS:
        said = [
            str(unknown_keyword(call, {name: None}))
            for call in (*CALLS, operator)
            for name in names.split()
            if name not in inspect.signature(call).parameters
        ]
        assert any(answer in x for x in said), names
