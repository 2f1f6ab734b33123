"""The parts of the page Causal work, top to bottom."""

from __future__ import annotations

import dataclasses
import functools

import streamlit as st

from cufa.architectures import Device
from cufa.dashboard import page, theme
from cufa.dashboard.charts import tile_grid, timeline, work
from cufa.dashboard.model import launch
from cufa.dashboard.model import work as accounting
from cufa.dashboard.state import Controls
from cufa.dashboard.theme import Palette
from cufa.kernels import KernelSpec, TileConfig
from cufa.occupancy import occupancy
from cufa.problem import Problem
from cufa.schedule import Schedule, Tile

GRID_KEY = "causal.grid"
MOST_BLOCKS_A_SIDE = 4096
_MOST_THREAD_BLOCKS = 400_000
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclasses.dataclass(frozen=True)
class View:
    """What the controls describe."""

    problem: Problem
    schedule: Schedule
    algorithm: str
    spec: KernelSpec
    config: TileConfig
    device: Device

    @functools.cached_property
    def blocks_per_sm(self) -> int:
        """What the kernel is compiled for (``__launch_bounds__``), unless shared memory allows fewer."""
        config = self.config
        threads = max(32, config.num_warps * 32)
        shared = self.spec.shared_memory(config, self.problem.head_dim)
        fitting = occupancy(self.device.arch, registers=32, threads=threads, shared_memory=shared).blocks
        return max(1, min(config.blocks_per_sm, fitting))

    @functools.cached_property
    def counts(self) -> dict[Tile, int]:
        return accounting.class_counts(self.schedule)

    @functools.cached_property
    def blocks(self) -> launch.Blocks:
        return launch.thread_blocks(self.problem, self.schedule, self.algorithm)

    @functools.cached_property
    def predicted(self) -> launch.Timeline:
        return launch.predict(self.blocks, self.device.num_sms, self.blocks_per_sm)


def show_grid(view: View, palette: Palette, selected: tuple[int, int] | None) -> None:
    """The score matrix of one head."""
    schedule, counts = view.schedule, view.counts
    page.verdict(_grid_verdict(view))
    legend = (Tile.FULL, Tile.PARTIAL, Tile.PADDED, Tile.SKIPPED)
    st.caption(
        " · ".join(
            f"**{theme.LIGHT.tiles[t].label}** {counts[t]:,} — {theme.LIGHT.tiles[t].meaning}" for t in legend
        )
    )
    figure = tile_grid.tile_grid(schedule, palette, selected)
    alt = tile_grid.describe(schedule, counts)
    if schedule.total <= tile_grid.PICKABLE:
        page.figure(figure, GRID_KEY, alt, on_select="rerun", selection_mode="points")
    else:
        page.figure(figure, "causal.grid.large", alt)


def _grid_verdict(view: View) -> str:
    schedule = view.schedule
    masked = accounting.work(view.problem, view.schedule)
    if not schedule.causal:
        return f"Nothing is masked: all {schedule.total:,} tiles of a head are computed."
    if not schedule.visited:
        return "No query sees a key: nothing is computed, and the result is zeros."
    if schedule.skip_masked_tiles:
        return (
            f"{schedule.visited:,} of {schedule.total:,} tiles are computed: {schedule.skipped / schedule.total:.0%} of the "
            f"matrix is skipped, which can make it {accounting.skip_speedup(schedule):.2f}× faster."
        )
    return (
        f"All {schedule.total:,} tiles are computed, though the mask throws {masked.waste_share:.0%} of the work away: "
        "nothing is skipped."
    )


def show_tile(view: View, palette: Palette, controls: Controls) -> None:
    """Running maximum and sum of the rows of the selected tile."""


def show_timelines(view: View, palette: Palette) -> None:
    """When each thread block runs: predicted, and measured where there is a trace."""
    st.header("On the SMs", anchor=False)
    if len(view.blocks) > _MOST_THREAD_BLOCKS:
        page.verdict(f"{len(view.blocks):,} thread blocks are more than are simulated here.", small=True)
        return
    predicted = view.predicted
    page.verdict(_timeline_verdict(view), tag="predicted", tone="warn" if predicted.tail > 0.1 else "")
    page.figure(
        timeline.timeline_figure(predicted, palette),
        "causal.predicted",
        timeline.describe_timeline(predicted),
    )


def _timeline_verdict(view: View) -> str:
    predicted, device = view.predicted, view.device
    if not predicted.span:
        return "No thread block has a tile to compute."
    if predicted.busy_sms < device.num_sms:
        return f"Only {predicted.busy_sms} of {device.num_sms} SMs get a thread block: {predicted.tail:.0%} of SM time is idle."
    waves = len(view.blocks) / (device.num_sms * view.blocks_per_sm)
    return f"{len(view.blocks):,} thread blocks in {waves:.1f} waves; {predicted.tail:.1%} of SM time is idle at the end."


def show_flops(view: View, palette: Palette) -> None:
    """Done, useful, dense."""
    st.header("Arithmetic", anchor=False)
    done = accounting.work(view.problem, view.schedule)
    page.verdict(
        f"{done.waste_share:.1%} of the arithmetic is thrown away: {work.si(done.waste, 'FLOP')} of {work.si(done.done, 'FLOP')}.",
        small=True,
    )
    alt = (
        f"Three bars: useful {work.si(done.useful, 'FLOP')}; done {work.si(done.done, 'FLOP')}, of which "
        f"{work.si(done.waste, 'FLOP')} thrown away; without a mask {work.si(done.dense, 'FLOP')}."
    )
    page.figure(work.flops_figure(done, palette), "causal.flops", alt)


def show_speedup(view: View, palette: Palette) -> None:
    """What causal skipping gains, by length."""
