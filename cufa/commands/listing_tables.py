"""`cufa compile --listing`: instructions of the loops and the busiest source lines of one build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..build.machine_code import KINDS, Code
from ..build.sass import Listing
from ..build.variants import Variant
from .common import stderr, stdout, table

_MOST_LINES = 30


def listing_record(variant: Variant, listing: Listing) -> dict[str, Any]:
    """Everything, for --json: per entry and language its loops, and its lines in the kernel's own file."""
    own = variant.source
    languages = {"ptx": listing.ptx, "sass": listing.sass}
    entries = {
        name: {entry: _code_record(code, own) for entry, code in codes.items()}
        for name, codes in languages.items()
    }
    return {"build": str(variant), "missing": listing.missing, **entries}


def _code_record(code: Code, own: str) -> dict[str, Any]:
    return {
        "instructions": len(code.instructions),
        "kinds": code.kinds(),
        "live": code.live,
        "loops": [
            {"line": loop.place.line if loop.place else None, "slots": loop.slots, "kinds": dict(loop.kinds)}
            for loop in code.tile_loops(own)
        ],
        "lines": {
            line: {"count": cost.count, "live": cost.live, **cost.kinds}
            for line, cost in code.lines(own).items()
        },
    }


def print_listing(variant: Variant, listing: Listing) -> None:
    """SASS where there is a disassembler, else PTX and what to install."""
    own = variant.source
    stderr().print(str(variant), markup=False)
    if listing.missing:
        stderr().print(f"PTX only: {listing.missing}", markup=False, soft_wrap=True)
    for entry, code in (listing.sass or listing.ptx).items():
        shown = table([f"of {own}"], ["instructions", "live", *KINDS], entry, no_wrap=True)
        shown.pad_edge = False
        shown.add_row("whole kernel", f"{len(code.instructions):,}", _live(code.live), *_kinds(code.kinds()))
        for loop in code.tile_loops(own):
            line = f"loop, line {loop.place.line}" if loop.place else "loop"
            shown.add_row(line, f"{loop.slots:,}", "", *_kinds(loop.kinds))
        costs = sorted(code.lines(own).values(), key=lambda cost: cost.count, reverse=True)[:_MOST_LINES]
        for cost in sorted(costs, key=lambda cost: cost.line):
            shown.add_row(f"line {cost.line}", f"{cost.count:,}", _live(cost.live), *_kinds(cost.kinds))
        stdout(140).print(shown)


def _live(number: int | None) -> str:
    return "" if number is None else str(number)


def _kinds(counts: Mapping[str, int]) -> list[str]:
    return [str(counts.get(kind, "")) for kind in KINDS]
