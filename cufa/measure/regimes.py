"""The regimes of measuring: the load under which a time was taken. The regime is part of every figure.

A Hopper GPU that multiplies matrices reaches its power limit within milliseconds; from then on energy decides, not
cycles, and two kernels may change places. So a :class:`~cufa.measure.timing.Timing` carries
its regime, and :func:`~cufa.measure.timing.speedup` refuses to divide times of different ones.
"""

from __future__ import annotations

import enum


class Regime(enum.StrEnum):
    """How contenders share the GPU. Records and tables have the value."""

    IN_TURNS = "in turns"
    """Contenders take turns within each round. The L2 cache is overwritten before each call, which is also a pause."""
    SUSTAINED = "sustained"
    """Each contender alone, back to back, once the card has warmed up and its clocks have settled."""

    @property
    def seconds(self) -> float:
        """Default measuring time: in turns, of all contenders of a case together; alone, of each contender, long enough
        to measure its energy."""
        return 0.5 if self is Regime.IN_TURNS else 3.0

    @property
    def how(self) -> str:
        """One sentence for the foot of a table."""
        if self is Regime.IN_TURNS:
            return "Contenders take turns within each round; L2 is cold; median of single calls."
        return "Each contender alone, warmed up, back to back; median over batches of calls."
