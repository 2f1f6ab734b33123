"""Planted bugs, and runs of the real kernels in checked mode that find them.

A run returns the kinds of its findings, separated by spaces, with "wrong" if a result is out of bounds. No bug: "".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from backward_support import NAMES, assert_gradients
from backward_support import make_case as backward_case
from cache_support import assert_attention_of, cache_case
from decode_kernel_support import configs, operands_of, plan_of, splits
from decode_support import make_case as decode_case
from fa3_support import SPEC, check_ragged, examples, execute_on_blocks, execute_ragged, gaps, unseen
from lengths_support import packed, padded
from support import assert_attention, make_inputs

from cufa import masks
from cufa.kernels import TileConfig
from cufa.problem.mask import CAUSAL, Mask
from cufa.run.emulate.calls import Emulation, EmulationError, Execution, emulate, emulate_backward, run_plan
from cufa.schedule import key_order


def kinds_of(execute: Callable[[], Emulation], check: Callable[[Emulation], object] = lambda _: None) -> str:
    try:
        run = execute()
    except EmulationError as error:
        return " ".join(sorted({f.kind for f in error.findings}))
    kinds = {f.kind for f in run.findings}
    try:
        with np.errstate(invalid="ignore"):
            check(run)
    except AssertionError:
        kinds.add("wrong")
    return " ".join(sorted(kinds))


def forward(
    algorithm: str, dtype: str, config: TileConfig, head_dim: int, mask: Mask, lengths, schedule="ascending",
    heads: int = 2, num_splits: int | None = None,
) -> str:  # fmt: skip
    inputs = make_inputs(1, heads, 1, *lengths, head_dim, dtype)
    how = {
        "algorithm": algorithm,
        "config": config,
        "mask": mask,
        "schedule": schedule,
        "num_splits": num_splits,
    }
    return kinds_of(lambda: emulate(*inputs, **how, mode="checked", trace=False))


def backward(
    algorithm: str, config: TileConfig | None, *, dtype: str = "float16", deterministic: bool = False,
    schedule: str | int = "ascending", **case: Any,
) -> str:  # fmt: skip
    """Several ragged tiles each way; two query heads share keys. ``case``: sizes, mask, softcap, spread."""
    sizes = {"heads": 2, "kv_heads": 1, "seqlen_q": 140, "seqlen_k": 150, "head_dim": 64}
    made = backward_case(1, **{**sizes, "mask": CAUSAL, **case}, dtype=dtype, dlse=True)
    precision = "float32" if dtype == "float32" else None
    how = {"algorithm": algorithm, "config": config, "deterministic": deterministic, "precision": precision}
    how |= {"schedule": schedule, "mode": "checked", "trace": False, "threads": 1}
    return kinds_of(
        lambda: emulate_backward(*made.arrays, **made.options, **how),
        lambda run: assert_gradients([run.results[name] for name in NAMES], made, precision),
    )


def small_batches() -> Any:
    """Head batches of one head, but for two in the last: blocks prepare all but the first beside tiles, and convert all
    but the last."""
    ones = ("_BATCH_BYTES", "_BATCH_ITEMS", "_BUSY_KEYS", "_NARROW_BUSY_KEYS", "_UNEVEN_LEAD")
    return mock.patch.multiple(key_order, _LAST_ITEMS=4, **dict.fromkeys(ones, 1))


def background(config: TileConfig, **case: Any) -> str:
    """Hopper's backward where thread blocks do the passes before and after beside their tiles: five heads."""
    with small_batches():
        return backward("fa3", config, **{"heads": 5, "kv_heads": 5, **case})


def in_pages(tree: bool = False) -> str:
    """FA3's forward over pages, which the call first appends to. ``tree``: each new token has two children; the new
    tokens of a sequence lie in two tiles."""
    made = cache_case(16, 256 if tree else 128, "float16")
    parents = np.tile((np.arange(64, dtype=np.int32) - 1) // 2, (len(made.operands["cache_seqlens"]), 1))
    mask: dict[str, Any] = {"tree": parents} if tree else {"causal": True}

    def check(run: Emulation) -> None:
        assert_attention_of(made, run.out, **mask)

    for schedule in ("ascending", "descending", 5):
        operands = {x: np.array(made.operands[x]) for x in made.operands}
        run = partial(
            emulate, **operands, **mask, algorithm="fa3", mode="checked", schedule=schedule, trace=False
        )
        if kinds := kinds_of(run, check):
            return kinds
    return ""


def listing(shown: str) -> str:
    """FA3's forward on few persistent blocks, where the producer lists tiles: several items each, ragged tiles."""
    run = of_lengths if shown in ("packed", "padded") else of_mask
    return next((kinds for schedule in ("ascending", "descending", 5) if (kinds := run(shown, schedule))), "")


def of_lengths(shown: str, schedule: str | int) -> str:
    found = []
    for lengths, options in (("equal", "causal"), ("one query", "full")):
        case = {"packed": packed, "padded": padded}[shown](lengths, options, 64, "float16")
        execute = partial(execute_ragged, case, Execution("checked", schedule), SPEC.configs[1])
        found.append(kinds_of(execute, partial(check_ragged, case)))
    return " ".join(sorted(set(" ".join(found).split())))


def of_mask(shown: str, schedule: str | int) -> str:
    # The last config has one consumer, so no ping-pong, and Q in shared memory.
    which = {"one consumer": -1, "nothing visible": 1}.get(shown, 0)
    config = SPEC.configs[which]
    rows, keys = 2 * config.block_q + 70, 4 * config.block_kv + 5
    inputs, launches = make_inputs(1, 4, 2, rows, keys, config.max_head_dim, "bfloat16"), 1
    if shown == "next launch":
        inputs, launches = make_inputs(1, 1, 1, 300, 200, 64, "float16"), 2
        mask: Mask = masks.evict(np.full(200, 150, np.int32))
    elif shown == "nothing visible":
        inputs, mask = unseen(config)
    elif shown == "gaps":
        mask = gaps(config, keys)
    elif shown == "one consumer":
        mask = masks.documents([70, keys - 70])
    else:
        mask = examples(rows, keys)[shown]
    execution = Execution("checked", schedule)
    return kinds_of(
        lambda: execute_on_blocks(inputs, mask, config, 1, execution, launches=launches),
        lambda run: assert_attention(run.out, run.lse, *inputs, mask=mask),
    )


def steep(algorithm: str, scale: float = 1.0, causal: bool = False) -> str:
    """A row's maximum grows by up to 2^30 between tiles: P in float16 must not overflow where O is not rescaled."""
    inputs, scores = make_inputs(1, 2, 1, 200, 260, 64, "float16"), {"causal": causal, "scale": scale}
    return kinds_of(
        lambda: emulate(*inputs, **scores, algorithm=algorithm, trace=False),
        lambda run: assert_attention(run.out, run.lse, *inputs, **scores),
    )


def below_zero() -> str:
    """Scores of -4,000 to -1,000, which grow from tile to tile as kernels walk them: from the last key to the first."""
    q, k, v = make_inputs(1, 2, 1, 200, 260, 64, "float16")
    q[...], k[...] = 1.0, -np.linspace(16.0, 64.0, 260, dtype=np.float16)[None, None, :, None]
    return kinds_of(
        lambda: emulate(q, k, v, algorithm="fa3", trace=False, scale=1.0),
        lambda run: assert_attention(run.out, run.lse, q, k, v, scale=1.0),
    )


def decoding(
    kernel: str, number: int, *, which: int = 0, change: dict[str, bool] | None = None, mode: str = "checked",
    schedule: str | int = "ascending", **case: Any,
) -> str:  # fmt: skip
    """``number`` splits of each sequence, or its share of a balanced batch; the kernel's config of the index ``which``,
    with these fields changed."""
    made = decode_case(**{"lengths": [150, 3, 200], "head_dim": 64, **case})
    config = dataclasses.replace(configs(kernel, made.q.shape[3])[which], **(change or {}))
    plan, operands = plan_of(made, kernel, splits(kernel, number), config), operands_of(made)

    def check(_: Emulation) -> None:
        made.check(operands["out"], operands["lse"])
        made.assert_stored(operands)

    return kinds_of(lambda: run_plan(plan, operands, Execution(mode, schedule), trace=False), check)


#: More rows than one warp's 16: several warps share a ring, or several blocks the keys of a head.
MANY_ROWS = {"heads": 40, "kv_heads": 1}
PAGES = {"tokens": 3, "new": 2, "page_size": 16}
BY_CLUSTER, BY_LAUNCH = {"fold_combine": False, "cluster_merge": True}, {"fold_combine": False}


def steep_decoding(kernel: str, scale: float = 1.0) -> str:
    return decoding(kernel, 1, mode="plain", lengths=[300, 200, 700], tokens=2, scale=scale)


def appending(kernel: str, schedule: str | int = "ascending") -> str:
    """Several blocks of 16 rows read the new tokens of one head; one of them must store these."""
    which = [c.block_q for c in configs(kernel, 64)].index(16)
    return decoding(kernel, 2, which=which, schedule=schedule, tokens=2, new=2, **MANY_ROWS)


def paged(kernel: str) -> str:
    """One sequence in pages, of more tiles than a warp's lanes look up twice; new tokens fill the last page."""
    rows = [c.block_kv for c in configs(kernel, 64)]
    length = -(-70 * min(rows) // 32) * 32
    how = {"mode": "plain", "lengths": [length], "kv_heads": 1, "page_size": 32, "new": 2}
    return decoding(kernel, 1, which=rows.index(min(rows)), **how)


def merging() -> str:
    """Splits of three sequences, merged in a cluster."""
    run = partial(decoding, "decode_split_tma", 3, change=BY_CLUSTER, **PAGES)
    return " ".join(
        {kind for schedule in ("ascending", "descending", 1) for kind in run(schedule=schedule).split()}
    )


class Bug(NamedTuple):
    what: str
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    kinds: str
    """One of these, separated by spaces, is among what the run returns."""
    run: Callable[[], str]


def of(run: Callable[..., str], file: str, *rows: tuple[Any, ...]) -> list[Bug]:
    """Bugs of one file: (what is wrong, text, text instead, kinds, and arguments of the run that differ)."""
    return [
        Bug(what, file, old, new, kinds, partial(run, **(case[0] if case else {})))
        for what, old, new, kinds, *case in rows
    ]
