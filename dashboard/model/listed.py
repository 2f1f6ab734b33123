"""PTX and SASS of builds, made in the background and cached."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from cufa.build import sass
from cufa.build.compiler import SOURCE_DIR
from cufa.build.machine_code import LoopCost
from cufa.build.sass import Listing, listing
from cufa.build.static_compile import CompileError
from cufa.build.variants import Variant
from cufa.dashboard.model.builder import Builder
from cufa.kernels import Kernel, TileConfig

_WARP_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Listed:
    """A listing, or the error."""

    listing: Listing | None
    error: str = ""


class Lister(Builder[Listed]):
    """Makes listings of variants."""

    folder = "listings"

    def make(self, variant: Variant) -> dict[str, Any]:
        try:
            return listing(variant).as_json()
        except (CompileError, RuntimeError) as error:
            return {"error": str(error)[:2000]}

    def read(self, content: Mapping[str, Any]) -> Listed:
        return Listed(None, content["error"]) if "error" in content else Listed(Listing.from_json(content))

    def tools(self) -> str:
        return str(sass.find_nvdisasm())


@functools.lru_cache(32)
def source_lines(file: str) -> tuple[str, ...]:
    """Lines of a file below ``cuda_src``; empty for a generated file."""
    path = (SOURCE_DIR / file).resolve()
    if not path.is_relative_to(SOURCE_DIR.resolve()) or not path.is_file():
        return ()
    return tuple(path.read_text(encoding="utf-8").splitlines())


def slots_per_tile(loop: LoopCost, spec: Kernel, config: TileConfig, head_dim: int) -> float | None:
    """Issue slots of an SM for one tile of a forward kernel, over all consumer warps; None unless a pass of the loop is
    a whole number of tiles."""
    if spec.operation != "forward" or not loop.flops:
        return None
    warps = min(config.num_warps, config.block_q // _WARP_ROWS)
    depth = -(-head_dim // _WARP_ROWS) * _WARP_ROWS
    tiles = loop.flops * warps / (4 * config.block_q * config.block_kv * depth)
    if round(tiles) < 1 or abs(tiles - round(tiles)) > 0.02:
        return None
    return loop.slots * warps / round(tiles)
