"""`cufa demo`: the main job, on whatever is here."""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np
import numpy.typing as npt

from ..gpu.architectures import Device
from ..measure import measured
from ..measure.cases import Case, contenders
from ..measure.inputs import Inputs
from ..measure.limits import measure_limits
from ..measure.measured import Measured
from ..measure.runner import predicted_speedup, run_case
from ..measure.suites import make
from ..measure.timing import speedup
from ..plan.planner import Plan
from ..problem.mask import CAUSAL
from ..schedule.schedule import Schedule, Tile
from . import common
from .demo_train import train_command
from .rows import print_skipped

_STORY = {
    "naive": "naive: scores stored",
    "fa1": "FlashAttention-1",
    "fa2_noskip": "FlashAttention-2, no skipping",
    "fa2": "FlashAttention-2",
}
#: An error above this is a wrong result, not rounding (standard normal inputs).
_TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5}
_MAP_ROWS, _MAP_COLUMNS = 16, 32
_GLYPHS = {Tile.SKIPPED: "· ", Tile.FULL: "██", Tile.PARTIAL: "▒▒", Tile.PADDED: "░░"}


@click.group("demo", invoke_without_command=True)
@click.option(
    "--seqlen", type=common.SIZE, help="Queries and keys.  [default: 4096 on a GPU, 2048 on the CPU]"
)
@common.device_option
@click.option(
    "--seconds", type=common.Seconds(), default=3.0, show_default=True, help="Time spent measuring."
)
@common.json_option
@click.pass_context
def demo_command(
    context: click.Context, seqlen: int | None, device: str, seconds: float, as_json: bool
) -> None:
    """Causal attention by four algorithms on the same inputs: time, tiles visited and skipped, extra memory,
    and the largest error against float64, with a map of the tiles that FlashAttention-2 visits.

    Exit codes: 0 every result is right; 1 a result is wrong; 2 wrong usage; 3 no GPU where one was asked for, or
    too little memory.
    """
    if context.invoked_subcommand is not None:
        if common.given(context.params):
            raise click.UsageError(f"options go behind the name: cufa demo {context.invoked_subcommand} ...")
        return
    target = common.find_device(device)
    if target is None:
        problem = make(1, 8, seqlen or 2048, 64, "float32", CAUSAL)
    else:
        problem = make(4, 16, seqlen or 4096, 64, "bfloat16", CAUSAL)
    with common.progress() as bar:
        bar.add_task("compiling and measuring" if target else "measuring", total=None)
        limits = measure_limits(target)
        rows, skipped = run_case(Case(problem, contenders(*_STORY)), target, limits, seconds=seconds)
        memory = {row.label: _extra_memory(row, target) for row in rows}
    right = all((row.error or 0.0) <= _TOLERANCE[problem.dtype] for row in rows) and not skipped
    if as_json:
        document = measured.run_json(rows, skipped, target, limits)
        document["extra_memory_bytes"] = memory
        common.print_json(document)
    else:
        _print(rows, memory, target)
        print_skipped(skipped)
        common.stdout().print("\n`cufa demo train` trains a model with these kernels.", markup=False)
    if not right:
        common.stderr().print("a result is missing or wrong", style="red")
        raise SystemExit(int(common.Exit.FAILED))


demo_command.add_command(train_command)


def _extra_memory(row: Measured, device: Device | None) -> int:
    """Bytes beyond inputs and output: what the plan allocates on a GPU, the measured peak on the CPU."""
    assert row.plan is not None
    if device is not None:
        return row.plan.workspace
    from ..run.cpu import forward as cpu
    from ..run.cpu.tiles import extra_memory

    arrays, plan = Inputs(row.problem, on_gpu=False, seed=0).arrays(row.problem), row.plan
    q, k, v, out = (arrays[name] for name in "qkvo")
    return extra_memory(lambda: cpu.run(plan, q, k, v, out, None))


def _print(rows: Sequence[Measured], memory: dict[str, int], device: Device | None) -> None:
    console = common.stdout()
    where = "the CPU, in NumPy (no GPU here)" if device is None else f"{device.name} ({device.arch.name})"
    console.print(f"Attention on {where}: {rows[0].problem}", markup=False)
    figures = ("time", "speed", "tiles visited", "tiles skipped", "extra memory", "max error")
    shown = common.table(["algorithm"], figures)
    for row in rows:
        assert row.plan is not None
        heads, schedule = row.problem.batch * row.problem.heads, row.plan.schedule
        tiled = row.label != "naive"
        shown.add_row(
            _STORY[row.label],
            common.seconds_text(row.seconds),
            common.rate_text(row.tflops),
            f"{schedule.visited * heads:,}" if tiled else "–",
            f"{schedule.skipped * heads:,}" if tiled else "–",
            common.bytes_text(memory[row.label]),
            f"{row.error:.1e}",
        )
    console.print(shown)
    by_name = {row.label: row for row in rows}
    if {"fa2", "fa2_noskip"} <= by_name.keys():
        slow, fast = by_name["fa2_noskip"], by_name["fa2"]
        assert slow.plan is not None and fast.plan is not None
        predicted = predicted_speedup(slow.plan, fast.plan)
        ratio = speedup(slow.timing, fast.timing)
        console.print(f"Skipping masked tiles: {ratio}; tile counts alone predict {predicted:.2f}×.")
        console.print()
        for line in block_map(fast.plan):
            console.print(line, markup=False)


def block_map(plan: Plan) -> list[str]:
    """Lines of text: which tiles of one head are visited. Large maps are drawn several tiles to a cell."""
    schedule = plan.schedule
    cells, tiles_a_cell = _coarsen(schedule)
    rows, columns = tiles_a_cell
    size = f"{schedule.block_q * rows} queries × {schedule.block_kv * columns} keys a cell"
    lines = [f"One head under {plan.spec.name}: {size}", "keys →"]
    lines += ["".join(_GLYPHS[Tile(int(tile))] for tile in row) for row in cells]
    used = [tile for tile in Tile if (cells == tile).any()]
    names = {
        Tile.SKIPPED: "skipped",
        Tile.FULL: "no mask needed",
        Tile.PARTIAL: "masked",
        Tile.PADDED: "over the end",
    }
    return [*lines, "   ".join(f"{_GLYPHS[tile].strip()} {names[tile]}" for tile in used)]


def _coarsen(schedule: Schedule) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """At most 16 × 32 cells. A cell of unlike tiles counts as partial."""
    tiles = schedule.tiles
    step = (-(-tiles.shape[0] // _MAP_ROWS), -(-tiles.shape[1] // _MAP_COLUMNS))
    cells = np.empty([-(-n // s) for n, s in zip(tiles.shape, step, strict=True)], np.uint8)
    for i, j in np.ndindex(cells.shape):
        part = tiles[i * step[0] : (i + 1) * step[0], j * step[1] : (j + 1) * step[1]]
        cells[i, j] = part.flat[0] if (part == part.flat[0]).all() else Tile.PARTIAL
    return cells, step
