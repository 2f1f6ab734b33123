"""Cases of decoding: query tokens against a long cache, beside other libraries and a plain streaming read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from ..gpu.architectures import Device
from ..kernels.decode import MAX_CLUSTER, DecodeConfig, items
from ..plan.decode_splits import longest, resident
from ..plan.planner import make_plan
from ..problem.lengths import Cached
from ..problem.mask import CAUSAL, Band, Mask
from ..problem.problem import Problem, default_scale
from ..schedule.decode import WAVES
from .cases import READ, Case, Contender, contenders

#: Label of the public call, for which the planner chooses.
OURS = "flash_decode"
_PEERS = ("torch flash", "torch cudnn")


def make_decode(
    batch: int, heads: int, kv_heads: int, capacity: int, *, tokens: int = 1, head_dim: int = 128,
    dtype: str = "bfloat16", cache_dtype: str | None = None, mask: Mask = CAUSAL,
    softcap: float | None = None, page_size: int = 0, lengths_given: bool = False,
) -> Problem:  # fmt: skip
    """A problem of decoding. The defaults are those of published figures: one query token, head dim 128, bfloat16."""
    pages = capacity // page_size if page_size else 0
    cache = Cached(page_size, pages, batch * pages, lengths_given)
    return Problem(
        batch, heads, kv_heads, tokens, capacity, head_dim, dtype, mask=mask, scale=default_scale(head_dim),
        softcap=softcap, lengths=cache, k_dtype=cache_dtype, v_dtype=cache_dtype, operation="decode",
    )  # fmt: skip


#: batch, query and key/value heads, cached tokens.
PUBLISHED = (
    (1, 32, 8, 1 << 10),
    (1, 32, 8, 8 << 10),
    (1, 32, 8, 128 << 10),
    (8, 32, 8, 32 << 10),
    (64, 32, 8, 8 << 10),
    (1, 32, 32, 32 << 10),
    (16, 64, 1, 16 << 10),
    (1, 64, 8, 512 << 10),
    (1, 64, 1, 16 << 10),
    (1, 64, 1, 64 << 10),
    (1, 32, 4, 1 << 10),
)


def published(device: Device | None) -> Iterator[Case]:
    """Shapes that others publish, with peers."""
    for batch, heads, kv_heads, capacity in PUBLISHED:
        title = f"{batch} × {heads}/{kv_heads} × {capacity >> 10}k"
        problem = make_decode(batch, heads, kv_heads, capacity)
        yield Case(problem, (Contender(name=OURS), *contenders(*_PEERS, READ)), title)


def decode(device: Device | None) -> Iterator[Case]:
    """Published shapes; then one change at a time: ragged lengths, pages, query groups, an 8-bit cache."""
    yield from published(device)
    yield _ragged()
    yield _pages()
    capacity = 32 << 10
    by_heads = tuple(
        Contender(name=f"{h}/8 heads", problem=make_decode(8, h, 8, capacity)) for h in (8, 32, 64)
    )
    first = by_heads[0].problem
    assert first is not None
    yield Case(first, (*by_heads, Contender(READ)), "8 × 32k, groups of query heads")
    fp8 = make_decode(8, 32, 8, capacity, cache_dtype="float8_e4m3")
    per_token = Contender(
        name="scale per token", problem=dataclasses.replace(fp8, scales=("", "token", "token"))
    )
    yield Case(fp8, (Contender(name=OURS), per_token, Contender(READ)), "8 × 32/8 × 32k, e4m3 cache")


def _ragged() -> Case:
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(128), np.log(65536), 64)).astype(int)
    schedules = (
        Contender("balanced"),
        Contender("fixed"),
        # Better, but only a host that knows the lengths can choose it: the planner plans for the longest sequence.
        Contender("fixed", name="fixed, 8 splits", num_splits=8),
        Contender(READ),
    )
    problem = make_decode(64, 32, 8, 64 << 10, lengths_given=True)
    return Case(problem, schedules, "64 ragged × 32/8, 128 to 64k", tuple(int(n) for n in lengths))


def _pages() -> Case:
    capacity = 32 << 10
    paged = (
        Contender(name=f"pages of {size}", problem=make_decode(8, 32, 8, capacity, page_size=size))
        for size in (16, 128)
    )
    layouts = (Contender(name="contiguous"), *paged, Contender(READ))
    return Case(make_decode(8, 32, 8, capacity), layouts, "8 × 32/8 × 32k, pages")


#: Numbers of splits in a sweep, up to more than any card gains from.
_SWEPT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


def sweep(device: Device | None) -> Iterator[Case]:
    """Fixed splits from few to many, the planner's own choice and a streaming read: the gain of splits."""
    for batch, heads, kv_heads, capacity in ((1, 32, 8, 8 << 10), (1, 32, 8, 128 << 10), (8, 32, 8, 8 << 10),
                                             (16, 64, 1, 16 << 10)):  # fmt: skip
        fixed = (Contender("fixed", name=f"{n} split{'s' * (n > 1)}", num_splits=n) for n in _SWEPT)
        problem = make_decode(batch, heads, kv_heads, capacity)
        title = f"{batch} × {heads}/{kv_heads} × {capacity >> 10}k, splits"
        yield Case(problem, (Contender(name=OURS), *fixed, Contender(READ)), title)


def ladder(device: Device | None) -> Iterator[Case]:
    """One technique at a time, from one thread block per head to the planner's choice and its options, for one and for
    64 sequences."""
    for batch, capacity in itertools.product((1, 64), (1 << 10, 8 << 10, 128 << 10)):
        problem = make_decode(batch, 32, 8, capacity)
        yield Case(
            problem, (*steps(problem, device), Contender(READ)), f"{batch} × 32/8 × {capacity >> 10}k, ladder"
        )


#: Numbers of splits that `cufa tune decode` tries, below and above the planner's choice.
_TUNED = (1, 2, 3, 4, 8, 12, 16, 32, 64)


def cuts(problem: Problem, device: Device) -> tuple[Contender, ...]:
    """The planner's choice, then fixed splits with every config and merge, then shares; last, a maximum by bound, which
    only the caller of flash_decode can choose."""
    spec = make_plan(problem, device, "fixed").spec
    fitting = spec.fitting(spec.configs, problem.head_dim, device)
    rows = min(
        (x.block_q for x in fitting if x.block_q >= problem.rows), default=max(x.block_q for x in fitting)
    )
    found = []
    for config in (x for x in fitting if x.block_q == rows):
        assert isinstance(config, DecodeConfig)
        blocks, in_cluster = items(problem, config), config.cluster_merge
        limit = min(longest(problem, config), max(WAVES * resident(device, config) // blocks, 1))
        name = f"{config}{', in clusters' * in_cluster}"
        counts = [n for n in _TUNED if n <= (min(limit, MAX_CLUSTER) if in_cluster else limit)]
        found += [Contender("fixed", config, f"{name}, {n} splits", num_splits=n) for n in counts]
    by_bound = dataclasses.replace(problem, softmax_max="bound")
    others = (Contender("balanced", name="shares"), Contender(name="maximum by bound", problem=by_bound))
    return (Contender(name=OURS), *found, *others)


def steps(problem: Problem, device: Device | None) -> tuple[Contender, ...]:
    """Contenders of the decoding ladder. The steps that change the merge need a config of a GPU: ``device`` None omits
    these steps."""
    capacity = problem.seqlen_k
    paged = make_decode(problem.batch, problem.heads, problem.kv_heads, capacity, page_size=16)
    found = [Contender("fixed", name="FlashAttention-2, no splits", num_splits=1)]
    if device is not None:
        spec = make_plan(problem, device, "fixed").spec
        config = spec.choose(problem, spec.fitting(spec.configs, problem.head_dim, device), device)
        two_launches = dataclasses.replace(config, fold_combine=False)
        found += [
            Contender("fixed", two_launches, "Flash-Decoding, merged by a second launch"),
            Contender("fixed", config, "merged by the last warp"),
            Contender("fixed", config.merged_in_cluster(), "merged in clusters"),
        ]
    return (
        *found,
        Contender("balanced", name="balanced shares"),
        Contender(name="pages of 16", problem=paged),
        Contender(name=OURS),
        Contender(name="maximum by bound", problem=dataclasses.replace(problem, softmax_max="bound")),
        Contender(name="maximum of 0", problem=dataclasses.replace(problem, softmax_max=0.0)),
        Contender(name="invariant", problem=dataclasses.replace(problem, invariant=True)),
    )


def windows(device: Device | None) -> Iterator[Case]:
    """The gain of a window: 1,024 of 128k cached tokens, beside a cache of 1,024 tokens."""
    for heads, kv_heads in ((32, 8), (32, 32)):
        long = make_decode(1, heads, kv_heads, 128 << 10, mask=Band(1023, 0))
        short = make_decode(1, heads, kv_heads, 1 << 10)
        beside = (
            Contender(name="window of 1k in 128k"),
            Contender(name="cache of 1k", problem=short),
            Contender("fa4"),
        )
        yield Case(long, beside, f"1 × {heads}/{kv_heads}, window of 1k")
