"""Regimes: the load on the GPU while a time is measured. The regime is part of every figure.

A Hopper GPU that multiplies matrices reaches its power limit within milliseconds. From then on energy decides, not
cycles, and another kernel may be the faster one. So a :class:`~cufa.measure.timing.Timing` has a regime, and
:func:`~cufa.measure.timing.speedup` refuses to divide times of different regimes.
"""

from __future__ import annotations

import enum


class Regime(enum.StrEnum):
    """How contenders share the GPU. Records and tables show the member's value."""

    IN_TURNS = "in turns"
    """Contenders take turns within each round. The L2 cache is overwritten before each call: a pause from computing."""
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
