"""Controls that several pages have."""

from __future__ import annotations

import contextlib

from cufa.dashboard.model import devices
from cufa.dashboard.state import Controls
from cufa.gpu.architectures import ARCHITECTURES, Device
from cufa.problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM

_MOST_SMS = 1024
HEAD_DIMS = [str(d) for d in range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)]
"""Head dims that kernels serve."""


def choose_kv_heads(
    controls: Controls, heads: int, default: int | None = None, help: str | None = None
) -> int:
    """A divisor of the heads: all of them unless ``default`` says otherwise."""
    divisors = [str(n) for n in range(heads, 0, -1) if heads % n == 0]
    return int(controls.choice("kv", "K/V heads", divisors, str(default or heads), help=help))


def choose_card(controls: Controls) -> Device:
    """This machine's GPU, or the typical card of an architecture. Links name the architecture, and the number of SMs if
    it is not typical: a link means the same on every machine."""
    cards = {str(c): Device.typical(c) for c in ARCHITECTURES}
    default = "90"
    if devices.gpu_count():
        with contextlib.suppress(ValueError):  # older than sm_80
            here = devices.gpu(0)
            default = card_key(here)
            cards = {default: here, **{key: card for key, card in cards.items() if key != default}}
    asked = controls.asked("card")
    if asked not in cards and (found := _card(asked)) is not None:
        cards[asked] = found
    words = {key: f"{d.name} · {d.arch.name} · {d.num_sms} SMs" for key, d in cards.items()}
    return cards[controls.choice("card", "Card to predict for", words, default, local=True)]


def card_key(device: Device) -> str:
    """Name of a card in links: 90, or 90x114."""
    typical = device.num_sms == device.arch.typical_sms
    return str(device.arch.capability) + ("" if typical else f"x{device.num_sms}")


def _card(key: str) -> Device | None:
    """An atypical card, from a link of another machine."""
    capability, _, sms = key.partition("x")
    if not (capability.isascii() and capability.isdigit() and sms.isascii() and sms.isdigit()):
        return None
    arch = ARCHITECTURES.get(int(capability))
    return Device("another card", arch, int(sms)) if arch and 1 <= int(sms) <= _MOST_SMS else None
