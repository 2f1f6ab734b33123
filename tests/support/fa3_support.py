"""FA3's forward kernel on few persistent blocks: masks whose tiles the producer lists, and sequences with lengths."""

from __future__ import annotations

from unittest import mock

import numpy as np
from lengths_support import Ragged
from support import assert_attention, forward_operands, make_inputs, make_problem, on_blocks, plan_with_blocks

from cufa import masks
from cufa.kernels import KERNELS, TileConfig
from cufa.plan.planner import make_plan
from cufa.problem.columns import Columns
from cufa.problem.integers import Integers
from cufa.problem.mask import Band, Mask
from cufa.run.emulate.calls import Emulation, Execution, emulate, run_plan

SPEC = KERNELS["fa3_forward"]


def examples(seqlen_q: int, seqlen_k: int) -> dict[str, Mask]:
    rng = np.random.default_rng(seqlen_q + seqlen_k)
    cuts = np.sort(rng.integers(0, seqlen_k + 1, 3))
    lengths = np.diff([0, *cuts, seqlen_k]).tolist()
    rows = rng.integers(0, seqlen_q + 1, (4, 1, 2, seqlen_k)).astype(np.int32)
    return {
        "prefix": masks.prefix(seqlen_k // 3),
        "streaming": masks.streaming(3, 40),
        "documents": masks.documents(lengths),
        "documents both ways": masks.documents(lengths, causal=False),
        "evicted": masks.evict(rng.integers(0, seqlen_q + 1, seqlen_k).astype(np.int32)),
        "half of all scores": half(seqlen_k),
        "two runs of heads": Columns(Band(right=5), Integers(rows)),
        "nothing for the first rows": Band(None, -seqlen_q // 2, "top-left", prefix=0, keep=1),
    }


def half(seqlen_k: int) -> Mask:
    """Each key is hidden from half of the rows, in one run: query blocks differ in visible keys, and clear tiles
    alternate with masked ones."""
    first = np.arange(seqlen_k, dtype=np.int32) % (seqlen_k // 2 + 1)
    return masks.columns(first, first + seqlen_k // 2)


def gaps(config: TileConfig, seqlen_k: int) -> Mask:
    """The first 64 rows see every second tile, the next 64 the others, later rows all; every row sees the last."""
    tile = np.arange(seqlen_k) // config.block_kv
    hidden = np.where(tile == tile[-1], 0, 64).astype(np.int32)
    first = np.where(tile % 2 == 0, 0, 64).astype(np.int32)
    return masks.columns(first, first + hidden)


def unseen(config: TileConfig) -> tuple[list[np.ndarray], Mask]:
    """Keys and values of NaN, and a mask that hides all of them."""
    q, k, v = make_inputs(1, 2, 1, 2 * config.block_q, config.block_kv + 40, 64, "float16")
    k[...] = v[...] = np.nan
    hidden = np.zeros((2, 1, 1, config.block_kv + 40), np.int32)
    hidden[1] = 2 * config.block_q
    return [q, k, v], Columns(Band(), Integers(hidden))


def execute_on_blocks(
    inputs, mask: Mask, config: TileConfig, blocks: int, execution: Execution, trace: bool = False,
    launches: int = 1, softcap: float | None = None,
) -> Emulation:  # fmt: skip
    plan = plan_with_blocks(make_problem(*inputs, mask=mask, softcap=softcap), config, blocks)
    return run_plan(plan, forward_operands(*inputs), execution, trace=trace, launches=launches)


def check(inputs, mask: Mask, config: TileConfig, runs: list[tuple[int, Execution]]) -> None:
    """Each of ``runs``, (blocks, execution), has no finding and gives the same bits, within the bound."""
    outputs = []
    for blocks, execution in runs:
        run = execute_on_blocks(inputs, mask, config, blocks, execution)
        assert not run.findings, "\n".join(map(str, run.findings))
        outputs.append(run.out.tobytes() + run.lse.tobytes())
    assert_attention(run.out, run.lse, *inputs, mask=mask)
    assert len(set(outputs)) == 1


def execute_ragged(case: Ragged, execution: Execution, config: TileConfig) -> Emulation:
    """A call with lengths, on two persistent blocks."""

    def on_two_blocks(*arguments, **request):
        return on_blocks(make_plan(*arguments, **request), 2)

    how = {"config": config, "mode": execution.mode, "schedule": execution.schedule}
    with mock.patch("cufa.run.emulate.calls.make_plan", on_two_blocks):
        return emulate(*case.forward, **case.lengths, **case.options, algorithm="fa3", **how)


def check_ragged(case: Ragged, run: Emulation) -> None:
    for name, x in run.results.items():
        case.check(name, np.asarray(x))
