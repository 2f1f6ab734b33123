"""Causal work: which tiles are computed, by which thread block, when, and what it was good for."""

from __future__ import annotations

import dataclasses
from typing import Any

import streamlit as st

from cufa.architectures import ARCHITECTURES, Device
from cufa.dashboard import page, work_views
from cufa.dashboard.model.launch import algorithms
from cufa.dashboard.state import Controls
from cufa.kernels import TileConfig
from cufa.planner import fitting_configs
from cufa.problem import Problem, default_scale
from cufa.schedule import Schedule

ALGORITHM_WORDS = {"fa1": "FA1", "fa2_noskip": "FA2, no skip", "fa2": "FA2"}
MAX_LENGTH = 131_072
CUSTOM = "custom"


def config_key(config: TileConfig) -> str:
    """A config in the link: 128x64w4, with s2 for two stages."""
    stages = f"s{config.num_stages}" if config.num_stages > 1 else ""
    return f"{config.block_q}x{config.block_kv}w{config.num_warps}{stages}"


def choose(controls: Controls) -> work_views.View:
    """The controls, and the problem that they describe."""
    specs = algorithms()
    with st.container(border=True):
        left, middle, right = st.columns([2.3, 1.4, 2])
        with left:
            words = {name: ALGORITHM_WORDS[name] for name in specs}
            algorithm = controls.choice("alg", "Algorithm", words, "fa2", segmented=True)
        with middle:
            masks = {"causal": "causal", "full": "full"}
            causal = controls.choice("mask", "Mask", masks, segmented=True) == "causal"
        with right:
            cards = {
                str(c): f"{a.typical_card} · {a.name} · {a.typical_sms} SMs" for c, a in ARCHITECTURES.items()
            }
            device = Device.typical(controls.choice("card", "Card to predict for", cards, "90"))
        columns = st.columns(6)
        with columns[0]:
            seqlen_q = controls.integer("sq", "Queries", 4096, 1, MAX_LENGTH, step=128)
        with columns[1]:
            seqlen_k = controls.integer("sk", "Keys", 4096, 1, MAX_LENGTH, step=128)
        with columns[2]:
            batch = controls.integer("batch", "Batch", 4, 1, 4096)
        with columns[3]:
            heads = controls.integer("heads", "Heads", 16, 1, 1024)
        with columns[4]:
            divisors = [str(n) for n in range(heads, 0, -1) if heads % n == 0]
            kv_heads = int(
                controls.choice("kv", "K/V heads", divisors, help="Divisors of the heads: GQA and MQA")
            )
        with columns[5]:
            sizes = [str(d) for d in (32, 40, 64, 80, 96, 128, 192, 256)]
            head_dim = int(controls.choice("d", "Head dim", sizes, "128"))
        config = _choose_config(controls, algorithm, head_dim, device)
    spec = specs[algorithm]
    problem = Problem(
        batch,
        heads,
        kv_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        "bfloat16",
        causal=causal,
        scale=default_scale(head_dim),
    )
    schedule = Schedule.of(problem, config.block_q, config.block_kv, spec.skip_masked_tiles)
    return work_views.View(problem, schedule, algorithm, spec, config, device)


def _choose_config(controls: Controls, algorithm: str, head_dim: int, device: Device) -> TileConfig:
    fitting = fitting_configs(algorithms()[algorithm], head_dim, device)
    options = {config_key(c): str(c) for c in fitting} | {CUSTOM: "custom tiles"}
    columns = st.columns([2, 1, 1, 1])
    with columns[0]:
        chosen = controls.choice("tiles", "Tiles (queries × keys) of this kernel on this card", options)
    start = fitting[0] if fitting else TileConfig(64, 64, 4)
    if chosen != CUSTOM:
        return next(c for c in fitting if config_key(c) == chosen)
    with columns[1]:
        block_q = controls.integer("bq", "Queries a tile", start.block_q, 16, 1024, step=16)
    with columns[2]:
        block_kv = controls.integer("bkv", "Keys a tile", start.block_kv, 16, 1024, step=16)
    with columns[3]:
        blocks = controls.integer("per_sm", "Blocks an SM", start.blocks_per_sm, 1, 32)
    smallest = work_views.MOST_BLOCKS_A_SIDE
    longest = max(st.session_state["causal.sq"], st.session_state["causal.sk"])
    if longest > smallest * min(block_q, block_kv):
        least = -(-longest // (16 * smallest)) * 16
        controls.notice(
            f"tiles of {block_q} × {block_kv} cut {longest:,} into too many; tiles of at least {least} are shown."
        )
        block_q, block_kv = max(block_q, least), max(block_kv, least)
    return dataclasses.replace(start, block_q=block_q, block_kv=block_kv, blocks_per_sm=blocks)


def main() -> None:
    palette = page.begin(
        "Causal work",
        "A causal mask hides almost half of the score matrix. Here is what each algorithm does about it: tile by tile, "
        "block by block, SM by SM.",
    )
    controls = Controls("causal")
    view = choose(controls)
    rows, columns = view.schedule.num_q_blocks, view.schedule.num_kv_blocks
    take_selection(controls)
    q_block = controls.value("q", -1, -1, rows - 1)
    kv_block = controls.value("k", -1, -1, columns - 1)
    selected = (q_block, kv_block) if q_block >= 0 and kv_block >= 0 else None

    work_views.show_grid(view, palette, selected)
    work_views.show_tile(view, palette, controls)
    work_views.show_timelines(view, palette)
    work_views.show_flops(view, palette)
    work_views.show_speedup(view, palette)
    controls.finish()


def take_selection(controls: Controls) -> None:
    """A click on a tile of the grid, which Streamlit put in the session before this run."""
    event: Any = st.session_state.get(work_views.GRID_KEY)
    points = event["selection"]["points"] if event else []
    picked = tuple(int(x) for x in points[0]["customdata"]) if points and "customdata" in points[0] else None
    if picked and picked != st.session_state.get("causal.picked"):
        controls.set("q", picked[0])
        controls.set("k", picked[1])
    st.session_state["causal.picked"] = picked


main()
