"""Recorded evidence as Markdown: the tables of the README, which a test holds to the records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import records, summary
from .decode import PEERS, READ
from .evidence import timing_of
from .records import Json
from .timing import speedup

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def update(text: str, evidence: dict[str, Json]) -> str:
    """``text`` with what stands between the markers replaced: the tables, and the summary where it is wanted.
    Raises ValueError when there are no markers for the tables."""
    text = _replace(text, BEGIN, END, markdown(evidence))
    return (
        _replace(text, summary.BEGIN, summary.END, summary.summary(evidence))
        if summary.BEGIN in text
        else text
    )


def _replace(text: str, begin: str, end: str, section: str) -> str:
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no lines {begin} and {end} to write between")
    return f"{before}{begin}\n{section.strip()}\n{end}{after}"


def update_file(file: Path) -> None:
    file.write_text(update(file.read_text(encoding="utf-8"), records.load_all()), encoding="utf-8")


def markdown(evidence: dict[str, Json]) -> str:
    """All tables of all recorded GPUs."""
    if not evidence:
        return "Nothing has been recorded yet.\n"
    return "\n".join("\n".join(_device_section(record)) for record in evidence.values())


def _device_section(record: Json) -> Iterator[str]:
    environment, tests, limits = record["environment"], record["tests"], record["limits"]
    versions = environment["versions"]
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    flops = ", ".join(f"{kind} {rate * 1e-12:.0f} TFLOP/s" for kind, rate in limits["flops"].items())
    yield (
        f"{environment['device']}, {environment['recorded'][:10]}: NVRTC {environment['nvrtc']}{torch}; "
        "medians, cold L2, FLOPs of visible scores only. Measured ceilings: copy "
        f"{limits['copy_bytes'] * 1e-12:.2f} TB/s; tensor cores {flops}."
    )
    if tests:
        yield f"{tests['passed']:,} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped."
    yield from _suite(record, "forward", _forward)
    yield from _decode(record.get("decode"))
    for name, build in _FURTHER_SUITES.items():
        yield from _folded(_suite(record, name, build))
    yield from _folded(_needs(record))
    yield from _folded(_host_calls(record))
    yield from _folded(_first_results(record))


def _folded(lines: Iterator[str]) -> Iterator[str]:
    """The first line, a title, is all that is seen before a click."""
    title = next(lines, None)
    if title is not None:
        yield f"\n<details><summary>{title.strip().strip('*')}</summary>\n"
        yield from lines
        yield "\n</details>"


def _suite(record: Json, name: str, build: Callable[[Json], Iterator[str]]) -> Iterator[str]:
    suite = record["suites"].get(name)
    if suite and suite["rows"]:
        yield f"\n**{suite['title'][0].upper()}{suite['title'][1:]}**\n"
        yield from build(suite)


def _host_calls(record: Json) -> Iterator[str]:
    yield "\n**Host time of one call, µs**\n"
    calls = record["host_calls"]
    yield from _table(["call", "median", "p10", "p90"], ([f"`{c['call']}`", *_percentiles(c)] for c in calls))


def _first_results(record: Json) -> Iterator[str]:
    """A new process, and each kernel's share in it."""
    yield "\n**First result of a new process, and compile of one variant, s**\n"
    first = record["first_result_seconds"]
    lines = [
        ["first result, nothing compiled yet", f"{first['cold']:.1f}"],
        ["first result, kernel cached on disk", f"{first['warm']:.1f}"],
    ]
    kernels = record["kernels"].items()
    lines += [[name, f"{k['compile_seconds']:.1f}"] for name, k in kernels if "compile_seconds" in k]
    yield from _table(["", "seconds"], lines)


def _percentiles(call: Json) -> list[str]:
    return [f"{call[key]:.1f}" for key in ("p50_us", "p10_us", "p90_us")]


#: What a kernel is held against where it was timed beside it; else the first peer. Torch's flash backend is
#: FA2's own code; on Hopper the fastest that torch has is cuDNN's.
_YARDSTICKS = {"fa3": "torch cudnn"}


def _forward(suite: Json) -> Iterator[str]:
    yield from _against_peers(suite, ["head dim", "seq"], lambda p: [str(p["head_dim"]), str(p["seqlen_q"])])


def _awkward(suite: Json) -> Iterator[str]:
    def shape(p: Json) -> list[str]:
        heads = str(p["heads"]) if p["heads"] == p["kv_heads"] else f"{p['heads']}/{p['kv_heads']}"
        lengths = str(p["seqlen_q"]) if p["seqlen_q"] == p["seqlen_k"] else f"{p['seqlen_q']}×{p['seqlen_k']}"
        return [f"{p['batch']} × {heads} × {lengths}", str(p["head_dim"])]

    yield from _against_peers(suite, ["batch × heads × seq", "head dim"], shape)


def _against_peers(suite: Json, names: list[str], shape: Callable[[Json], list[str]]) -> Iterator[str]:
    """TFLOP/s of every contender, and ratios to peers measured side by side."""
    labels = list(dict.fromkeys(row["label"] for row in suite["rows"]))
    peers = [label for label in labels if label.startswith("torch")]
    ours = [label for label in labels if label not in peers] if peers else []
    held_against = {x: _YARDSTICKS[x] if _YARDSTICKS.get(x) in peers else peers[0] for x in ours}
    lines = []
    for problem, rows in _by_problem(suite):
        precision = f" {problem['precision']}" if problem["precision"] == "tf32" else ""
        cells = [*shape(problem), _mask(problem) + precision]
        cells += [f"{rows[label]['tflops']:.0f}" if label in rows else "–" for label in labels]
        cells += [_speedup(rows, peer, label) for label, peer in held_against.items()]
        lines.append(cells)
    ratios = [f"{label} over {peer}" for label, peer in held_against.items()]
    yield from _table([*names, "mask", *labels, *ratios], lines)


def _decode(section: Json | None) -> Iterator[str]:
    """Published shapes beside the peers, then the contenders of the other cases; TB/s of keys and values."""
    if section is None:
        return
    by_case = {
        case: {row["label"]: row for row in rows}
        for case, rows in itertools.groupby(section["rows"], key=lambda row: row["case"])
    }
    compared, others = [], []
    for case, rows in by_case.items():
        peers = [row for label, row in rows.items() if label.startswith("torch")]
        read = rows[READ]
        if not peers:
            others += [
                [case, label, f"{row['p50_ns'] / 1e3:.1f}", *_of_read(row, read)]
                for label, row in rows.items()
                if label != READ
            ]
            continue
        ours, best = rows["flash_decode"], min(peers, key=lambda row: float(row["p50_ns"]))
        cells = [f"{rows[name]['tbytes_per_s']:.2f}" if name in rows else "–" for name in PEERS]
        ratio = str(speedup(timing_of(best), timing_of(ours)))
        compared.append([case, f"{ours['p50_ns'] / 1e3:.1f}", *_of_read(ours, read), *cells, ratio])
    yield "\n**Decode: one query token, head dim 128, bfloat16**\n"
    header = ["batch × heads × cached", "µs", "TB/s", "of a streaming read", *(f"{p}, TB/s" for p in PEERS)]
    yield from _table([*header, "over the best of them"], compared)
    yield "\n"
    yield from _table(["case", "", "µs", "TB/s", "of a streaming read"], others)


def _of_read(row: Json, read: Json) -> list[str]:
    """TB/s, and the share of what the streaming read reached on as many bytes."""
    return [f"{row['tbytes_per_s']:.2f}", f"{read['p50_ns'] / row['p50_ns']:.0%}"]


def _ladder(suite: Json) -> Iterator[str]:
    """TFLOP/s of each step, and its gain over the step before: measured, and predicted from the ceilings."""
    labels = list(dict.fromkeys(row["label"] for row in suite["rows"]))
    lines = []
    for problem, rows in _by_problem(suite):
        cells = [str(problem["head_dim"]), str(problem["seqlen_q"]), _mask(problem)]
        for before, label in zip([None, *labels], labels, strict=False):
            gain = f" · {_gain(rows, before, label)}" if {before, label} <= rows.keys() else ""
            cells.append(f"{rows[label]['tflops']:.0f}{gain}" if label in rows else "–")
        lines.append(cells)
    yield "TFLOP/s · gain over the step before (as predicted from the ceilings)\n"
    yield from _table(["head dim", "seq", "mask", *labels], lines)


def _gain(rows: dict[str, Json], before: str | None, label: str) -> str:
    assert before is not None
    measured, predicted = (rows[before][key] / rows[label][key] for key in ("p50_ns", "predicted_ns"))
    return f"{measured:.2f}× ({predicted:.2f}×)"


def _needs(record: Json) -> Iterator[str]:
    """How much of the time measured each resource needs by itself, for the rows of "forward" that say so."""
    rows = [row for row in record["suites"].get("forward", {"rows": []})["rows"] if "needs_ns" in row]
    if not rows:
        return
    yield "\n**FA3: what each resource would need by itself, of the time measured**\n"
    names = list(rows[0]["needs_ns"])
    lines = []
    for row in rows:
        problem = row["problem"]
        cells = [str(problem["head_dim"]), str(problem["seqlen_q"]), _mask(problem), f"{row['tflops']:.0f}"]
        lines.append([*cells, *(f"{row['needs_ns'][name] / row['p50_ns']:.0%}" for name in names)])
    yield from _table(["head dim", "seq", "mask", "TFLOP/s", *names], lines)


def _versions(suite: Json) -> Iterator[str]:
    """Times in µs; what the causal skip alone gives, predicted and measured; FA1 to FA2 as published."""
    labels = ["naive", "fa1", "fa2_noskip", "fa2"]
    lines = []
    for problem, rows in _by_problem(suite):
        shape = f"{problem['batch']} × {problem['heads']} × {problem['seqlen_q']}"
        times = [f"{rows[label]['p50_ns'] / 1e3:.1f}" if label in rows else "–" for label in labels]
        predicted = _predicted(rows["fa2_noskip"], rows["fa2"])
        skip = _speedup(rows, "fa2_noskip", "fa2")
        versions = _speedup(rows, "fa1", "fa2")
        fewer_tiles = f"{_predicted(rows['fa1'], rows['fa2']):.2f}×" if "fa1" in rows else "–"
        lines.append([shape, problem["dtype"], *times, f"{predicted:.2f}×", skip, fewer_tiles, versions])
    header = ["batch × heads × seq", "dtype", *(f"{label}, µs" for label in labels)]
    yield from _table([*header, "skip by tiles", "skip, measured", "FA1 → FA2 by tiles", "FA1 → FA2"], lines)


def _predicted(slow: Json, fast: Json) -> float:
    scores = [r["tiles_visited"] * r["config"]["block_q"] * r["config"]["block_kv"] for r in (slow, fast)]
    return float(scores[0] / scores[1])


def _blocks(suite: Json) -> Iterator[str]:
    columns = list(_by_problem(suite))
    labels = list(dict.fromkeys(row["label"] for row in suite["rows"]))
    header = ["FA1 tiles", *(f"{p['batch']} × {p['heads']} × {p['seqlen_q']}, µs" for p, _ in columns)]
    lines = []
    for label in labels:
        times = [f"{rows[label]['p50_ns'] / 1e3:.1f}" if label in rows else "–" for _, rows in columns]
        lines.append([label.removeprefix("fa1 "), *times])
    yield from _table(header, lines)


def _memory(suite: Json) -> Iterator[str]:
    lines = []
    for problem, rows in _by_problem(suite):
        if not {"naive", "fa2"} <= rows.keys():
            continue
        memory = [f"{rows[label]['workspace_bytes'] / 2**20:,.0f}" for label in ("naive", "fa2")]
        shape = f"{problem['batch']} × {problem['heads']} × {problem['seqlen_q']}"
        lines.append([shape, *memory, _speedup(rows, "naive", "fa2")])
    yield from _table(["batch × heads × seq", "naive, extra MiB", "fa2, extra MiB", "naive → fa2"], lines)


def _speedup(rows: dict[str, Json], slow: str, fast: str) -> str:
    """Ratio of medians with its 95% interval, from the recorded samples."""
    if not {slow, fast} <= rows.keys():
        return "–"
    return str(speedup(timing_of(rows[slow]), timing_of(rows[fast])))


def _by_problem(suite: Json) -> Iterator[tuple[Json, dict[str, Json]]]:
    for problem, rows in itertools.groupby(suite["rows"], key=lambda row: row["problem"]):
        yield problem, {row["label"]: row for row in rows}


def _mask(problem: Json) -> str:
    return "causal" if problem["causal"] else "full"


def _table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for line in lines:
        yield f"| {' | '.join(line)} |"


_FURTHER_SUITES = {
    "awkward": _awkward,
    "ladder": _ladder,
    "versions": _versions,
    "float32": _forward,
    "fa1-blocks": _blocks,
    "memory": _memory,
}
