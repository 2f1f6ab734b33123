"""What the words of the pages mean, once for all of them: two sentences each at most.

Headings, metrics and the sentences above figures explain the words they use (:mod:`cufa.dashboard.page`); every page
has the whole list in a popover.
"""

from __future__ import annotations

import functools
import html
import re

TERMS: dict[str, str] = {
    "alpha": "exp(old maximum − new maximum) of a row, at most 1. What the row has summed up so far is "
    "multiplied by it when a larger score turns up.",
    "bank conflict": "Threads of a warp that ask one bank of shared memory for different words. They "
    "are served one after the other.",
    "busiest": "The thread block, or the SM, with the most tiles. The launch takes as long as it does.",
    "causal": "The mask under which a query sees the keys up to its own, and none after it.",
    "cold L2": "Before each timed call the L2 cache is filled with other data. Every byte of the inputs"
    " then comes from device memory, as it does between the layers of a model.",
    "device memory": "The GPU's large memory outside the chip (HBM). All inputs and outputs lie there, "
    "and it is the slowest memory that a kernel uses.",
    "FLOP": "One floating-point operation. Attention counts 4 × head dim of them per visible score, 10 "
    "× in the backward.",
    "head dim": "Numbers per query, key and value of one head.",
    "idle": "Time in which an SM, or one of its places, has no work.",
    "in turns": "The kernels that are compared run one call each, round after round. All of them meet "
    "the same clock and temperature.",
    "key block": "The keys and values that are brought to an SM at once: a column of tiles.",
    "L2": "The cache between device memory and all SMs. What one thread block has read lately, another "
    "often finds here.",
    "lse": "The log of the sum of exp(score) over a row, called L in the papers. The backward and every"
    " merge of partial results need it.",
    "mask": "Which keys each query sees. Scores that it hides count as minus infinity.",
    "median": "The middle one of all timed calls: half of them took longer.",
    "merge": "Partial results over different keys become the whole: each is weighted by exp(its LSE). "
    "It is exact.",
    "occupancy": "Warps that live on an SM, as a share of the most that it can hold. Registers, shared "
    "memory and threads of a block limit it.",
    "online softmax": "Softmax in one pass: a running maximum and a running sum per row, corrected "
    "whenever a larger score turns up.",
    "padded": "A tile that hangs over the end of the queries or the keys. The part beyond is computed "
    "and thrown away.",
    "paged": "Of a cache: cut into pieces of a fixed number of tokens, the pages. A table says which of"
    " them a sequence has.",
    "partial": "A tile that a boundary of the mask runs through. Its hidden scores are computed, then "
    "set to minus infinity.",
    "persistent": "A thread block that stays for the whole launch and takes one piece of work after another.",
    "place": "Room for one thread block on an SM. An SM has as many as its registers and shared memory "
    "allow.",
    "product": "A matrix product on the tensor cores: S = Q Kᵀ or O = P V.",
    "query block": "The queries that one thread block works on at once: a row of tiles.",
    "ragged": "Sequences of a batch that have different lengths.",
    "register": "The memory of a single thread, the fastest there is. An SM has 65,536 of 4 bytes for "
    "all its threads.",
    "roofline": "The speed that memory and arithmetic allow a kernel, by the FLOPs it does per byte it "
    "moves.",
    "share": "The tiles of all sequences laid end to end and cut into equal parts: one part. Each "
    "thread block takes one at a time.",
    "shared memory": "Memory of one thread block on its SM, up to 227 KiB. Tiles of Q, K and V wait "
    "here for the tensor cores.",
    "skipped": "A tile in which no query sees a key. It is neither read nor computed.",
    "SM": "Streaming multiprocessor: one of the GPU's processors, with its own registers, shared memory"
    " and tensor cores. An H200 has 132.",
    "soft cap": "Replaces a score s by cap · tanh(s / cap), so that none is larger than the cap.",
    "spill": "Registers that did not suffice: a thread's values go to slow memory and back.",
    "split": "One of the parts into which the keys of a sequence are cut, so that several thread blocks"
    " read them at once. Their results are merged.",
    "sustained": "One kernel runs alone, call after call, for seconds. The power limit then decides its"
    " clock.",
    "tail": "The end of a launch, when some SMs have run out of work and wait for the last thread blocks.",
    "thread block": "Threads that run on one SM and share its shared memory. A kernel is launched as a "
    "grid of them.",
    "tile": "A block of queries against a block of keys: the piece of the score matrix that is computed"
    " at once.",
    "warp": "32 threads that execute together.",
    "warpgroup": "Four warps that issue a tensor-core product of Hopper together.",
    "wave": "As many thread blocks as the GPU runs at once. The last wave is often not full.",
    "window": "A mask under which a query sees only keys near its own.",
}
"""By word, as it stands in a sentence."""


def found(text: str) -> list[str]:
    """Words of the list that a text uses, in its order, each once."""
    seen = (_term(match) for match in _pattern().finditer(text))
    return list(dict.fromkeys(seen))


def help_text(text: str) -> str | None:
    """Markdown that explains the words of a heading or a metric; None where it uses none."""
    lines = [f"**{term}**: {TERMS[term]}" for term in found(text)]
    return "\n\n".join(lines) or None


def explained(text: str) -> str:
    """A sentence as HTML in which each word of the list, where it stands first, tells what it means when the mouse or
    the focus is on it."""
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
"""Of words that have an everyday sense too, or another spelling: where they are meant."""


@functools.cache
def _pattern() -> re.Pattern[str]:
    """Longer words first: a query block is no block, cold L2 no L2. A plural is the same word."""
    forms = {term: _FORMS.get(term, rf"{re.escape(term)}(?:e?s)?") for term in TERMS}
    parts = (f"(?P<_{n}>{forms[term]})" for n, term in enumerate(_words()))
    return re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})(?![\w-])", re.IGNORECASE)


@functools.cache
def _words() -> list[str]:
    return sorted(TERMS, key=lambda term: -len(term))


def _term(match: re.Match[str]) -> str:
    return _words()[int(str(match.lastgroup)[1:])]
