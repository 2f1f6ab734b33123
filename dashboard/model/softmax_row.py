"""One row of the walkthrough: its online softmax beside a two-pass softmax, and the numbers of the derivations in
understand.md."""

from __future__ import annotations

import dataclasses

import numpy as np

from cufa.dashboard import sentences
from cufa.dashboard.model.walkthrough import BLOCK, Floats, Step, Walk
from cufa.dashboard.model.walkthrough_words import size, span
from cufa.run.cpu.tiles import TileStep


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the tile of a step."""

    walk: Walk
    step: Step
    row: int
    """Within the tile."""

    @property
    def tile(self) -> TileStep:
        assert self.step.tile is not None
        return self.step.tile

    @property
    def name(self) -> str:
        if self.walk.is_decode:
            return f"query head {self.row}"
        return f"query {self.step.q_block * BLOCK + self.row}"

    @property
    def steps(self) -> list[Step]:
        """All tiles of this row that its thread block computes, in order."""
        own = self.step.q_block, self.step.thread_block
        return [s for s in self.walk.steps if s.tile is not None and (s.q_block, s.thread_block) == own]


def row_of(walk: Walk, n: int) -> Row:
    """The row whose maximum rises most in step ``n``, from 0. If no maximum rises in step ``n``: the next step in which
    one does, else the nearest before; else the first tile with a visible score."""
    rises = {k: _rise(s.tile) for k, s in enumerate(walk.steps) if s.tile is not None}
    risen = [k for k, rise in rises.items() if rise.max() > 0]
    step = min((k for k in risen if k >= n), default=max(risen, default=-1))
    if step < 0:
        step = next(k for k, rise in rises.items() if rise.max() == 0)
    return Row(walk, walk.steps[step], int(np.argmax(rises[step])))


def _rise(tile: TileStep) -> Floats:
    """The rise of each row's maximum; 0: the first maximum, or no rise; -1: a row without a visible
    score."""
    with np.errstate(invalid="ignore"):
        rise = np.where(np.isfinite(tile.m_before), tile.m_after - tile.m_before, 0)
    return np.where(np.isfinite(tile.S).any(axis=1), rise, -1)


def number(x: float) -> str:
    """A number with two decimals; small numbers with three digits."""
    text = f"{x:.2f}" if abs(x) >= 0.1 or x == 0 else f"{x:.3g}"
    return text.replace("-", "−").replace("inf", "∞")


def passes(row: Row) -> list[dict[str, str]]:
    """A line for each tile: maximum and sum of the online softmax, and of the two passes."""
    steps, r = row.steps, row.row
    tiles = [s.tile for s in steps if s.tile is not None]
    m, l = tiles[-1].m_after[r], 0.0
    lines = []
    for step, tile in zip(steps, tiles, strict=True):
        l += float(np.exp(tile.S[r] - m).sum())
        line = {
            "keys": span(step.kv_block).replace("–", "\u2060–\u2060"),  # no line break
            "largest score": number(tile.S[r].max()),
            "online: m": number(tile.m_after[r]),
            "α": number(_alpha(tile, r)),
            "online: l": number(tile.l_after[r]),
            "first pass: m": number(tile.m_after[r]),
            "second pass: l": number(l),
        }
        lines.append({name: f"**{x}**" for name, x in line.items()} if step is row.step else line)
    return lines


def _alpha(tile: TileStep, row: int) -> float:
    return float(np.exp(tile.m_before[row] - tile.m_after[row])) if np.isfinite(tile.m_after[row]) else 1.0


def values(row: Row) -> dict[str, str]:
    """The numbers of understand.md, by name."""
    walk, tile, r = row.walk, row.tile, row.row
    scores, m, last = tile.S[r], float(tile.m_after[r]), row.steps[-1].tile
    assert last is not None
    largest = float(scores.max())
    is_divided = walk.case.algorithm == "fa1"
    before = float(row.step.O_before[r, 0] * (tile.l_before[r] if is_divided else 1))
    after = float(row.step.O[r, 0] * (tile.l_after[r] if is_divided else 1))
    alpha, plain, keys = _alpha(tile, r), float(np.exp(np.float64(scores)).sum()), _bytes_of_keys(row)
    ends = {f"{t}_end": number(np.log(float(np.finfo(t).max))) for t in ("float16", "float32")}
    with np.errstate(over="ignore"):
        overflow = number(np.exp(np.float32(100)))
    exact: Floats = walk.exact[row.step.q_block * BLOCK + r]
    numbers = {
        "m_end": last.m_after[r], "l_end": last.l_after[r], "largest": largest, "m": m, "plain_sum": plain,
        "shifted_sum": tile.P[r].sum(), "share": np.exp(largest) / plain, "shift": 100 - largest, "alpha": alpha,
        "m_before": tile.m_before[r], "l_before": tile.l_before[r], "l_added": tile.P[r].sum(),
        "l_after": tile.l_after[r], "o_before": before, "o_added": after - alpha * before, "o_after": after,
        "ended": row.step.ended[r, 0], "exact": exact[0],
    }  # fmt: skip
    texts = {
        "row": row.name, "rows": str(BLOCK), "keys": f"keys {span(row.step.kv_block)}", "overflow": overflow,
        "count": sentences.count(len(row.steps), "tile"), "two_bytes": size(3 * keys), "one_bytes": size(2 * keys),
        "scores": ", ".join("hidden" if np.isinf(x) else number(x) for x in scores),
    }  # fmt: skip
    texts = {
        "row": row.name, "rows": str(BLOCK), "keys": f"keys {span(row.step.kv_block)}", "overflow": overflow,
        "count": sentences.count(len(row.steps), "tile"), "two_bytes": size(3 * keys), "one_bytes": size(2 * keys),
        "scores": ", ".join("hidden" if np.isinf(x) else number(x) for x in scores),
    }  # fmt: skip
    return ends | {name: number(float(x)) for name, x in numbers.items()} | texts


def _bytes_of_keys(row: Row) -> int:
    """K (as V) of all tiles of the row."""
    return len(row.steps) * BLOCK * row.walk.problem.head_dim * row.walk.problem.k_element.itemsize
