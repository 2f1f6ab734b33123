"""Terms of the pages, with at most two sentences each.

Headings, metrics and verdicts explain their terms (:mod:`cufa.dashboard.page`); each page has the whole list in a
popover.
"""

from __future__ import annotations

import functools
import html
import re

TERMS: dict[str, str] = {
    "alpha": "exp(old maximum − new maximum) of a row, at most 1. When a larger score appears, the partial sums of the "
    "row are multiplied by alpha.",
    "bank conflict": "Threads of a warp access different words of one bank of shared memory. The accesses are "
    "serialized.",
    "busiest": "The thread block, or the SM, with the most tiles. It determines the time of the launch.",
    "causal": "The mask under which a query sees the keys up to its own position, and no later key.",
    "cold L2": "Before each timed call the L2 cache is filled with other data. Every byte of the inputs"
    " then comes from device memory, as it does between the layers of a model.",
    "device memory": "The GPU's large memory outside the chip (HBM). It holds all inputs and outputs, and is the "
    "slowest memory of a kernel.",
    "FLOP": "One floating-point operation. Attention needs 4 × head dim FLOP per visible score, the backward 10 × "
    "head dim.",
    "head dim": "Numbers per query, key and value of one head.",
    "idle": "An SM, or one of its places, has no work.",
    "in turns": "The compared kernels run one call each, round after round. All kernels run at the same clock and "
    "temperature.",
    "key block": "Keys and values that an SM loads at once: a column of tiles.",
    "L2": "The cache between device memory and all SMs. Thread blocks find data here that other thread blocks have "
    "read.",
    "lse": "The log of the sum of exp(score) over a row, L in the papers. The backward and the merge of splits need "
    "it.",
    "mask": "The visible keys of each query. Hidden scores count as minus infinity.",
    "median": "The middle of all timed calls: half of the calls took longer.",
    "merge": "Partial results over different keys are combined with the weights exp(LSE). The merge is exact.",
    "occupancy": "Resident warps of an SM, as a share of its maximum. Registers, shared memory and threads of a "
    "block limit it.",
    "online softmax": "Softmax in one pass: a running maximum and a running sum per row. They are rescaled when a "
    "larger score appears.",
    "padded": "A tile that extends past the last query or key. The part beyond is computed and discarded.",
    "paged": "A cache in pages of a fixed number of tokens. A table lists the pages of each sequence.",
    "partial": "A tile that a mask boundary cuts. Its hidden scores are computed, then set to minus infinity.",
    "persistent": "A thread block that stays for the whole launch and takes several work items.",
    "place": "Room for one thread block on an SM. Registers and shared memory limit the places of an SM.",
    "product": "A matrix product on the tensor cores: S = Q Kᵀ or O = P V.",
    "query block": "Queries that a thread block computes at once: a row of tiles.",
    "ragged": "Sequences of a batch that have different lengths.",
    "register": "The memory of a single thread, and the fastest memory. An SM has 65,536 registers of 4 bytes.",
    "roofline": "The limit of a kernel's speed by memory and arithmetic, for its FLOP per byte.",
    "share": "One of the equal parts of the tiles of all sequences, laid end to end. Each thread block takes one "
    "share.",
    "shared memory": "Memory of a thread block on its SM, up to 227 KiB. It holds tiles of Q, K and V for the tensor "
    "cores.",
    "skipped": "A tile without a visible score. It is neither read nor computed.",
    "SM": "Streaming multiprocessor: a processor with its own registers, shared memory and tensor cores. An H200 has "
    "132 SMs.",
    "soft cap": "Replaces a score s by cap · tanh(s / cap), which stays below the cap.",
    "spill": "Values of a thread that do not fit in its registers and go to slow memory.",
    "split": "A part of the keys of a sequence. Several thread blocks compute the splits at once; then the results "
    "are merged.",
    "sustained": "One kernel runs alone for seconds, call after call. The power limit then determines the clock.",
    "tail": "The end of a launch: some SMs are idle while the last thread blocks run.",
    "thread block": "Threads that run on one SM and share its shared memory. A launch is a grid of thread blocks.",
    "tile": "A block of queries times a block of keys: the part of the score matrix that is computed at once.",
    "warp": "32 threads that execute together.",
    "warpgroup": "Four warps that issue a wgmma product together, on Hopper.",
    "wave": "The thread blocks that the GPU runs at once. The last wave is often not full.",
    "window": "A mask under which a query sees only keys near its own.",
}
"""By term, as written in a sentence."""


def found(text: str) -> list[str]:
    """Terms of a text in order, each once."""
    seen = (_term(match) for match in _pattern().finditer(text))
    return list(dict.fromkeys(seen))


def help_text(text: str) -> str | None:
    """Markdown that explains the terms of a heading or a metric; None without terms."""
    lines = [f"**{term}**: {TERMS[term]}" for term in found(text)]
    return "\n\n".join(lines) or None


def explained(text: str) -> str:
    """A sentence as HTML: the first use of each term shows its explanation on hover and focus."""
    told: set[str] = set()
    parts, end = [], 0
    for match in _pattern().finditer(text):
        term = _term(match)
        parts.append(html.escape(text[end : match.start()]))
        end = match.end()
        word = html.escape(match[0])
        if term in told:
            parts.append(word)
            continue
        told.add(term)
        tip = html.escape(TERMS[term], quote=True)
        parts.append(
            f'<span class="cufa-term" tabindex="0" data-tip="{tip}" aria-description="{tip}">{word}</span>'
        )
    return "".join([*parts, html.escape(text[end:])])


def as_markdown() -> str:
    """The whole list."""
    return "  \n".join(f"**{term}**: {TERMS[term]}" for term in sorted(TERMS, key=str.lower))


_FORMS = {
    "place": r"places|(?:busiest|free|[\d,]+) place",
    "share": r"[\d,]+ shares?|shares of all tiles",
    "partial": "partial(?! results?)",
    "product": "products",
    "lse": "lse|LSE|log-sum-exp",
    "L2": "L2",
}
"""Patterns of terms that have another spelling, or an everyday meaning too."""


@functools.cache
def _pattern() -> re.Pattern[str]:
    """Longer terms come first: "cold L2" before "L2". A plural is the same term."""
    forms = {term: _FORMS.get(term, rf"{re.escape(term)}(?:e?s)?") for term in TERMS}
    parts = (f"(?P<_{n}>{forms[term]})" for n, term in enumerate(_words()))
    return re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})(?![\w-])", re.IGNORECASE)


@functools.cache
def _words() -> list[str]:
    return sorted(TERMS, key=lambda term: -len(term))


def _term(match: re.Match[str]) -> str:
    return _words()[int(str(match.lastgroup)[1:])]
