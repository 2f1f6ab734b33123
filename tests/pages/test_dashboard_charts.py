"""The dashboard's figures and their theme; no page is opened."""

from __future__ import annotations

import dataclasses
import tomllib

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard needs streamlit: pip install 'cufa[dashboard]'")

import plotly.graph_objects as go
from dashboard_support import LIMITS, decode_plan, schedules, write_evidence

from cufa.commands.dashboard import dashboard_dir
from cufa.dashboard import theme
from cufa.dashboard.charts import occupancy as occupancy_charts
from cufa.dashboard.charts import rates as rates_charts
from cufa.dashboard.charts import roofline as roofline_charts
from cufa.dashboard.charts import splits as splits_charts
from cufa.dashboard.charts import tile_grid, timeline
from cufa.dashboard.charts import work as work_charts
from cufa.dashboard.charts.occupancy import Point
from cufa.dashboard.model import counters, evidence, launch, softmax_steps, splits, work
from cufa.gpu.architectures import ARCHITECTURES
from cufa.measure.suites import make
from cufa.problem.mask import CAUSAL, Band
from cufa.schedule.schedule import Schedule, Tile

PALETTES = (theme.LIGHT, theme.DARK)


# --- Figures ---------------------------------------------------------------------------------------------


def text_of(figure: go.Figure) -> str:
    return figure.to_json()


@pytest.mark.parametrize("palette", PALETTES, ids=lambda p: p.name)
@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_the_grid_shows_every_tile(schedule: Schedule, palette: theme.Palette) -> None:
    figure = tile_grid.tile_grid(schedule, palette, selected=(0, 0))
    picked = figure.data[0]
    assert len(picked.x) == schedule.total
    assert (picked.y[-1], picked.x[-1]) == (schedule.num_q_blocks - 1, schedule.num_kv_blocks - 1)
    bars = {trace.name: np.asarray(trace.x).sum() for trace in figure.data[1:]}
    for tile, count in work.class_counts(schedule).items():
        assert bars[palette.tiles[tile].label] == count
    for axis in (figure.layout.xaxis, figure.layout.xaxis2, figure.layout.yaxis):
        assert axis.title.text


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_wanted_scores_are_those_of_the_mask(schedule: Schedule, step: int) -> None:
    mask = schedule.mask.dense(schedule.seqlen_q, schedule.seqlen_k)
    for axis, size in enumerate((schedule.block_q * step, schedule.block_kv * step)):
        mask = np.add.reduceat(mask.astype(int), np.arange(0, mask.shape[axis], size), axis)
    np.testing.assert_array_equal(work.wanted_scores(schedule, step), mask)


@pytest.mark.parametrize("seqlen", [65 * 64, 300 * 64])
def test_a_large_grid_says_how_much_of_a_cell_is_wanted(seqlen: int) -> None:
    figure = tile_grid.tile_grid(Schedule(seqlen, seqlen, 64, 64, CAUSAL), theme.LIGHT, (1, 0))
    (hover,) = (trace for trace in figure.data if trace.type == "heatmap")
    percent = np.asarray(hover.z)
    assert max(percent.shape) <= 256
    assert (np.triu(percent, 1) == 0).all()
    assert (np.tril(percent, -1)[1:, 0] == 100).all()
    assert ((np.diag(percent) > 0) & (np.diag(percent) < 100)).all()
    assert hover.x0 + (percent.shape[1] - 1) * hover.dx <= seqlen / 64
    assert len(figure.layout.shapes) == 2  # the frame


def test_a_window_of_a_large_grid_is_wanted_along_the_diagonal() -> None:
    figure = tile_grid.tile_grid(Schedule(16384, 16384, 64, 64, Band(1023, 0)), theme.LIGHT)
    percent = np.asarray(next(trace for trace in figure.data if trace.type == "heatmap").z)
    assert percent.shape == (256, 256)
    row, column = np.indices(percent.shape)
    assert (percent[(row - column >= 1) & (row - column < 15)] == 100).all()
    assert (percent[(column > row) | (row - column > 16)] == 0).all()


def test_classes_are_told_apart_without_colour() -> None:
    """The inked pixels of any two classes differ."""
    grid = np.array([[tile] for tile in Tile], np.uint8)
    image = np.asarray(tile_grid.raster(grid, theme.LIGHT))
    side = image.shape[0] // 4
    inked = [(image[side * t + 4 : side * (t + 1) - 4, 4:-4] % 2).astype(bool) for t in range(4)]
    shares = [float(x.mean()) for x in inked]
    assert shares[Tile.FULL] == 0
    for a in Tile:
        for b in Tile:
            if a < b:
                assert (inked[a] != inked[b]).mean() > 0.02, f"{a.name} looks like {b.name}"
    patterns = {theme.LIGHT.tiles[t].pattern for t in Tile}
    assert len(patterns) == 4


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (1, 2048), (64, 1), (2, 3), (32, 64), (3000, 5)])
def test_a_raster_has_the_shape_of_the_figure(shape: tuple[int, int]) -> None:
    """For any grid: a stretched pattern is a moiré."""
    image = tile_grid.raster(np.ones(shape, np.uint8), theme.LIGHT, (1024, 660))
    assert 512 <= image.width <= 1024
    assert 330 <= image.height <= 1024


def test_one_query_is_one_flat_row_and_one_point() -> None:
    schedule = Schedule(1, 4096, 64, 64, CAUSAL)
    figure = tile_grid.tile_grid(schedule, theme.LIGHT)
    assert figure.layout.height < 260
    assert list(figure.layout.yaxis.tickvals) == [0]
    step = softmax_steps.observe_rows(schedule, 0, 64)[1]
    drawn = work_charts.softmax_figure(step, theme.LIGHT)
    assert {trace.mode for trace in drawn.data} == {"markers"}  # a line of one point is invisible


def test_a_reduced_grid_keeps_the_boundary() -> None:
    tiles = Schedule(64 * 1000, 64 * 1000, 64, 64, CAUSAL).tiles
    small = tile_grid.reduce_tiles(tiles, 250)
    assert small.shape == (250, 250)
    assert (np.diag(small) == Tile.PARTIAL).all()
    assert small[0, -1] == Tile.SKIPPED
    assert small[-1, 0] == Tile.FULL


@pytest.mark.parametrize("blocks", [1, 40, timeline.BARS, timeline.BARS + 1, 20_000])
def test_timeline_of_few_and_many_blocks(blocks: int) -> None:
    tiles = np.arange(blocks) % 13 + 1
    zeros = np.zeros(blocks, np.int64)
    line = launch.predict(launch.Blocks(zeros, zeros, zeros, tiles), 132, 2)
    figure = timeline.timeline_figure(line, theme.DARK)
    drawn = figure.data[0]
    if blocks <= timeline.BARS:
        assert np.asarray(drawn.x).sum() == tiles.sum()
    else:
        share = np.isfinite(drawn.z).mean()
        assert share == pytest.approx(tiles.sum() / (264 * line.span), abs=0.02)
        first, last = drawn.y0, drawn.y0 + 263 * drawn.dy  # two places per SM, around its number
        assert (first, last) == pytest.approx((-0.25, 131.25))
    assert "SM" in figure.layout.yaxis.title.text
    assert f"{blocks:,} thread blocks" in timeline.describe_timeline(line)


def test_an_empty_launch_can_be_drawn() -> None:
    nothing = np.zeros(4, np.int64)
    line = launch.predict(launch.Blocks(nothing, nothing, nothing, nothing), 4, 1)
    assert line.tail == 0
    text_of(timeline.timeline_figure(line, theme.LIGHT))
    text_of(timeline.sm_finish({"predicted": line}, theme.LIGHT))


@pytest.mark.parametrize("palette", PALETTES, ids=lambda p: p.name)
def test_the_other_figures(palette: theme.Palette, tmp_path) -> None:
    problem = make(2, 3, 1000, 64, "bfloat16", CAUSAL)
    schedule = Schedule.of(problem, 128, 64, True)
    flops = work_charts.flops_figure(work.work(problem, schedule), palette)
    assert sum(t.x[0] for t in flops.data if t.y[0] == "done") == work.work(problem, schedule).done
    lengths = [256, 512]
    gain = work_charts.speedup_figure(
        (lengths, [1.0, 1.1]), (lengths, [1.3, 1.6]), (512, 1.6), {"recorded": {512: 1.4}}, palette
    )
    assert {"recorded", "this view"} <= {t.name for t in gain.data}
    assert gain.layout.shapes[0].y0 == 2
    window = work_charts.speedup_figure(
        (lengths, [1.0, 9.0]), (lengths, [1.3, 60.0]), (512, 60.0), {}, palette,
        limit=float("inf"), with_published=False,
    )  # fmt: skip
    assert window.layout.yaxis.type == "log"
    assert not window.layout.shapes
    step = softmax_steps.observe_rows(schedule, 0, 32)[0]
    softmax = work_charts.softmax_figure(step, palette)
    np.testing.assert_array_equal(softmax.data[1].y, step.m_after)
    assert np.isnan(softmax.data[0].y).all()  # minus infinity before the first tile
    batch = splits.Batch.of(decode_plan(1, 4096), (4096,), overhead=1)
    curve = splits.split_curve(batch, splits.candidates(16))
    for kind in ("fixed", "balanced"):
        text_of(splits_charts.split_figure(curve, (kind, splits.best(curve)), curve[0], palette))
    write_evidence(tmp_path, "forward")
    rows = evidence.load(tmp_path)[0].rows
    limited = [r for r in rows if r.operation.memory_bound]
    bars = rates_charts.rates_figure(limited, palette)
    assert sum(len(t.x) for t in bars.data if t.hoverinfo != "skip") == len(limited)
    rows = [r for r in rows if not r.operation.memory_bound]
    roof = roofline_charts.roofline(rows, LIMITS, ["bfloat16"], palette)
    points = [t for t in roof.data if t.mode == "markers"]
    assert sum(len(t.x) for t in points) == len(rows)
    assert max(t.y.max() if hasattr(t.y, "max") else max(t.y) for t in points) < 700


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_the_occupancy_sentence_is_true(arch) -> None:
    """The stated change adds a block; one register less saved does not."""
    point = Point(registers=168, threads=128, shared_memory=20_000)
    o = point.on(arch)
    sentence = occupancy_charts.verdict(o)
    assert f"{o.blocks} block" in sentence
    needs = o.one_more_block
    if needs is not None and needs.registers is not None and needs.shared_memory is None:
        assert f"{168 - needs.registers} fewer registers" in sentence
        assert dataclasses.replace(point, registers=needs.registers).on(arch).blocks == needs.blocks
        assert dataclasses.replace(point, registers=needs.registers + 8).on(arch).blocks < needs.blocks


def test_occupancy_figures() -> None:
    arch = ARCHITECTURES[90]
    kernel = Point(168, 128, 50_000)
    what_if = dataclasses.replace(kernel, threads=256)
    for field, value, x in (("registers", 128, 128), ("shared_memory", 40 * 1024, 40), ("threads", 512, 512)):
        curve = occupancy_charts.curve(arch, field, kernel, what_if, theme.LIGHT).data[0]
        expected = dataclasses.replace(what_if, **{field: value}).on(arch).fraction
        assert curve.y[list(curve.x).index(x)] == expected
    cells = [[kernel.on(arch), "does not fit"], ["…", kernel.on(arch)]]
    table = occupancy_charts.table(["a", "b"], ["x", "y"], cells, theme.DARK, (0, 0))
    assert table.data[0].text[0][1] == "does not fit"
    assert table.data[0].z[0][0] == kernel.on(arch).fraction


def test_a_kernel_that_cannot_run_is_called_that() -> None:
    assert "cannot run" in occupancy_charts.verdict(Point(255, 1024, 0).on(ARCHITECTURES[80]))


# --- The theme ---------------------------------------------------------------------------------


def test_the_streamlit_theme_has_the_same_colours() -> None:
    config = tomllib.loads((dashboard_dir() / ".streamlit" / "config.toml").read_text())
    for palette in PALETTES:
        section = config["theme"][palette.name]
        assert section["backgroundColor"] == palette.background
        assert section["textColor"] == palette.text
        assert section["primaryColor"] == palette.accent


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
            for v in (x / 255 for x in bytes.fromhex(colour[1:]))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", PALETTES, ids=lambda p: p.name)
def test_text_and_lines_stand_out(palette: theme.Palette) -> None:
    """WCAG AA: 4.5 for text, 3 for what has a meaning in a figure."""
    for name in ("text", "muted", "alarm", "warn", "measured", "predicted"):
        assert contrast(getattr(palette, name), palette.background) >= 4.5, name
    for colour in palette.series:
        assert contrast(colour, palette.background) >= 3, colour


def test_the_server_is_local_and_silent() -> None:
    config = tomllib.loads((dashboard_dir() / ".streamlit" / "config.toml").read_text())
    assert config["server"]["address"] == "127.0.0.1"
    assert set(config["server"]["allowedHosts"]) == {"localhost", "127.0.0.1", "[::1]"}
    assert config["browser"]["gatherUsageStats"] is False


def test_why_a_head_is_not_executed_here() -> None:
    assert counters.why_not_emulated(Schedule(1024, 1024, 128, 64, CAUSAL), 64, True) is None
    assert "s on a CPU core" in str(
        counters.why_not_emulated(Schedule(65536, 65536, 128, 64, CAUSAL), 64, True)
    )
    assert "No kernel" in str(counters.why_not_emulated(Schedule(64, 64, 16, 16, CAUSAL), 64, False))


def test_every_config_of_a_kernel_has_its_own_name_in_the_link() -> None:
    from cufa.dashboard.model.configs import config_key, config_words
    from cufa.kernels import KERNELS

    for spec in KERNELS.values():
        for head_dim in range(8, 257, 8):
            fitting = [c for c in spec.configs if c.fits(head_dim)]
            assert len({config_key(c) for c in fitting}) == len(fitting), (spec.name, head_dim)
            assert len({config_words(c) for c in fitting}) == len(fitting), (spec.name, head_dim)
