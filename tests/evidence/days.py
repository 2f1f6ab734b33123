"""Sentences about a card: on which day it was measured, and how many GPU tests passed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cufa.measure.cards import Card


def other_days(card: Card, suites: Iterable[str] = ()) -> str:
    """One sentence per other day or driver, naming the suites measured then (default: of all suites). "": all were
    measured on the day, and with the driver, of the newest rows."""
    wanted, found = list(suites), dict[str, dict[str, None]]()
    for row in card.rows:
        when = _apart(card, row.recorded)
        if when and (not wanted or row.suite in wanted):
            found.setdefault(when, {})[f"{row.suite} ({row.regime})"] = None
    return " ".join(f"Measured {when}: {', '.join(names)}." for when, names in found.items())


def when_else(card: Card, line: dict[str, Any]) -> str:
    """Day or driver of a line that holds no measurement, with a leading space. "": those of the newest rows."""
    when = _apart(card, line["recorded"])
    return f" {when}" if when else ""


def tests_in_words(card: Card, tests: dict[str, Any]) -> str:
    counts = f"{tests['passed']:,} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
    return f"{counts}{when_else(card, tests)}"


def _apart(card: Card, recorded: str) -> str:
    here, newest = card.sessions[recorded], card.environment
    words = [f"on {recorded[:10]}"] if recorded[:10] != newest["recorded"][:10] else []
    words += [f"with driver {_driver(here)}"] if _driver(here) != _driver(newest) else []
    return " ".join(words)


def _driver(session: dict[str, Any]) -> str:
    return str((session.get("gpu") or {}).get("driver_version", ""))
