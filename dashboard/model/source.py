"""CUDA source lines that implement the content of a figure. A marker text finds them: line numbers would change with
each edit of a file."""

from __future__ import annotations

import dataclasses

from cufa.build.compiler import SOURCE_DIR


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """Lines from ``marker`` to the next empty line."""

    title: str
    file: str
    """Under ``cuda_src``."""
    marker: str

    @property
    def lines(self) -> tuple[int, list[str]]:
        """Number of the first line, and the lines. Raises LookupError unless exactly one line has the marker."""
        text = (SOURCE_DIR / self.file).read_text(encoding="utf-8").splitlines()
        where = [n for n, line in enumerate(text) if self.marker in line]
        if len(where) != 1:
            raise LookupError(f"{self.file} has {self.marker!r} in {len(where)} lines: it must be in one")
        first = where[0]
        end = next((n for n in range(first, len(text)) if not text[n].strip()), len(text))
        return first + 1, text[first:end]

    @property
    def numbered(self) -> str:
        """The lines with their numbers."""
        first, lines = self.lines
        indent = min(
            len(line) - len(line.lstrip()) for line in lines if line.strip() and not line.startswith("#")
        )
        shown = (line if line.startswith("#") else line[indent:] for line in lines)
        width = len(str(first + len(lines)))
        return "\n".join(f"{first + n:>{width}}  {line}" for n, line in enumerate(shown))

    @property
    def heading(self) -> str:
        return f"**{self.title}**, `cuda_src/{self.file}`"


_FA1, _FA2, _FA3 = "forward/fa1/kernel.cu", "forward/fa2/kernel.cu", "forward/fa3"
_BACKWARD, _PRODUCTS = "backward/fa2/kernel.cu", "backward/fa2/products.cuh"
_TILES = (
    Excerpt(
        "Tiles that a query block visits",
        "forward/query_block.cuh",
        "DEVICE TileRange visited_tiles(const HeadMask",
    ),
    Excerpt(
        "The walk over them, masked ones first",
        "shared/segments.cuh",
        "// visit(j, segment) for tiles from `j` down to the first",
    ),
)
_SOFTMAX = (
    Excerpt("New maxima, and alpha", "shared/softmax.cuh", "// Takes the row maxima of a new tile"),
    Excerpt("P, and l", "shared/softmax.cuh", "// One probability, not yet divided by the row's sum."),
)
_ORDER = (
    Excerpt("Which block of a head comes when", "shared/block_order.cuh", "DEVICE HeadBlock ordered_block("),
    Excerpt(
        "Items of a persistent block (FA3)",
        "forward/fa3/persistent_items.cuh",
        "// False when this block has done its share.",
    ),
)
_SPLITS = (
    Excerpt(
        "One of the fixed splits", "decode/schedule.cuh", "// Flash-Decoding: split `split` of the work item"
    ),
    Excerpt("The spans of a share", "decode/schedule.cuh", "DEVICE bool next(const DecodeParams& p, Span&"),
)
_REGISTERS = (
    Excerpt("Launch bounds for the register allocator (FA2)", _FA2, "KERNEL __launch_bounds__(NUM_THREADS"),
    Excerpt(
        "Operands in registers", "forward/fa2/shape.cuh", "// Q stays in registers if O, S and Q together"
    ),
)
_CEILINGS = (
    Excerpt("The ceiling of products", "limits/tensor_cores.cu", "KERNEL mma_limit("),
    Excerpt("The ceiling of exponentials", "limits/tensor_cores.cu", "KERNEL exp2_limit("),
    Excerpt("The ceiling of reads", "limits/tensor_cores.cu", "KERNEL read_limit("),
)

FIGURES: dict[str, tuple[Excerpt, ...]] = {
    "masked.grid": _TILES,
    "masked.grid.large": _TILES,
    "masked.softmax": _SOFTMAX,
    "masked.predicted": _ORDER,
    "masked.measured": _ORDER,
    "masked.finish": _ORDER,
    "masked.flops": _TILES,
    "masked.speedup": _TILES,
    "masked.pair.grids": _TILES,
    "masked.pair.predicted": _ORDER,
    "masked.pair.measured": _ORDER,
    "roofline": _CEILINGS,
    "roofline.needs": _CEILINGS,
    "occupancy.table": _REGISTERS,
    "decode.fixed": _SPLITS[:1],
    "decode.balanced": _SPLITS[1:],
    "decode.curve": _SPLITS,
}
"""By key of the figure."""

_MERGE = Excerpt("Add two parts", "shared/parts.cuh", "// (o, m, l) merged with part (o_part, ml_part).")
PHASES: dict[str, dict[str, Excerpt]] = {
    "fa1": {
        "Load": Excerpt("Algorithm 1, l. 6 and 8", _FA1, "// Alg. 1, l. 6. Rows past the end"),
        "Score": Excerpt("Algorithm 1, l. 9", _FA1, "// Alg. 1, l. 9: Sij = Qi Kj^T"),
        "Rescale": Excerpt(
            "Algorithm 1, l. 11", "forward/fa1/strip_state.cuh", "// Alg. 1, l. 11: m_new = max(m, m~)"
        ),
        "Add": Excerpt(
            "Algorithm 1, l. 12", "forward/fa1/strip_state.cuh", "// Alg. 1, l. 12: the new O of one slice."
        ),
        "Store": Excerpt(
            "Algorithm 1, l. 12", "forward/fa1/strip_state.cuh", "// Alg. 1, l. 12: O to device memory until"
        ),
    },
    "fa2": {
        "Load": Excerpt("Algorithm 1, l. 4 and 7", _FA2, "// Alg. 1, l. 4 and 7: Q, and the first K and V."),
        "Score": Excerpt("Algorithm 1, l. 8", _FA2, "// Alg. 1, l. 8: S = Q K^T."),
        "Rescale": Excerpt("Algorithm 1, l. 9 and 10", _FA2, "// Alg. 1, l. 9: the row maxima."),
        "Add": Excerpt("Algorithm 1, l. 10", _FA2, "// Alg. 1, l. 10: O += P V for 16 keys."),
        "Store": Excerpt("Algorithm 1, l. 12 to 15", _FA2, "// Alg. 1, l. 12-15: O = O / l"),
    },
    "fa3": {
        "Producer": Excerpt(
            "Algorithm 1, l. 3 to 10", f"{_FA3}/producer.cuh", "// Alg. 1, l. 3-10: one thread asks"
        ),
        "Consumer": Excerpt(
            "Algorithm 2, l. 8 to 14", f"{_FA3}/kernel.cu", "// One step of the pipeline (Alg. 2, l. 8-14)"
        ),
        "Ping-pong": Excerpt(
            "Section 3.1", f"{_FA3}/consumer_items.cuh", "// Ping-pong: consumers issue their products"
        ),
    },
    "decode": {"Split": _SPLITS[0], "Merge": _MERGE},
    "fa2_backward": {
        "D": Excerpt("Algorithm 2, l. 4", "backward/common/passes.cuh", "// Algorithm 2, l. 4: D = rowsum"),
        "Load": Excerpt("Algorithm 2, l. 9", _BACKWARD, "// Alg. 2, l. 9, asynchronously"),
        "Recompute": Excerpt("Algorithm 2, l. 10 to 14", _PRODUCTS, "// Alg. 2, l. 11"),
        "dV and dK": Excerpt("Algorithm 2, l. 12 and 16", _PRODUCTS, "// Alg. 2, l. 12 and 16"),
        "dQ": Excerpt("Algorithm 2, l. 15", "backward/fa2/dq.cuh", "// Alg. 2, l. 15"),
        "Store": Excerpt("Algorithm 2, l. 18", "backward/fa2/store.cuh", "// Alg. 2, l. 18"),
    },
}
"""Steps of the walkthrough by algorithm."""
