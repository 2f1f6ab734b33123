"""Controls that several pages have."""

from __future__ import annotations

import contextlib

from cufa.core.architectures import ARCHITECTURES, Device
from cufa.dashboard.model import devices, gpu
from cufa.dashboard.state import Controls

_HERE = "here"


def choose_kv_heads(
    controls: Controls, heads: int, default: int | None = None, help: str | None = None
) -> int:
    """A divisor of the heads: all of them unless ``default`` says otherwise."""
    divisors = [str(n) for n in range(heads, 0, -1) if heads % n == 0]
    return int(controls.choice("kv", "K/V heads", divisors, str(default or heads), help=help))


def choose_card(controls: Controls) -> Device:
    """This machine's GPU, if there is one, or an architecture's typical card."""
    cards = {str(c): Device.typical(c) for c in ARCHITECTURES}
    if gpu.gpu_count():
        with contextlib.suppress(ValueError):  # older than any that kernels are built for
            cards = {_HERE: devices.gpu(0), **cards}
    words = {key: f"{d.name} · {d.arch.name} · {d.num_sms} SMs" for key, d in cards.items()}
    return cards[controls.choice("card", "Card to predict for", words, _HERE if _HERE in cards else "90")]
