"""Tile configurations in links and in words."""

from __future__ import annotations

from cufa.kernels import TileConfig


def config_key(config: TileConfig) -> str:
    """Name in links: 128x64w4, then s2 for two stages, b2 for two blocks per SM, and options of the kernel family.
    Equal for configs with equal builds."""
    stages = f"s{config.num_stages}" if config.num_stages > 1 else ""
    blocks = f"b{config.blocks_per_sm}" if config.blocks_per_sm > 1 else ""
    own = "".join(f"-{name}{int(value)}" for name, value in config.own.items())
    return f"{config.block_q}x{config.block_kv}w{config.num_warps}{stages}{blocks}{own}"


def config_words(config: TileConfig) -> str:
    """A config on the screen."""
    blocks = f", {config.blocks_per_sm} blocks per SM" if config.blocks_per_sm > 1 else ""
    own = "".join(
        f", {name.replace('_', ' ')}" + ("" if value is True else f" {value}")
        for name, value in config.own.items()
        if value is not False and name not in config.in_text
    )
    return f"{config}{blocks}{own}"
