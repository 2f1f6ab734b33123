"""Jobs of schema 1, which are still on users' disks, as schema 2: the mask was a bool, decoding had cases of its own,
and contenders always took turns."""

from __future__ import annotations

from typing import Any

from cufa.bench.cases import READ
from cufa.bench.records_v1 import decode_problem, problem
from cufa.bench.regimes import Regime

Json = dict[str, Any]

_CONTENDER: Json = {"algorithm": "auto", "config": None, "name": "", "num_splits": None, "problem": None}
_PEERS = ("torch flash", "torch cudnn")


def upgraded(old: Json) -> Json:
    """Raises KeyError or TypeError when the content is no job."""
    cases = [*map(_case, old["cases"]), *map(_split_case, old.get("decode", ()))]
    return {**old, "schema": 2, "regime": Regime.IN_TURNS.value, "cases": cases}


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
