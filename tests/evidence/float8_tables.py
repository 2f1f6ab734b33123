"""The tables of recorded suites of e4m3, as lines of Markdown."""

from __future__ import annotations

from cufa.measure.measured import Measured, by_case
from cufa.measure.quantized import QUANTIZE

from .tables import NONE, Lines, labels_of, ratio, table


def accuracy(rows: list[Measured]) -> Lines:
    """The root mean square of errors and the largest error, by distribution of the inputs; of needles the share that
    is found."""
    found = {(row.label, x.distribution): x for row in rows if (x := row.accuracy)}
    distributions = list(dict.fromkeys(name for _, name in found))

    def cell(label: str, name: str) -> str:
        one = found.get((label, name))
        if one is None:
            return NONE
        return f"{one.rmse:.1e}, {one.largest:.1e}" + (
            "" if one.found is None else f", {one.found:.0%} found"
        )

    lines = ([label, *(cell(label, name) for name in distributions)] for label in labels_of(rows))
    return table(["", *distributions], lines)


def speed(rows: list[Measured]) -> Lines:
    """TFLOP/s, and what quantising costs."""
    labels = [label for label in labels_of(rows) if label != QUANTIZE]
    ours = next(label for label in labels if label.startswith("e4m3"))
    others = [label for label in labels if label != ours]
    lines = []
    for case in by_case(rows):
        p = next(iter(case.values())).problem
        rates = (f"{case[x].tflops:.0f}" if x in case else NONE for x in labels)
        share = (
            f"{case[QUANTIZE].p50_ns / case[ours].p50_ns:.0%}" if {QUANTIZE, ours} <= case.keys() else NONE
        )
        over = (ratio(case, x, ours) for x in others)
        lines.append([str(p.head_dim), str(p.seqlen_q), p.scores_text, *rates, *over, share])
    return table(
        ["head dim", "seq", "mask", *labels, *(f"{ours} over {x}" for x in others), f"{QUANTIZE} of {ours}"],
        lines,
    )
