"""The controls of the page Masked work."""

from __future__ import annotations

import dataclasses

from cufa.dashboard import page
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.launch import algorithms
from cufa.dashboard.state import Controls
from cufa.dashboard.views import mask_editor
from cufa.dashboard.views.masked_view import MOST_BLOCKS_A_SIDE, View
from cufa.dashboard.views.shape_controls import HEAD_DIMS, choose_card, choose_kv_heads
from cufa.gpu.architectures import Device
from cufa.kernels import Kernel, TileConfig
from cufa.plan.candidates import serving_configs
from cufa.plan.operation import OPERATIONS
from cufa.problem.problem import Problem, default_scale
from cufa.schedule.schedule import Schedule

ALGORITHM_WORDS = {"fa1": "FA1", "fa2_noskip": "FA2, no skip", "fa2": "FA2", "fa3": "FA3"}
MAX_LENGTH = 131_072
_CUSTOM = "custom"
DRAWN = ("forward", "backward")
"""Operations with a schedule of tiles: by queries, and by keys."""
_DTYPES = {
    "bfloat16": ("bfloat16", "native"),
    "float16": ("float16", "native"),
    "float32": ("float32", "float32"),
    "tf32": ("float32", "tf32"),
}
"""Element type and precision by name in links."""


def masked_dtype(problem: Problem) -> str:
    """Name of a problem's type in links. Raises ValueError for a type that the page does not offer."""
    wanted = problem.dtype, problem.precision
    name = next((name for name, found in _DTYPES.items() if found == wanted), None)
    if name is None:
        raise ValueError(f"Tiles of {problem.dtype} are not drawn there.")
    return name


def choose(controls: Controls) -> View:
    """The controls, and the view that they describe."""
    with page.control_box():
        first, left, middle, right = page.fields(1.4, 2.4, 1, 1.8)
        with first:
            titles = {name: OPERATIONS[name].title for name in DRAWN}
            operation = controls.choice("op", "Operation", titles, DRAWN[0], segmented=True)
        with right:
            device = choose_card(controls)
        with middle:
            words = {name: element for name, (element, _) in _DTYPES.items()} | {"tf32": "float32 (tf32)"}
            dtype, precision = _DTYPES[controls.choice("dtype", "Type", words)]
        known = algorithms(operation, dtype)
        specs = {name: spec for name, spec in known.items() if spec.runs_on(device.arch.capability)}
        with left:
            words = {name: ALGORITHM_WORDS.get(name, name) for name in specs}
            algorithm = controls.choice("alg", "Algorithm", words, "fa2", segmented=True)
        columns = page.fields(1, 1, 1, 1, 1, 1)
        seqlen_q = controls.integer("sq", "Queries", 4096, 1, MAX_LENGTH, step=128, at=columns[0])
        seqlen_k = controls.integer("sk", "Keys", 4096, 1, MAX_LENGTH, step=128, at=columns[1])
        batch = controls.integer("batch", "Batch", 4, 1, 4096, at=columns[2])
        heads = controls.integer("heads", "Heads", 16, 1, 1024, at=columns[3])
        with columns[4]:
            help_text = (
                "Divisors of the heads: fewer K/V heads are GQA, one is MQA. They change traffic, not tiles."
            )
            kv_heads = choose_kv_heads(controls, heads, help=help_text)
        head_dim = int(controls.choice("d", "Head dim", HEAD_DIMS, "128", at=columns[5]))
        mask, softcap = mask_editor.choose(controls, seqlen_q, seqlen_k)
        shape = (batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim)
        scale = default_scale(head_dim)
        problem = Problem(*shape, dtype, mask, scale, softcap, precision, operation=operation)
        spec = algorithms(operation, dtype, head_dim)[algorithm]
        config = choose_config(controls, problem, spec, device)
    schedule = Schedule.of(problem, config.block_q, config.block_kv, spec.skip_masked_tiles)
    return View(problem, schedule, algorithm, spec, config, device)


def choose_config(controls: Controls, problem: Problem, spec: Kernel, device: Device) -> TileConfig:
    """Built tiles for this kernel, head dim and card (default: the planner's choice), or custom tiles."""
    configs = serving_configs(spec, problem, device)
    fitting = {config_key(c): c for c in configs}
    words = {key: config_words(c) for key, c in fitting.items()} | {_CUSTOM: "custom tiles"}
    planned = config_key(spec.choose(problem, configs, device)) if configs else _CUSTOM
    columns = page.fields(3, 1.2, 1.2, 1)
    chosen = controls.choice(
        "tiles", "Tiles (queries × keys) of this kernel on this card", words, planned, at=columns[0]
    )
    if chosen != _CUSTOM:
        return fitting[chosen]
    start = next(iter(configs), spec.configs[0])
    block_q = controls.integer("bq", "Queries per tile", start.block_q, 16, 1024, step=16, at=columns[1])
    block_kv = controls.integer("bkv", "Keys per tile", start.block_kv, 16, 1024, step=16, at=columns[2])
    blocks = controls.integer("per_sm", "Blocks per SM", start.blocks_per_sm, 1, 32, at=columns[3])
    longest = max(problem.seqlen_q, problem.seqlen_k)
    least = -(-longest // (16 * MOST_BLOCKS_A_SIDE)) * 16
    if min(block_q, block_kv) < least:
        controls.notice(
            f"tiles of {block_q} × {block_kv} are too many for {longest:,} rows; the smallest side here is {least}."
        )
        block_q, block_kv = max(block_q, least), max(block_kv, least)
    return dataclasses.replace(start, block_q=block_q, block_kv=block_kv, blocks_per_sm=blocks)
