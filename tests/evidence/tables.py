"""The tables of recorded suites, as lines of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cufa.measure import additions
from cufa.measure.cases import READ
from cufa.measure.ladder import is_step
from cufa.measure.measured import Measured, by_case, speedup
from cufa.measure.quantized import QUANTIZE
from cufa.measure.suites import BLOCK_LOSERS, BLOCK_WINNER
from cufa.plan.operation import OPERATIONS
from cufa.problem.problem import Problem

Rows = dict[str, Measured]
"""One row per contender of a case, by label."""
Lines = Iterator[str]

#: The peer that a kernel is compared with if it was measured; else the first peer. On Hopper, cuDNN is torch's fastest
#: backend, whereas its flash backend is FA2.
_YARDSTICKS = {"fa3": "torch cudnn"}
NONE = "–"


def table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> Lines:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def labels_of(rows: Iterable[Measured]) -> list[str]:
    return list(dict.fromkeys(row.label for row in rows))


def best_peer(found: dict[str, Measured]) -> str:
    """The fastest of another library in one case; "" when none was timed."""
    peers = [row for row in found.values() if row.is_peer]
    return min(peers, key=lambda row: row.p50_ns).label if peers else ""


def ratio(rows: Rows, slow: str, fast: str) -> str:
    """Ratio of medians with its 95% confidence interval."""
    return str(speedup(rows[slow], rows[fast])) if {slow, fast} <= rows.keys() else NONE


def _cells(rows: Rows, labels: Iterable[str], text: Callable[[Measured], str]) -> list[str]:
    return [text(rows[label]) if label in rows else NONE for label in labels]


def _rate(row: Measured) -> str:
    return f"{row.tflops:.0f}"


def _us(row: Measured) -> str:
    return f"{row.p50_ns / 1e3:.1f}"


def _first(rows: Rows) -> Measured:
    return next(iter(rows.values()))


def _shape(p: Problem) -> str:
    lengths = str(p.seqlen_q) if p.seqlen_q == p.seqlen_k else f"{p.seqlen_q}×{p.seqlen_k}"
    return f"{p.batch} × {p.heads_text} × {lengths}"


def _mask(p: Problem) -> str:
    return p.scores_text + (" tf32" if p.precision == "tf32" else "")


# --- Against peers ----------------------------------------------------------------------------------------


def forward(rows: list[Measured]) -> Lines:
    return _against_peers(rows, ["head dim", "seq"], lambda p: [str(p.head_dim), str(p.seqlen_q)])


def awkward(rows: list[Measured]) -> Lines:
    return _against_peers(rows, ["batch × heads × seq", "head dim"], lambda p: [_shape(p), p.dims_text])


def _held_against(rows: list[Measured]) -> list[tuple[str, str]]:
    """(our kernel, the peer that it is compared with) for each of our kernels. Empty: no peer was measured."""
    peers = labels_of(row for row in rows if row.is_peer)
    ours = labels_of(row for row in rows if row.is_ours) if peers else []
    return [(x, _YARDSTICKS[x] if _YARDSTICKS.get(x) in peers else peers[0]) for x in ours]


def _against_peers(rows: list[Measured], names: list[str], shape: Callable[[Problem], list[str]]) -> Lines:
    """TFLOP/s of every contender, and ratios to peers measured in alternation."""
    labels, pairs, lines = labels_of(rows), _held_against(rows), []
    for found in by_case(rows):
        p = _first(found).problem
        ratios = (ratio(found, peer, ours) for ours, peer in pairs)
        lines.append([*shape(p), _mask(p), *_cells(found, labels, _rate), *ratios])
    return table([*names, "mask", *labels, *(f"{ours} over {peer}" for ours, peer in pairs)], lines)


def sustained(alone: list[Measured], in_turns: list[Measured]) -> Lines:
    """Rates of each contender alone, and ratios to peers in both regimes."""
    labels, pairs, lines = labels_of(alone), _held_against(alone), []
    beside = {_first(x).group[2]: x for x in by_case(in_turns)}
    for found in by_case(alone):
        one, p = _first(found), _first(found).problem
        cells = [one.case or f"{_shape(p)}, d{p.dims_text}, {_mask(p)}", *_cells(found, labels, _load)]
        for ours, peer in pairs:
            # If one of the times is host-bound, the ratio would not compare kernels.
            host = any(found[x].host_bound for x in (peer, ours) if x in found)
            cells += [ratio(beside.get(one.group[2], {}), peer, ours)]
            cells += ["host-bound" if host else ratio(found, peer, ours)]
        lines.append(cells)
    ratios = (f"{ours} over {peer}, {x}" for ours, peer in pairs for x in ("in turns", "sustained"))
    return table(["batch × heads × seq", *labels, *ratios], lines)


def _load(row: Measured) -> str:
    load, rate = row.load, _rate(row) if row.tflops >= 10 else f"{row.gbytes / 1e3:.2f} TB/s"
    joule = NONE if load.get("tflop_per_joule") is None else f"{load['tflop_per_joule']:.2f}"
    clock = NONE if load.get("clock_mhz") is None else f"{load['clock_mhz']:.0f}"
    return f"{rate} · {joule} · {clock}"


def masks(rows: list[Measured]) -> Lines:
    """TFLOP/s over visible scores; for decode, the time."""
    of_time = [row for row in rows if OPERATIONS[row.problem.operation].memory_bound]
    cases = list(by_case(row for row in rows if row not in of_time))
    labels = labels_of(row for found in cases for row in found.values())
    lines = []
    for found in cases:
        one, peer = _first(found), best_peer(found)
        ours = next(label for label in found if found[label].is_ours)
        against = f"{ratio(found, peer, ours)} {peer}" if peer else NONE
        name = one.case or one.problem.scores_text
        lines.append([_shape(one.problem), name, *_cells(found, labels, _rate), against])
    yield from table(["batch × heads × seq", "mask", *labels, "ours over the best of them"], lines)
    if of_time:
        yield "\n"
        yield from table(["case", "", "µs"], ([row.case, row.label, _us(row)] for row in of_time))


# --- Decoding ---------------------------------------------------------------------------------------------


def decode(rows: list[Measured]) -> Lines:
    """First the cases with peers, then all contenders of the other cases. TB/s counts the bytes that must be read."""
    peers = labels_of(row for row in rows if row.is_peer)
    compared, others = [], []
    for found in by_case(rows):
        read = found[READ]

        def cells(row: Measured, read: Measured = read) -> list[str]:
            """µs, TB/s, and the fraction of the rate of a streaming read of equally many bytes."""
            return [_us(row), f"{row.gbytes / 1e3:.2f}", f"{read.p50_ns / row.p50_ns:.0%}"]

        if best := best_peer(found):
            ours = next(row for row in found.values() if row.is_ours)
            rates = _cells(found, peers, lambda row: f"{row.gbytes / 1e3:.2f}")
            compared.append([ours.case, *cells(ours), *rates, ratio(found, best, ours.label)])
        else:
            others += [[row.case, label, *cells(row)] for label, row in found.items() if label != READ]
    columns = ["µs", "TB/s", "of a streaming read"]
    named = [f"{peer}, TB/s" for peer in peers]
    yield from table(["batch × heads × cached", *columns, *named, "over the best of them"], compared)
    yield "\n"
    yield from table(["case", "", *columns], others)


# --- Gains of techniques -----------------------------------------------------------------------------------


def ladder(rows: list[Measured]) -> Lines:
    """TFLOP/s of each step with its gain over the preceding step; of each variation with its gain over the last step.
    Gains are measured and, if rows have a prediction, also predicted from the ceilings."""
    # Steps in order, then variations. A shape may lack some steps.
    labels = sorted(labels_of(rows), key=lambda x: (not is_step(x), x if is_step(x) else ""))
    lines = []
    for found in by_case(rows):
        p, cells, before = _first(found).problem, dict.fromkeys(labels, NONE), ""
        for label in (x for x in labels if x in found):
            gain = f" · {_gain(found[before], found[label])}" if before else ""
            cells[label] = f"{_rate(found[label])}{gain}"
            before = label if is_step(label) else before
        lines.append([str(p.head_dim), str(p.seqlen_q), _mask(p), *cells.values()])
    of_variations = "" if all(map(is_step, labels)) else ", of variations over the last step"
    yield f"TFLOP/s · gain over the step before{of_variations} (as predicted from the ceilings)\n"
    yield from table(["head dim", "seq", "mask", *labels], lines)


def _gain(before: Measured, after: Measured) -> str:
    measured = f"{before.p50_ns / after.p50_ns:.2f}×"
    if not {"predicted_ns"} <= before.json.keys() & after.json.keys():
        return measured
    return f"{measured} ({before.json['predicted_ns'] / after.json['predicted_ns']:.2f}×)"


def needs(rows: list[Measured], device: str) -> Lines:
    """Fraction of the measured time that each resource needs, for the rows of one operation that have bounds."""
    derived = [row for row in rows if "needs_ns" in row.json]
    if not derived:
        return
    most_first = sorted(derived, key=lambda row: -len(row.json["needs_ns"]))
    names = list(dict.fromkeys(name for row in most_first for name in row.json["needs_ns"]))
    lines = []
    for row in derived:
        p, found = row.problem, row.json["needs_ns"]
        cells = [row.label, str(p.head_dim), str(p.seqlen_q), _mask(p), _rate(row)]
        shares = (f"{found[name] / row.p50_ns:.0%}" if name in found else NONE for name in names)
        lines.append([*cells, *shares, f"{row.json['predicted_ns'] / row.p50_ns - 1:+.0%}"])
    title = OPERATIONS[rows[0].problem.operation].title
    what = "what each resource would need by itself, of the time measured; how far off the prediction is"
    yield f"\n**{title}: {what}**\n"
    if additions.NAME in names:
        yield f"{additions.NAME}: at {additions.of_card(device)}.\n"
    yield from table(["kernel", "head dim", "seq", "mask", "TFLOP/s", *names, "prediction"], lines)


def versions(rows: list[Measured]) -> Lines:
    """Times in µs, then two gains by visited tiles and as measured: of skipping masked tiles, and of FA2 over FA1."""
    labels, lines = ["naive", "fa1", "fa2_noskip", "fa2"], []
    for found in by_case(rows):
        p, gains = _first(found).problem, []
        for slow in ("fa2_noskip", "fa1"):
            predicted = f"{_scores(found[slow]) / _scores(found['fa2']):.2f}×" if slow in found else NONE
            gains += [predicted, ratio(found, slow, "fa2")]
        lines.append([_shape(p), p.dtype, *_cells(found, labels, _us), *gains])
    header = ["batch × heads × seq", "dtype", *(f"{label}, µs" for label in labels)]
    return table([*header, "skip by tiles", "skip, measured", "FA1 → FA2 by tiles", "FA1 → FA2"], lines)


def _scores(row: Measured) -> float:
    """Scores that the kernel computes: tiles visited times scores of a tile."""
    config = row.json["config"]
    return float(row.json["tiles_visited"] * config["block_q"] * config["block_kv"])


def blocks(rows: list[Measured]) -> Lines:
    """FA1's times by tile config and shape, one table per dtype. The float32 table also has the published ranking."""
    for dtype in dict.fromkeys(row.problem.dtype for row in rows):
        columns = list(by_case(row for row in rows if row.problem.dtype == dtype))
        times = [f"{_shape(_first(found).problem)}, µs" for found in columns]
        if dtype == "float32":
            yield from table(["FA1 tiles, float32", "published, on an A10", *times], _known_blocks(columns))
        else:
            labels = labels_of(row for found in columns for row in found.values())
            named = ([x.removeprefix("fa1 "), *(_cells(f, [x], _us)[0] for f in columns)] for x in labels)
            yield from table([f"FA1 tiles, {dtype}", *times], named)
        yield ""


def _known_blocks(columns: list[Rows]) -> Iterator[list[str]]:
    """Times, also as multiples of the time of the published winner."""
    by_tiles = [{_tiles(row): row for row in found.values()} for found in columns]
    for tiles in (BLOCK_WINNER, *BLOCK_LOSERS):
        line = [f"{tiles[0]}×{tiles[1]}, {tiles[2]} warps", "fastest" if tiles == BLOCK_WINNER else "slower"]
        for found in by_tiles:
            row, winner = found.get(tiles), found.get(BLOCK_WINNER)
            over = f" ({row.p50_ns / winner.p50_ns:.2f}×)" if row and winner else ""
            line.append(f"{_us(row)}{over}" if row else NONE)
        yield line


def _tiles(row: Measured) -> tuple[int, int, int]:
    config = row.json["config"]
    return config["block_q"], config["block_kv"], config["num_warps"]


def memory(rows: list[Measured]) -> Lines:
    lines = []
    for found in by_case(rows):
        if {"naive", "fa2"} <= found.keys():
            extra = [f"{found[label].json['workspace_bytes'] / 2**20:,.0f}" for label in ("naive", "fa2")]
            lines.append([_shape(_first(found).problem), *extra, ratio(found, "naive", "fa2")])
    return table(["batch × heads × seq", "naive, extra MiB", "fa2, extra MiB", "naive → fa2"], lines)


# --- e4m3 ---------------------------------------------------------------------------------------------------


def accuracy(rows: list[Measured]) -> Lines:
    """The root mean square of errors and the largest error, by distribution of the inputs; of needles the share that
    is found."""
    found = {(row.label, x.distribution): x for row in rows if (x := row.accuracy)}
    distributions = list(dict.fromkeys(name for _, name in found))

    def cell(label: str, name: str) -> str:
        one = found.get((label, name))
        if one is None:
            return NONE
        return f"{one.rmse:.1e}, {one.largest:.1e}" + (
            "" if one.found is None else f", {one.found:.0%} found"
        )

    lines = ([label, *(cell(label, name) for name in distributions)] for label in labels_of(rows))
    return table(["", *distributions], lines)


def float8_speed(rows: list[Measured]) -> Lines:
    """TFLOP/s, and what quantising costs."""
    labels = [label for label in labels_of(rows) if label != QUANTIZE]
    ours = next(label for label in labels if label.startswith("e4m3"))
    others = [label for label in labels if label != ours]
    lines = []
    for case in by_case(rows):
        p = next(iter(case.values())).problem
        rates = (f"{case[x].tflops:.0f}" if x in case else NONE for x in labels)
        share = (
            f"{case[QUANTIZE].p50_ns / case[ours].p50_ns:.0%}" if {QUANTIZE, ours} <= case.keys() else NONE
        )
        over = (ratio(case, x, ours) for x in others)
        lines.append([str(p.head_dim), str(p.seqlen_q), p.scores_text, *rates, *over, share])
    return table(
        ["head dim", "seq", "mask", *labels, *(f"{ours} over {x}" for x in others), f"{QUANTIZE} of {ours}"],
        lines,
    )
