"""The mask control of several pages: visible scores and soft cap.

In links a mask is ``mask`` (full, causal, window), ``left`` and ``right`` of a window (a number, or none), ``diag``
(where the diagonal lies, or at) with its number ``at``; a soft cap is ``softcap``. The words are the names that masks
print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from streamlit.delta_generator import DeltaGenerator

from cufa import masks
from cufa.dashboard import page, sentences
from cufa.dashboard.state import Controls, Place
from cufa.problem.mask import CAUSAL, DIAGONALS, Band, Mask
from cufa.problem.options import MAX_SOFTCAP
from cufa.problem.problem import BAND_KINDS, Problem

_KINDS = {"causal": "causal", "full": "full", "window": "window"}
AT = "at"
_ALL = "all"
MOST = 1 << 20
_SOFTCAP_HELP = "Scores become cap · tanh(score / cap) before the mask, as in Gemma 2. Empty: no cap."
_SIDE_HELP = "Both ends are included. Empty: no bound on this side."


def choose(
    controls: Controls, start: Mask = CAUSAL, start_softcap: float | None = None, *, cached: bool = False
) -> tuple[Mask, float | None]:
    """Mask and soft cap, in one row. ``start``: the default. ``cached``: the queries are the last tokens of a cache, so
    the diagonal is fixed and no key follows them."""
    begin = settings(start, start_softcap)
    columns = page.line_of_fields(224, 144, 144, 144, 132, 132)
    kinds = {kind: words for kind, words in _KINDS.items() if not cached or kind != "full"}
    help = sentences.of_masks(kinds)
    kind = controls.choice("mask", "Mask", kinds, begin["mask"], segmented=True, at=next(columns), help=help)
    left, right = None, None if kind == "full" else 0
    if kind == "window":
        left = choose_side(controls, "left", begin["left"], next(columns))
    if kind == "window" and not cached:
        right = choose_side(controls, "right", begin["right"], next(columns))
    diagonal: str | int = DIAGONALS[0]
    if kind != "full" and not cached:
        diagonal = choose_diagonal(controls, begin, columns)
    return masks.window(left, right, diagonal), choose_softcap(controls, begin["softcap"], next(columns))


def choose_side(controls: Controls, name: str, begin: int | None, at: Place) -> int | None:
    """The ``left`` or the ``right`` end of a window."""
    label = {"left": "Keys before", "right": "Keys after"}[name]
    return controls.optional(name, label, begin, 0, MOST, at=at, step=128, help=_SIDE_HELP)


def choose_softcap(controls: Controls, begin: float | None, at: Place) -> float | None:
    return controls.optional(
        "softcap", "Soft cap", begin, 0.01, float(MAX_SOFTCAP), at=at, step=5.0, help=_SOFTCAP_HELP
    )


def choose_diagonal(
    controls: Controls, begin: Mapping[str, Any], columns: Iterator[DeltaGenerator]
) -> str | int:
    """Position of the diagonal. ``begin`` has ``diag`` and ``at``."""
    words = {name: name.replace("-", " ") for name in DIAGONALS} | {AT: "at a key"}
    help = (
        "Position of the causal diagonal. Bottom right: the last query's own key is the last key. Top left: the first "
        "query's own key is the first key."
    )
    place = controls.choice("diag", "Diagonal", words, begin["diag"], help=help, at=next(columns))
    if place != AT:
        return place
    return controls.integer("at", "Key of query 0", begin["at"], -MOST, MOST, step=128, at=next(columns))


def settings(mask: Mask, softcap: float | None = None) -> dict[str, Any]:
    """Values of the controls for a band mask, by name in links. Raises TypeError for other masks."""
    if not isinstance(mask, Band) or mask.irregular_kind:
        raise TypeError(f"{mask} is more than a band with two edges, which this control sets")
    is_number = isinstance(mask.diagonal, int)
    window = mask.left is not None or mask.right not in (None, 0)
    return {
        "mask": "window" if window else "full" if mask.right is None else "causal",
        "left": mask.left if window else 1023,
        "right": mask.right if window else 0,
        "diag": AT if is_number else mask.diagonal,
        "at": mask.diagonal if is_number else 0,
        "softcap": softcap,
    }


def put(name_of_page: str, problem: Problem) -> None:
    """Set a page's control to a problem's mask and cap; for callbacks, and before the control exists."""
    for name, value in settings(problem.mask, problem.softcap).items():
        Controls.put(name_of_page, name, value)


def choose_among(controls: Controls, problems: Iterable[Problem]) -> str:
    """One of the masks that problems have, by :attr:`~cufa.problem.problem.Problem.scores_text`; "" for all."""
    words = {_ALL: "all"} | {text: text for text in dict.fromkeys(p.scores_text for p in problems)}
    chosen = controls.choice("mask", "Mask", words, segmented=len(words) <= 4)
    return "" if chosen == _ALL else chosen


def usual(problems: Iterable[Problem]) -> Problem:
    """The default problem: causal, without a soft cap."""
    known = list(problems)
    return next((p for p in known if p.mask == CAUSAL and p.softcap is None), known[0])


def choose_built(controls: Controls, problems: Iterable[Problem]) -> list[Problem]:
    """Compiled problems of one kind of mask: all windows share one build."""
    known = list(problems)
    words = dict(zip(BAND_KINDS, ("full", "causal", "window"), strict=True))
    kinds = {kind: words[kind] for kind in BAND_KINDS if any(p.mask_kind == kind for p in known)}
    kind = controls.choice("mask", "Mask", kinds, usual(known).mask_kind, segmented=True)
    known = [p for p in known if p.mask_kind == kind]
    if len({p.softcap is None for p in known}) > 1:
        capped = controls.flag("softcap", "Soft cap", help=_SOFTCAP_HELP.partition(" Empty")[0])
        known = [p for p in known if (p.softcap is not None) == capped]
    return known
