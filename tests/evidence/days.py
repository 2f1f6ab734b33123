"""When the rows of a card were measured, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cufa.measure.cards import Card


def other_days(card: Card, suites: Iterable[str] = ()) -> str:
    """One sentence on suites that were measured on another day than the newest rows, or with another driver; "" where
    there is none. ``suites``: those that are asked about, else all."""
    wanted, found = list(suites), dict[str, list[str]]()
    for row in card.rows:
        when = _apart(card, row.recorded)
        name = f"{row.suite} ({row.regime})"
        if when and (not wanted or row.suite in wanted) and name not in found.setdefault(when, []):
            found[when].append(name)
    return " ".join(f"Measured {when}: {', '.join(names)}." for when, names in found.items())


def when_else(card: Card, line: dict[str, Any]) -> str:
    """When something that is no row was measured, after a space; "" on the day of the newest rows."""
    when = _apart(card, line["recorded"])
    return f" {when}" if when else ""


def _apart(card: Card, recorded: str) -> str:
    here, newest = card.sessions[recorded], card.environment
    words = [f"on {recorded[:10]}"] if recorded[:10] != newest["recorded"][:10] else []
    words += [f"with driver {_driver(here)}"] if _driver(here) != _driver(newest) else []
    return " ".join(words)


def _driver(session: dict[str, Any]) -> str:
    return str((session.get("gpu") or {}).get("driver_version", ""))
