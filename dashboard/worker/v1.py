"""Runs of schema 1, which are still on users' disks, as schema 2: the mask was a bool, decoding had cases and events
of its own, and contenders always took turns. (Their records are :mod:`cufa.measure.records_v1`'s.)"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cufa.measure.cases import READ
from cufa.measure.records_v1 import decode_problem, problem
from cufa.measure.regimes import Regime

Json = dict[str, Any]

_CONTENDER: Json = {"algorithm": "auto", "config": None, "name": "", "num_splits": None, "problem": None}
_PEERS = ("torch flash", "torch cudnn")


def job(old: Json) -> Json:
    """Raises KeyError or TypeError when the content is no job."""
    cases = [*map(_case, old["cases"]), *map(_split_case, old.get("decode", ()))]
    return {**old, "schema": 2, "regime": Regime.IN_TURNS.value, "cases": cases}


def told(record: Json, events: Iterable[Json]) -> Json:
    """A record of schema 1 that is put together from events: those of decoding had a kind of their own."""
    rows = [event["record"] for event in events if event.get("event") == "decode"]
    return {**record, "decode": {"rows": rows}} if rows else record


def _case(old: Json) -> Json:
    contenders = [{**_CONTENDER, **c} for c in old["contenders"]]
    return {"name": "", "problem": problem(old["problem"]), "lengths": None, "contenders": contenders}


def _split_case(old: Json) -> Json:
    ours = [
        {
            **_CONTENDER,
            "algorithm": c["schedule"],
            "name": c["label"],
            "num_splits": c["num_splits"],
            "problem": decode_problem(c["problem"]),
        }
        for c in old["contenders"]
    ]
    others = [*(_PEERS if old.get("with_peers") else ()), READ]
    contenders = [*ours, *({**_CONTENDER, "algorithm": name} for name in others)]
    first = ours[0]["problem"]
    return {"name": old["title"], "problem": first, "lengths": old["lengths"], "contenders": contenders}
