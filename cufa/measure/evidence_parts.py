"""What evidence is recorded of: suites and regimes, in their order."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..gpu.architectures import Device
from .cases import Case
from .regimes import Regime
from .suites import SUITES


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the recorded evidence: the cases of one suite under one regime."""

    suite: str
    regime: Regime = Regime.IN_TURNS
    seconds: float | None = None
    """None: as the run has it (in turns), or as the regime does."""
    section: str = ""
    """Suite of the record that its rows are kept in; "" is its own."""

    @property
    def name(self) -> str:
        return f"{self.suite}, {self.regime}"

    def cases(self, device: Device | None) -> list[Case]:
        """Those of its suite."""
        return list(SUITES[self.suite].cases(device))

    @property
    def kept_in(self) -> str:
        return self.section or self.suite

    def keeps(self, suite: str, row: dict[str, Any]) -> bool:
        """Whether a record's row, or what it says of one that was skipped, belongs to this part. (Of what was skipped
        records once did not say in which regime.)"""
        return suite == self.kept_in and row.get("regime", Regime.IN_TURNS) == self.regime


#: Enough for a time, not for joules.
_SHORT = 1.0

#: What evidence is recorded of, in this order.
EVIDENCE = (
    *(
        Part(x)
        for x in ("forward", "awkward", "chunks", "ladder", "versions", "float32", "fa1-blocks", "memory")
    ),
    *(Part(x) for x in ("masks", "decode", "splits", "backward", "backward-beside")),
    Part("backward-ladder"),
    Part("fa3", Regime.SUSTAINED, _SHORT, section="forward"),
    Part("decode-published", Regime.SUSTAINED, _SHORT, section="decode"),
    Part("backward", Regime.SUSTAINED, _SHORT / 2),
    Part("energy", Regime.SUSTAINED),
    Part("backward-energy", Regime.SUSTAINED),
)
