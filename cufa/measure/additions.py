"""The ceiling of float32 sums that thread blocks add to memory while it stays in the L2 cache."""

from __future__ import annotations

import dataclasses

NAME = "L2 additions"
"""What tables and figures call the time of :class:`Additions`."""


@dataclasses.dataclass(frozen=True)
class Additions:
    """Of one card."""

    bytes_per_second: float
    """Of what is added."""
    origin: str
    """In words, for captions: it is not among the rates that are measured and recorded here."""

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e12:.1f} TB/s ({self.origin})"


#: 132 and 264 blocks added tiles of 8 to 32 KiB along heads, at most 32 MiB at a time: 3.9 TB/s by the copy engine,
#: 3.8 to 3.9 by ``red`` from registers. Where 128 and 512 MiB were added to in turn it was 1.8 to 3.3 and 1.3 to 1.76.
#: An H100's: what backward kernels reached that differ in mask, head dim and in the way that they add, of which nothing
#: else binds those of wide heads: 2.8 to 2.9 TB/s.
_ADDED_BY_HAND = {
    "H200": Additions(3.9e12, "measured by hand on one H200 on 2026-11-22, not recorded yet"),
    "H100 80GB HBM3": Additions(2.85e12, "measured by hand on one H100 on 2026-11-25, not recorded yet"),
}


def of_card(device: str) -> Additions | None:
    """Of a GPU, by its name; None where nobody has measured it."""
    return _ADDED_BY_HAND.get(device.removeprefix("NVIDIA "))
