"""Options of masks and soft cap, and the masks that they make. Errors have the words of the public calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..masks import causal as causal_mask
from ..masks import window as window_mask
from ..problem.checks import check_window
from ..problem.mask import FULL, Band, Mask
from ..problem.options import check_softcap, decode_mask, resolve_mask

FORWARD_ONLY = ("causal", "diagonal")
"""Queries of other calls are the last tokens of their sequence."""


def _checked(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error)) from None


def _number_or_text(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _window(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    sides = [side.strip().lower() for side in value.split(",")]
    return _checked(check_window, tuple(None if side == "none" else _number_or_text(side) for side in sides))


def _diagonal(context: click.Context, parameter: click.Parameter, value: str | None) -> str | int | None:
    if value is None:
        return None
    diagonal = _number_or_text(value)
    _checked(causal_mask, diagonal)
    return diagonal


def _softcap(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    checked: float | None = _checked(check_softcap, value)
    return checked


MASK_OPTIONS = (
    click.option("--causal/--full", default=False, show_default=True),
    click.option(
        "--window",
        metavar="LEFT,RIGHT",
        callback=_window,
        help="How many keys before and after its own a query sees, such as 1023,0; none: no bound.",
    ),
    click.option(
        "--diagonal",
        callback=_diagonal,
        help="Where the first query stands among the keys: bottom-right, top-left or a number.  "
        "[default: bottom-right]",
    ),
    click.option("--softcap", type=float, callback=_softcap, help="Soft cap of the scores, such as 30."),
)
""":func:`forward_mask` and :func:`decoding_mask` make a mask of the first three."""


def forward_mask(options: dict[str, Any]) -> Mask:
    """The mask of a forward call. Raises ValueError for options that contradict each other."""
    mask = resolve_mask(options["causal"], options["window"], None)
    if options["diagonal"] is None:
        return mask
    if mask == FULL:
        raise ValueError(
            f"--diagonal {options['diagonal']} moves the bounds of a mask, and there is none: "
            "add --causal or --window"
        )
    assert isinstance(mask, Band)
    return window_mask(mask.left, mask.right, options["diagonal"])


def decoding_mask(options: dict[str, Any]) -> Mask:
    """The mask of a decoding call. Raises ValueError for options that it does not take."""
    return decode_mask(options["window"])
