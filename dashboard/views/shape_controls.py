"""Controls of a problem's shape that several pages have."""

from __future__ import annotations

from cufa.dashboard.state import Controls


def choose_kv_heads(
    controls: Controls, heads: int, default: int | None = None, help: str | None = None
) -> int:
    """A divisor of the heads: all of them unless ``default`` says otherwise."""
    divisors = [str(n) for n in range(heads, 0, -1) if heads % n == 0]
    return int(controls.choice("kv", "K/V heads", divisors, str(default or heads), help=help))
