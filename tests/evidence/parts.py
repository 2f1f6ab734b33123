"""The suites and regimes that ``record`` measures, in this order."""

from __future__ import annotations

import dataclasses

from cufa.gpu.architectures import Device
from cufa.measure.cases import Case
from cufa.measure.measuring import WARM_SECONDS
from cufa.measure.regimes import Regime
from cufa.measure.suites import SUITES
from cufa.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Part:
    """The cases of one suite under one regime."""

    suite: str
    regime: Regime = Regime.IN_TURNS
    seconds: float | None = None
    """Measuring time; None: the regime's default."""
    section: str = ""
    """Suite under which the rows are stored; "": ``suite``."""

    @property
    def name(self) -> str:
        return f"{self.suite}, {self.regime}"

    def cases(self, device: Device | None) -> list[Case]:
        return list(SUITES[self.suite].cases(device))

    @property
    def kept_in(self) -> str:
        return self.section or self.suite

    def group(self, case: Case) -> tuple[str, Regime, str | Problem]:
        """:attr:`cufa.measure.measured.Measured.group` of the rows of a case."""
        return self.kept_in, self.regime, case.name or dataclasses.replace(case.problem, deterministic=False)

    def least_seconds(self, case: Case) -> float:
        """Seconds of warm-up and measurement of one case, without inputs, references and compilation."""
        seconds = self.seconds or self.regime.seconds
        return seconds if self.regime is Regime.IN_TURNS else len(case.contenders) * (seconds + WARM_SECONDS)


_IN_TURNS = (
    "forward", "awkward", "chunks", "ladder", "versions", "float32", "fa1-blocks", "memory", "masks", "decode",
    "splits", "backward", "backward-beside", "backward-ladder", "fp8", "fp8-speed",
)  # fmt: skip
#: Seconds that suffice for a time, but not for energy.
_SHORT = 1.0

#: All parts, in the order in which they are measured.
PARTS = (
    *map(Part, _IN_TURNS),
    Part("fa3", Regime.SUSTAINED, _SHORT, section="forward"),
    Part("decode-published", Regime.SUSTAINED, _SHORT, section="decode"),
    Part("backward", Regime.SUSTAINED, _SHORT / 2),
    Part("energy", Regime.SUSTAINED),
    Part("fp8-energy", Regime.SUSTAINED),
    Part("backward-energy", Regime.SUSTAINED),
)
