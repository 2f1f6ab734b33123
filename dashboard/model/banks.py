"""Which bytes of shared memory a warp touches, and on which banks they fall: from executing one tile on this CPU."""

from __future__ import annotations

import dataclasses
import functools

from cufa.dashboard.sentences import count
from cufa.kernels import Kernel, TileConfig
from cufa.measure.costs import ONE_SM
from cufa.measure.inputs import Inputs, given_to
from cufa.plan.planner import make_plan
from cufa.problem.lengths import DENSE, Cached
from cufa.problem.problem import Problem
from cufa.run.emulate.shared_accesses import BANKS, WORD, Access, Pass, shared_accesses

MATRICES = ("ldmatrix", "stmatrix", "wgmma, operand A", "wgmma, operand B")
"""Accesses of whole 16-byte rows of a tile, whose layout can be undone."""


@functools.lru_cache(32)
def accesses(spec: Kernel, config: TileConfig, problem: Problem) -> tuple[Access, ...] | str:
    """Accesses of one query tile and two key tiles of one head; on failure, the reason."""
    from cufa.run.emulate.build import CompilerError
    from cufa.run.emulate.calls import EmulationError

    decode = spec.operation == "decode"
    small = dataclasses.replace(
        problem,
        batch=1,
        heads=problem.group_size if decode else 1,
        kv_heads=1,
        seqlen_q=problem.seqlen_q if decode else config.block_q,
        seqlen_k=2 * config.block_kv,
        lengths=Cached() if decode else DENSE,
    )
    try:
        plan = make_plan(small, ONE_SM, config=config, kernel=spec.name, num_splits=1)
        arrays = given_to(plan.operation, Inputs(small, on_gpu=False, seed=0).arrays(small))
        return shared_accesses(plan, arrays)
    except (EmulationError, CompilerError, NotImplementedError, ValueError) as error:
        return f"The kernel could not be executed here: {error}"


def is_swizzled(spec: Kernel) -> bool:
    """The tiles have the copy engine's 128-byte swizzle; else each row is padded by 16 bytes."""
    return spec.uses_copy_engine


def in_plain_rows(plain: Pass, swizzled: bool) -> Pass:
    """The pass as if rows of a tile lay behind one another: without the swizzle, or without the padding of rows.

    The swizzle exchanges the 16-byte units of a 128-byte row: unit u of row r lies at u ^ (r % 8).
    """
    if swizzled:
        moved = tuple(a ^ (a >> 7 & 7) << 4 for a in plain.addresses)
    else:
        pitch = plain.addresses[1] - plain.addresses[0]
        first = plain.addresses[0]
        moved = (
            tuple(a - 16 * ((a - first) // pitch) for a in plain.addresses)
            if pitch // 16 % 2
            else plain.addresses
        )
    return dataclasses.replace(plain, addresses=moved)


@dataclasses.dataclass(frozen=True)
class Wavefront:
    """One wavefront of a pass: the word on each bank, and the lane that wants it; None: the bank idles."""

    pass_number: int
    words: tuple[tuple[int, int] | None, ...]


def wavefronts(passes: tuple[Pass, ...]) -> list[Wavefront]:
    """The wavefronts in order. A bank serves one word in a wavefront: further words wait for the next one."""
    waves = []
    for number, one in enumerate(passes):
        by_bank = one.words()
        for wave in range(one.wavefronts):
            words = tuple(bank[wave] if wave < len(bank) else None for bank in by_bank)
            waves.append(Wavefront(number, words))
    return waves


def sentence(passes: tuple[Pass, ...]) -> str:
    """Passes, wavefronts and conflicts in words."""
    waves = sum(x.wavefronts for x in passes)
    moved = (
        len({(n, word) for n, one in enumerate(passes) for bank in one.words() for word, _ in bank}) * WORD
    )
    worst = max(x.wavefronts for x in passes)
    busy = moved / (waves * BANKS * WORD)
    text = f"{count(len(passes), 'pass')} in {count(waves, 'wavefront')}, {moved:,} bytes, {busy:.0%} of the bandwidth"
    return f"{text}; {'no bank conflict' if worst == 1 else f'{worst}-way bank conflicts'}"
