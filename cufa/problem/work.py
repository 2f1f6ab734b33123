"""The work of a problem, and its one line of text, by operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lengths import DENSE
from .mask import CAUSAL

if TYPE_CHECKING:
    from .problem import Problem


def _query_bytes(problem: Problem) -> int:
    """Bytes of one query and its output."""
    return problem.head_dim * problem.q_element.itemsize + problem.v_dim * problem.out_element.itemsize


class ForwardWork:
    by_keys = False
    """Blocks are blocks of keys, which visit tiles of queries (:class:`~cufa.schedule.schedule.Schedule`)."""

    def flops(self, problem: Problem) -> int:
        """Useful floating-point operations."""
        return 2 * (problem.head_dim + problem.v_dim) * problem.all_visible_scores

    def io_bytes(self, problem: Problem) -> int:
        """q, k, v read once, o written once."""
        queries, keys = problem.tokens
        return problem.heads * queries * _query_bytes(problem) + problem.kv_heads * keys * problem.key_bytes

    def describe(self, problem: Problem) -> str:
        p = problem
        dtype = f"{p.dtype} (tf32)" if p.precision == "tf32" else p.dtype
        if p.scales:
            dtype += f" (scales per {', '.join(dict.fromkeys(p.scales))}) to {p.out_element.name}"
        lengths = "" if p.lengths == DENSE else f" ({p.lengths})"
        return (
            f"batch {p.batch}, heads {p.heads_text}, seqlen {p.seqlen_q}×{p.seqlen_k}{lengths}, "
            f"head_dim {p.dims_text}, {dtype}, {p.scores_text}"
        )


class BackwardWork(ForwardWork):
    by_keys = True

    def flops(self, problem: Problem) -> int:
        return (6 * problem.head_dim + 4 * problem.v_dim) * problem.all_visible_scores

    def io_bytes(self, problem: Problem) -> int:
        """dout, q, k, v, out and lse read once, dq, dk and dv written once."""
        queries, keys = problem.tokens
        wide = problem.float32_gradients  # two bytes more for each element
        row_bytes = 2 * _query_bytes(problem) + 4 + 2 * ("dq" in wide) * problem.head_dim
        key_bytes = 2 * problem.key_bytes + 2 * ("dk" in wide) * (problem.head_dim + problem.v_dim)
        return problem.heads * queries * row_bytes + problem.kv_heads * keys * key_bytes

    def describe(self, problem: Problem) -> str:
        wide = f", {', '.join(problem.float32_gradients)} in float32" if problem.float32_gradients else ""
        return f"backward {super().describe(problem)}{wide}" + ", deterministic" * problem.deterministic


class DecodeWork(ForwardWork):
    def io_bytes(self, problem: Problem) -> int:
        """Keys and values that some query sees, q and o once each."""
        queries = problem.batch * problem.heads * problem.seqlen_q
        return problem.kv_bytes() + queries * _query_bytes(problem)

    def describe(self, problem: Problem) -> str:
        p = problem
        tokens = f", {p.seqlen_q} tokens" if p.seqlen_q > 1 else ""
        cache = f" in pages of {p.cache.page_size}" if p.cache.paged else ""
        appended = f", {p.cache.new_tokens} appended" if p.cache.new_tokens else ""
        dtype = p.dtype if p.k_element is p.q_element else f"{p.dtype} over {p.k_element.name}"
        if p.scales:
            dtype += f" (scales per {p.scales[1]})"
        upto = "up to " if p.lengths.ragged else ""
        changed = p.alibi or p.sink or p.invariant or p.tree or p.softmax_max != ""
        plain = p.mask == CAUSAL and p.softcap is None and not changed
        scores = "" if plain else f", {p.scores_text}"
        return (
            f"decode batch {p.batch}, heads {p.heads_text}{tokens}, {upto}{p.seqlen_k:,} cached{cache}"
            f"{appended}, head_dim {p.dims_text}, {dtype}{scores}"
        )


WORK = {"forward": ForwardWork(), "backward": BackwardWork(), "decode": DecodeWork()}
"""By :attr:`cufa.problem.problem.Problem.operation`."""
