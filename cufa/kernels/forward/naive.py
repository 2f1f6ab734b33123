"""naive: three passes with the score matrix in device memory."""

from __future__ import annotations

from ...problem.problem import MASK_KINDS, Problem
from ..base import Kernel, mask_launches
from ..config import Buffer, Launch, Split, TileConfig, ceil_div, tile_pitch


class Naive(Kernel):
    name = "naive"
    algorithm = "naive"
    title = "Three passes with the score matrix in device memory"
    paper = "Vaswani et al. 2017, Attention Is All You Need, section 3.2.1"
    source = "forward/naive/kernel.cu"
    entry = "naive_scores"
    dtypes = ("float16", "bfloat16", "float32")
    precisions = ("native", "float32", "tf32")
    masks = MASK_KINDS
    options = options_with_irregular_masks = ("score", "dropout")
    any_v_dim = True
    configs = (TileConfig(64, 64, num_warps=4, blocks_per_sm=4),)
    workspace_holds = "the scores in float32 and the probabilities"

    def shared_memory(self, config: TileConfig, head_dim: int, v_dim: int = 0) -> tuple[Buffer, ...]:
        """A tile of each factor, 128 bytes of the inner dimension per row."""
        pitch = tile_pitch(64, itemsize=2, pad_to=16)
        return Buffer("A", config.block_q * pitch), Buffer("B", config.block_kv * pitch)

    def launches(
        self, problem: Problem, config: TileConfig, shared_memory: int, split: Split | None = None
    ) -> tuple[Launch, ...]:
        heads = problem.batch * problem.heads
        row_blocks = heads * ceil_div(problem.seqlen_q, config.block_q)
        threads = config.num_warps * 32
        score_tiles = row_blocks * ceil_div(problem.seqlen_k, config.block_kv)
        softmax_blocks = ceil_div(heads * problem.seqlen_q, config.num_warps)
        output_tiles = row_blocks * ceil_div(problem.v_dim, config.block_kv)
        return (
            *mask_launches(problem, config),
            Launch("naive_scores", (score_tiles, 1, 1), threads, shared_memory),
            Launch("naive_softmax", (softmax_blocks, 1, 1), threads, 0),
            Launch("naive_values", (output_tiles, 1, 1), threads, shared_memory),
        )

    def workspace(self, problem: Problem, config: TileConfig, split: Split | None = None) -> int:
        """Scores in float32, probabilities in the inputs' dtype."""
        scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
        return scores * (4 + problem.itemsize)
