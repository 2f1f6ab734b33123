"""Errors for unknown keywords of public calls: if another library has the keyword, the error names cufa's keyword.

Public functions end in ``**unknown: Never``, which costs a call 15 ns; type checkers refuse any keyword for it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_ANSWERS = (
    ("attn_mask", "mask", "mask=cufa.masks.from_dense(attn_mask), or one of cufa.masks"),
    ("block_mask mask_mod", "mask", "mask=, made by cufa.masks"),
    ("score_mod", "score", "score=cufa.score(function, **arrays)"),
    ("attn_bias", "bias", "bias="),
    (
        "bias attn_bias score score_mod",
        "alibi_slopes",
        "it changes scores by alibi_slopes= and softcap= only",
    ),
    ("dropout_p dropout_rate", "dropout", "dropout= and seed="),
    ("dropout_p dropout dropout_rate seed", "", "dropout is for training, leave it out"),
    ("enable_gqa", "", "query heads share key/value heads wherever q has more heads, leave it out"),
    ("is_causal", "causal", 'causal=True (bottom-right), or mask=cufa.masks.causal("top-left")'),
    ("causal is_causal", "cache_seqlens", "decoding is causal, leave it out"),
    ("softmax_scale sm_scale", "scale", "scale="),
    ("window_size local_window_size sliding_window", "window", "window=(left, right), None for an open side"),
    ("window_left", "window", "window=(left, 0)"),
    ("logits_soft_cap logits_softcap", "softcap", "softcap=, None for no cap"),
    ("sinks s_aux learnable_sink", "sink", "sink="),
    ("return_attn_probs return_softmax_lse return_residual", "return_lse", "return_lse=True"),
    ("cu_seqlens_q cu_seqlens_k cu_seq_q cu_seq_k", "", "cufa.flash_attention_varlen packs sequences"),
    ("max_seqlen_q max_seqlen_k max_q max_k", "", "cufa finds the longest sequence, leave it out"),
    ("seqused_q query_seq_lengths", "seqlens_q", "seqlens_q="),
    ("seqused_k key_value_seq_lengths", "seqlens_k", "seqlens_k="),
    ("seqused_k seqlens_k seq_lens", "cache_seqlens", "cache_seqlens="),
    ("block_tables page_table", "block_table", "block_table="),
    ("block_table block_tables page_table cache_seqlens", "", "cufa.flash_decode reads a cache"),
    ("k", "k_new", "k_new="),
    ("v", "v_new", "v_new="),
    ("q_descale", "q_scale", "q_scale="),
    ("k_descale", "k_scale", "k_scale="),
    ("v_descale", "v_scale", "v_scale="),
    ("kv_layout tensor_layout qkv_format", "layout", 'layout="bhsd" or "bshd"'),
    ("layout kv_layout qkv_format", "cu_seqlens_q", "packed arrays are (tokens, heads, head_dim)"),
    ("backend implementation", "algorithm", "algorithm="),
    ("deterministic", "", "results have the same bits in every run, leave it out"),
)
"""Names, the parameter that a function must have for the answer to fit ("": any function), and the answer."""


def unknown_keyword(function: Callable[..., Any], unknown: Mapping[str, Any]) -> TypeError:
    """The error for a call of ``function`` with keywords that it does not have."""
    parameters = [name for name in inspect.signature(function).parameters if name != "unknown"]
    name = next(iter(unknown))
    for names, parameter, answer in _ANSWERS:
        if name in names.split() and (not parameter or parameter in parameters):
            return TypeError(f"{function.__name__} takes no {name}: {answer} (README, Coming from)")
    near = difflib.get_close_matches(name, parameters, 1)
    answer = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(parameters)}"
    return TypeError(f"{function.__name__} takes no {name}: {answer}")
