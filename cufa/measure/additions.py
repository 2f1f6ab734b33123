"""The measured rate at which thread blocks add float32 values to memory that stays in the L2 cache."""

from __future__ import annotations

import dataclasses

NAME = "L2 additions"
"""Name of this resource in tables and figures."""


@dataclasses.dataclass(frozen=True)
class Additions:
    """Rate of float32 additions of one card."""

    bytes_per_second: float
    """Bytes of the addends."""
    origin: str
    """Source of the figure, for captions."""

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e12:.1f} TB/s ({self.origin})"


#: H200: 132 and 264 blocks add tiles of 8 to 32 KiB along heads, at most 32 MiB at a time: 3.9 TB/s by the copy engine,
#: 3.8 to 3.9 by ``red`` from registers. Over 128 MiB: 1.8 to 3.3 TB/s; over 512 MiB: 1.3 to 1.76 TB/s.
#: H100: 2.8 to 2.9 TB/s, reached by backward kernels of several masks and head dims; nothing else limits wide heads.
_MEASURED_BY_HAND = {
    "H200": Additions(3.9e12, "measured by hand on one H200 on 2026-11-22, not recorded yet"),
    "H100 80GB HBM3": Additions(2.85e12, "measured by hand on one H100 on 2026-11-25, not recorded yet"),
}


def of_card(device: str) -> Additions | None:
    """The rate of a GPU, by its name; None: not measured."""
    return _MEASURED_BY_HAND.get(device.removeprefix("NVIDIA "))
