"""Controls that several pages have."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from cufa.dashboard.model import devices
from cufa.dashboard.state import Controls, Place
from cufa.gpu.architectures import ARCHITECTURES, Device
from cufa.measure.regimes import Regime
from cufa.problem.problem import HEAD_DIM_STEP, MAX_HEAD_DIM

_MOST_SMS = 1024
HEAD_DIMS = [str(d) for d in range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)]
"""Head dims that kernels serve."""
_H100 = dataclasses.replace(Device.typical(90), name="H100")
"""The typical card's number of SMs, but less memory bandwidth: plans and times differ."""


def choose_kv_heads(
    controls: Controls, heads: int, default: int | None = None, *, at: Place, help: str | None = None
) -> int:
    """A divisor of the heads: all of them unless ``default`` says otherwise."""
    divisors = [str(n) for n in range(heads, 0, -1) if heads % n == 0]
    return int(controls.choice("kv", "K/V heads", divisors, str(default or heads), at=at, help=help))


def choose_card(controls: Controls, at: Place) -> Device:
    """This machine's GPU, an architecture's typical card, or an H100. Links name the architecture, and the number of
    SMs if it is not typical: a link means the same on every machine."""
    cards = {str(c): Device.typical(c) for c in ARCHITECTURES}
    cards[card_key(_H100)] = _H100
    default = "90"
    if devices.gpu_count():
        with contextlib.suppress(ValueError):  # older than sm_80
            here = devices.gpu(0)
            default = card_key(here)
            cards = {default: here, **{key: card for key, card in cards.items() if key != default}}
    wanted = controls.asked("card")
    if wanted not in cards and (other := device_of(wanted)) is not None:
        cards[wanted] = other
    words = {key: f"{d.name} · {d.arch.name} · {d.num_sms} SMs" for key, d in cards.items()}
    return cards[controls.choice("card", "Card to predict for", words, default, local=True, at=at)]


def choose_regime(controls: Controls, regimes: Sequence[Regime], at: Place, *, local: bool = False) -> Regime:
    """One of these regimes, each explained."""
    help_text = "  \n".join(f"**{regime}**: {regime.how}" for regime in regimes)
    words = [str(regime) for regime in regimes]
    return Regime(
        controls.choice("regime", "Regime", words, segmented=True, local=local, help=help_text, at=at)
    )


def card_key(device: Device) -> str:
    """Name of a card in links: 90, 90-h100, or 90x114."""
    typical = device.num_sms == device.arch.typical_sms
    named = "-h100" if device.slow_memory else ""
    return f"{device.arch.capability}{named}" if typical else f"{device.arch.capability}x{device.num_sms}"


def capability_of(key: str) -> int:
    """The compute capability in a :func:`card_key`."""
    return int(key.partition("x")[0].partition("-")[0])


def device_of(key: str) -> Device | None:
    """The card of a :func:`card_key`; None for other text. An atypical card of another machine has no name."""
    if key == card_key(_H100):
        return _H100
    if key.isascii() and key.isdigit() and int(key) in ARCHITECTURES:
        return Device.typical(int(key))
    capability, _, sms = key.partition("x")
    if not (capability.isascii() and capability.isdigit() and sms.isascii() and sms.isdigit()):
        return None
    arch = ARCHITECTURES.get(int(capability))
    return Device("another card", arch, int(sms)) if arch and 1 <= int(sms) <= _MOST_SMS else None
