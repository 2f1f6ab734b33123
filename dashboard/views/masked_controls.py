"""The controls of the page Masked work, and the view that they describe."""

from __future__ import annotations

import dataclasses
import functools

from cufa.dashboard import page
from cufa.dashboard.model import counters, launch, work
from cufa.dashboard.model.configs import config_key, config_words
from cufa.dashboard.model.launch import algorithms
from cufa.dashboard.model.subject import Subject
from cufa.dashboard.state import Controls
from cufa.dashboard.views import mask_editor
from cufa.dashboard.views.shape_controls import HEAD_DIMS, card_key, choose_card, choose_kv_heads
from cufa.gpu.architectures import Device
from cufa.gpu.occupancy import occupancy
from cufa.kernels import Kernel, TileConfig
from cufa.plan.candidates import serving_configs
from cufa.plan.operation import OPERATIONS
from cufa.problem.problem import Problem, default_scale
from cufa.schedule.schedule import Schedule, Tile

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
    name = next((name for name, offered in _DTYPES.items() if offered == wanted), None)
    if name is None:
        raise ValueError(f"Tiles of {problem.dtype} are not drawn there.")
    return name


def choose(controls: Controls) -> View:
    """The controls, and the view that they describe."""
    with page.control_box():
        first, left, middle, right = page.fields(1.4, 2.4, 1, 1.8)
        titles = {name: OPERATIONS[name].title for name in DRAWN}
        operation = controls.choice("op", "Operation", titles, DRAWN[0], segmented=True, at=first)
        device = choose_card(controls, right)
        words = {name: element for name, (element, _) in _DTYPES.items()} | {"tf32": "float32 (tf32)"}
        dtype, precision = _DTYPES[controls.choice("dtype", "Type", words, at=middle)]
        known = algorithms(operation, dtype)
        specs = {name: spec for name, spec in known.items() if spec.runs_on(device.arch.capability)}
        words = {name: ALGORITHM_WORDS.get(name, name) for name in specs}
        algorithm = controls.choice("alg", "Algorithm", words, "fa2", segmented=True, at=left)
        columns = page.fields(1, 1, 1, 1, 1, 1)
        seqlen_q = controls.integer("sq", "Queries", 4096, 1, MAX_LENGTH, step=128, at=columns[0])
        seqlen_k = controls.integer("sk", "Keys", 4096, 1, MAX_LENGTH, step=128, at=columns[1])
        batch = controls.integer("batch", "Batch", 4, 1, 4096, at=columns[2])
        heads = controls.integer("heads", "Heads", 16, 1, 1024, at=columns[3])
        help_text = (
            "Divisors of the heads: fewer K/V heads are GQA, one is MQA. They change traffic, not tiles."
        )
        kv_heads = choose_kv_heads(controls, heads, at=columns[4], help=help_text)
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


MOST_BLOCKS_A_SIDE = 4096
"""The most tiles per side."""
MOST_THREAD_BLOCKS = 400_000
"""The largest launch that is simulated."""
_ANY_REGISTERS = 32  # few enough not to limit


@dataclasses.dataclass(frozen=True)
class View:
    """One problem under one tiling on one card."""

    problem: Problem
    schedule: Schedule
    algorithm: str
    spec: Kernel
    config: TileConfig
    device: Device

    @functools.cached_property
    def blocks_per_sm(self) -> int:
        """The kernel's ``__launch_bounds__``, or fewer if shared memory limits them."""
        config = self.config
        shared, threads = self.spec.shared_bytes(config, self.problem.head_dim), 32 * max(1, config.num_warps)
        arch = self.device.arch
        fitting = occupancy(arch, registers=_ANY_REGISTERS, threads=threads, shared_memory=shared)
        return max(1, min(config.blocks_per_sm, fitting.blocks))

    @functools.cached_property
    def counts(self) -> dict[Tile, int]:
        """Tiles of one head by class."""
        return work.class_counts(self.schedule)

    @functools.cached_property
    def blocks(self) -> launch.Blocks:
        return launch.thread_blocks(self.problem, self.schedule, self.spec, self.device, self.config)

    @functools.cached_property
    def predicted(self) -> launch.Timeline:
        return launch.predict(self.blocks, self.device.num_sms, self.blocks_per_sm)

    @property
    def whole_heads(self) -> bool:
        """Whether a thread block computes all query blocks of a head."""
        return bool(len(self.blocks)) and int(self.blocks.q_block[0]) == launch.WHOLE_HEAD

    @property
    def item_noun(self) -> str:
        """Work item of a persistent thread block."""
        if self.whole_heads:
            return "head"
        return "key block" if self.schedule.by_keys else "query block"

    @property
    def subject(self) -> Subject:
        return Subject(self.problem, self.spec.name, self.config, card_key(self.device))

    @property
    def is_registered(self) -> bool:
        """Whether a kernel with these tiles serves the mask, so that it can run."""
        return self.config in self.spec.configs and self.refusal is None

    @property
    def why_not_executed(self) -> str | None:
        """Why this CPU cannot execute one head of the kernel within seconds; None if it can."""
        if self.refusal:
            return f"{self.spec.name} {self.refusal}."
        return counters.why_not_emulated(self.schedule, self.problem.head_dim, self.is_registered)

    @functools.cached_property
    def refusal(self) -> str | None:
        """Why the kernel does not serve the problem; the page draws the schedule in any case."""
        return self.spec.refuses(self.problem, self.device.arch.capability)
