"""The tables of recorded suites, as lines of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cufa.measure import additions
from cufa.measure.cases import READ
from cufa.measure.ladder import is_step
from cufa.measure.measured import Measured, best_peer, by_case, speedup
from cufa.measure.published import BLOCK_LOSERS, BLOCK_WINNER
from cufa.plan.operation import OPERATIONS
from cufa.problem.problem import Problem

Rows = dict[str, Measured]

#: What a kernel is held against where it was timed beside it; else the first peer. Torch's flash backend is
#: FA2's own code; on Hopper the fastest that torch has is cuDNN's.
_YARDSTICKS = {"fa3": "torch cudnn"}

NONE = "–"


def table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def labels_of(rows: Iterable[Measured]) -> list[str]:
    return list(dict.fromkeys(row.label for row in rows))


def ratio(rows: Rows, slow: str, fast: str) -> str:
    """Ratio of medians with its 95% interval."""
    if not {slow, fast} <= rows.keys():
        return NONE
    return str(speedup(rows[slow], rows[fast]))


def _one(rows: Rows) -> Problem:
    return next(iter(rows.values())).problem


def _shape(p: Problem) -> str:
    lengths = str(p.seqlen_q) if p.seqlen_q == p.seqlen_k else f"{p.seqlen_q}×{p.seqlen_k}"
    return f"{p.batch} × {p.heads_text} × {lengths}"


def _mask(p: Problem) -> str:
    return p.scores_text + (" tf32" if p.precision == "tf32" else "")


# --- Against peers ----------------------------------------------------------------------------------------


def forward(rows: list[Measured]) -> Iterator[str]:
    yield from _against_peers(rows, ["head dim", "seq"], lambda p: [str(p.head_dim), str(p.seqlen_q)])


def awkward(rows: list[Measured]) -> Iterator[str]:
    yield from _against_peers(
        rows, ["batch × heads × seq", "head dim"], lambda p: [_shape(p), str(p.head_dim)]
    )


def _held_against(rows: list[Measured]) -> dict[str, str]:
    """The peer that each kernel of ours is compared with; empty where no peer was timed."""
    peers = labels_of(row for row in rows if row.is_peer)
    ours = labels_of(row for row in rows if row.is_ours) if peers else []
    return {x: _YARDSTICKS[x] if _YARDSTICKS.get(x) in peers else peers[0] for x in ours}


def _against_peers(
    rows: list[Measured], names: list[str], shape: Callable[[Problem], list[str]]
) -> Iterator[str]:
    """TFLOP/s of every contender, and ratios to peers measured side by side."""
    labels, held_against, lines = labels_of(rows), _held_against(rows), []
    for found in by_case(rows):
        cells = [*shape(_one(found)), _mask(_one(found))]
        cells += [f"{found[label].tflops:.0f}" if label in found else NONE for label in labels]
        lines.append([*cells, *(ratio(found, peer, label) for label, peer in held_against.items())])
    ratios = [f"{label} over {peer}" for label, peer in held_against.items()]
    yield from table([*names, "mask", *labels, *ratios], lines)


def sustained(alone: list[Measured], in_turns: list[Measured]) -> Iterator[str]:
    """Each contender alone, and the same ratios in both regimes side by side."""
    labels, lines = labels_of(alone), []
    beside = {next(iter(x.values())).group[2]: x for x in by_case(in_turns)}
    held_against = _held_against(alone)
    for found in by_case(alone):
        one = next(iter(found.values()))
        shape = one.case or f"{_shape(one.problem)}, d{one.problem.head_dim}, {_mask(one.problem)}"
        cells = [_load(found[label]) if label in found else NONE for label in labels]
        for label, peer in held_against.items():
            cells += [ratio(beside.get(one.group[2], {}), peer, label), _alone(found, peer, label)]
        lines.append([shape, *cells])
    ratios = [
        f"{label} over {peer}, {regime}"
        for label, peer in held_against.items()
        for regime in ("in turns", "sustained")
    ]
    yield from table(["batch × heads × seq", *labels, *ratios], lines)


def _alone(rows: Rows, peer: str, ours: str) -> str:
    """A ratio in which one time is the host's would not be the kernels'."""
    if any(rows[label].host_bound for label in (peer, ours) if label in rows):
        return "host-bound"
    return ratio(rows, peer, ours)


def _load(row: Measured) -> str:
    load, rate = row.load, f"{row.tflops:.0f}" if row.tflops >= 10 else f"{row.tbytes:.2f} TB/s"
    joule = NONE if load.get("tflop_per_joule") is None else f"{load['tflop_per_joule']:.2f}"
    clock = NONE if load.get("clock_mhz") is None else f"{load['clock_mhz']:.0f}"
    return f"{rate} · {joule} · {clock}"


def masks(rows: list[Measured]) -> Iterator[str]:
    """TFLOP/s over visible scores; decoding by its time."""
    cases = list(by_case(rows))
    of_rate = [found for found in cases if not OPERATIONS[_one(found).operation].memory_bound]
    labels = labels_of(row for found in of_rate for row in found.values())
    lines = []
    for found in of_rate:
        ours, peer = next(label for label in found if found[label].is_ours), best_peer(found)
        cells = [f"{found[label].tflops:.0f}" if label in found else NONE for label in labels]
        against = f"{ratio(found, peer, ours)} {peer}" if peer else NONE
        name = next(iter(found.values())).case or _one(found).scores_text
        lines.append([_shape(_one(found)), name, *cells, against])
    yield from table(["batch × heads × seq", "mask", *labels, "ours over the best of them"], lines)
    times = [
        [row.case, label, f"{row.p50_ns / 1e3:.1f}"]
        for found in cases
        for label, row in found.items()
        if OPERATIONS[row.problem.operation].memory_bound
    ]
    if times:
        yield "\n"
        yield from table(["case", "", "µs"], times)


# --- Decoding ---------------------------------------------------------------------------------------------


def decode(rows: list[Measured]) -> Iterator[str]:
    """Cases with peers, then the contenders of the others; TB/s of what must be read."""
    peers = labels_of(row for row in rows if row.is_peer)
    compared, others = [], []
    for found in by_case(rows):
        read = found[READ]
        if not any(row.is_peer for row in found.values()):
            others += [
                [row.case, label, f"{row.p50_ns / 1e3:.1f}", *_of_read(row, read)]
                for label, row in found.items()
                if label != READ
            ]
            continue
        ours = next(row for row in found.values() if row.is_ours)
        cells = [f"{found[name].tbytes:.2f}" if name in found else NONE for name in peers]
        best = ratio(found, best_peer(found), ours.label)
        compared.append([ours.case, f"{ours.p50_ns / 1e3:.1f}", *_of_read(ours, read), *cells, best])
    header = ["batch × heads × cached", "µs", "TB/s", "of a streaming read", *(f"{p}, TB/s" for p in peers)]
    yield from table([*header, "over the best of them"], compared)
    yield "\n"
    yield from table(["case", "", "µs", "TB/s", "of a streaming read"], others)


def _of_read(row: Measured, read: Measured) -> list[str]:
    """TB/s, and the share of what the streaming read reached on as many bytes."""
    return [f"{row.tbytes:.2f}", f"{read.p50_ns / row.p50_ns:.0%}"]


# --- What techniques bring --------------------------------------------------------------------------------


def ladder(rows: list[Measured]) -> Iterator[str]:
    """TFLOP/s of each step, and its gain over the step before, of a variation over the last step: measured, and where
    that is derived predicted from the ceilings."""
    labels, lines = sorted(labels_of(rows), key=_place), []
    for found in by_case(rows):
        p = _one(found)
        cells = dict.fromkeys(labels, NONE)
        before = ""
        for label in (x for x in labels if x in found):
            gain = f" · {_gain(found[before], found[label])}" if before else ""
            cells[label] = f"{found[label].tflops:.0f}{gain}"
            before = label if is_step(label) else before
        lines.append([str(p.head_dim), str(p.seqlen_q), _mask(p), *cells.values()])
    compared = (
        "the step before"
        if all(map(is_step, labels))
        else "the step before, of variations over the last step"
    )
    yield f"TFLOP/s · gain over {compared} (as predicted from the ceilings)\n"
    yield from table(["head dim", "seq", "mask", *labels], lines)


def _place(label: str) -> tuple[bool, str]:
    """Steps in order, which not every shape has all of, then variations."""
    return not is_step(label), label if is_step(label) else ""


def _gain(before: Measured, after: Measured) -> str:
    measured = f"{before.p50_ns / after.p50_ns:.2f}×"
    if not {"predicted_ns"} <= before.json.keys() & after.json.keys():
        return measured
    return f"{measured} ({before.json['predicted_ns'] / after.json['predicted_ns']:.2f}×)"


def needs(rows: list[Measured], device: str) -> Iterator[str]:
    """How much of the time measured each resource needs by itself, for the rows of one operation that say so."""
    derived = [row for row in rows if "needs_ns" in row.json]
    if not derived:
        return
    most_first = sorted(derived, key=lambda row: -len(row.json["needs_ns"]))
    names = list(dict.fromkeys(name for row in most_first for name in row.json["needs_ns"]))
    lines = []
    for row in derived:
        p, found = row.problem, row.json["needs_ns"]
        cells = [row.label, str(p.head_dim), str(p.seqlen_q), _mask(p), f"{row.tflops:.0f}"]
        off = f"{row.json['predicted_ns'] / row.p50_ns - 1:+.0%}"
        shares = (f"{found[name] / row.p50_ns:.0%}" if name in found else NONE for name in names)
        lines.append([*cells, *shares, off])
    title = OPERATIONS[rows[0].problem.operation].title
    what = "what each resource would need by itself, of the time measured; how far off the prediction is"
    yield f"\n**{title}: {what}**\n"
    if additions.NAME in names:
        yield f"{additions.NAME}: at {additions.of_card(device)}.\n"
    yield from table(["kernel", "head dim", "seq", "mask", "TFLOP/s", *names, "prediction"], lines)


def versions(rows: list[Measured]) -> Iterator[str]:
    """Times in µs; what skipping tiles alone gives, predicted and measured; FA1 to FA2 as published."""
    labels = ["naive", "fa1", "fa2_noskip", "fa2"]
    lines = []
    for found in by_case(rows):
        times = [f"{found[label].p50_ns / 1e3:.1f}" if label in found else NONE for label in labels]
        predicted = _predicted(found["fa2_noskip"], found["fa2"])
        skip, gain = ratio(found, "fa2_noskip", "fa2"), ratio(found, "fa1", "fa2")
        fewer_tiles = f"{_predicted(found['fa1'], found['fa2']):.2f}×" if "fa1" in found else NONE
        p = _one(found)
        lines.append([_shape(p), p.dtype, *times, f"{predicted:.2f}×", skip, fewer_tiles, gain])
    header = ["batch × heads × seq", "dtype", *(f"{label}, µs" for label in labels)]
    yield from table([*header, "skip by tiles", "skip, measured", "FA1 → FA2 by tiles", "FA1 → FA2"], lines)


def _predicted(slow: Measured, fast: Measured) -> float:
    scores = [
        r["tiles_visited"] * r["config"]["block_q"] * r["config"]["block_kv"] for r in (slow.json, fast.json)
    ]
    return float(scores[0] / scores[1])


def blocks(rows: list[Measured]) -> Iterator[str]:
    """Tilings of FA1 by shape, each element in a table of its own: float32 beside what was published of it."""
    for dtype in dict.fromkeys(row.problem.dtype for row in rows):
        of_dtype = [row for row in rows if row.problem.dtype == dtype]
        yield from _known_blocks(of_dtype) if dtype == "float32" else _blocks(of_dtype)
        yield ""


def _blocks(rows: list[Measured]) -> Iterator[str]:
    columns = list(by_case(rows))
    header = [f"FA1 tiles, {rows[0].problem.dtype}", *(f"{_shape(_one(found))}, µs" for found in columns)]
    lines = []
    for label in labels_of(rows):
        times = [f"{found[label].p50_ns / 1e3:.1f}" if label in found else NONE for found in columns]
        lines.append([label.removeprefix("fa1 "), *times])
    yield from table(header, lines)


def _known_blocks(rows: list[Measured]) -> Iterator[str]:
    """Times, and as multiples of that of the published winner."""
    columns = [{_tiles(row): row.p50_ns for row in found.values()} for found in by_case(rows)]
    shapes = [_shape(_one(found)) for found in by_case(rows)]
    header = ["FA1 tiles, float32", "published, on an A10", *(f"{shape}, µs" for shape in shapes)]
    lines = []
    for tiles in (BLOCK_WINNER, *BLOCK_LOSERS):
        cells = [_beside(found, tiles) for found in columns]
        place = "fastest" if tiles == BLOCK_WINNER else "slower"
        lines.append([f"{tiles[0]}×{tiles[1]}, {tiles[2]} warps", place, *cells])
    yield from table(header, lines)


def _tiles(row: Measured) -> tuple[int, int, int]:
    config = row.json["config"]
    return config["block_q"], config["block_kv"], config["num_warps"]


def _beside(times: dict[tuple[int, int, int], float], tiles: tuple[int, int, int]) -> str:
    if tiles not in times:
        return NONE
    over = f" ({times[tiles] / times[BLOCK_WINNER]:.2f}×)" if BLOCK_WINNER in times else ""
    return f"{times[tiles] / 1e3:.1f}{over}"


def memory(rows: list[Measured]) -> Iterator[str]:
    lines = []
    for found in by_case(rows):
        if not {"naive", "fa2"} <= found.keys():
            continue
        extra = [f"{found[label].json['workspace_bytes'] / 2**20:,.0f}" for label in ("naive", "fa2")]
        lines.append([_shape(_one(found)), *extra, ratio(found, "naive", "fa2")])
    yield from table(["batch × heads × seq", "naive, extra MiB", "fa2, extra MiB", "naive → fa2"], lines)
