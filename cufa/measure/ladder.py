"""The techniques of Hopper's kernels, switched on one after another, to predict and measure the gain of each step.

A step sets one field of the kernel's config, or turns persistent blocks on. The last step is the planned config.
:func:`variations` adds, to this config, techniques that the planner left out, if they fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..kernels import TileConfig
from ..kernels.backward.fa3_config import Fa3BackwardConfig
from ..kernels.forward.fa3 import Fa3Config
from ..kernels.support import refusal
from ..plan.planner import Plan, make_plan
from .cases import Contender


@dataclasses.dataclass(frozen=True)
class Step:
    """One technique."""

    field: str
    """A field of the configs. "": persistent blocks instead of one thread block per work item."""
    words: str
    without: int = False
    taken: int = True
    """The field's value with the technique; ``without`` is its value without the technique."""
    kernels: tuple[str, ...] = ()
    """Kernels that :func:`variations` measures with the technique if their planned config does not use it."""


@dataclasses.dataclass(frozen=True)
class Story:
    begin: str
    """Techniques that the kernel always has, in words."""
    steps: tuple[Step, ...]
    """The steps in order. A label has its step's number in this tuple: a label means the same for every shape."""
    older: str = ""
    """The preceding algorithm, measured as step 0; "": none."""
    older_words: str = ""


_STORIES: dict[type[TileConfig], Story] = {
    Fa3Config: Story(
        "TMA, WGMMA, warp specialisation, overlap inside a warpgroup",
        (
            Step("ping_pong", "ping-pong"),
            Step("store_by_tma", "O by TMA"),
            Step("", "persistent blocks"),
        ),
    ),
    Fa3BackwardConfig: Story(
        "TMA, WGMMA, warp specialisation",
        (
            Step("bulk_add", "dQ added by the copy engine"),
            Step("block_q", "128 queries per tile", 64, 128),
            Step("num_stages", "a third stage of Q", 2, 3, kernels=("fa3_backward",)),
            # Persistent blocks of the wide kernel would spill.
            Step("persistent", "persistent blocks", kernels=("fa3_backward",)),
        ),
        older="fa2",
        older_words="FlashAttention-2",
    ),
}


def ladder(algorithm: str, config: TileConfig) -> tuple[Contender, ...]:
    """One contender per step. In the first, all techniques that can be switched off are off; the last has ``config``.
    Steps for techniques that ``config`` does not use are left out."""
    story = _STORIES[type(config)]
    first = 1 if story.older else 0
    steps = [(n, x) for n, x in enumerate(story.steps, first + 1) if _uses(config, x)]
    labels = [f"{first}. {story.begin}", *(f"{n}. + {step.words}" for n, step in steps)]
    rungs = [Contender(story.older, name=f"0. {story.older_words}")] if story.older else []
    for n, label in enumerate(labels):
        left_out = [step for _, step in steps[n:]]
        chosen = dataclasses.replace(config, **{x.field: x.without for x in left_out if x.field})
        one_item = any(not x.field for x in left_out)
        rungs.append(Contender(algorithm, chosen, label, one_item_a_block=one_item))
    return tuple(rungs)


def variations(plan: Plan) -> Iterator[Contender]:
    """For each unused technique that fits: the plan's config with this technique. For a backward, finally, the planned
    config with a fixed addition order."""
    config, spec, problem = plan.config, plan.spec, plan.problem
    assert plan.device is not None
    for step in _STORIES[type(config)].steps:
        if spec.name not in step.kernels or _uses(config, step):
            continue
        changed = dataclasses.replace(config, **{step.field: step.taken})
        serves = refusal(spec, problem, config=changed) is None
        if serves and spec.fitting((changed,), problem.head_dim, plan.device, problem.v_dim):
            yield Contender(spec.algorithm, changed, f"with {step.words}")
    if problem.operation == "backward":
        ordered = dataclasses.replace(problem, deterministic=True)
        if not spec.refuses(ordered, plan.device.arch.capability):
            planned = make_plan(ordered, plan.device, spec.algorithm).config
            yield Contender(spec.algorithm, planned, "with a fixed order of sums", problem=ordered)


def is_step(label: str) -> bool:
    """Whether a label is from :func:`ladder` rather than :func:`variations`."""
    return label.partition(".")[0].isdigit()


def _uses(config: TileConfig, step: Step) -> bool:
    return not step.field or bool(getattr(config, step.field) == step.taken)
