"""Records of schema 1 as schema 2: the mask was a bool, decoding had a problem and a section of its own, and
every row was measured in turns."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..problem.lengths import DENSE, Cached
from ..problem.mask import CAUSAL, FULL
from ..problem.problem import Problem
from .cases import Work
from .regimes import Regime

Json = dict[str, Any]

#: Fields of trace records by what they were called; those that are not here are 0 in old traces: a causal head
#: began with its first tile, and with those that need no mask.
TRACE_FIELDS = {"tiles_clear": "tiles_unmasked"}

_DECODE_TITLE = "decode: one query token, head dim 128, bfloat16"


def upgraded(record: Json) -> Json:
    """Evidence, or a run."""
    record = {**record, "schema": 2}
    if "rows" in record:
        record["rows"] = [_row(row) for row in record["rows"]]
        record["skipped"] = [_skipped(row) for row in record.get("skipped", ())]
    suites = {
        name: {
            **suite,
            "rows": [_row(x) for x in suite["rows"]],
            "skipped": [*map(_skipped, suite["skipped"])],
        }
        for name, suite in record.get("suites", {}).items()
    }
    decoding = record.pop("decode", None)
    if decoding is not None:
        rows = [_decode_row(row) for row in decoding["rows"]]
        if suites:
            suites["decode"] = {"title": _DECODE_TITLE, **decoding, "rows": rows, "skipped": []}
        else:
            record["rows"] = [*record.get("rows", ()), *rows]
    if suites:
        record["suites"] = suites
    return record


def problem(old: Json) -> Json:
    """A problem of forward as it was written."""
    kept = {name: value for name, value in old.items() if name != "causal"}
    mask = CAUSAL if old.get("causal") else FULL
    return Problem(**kept, mask=mask, lengths=DENSE).as_json()


def decode_problem(old: Json) -> Json:
    """Of decoding."""
    cache = {name: old[name] for name in ("page_size", "max_pages", "num_pages", "new_tokens")}
    cache_dtype = None if old["cache_dtype"] == old["dtype"] else old["cache_dtype"]
    same = ("batch", "heads", "kv_heads", "head_dim", "dtype", "scale", "alignment", "positive_strides")
    return Problem(
        **{name: old[name] for name in same},
        seqlen_q=old["tokens"],
        seqlen_k=old["capacity"],
        mask=CAUSAL,
        lengths=Cached(**cache, given=old["ragged"]),
        k_dtype=cache_dtype,
        v_dtype=cache_dtype,
        operation="decode",
    ).as_json()


def _row(old: Json) -> Json:
    row = {**old, "case": "", "problem": problem(old["problem"]), "regime": Regime.IN_TURNS.value}
    work = Work.of(Problem.from_json(row["problem"]))
    return {**row, **dataclasses.asdict(work)}


def _skipped(old: Json) -> Json:
    return {**old, "case": "", "problem": problem(old["problem"])}


def _decode_row(old: Json) -> Json:
    row = {**old, "problem": decode_problem(old["problem"]), "regime": Regime.IN_TURNS.value}
    found = Problem.from_json(row["problem"])
    io_bytes, seconds = row.pop("kv_bytes"), row["p50_ns"] * 1e-9
    # Lengths of ragged batches were not kept: what was read says how many keys were valid in all.
    keys = io_bytes // (found.kv_bytes() // (found.batch * found.seqlen_k))
    scores = keys * found.heads * found.seqlen_q
    flops = 4 * found.head_dim * scores
    row |= {"flops": flops, "io_bytes": io_bytes, "scores": scores, "of_ceiling": None, "ceiling": None}
    row |= {"tflops": round(flops / seconds * 1e-12, 3), "gbytes_per_s": row.pop("tbytes_per_s") * 1e3}
    if "schedule" in row:
        row["split"] = {"kind": row.pop("schedule"), "count": row.pop("num_splits")}
    return row
