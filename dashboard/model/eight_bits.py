"""One row of the walkthrough's tile in e4m3: its scores from rounded Q and K, its weights times 448 as e4m3, and the
result beside the 16-bit result. The arithmetic follows cufa's e4m3 path, on the page's own numbers."""

from __future__ import annotations

import numpy as np

from cufa.dashboard.model.softmax_row import Row, number
from cufa.dashboard.model.walkthrough import BLOCK, Floats
from cufa.problem.float8 import LARGEST, round_to_e4m3
from cufa.run.cpu.quantize import scale_of


def rounded(x: Floats) -> tuple[Floats, float]:
    """(e4m3 numbers as float32, scale) with one scale for the array."""
    x = x.astype(np.float32)
    scale = float(scale_of(np.asarray(np.abs(x).max())))
    numbers: Floats = round_to_e4m3(np.clip(x / np.float32(scale), -LARGEST, LARGEST))
    return numbers, scale


class EightBits:
    """The row of a tile, with keys that the mask shows."""

    def __init__(self, row: Row) -> None:
        walk, tile, r = row.walk, row.tile, row.row
        keys = slice(row.step.kv_block * BLOCK, (row.step.kv_block + 1) * BLOCK)
        query = row.step.q_block * BLOCK + r
        (q, q_scale), (k, k_scale), (v, v_scale) = map(rounded, (walk.Q, walk.K, walk.V))
        self.scales = {"q": q_scale, "k": k_scale, "v": v_scale}
        self.seen = np.isfinite(tile.S[r])
        self.scores = np.where(self.seen, tile.S[r], -np.inf)
        in_e4m3 = np.float32(walk.problem.scale * q_scale * k_scale) * (k[keys] @ q[query])
        self.scores8 = np.where(self.seen, in_e4m3, -np.inf)
        self.weights = _softmax(self.scores)
        exact = _softmax(self.scores8, divide=False)
        self.weights8 = round_to_e4m3(np.float32(LARGEST) * exact)
        self.sum = float(exact.sum())
        self.result = self.weights @ walk.V[keys].astype(np.float32)
        self.result8 = v_scale * (self.weights8 @ v[keys]) / (LARGEST * self.sum)

    def lines(self) -> list[dict[str, str]]:
        """A line for each visible key."""
        return [
            {
                "key": str(n),
                "score": number(s),
                "score of e4m3 q and k": number(s8),
                "weight": number(p),
                "448 · exp(s − m)": number(w),
                "as e4m3": number(w8),
            }
            for n, s, s8, p, w, w8 in zip(
                np.flatnonzero(self.seen), *(x[self.seen] for x in self._columns), strict=True
            )
        ]

    @property
    def _columns(self) -> tuple[Floats, ...]:
        of_448 = LARGEST * _softmax(self.scores8, divide=False)
        return self.scores, self.scores8, self.weights, of_448, self.weights8

    def values(self) -> dict[str, str]:
        """The numbers of understand.md."""
        off = np.abs(self.scores8[self.seen] - self.scores[self.seen]).max()
        return {f"scale_{name}": number(x) for name, x in self.scales.items()} | {
            "score_off": number(float(off)), "sum8": number(self.sum),
            "o16": number(float(self.result[0])), "o8": number(float(self.result8[0])),
            "o_off": number(float(np.abs(self.result8 - self.result).max())),
        }  # fmt: skip


def _softmax(scores: Floats, divide: bool = True) -> Floats:
    weights: Floats = np.exp(scores - scores.max()).astype(np.float32)
    return weights / weights.sum() if divide else weights
