"""Recorded evidence in a few lines: the first table of the README."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .records import Json

BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"

_LENGTHS = (1024, 4096, 16384)
_HEAD_DIMS = (64, 128, 256)


def summary(evidence: dict[str, Json]) -> str:
    """One table a recorded GPU: speed over the peers that were timed side by side."""
    return "\n".join("\n".join(_device(record)) for record in evidence.values()) + "\n"


def _device(record: Json) -> Iterator[str]:
    environment, suites = record["environment"], record["suites"]
    yield (
        f"On an {environment['device'].removeprefix('NVIDIA ')} ({environment['recorded'][:10]}, bfloat16, "
        "16k tokens × 2048 hidden, cold L2), speed over PyTorch's in the same run at 1k · 4k · 16k; every "
        "row [below](#measured):\n"
    )
    yield "| | " + " | ".join(f"head dim {d}" for d in _HEAD_DIMS) + " |"
    yield "|---" * (1 + len(_HEAD_DIMS)) + "|"
    rows = suites["forward"]["rows"]
    for ours, peer, words in (
        ("fa3", "torch cudnn", "FA3 over cuDNN"),
        ("fa2", "torch flash", "FA2 over PyTorch's FA2"),
    ):
        for causal in (False, True):
            cells = [_cell(rows, ours, peer, d, causal) for d in _HEAD_DIMS]
            if any(cells):
                yield f"| {words}, {'causal' if causal else 'full'} | " + " | ".join(cells) + " |"
    yield from _sentences(record)


def _cell(rows: list[Json], ours: str, peer: str, head_dim: int, causal: bool) -> str:
    def this(problem: Json) -> bool:
        return bool(problem["head_dim"] == head_dim and problem["causal"] == causal)

    found = dict(_ratios(rows, ours, peer, this))
    return " · ".join(f"{found[n]:.2f}×" for n in _LENGTHS if n in found)


def _ratios(
    rows: list[Json], ours: str, peer: str, wanted: Callable[[Json], bool]
) -> Iterator[tuple[int, float]]:
    """(seqlen, speed-up) of each wanted shape that both were timed on."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if wanted(row["problem"]):
            times.setdefault(tuple(row["problem"].items()), {})[row["label"]] = row["p50_ns"]
    for shape, by_label in times.items():
        if ours in by_label and peer in by_label:
            yield dict(shape)["seqlen_q"], by_label[peer] / by_label[ours]


def _sentences(record: Json) -> Iterator[str]:
    suites = record["suites"]
    lines = []
    float32 = _range(suites, "float32", "fa2", "torch efficient", lambda p: p["precision"] == "float32")
    if float32:
        lines.append(f"float32 with float32 accuracy: {float32} PyTorch's memory-efficient backend.")
    awkward = _range(suites, "awkward", "fa3", "torch cudnn", lambda p: True)
    if awkward:
        lines.append(f"Short, ragged and uneven shapes: {awkward} cuDNN.")
    decoding = [min(peers) / ours for ours, peers in _decode_times(record)]
    if decoding:
        lines.append(
            f"Decoding, a token against 1k to 512k: {min(decoding):.2f}–{max(decoding):.2f}× the faster of "
            "PyTorch's two."
        )
    calls = {c["call"]: c["p50_us"] for c in record["host_calls"]}
    call = calls.get("flash_attention(q, k, v, causal=True)")
    first = record["first_result_seconds"]
    if call and "torch flash" in calls:
        lines.append(
            f"A call costs {call:.1f} µs of host time (PyTorch's flash backend: {calls['torch flash']:.1f});"
        )
        lines.append(
            f"the first ever takes {first['cold']:.1f} s with compilation, {first['warm']:.1f} s once the "
            "kernel is on disk."
        )
    yield "\n" + "\n".join(lines)


def _decode_times(record: Json) -> Iterator[tuple[float, list[float]]]:
    """(ours, the peers') of every case of decoding that has peers."""
    cases: dict[str, dict[str, float]] = {}
    for row in record.get("decode", {}).get("rows", []):
        cases.setdefault(row["case"], {})[row["label"]] = row["p50_ns"]
    for times in cases.values():
        peers = [time for label, time in times.items() if label.startswith("torch")]
        if peers and "flash_decode" in times:
            yield times["flash_decode"], peers


def _range(suites: Json, suite: str, ours: str, peer: str, wanted: Callable[[Json], bool]) -> str | None:
    found = [ratio for _, ratio in _ratios(suites.get(suite, {}).get("rows", []), ours, peer, wanted)]
    return f"{min(found):.2f}–{max(found):.2f}×" if found else None
