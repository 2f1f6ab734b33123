"""Keys and values that do not fit the card: they stay in host memory. Each piece travels while attention to the
previous piece is computed (Fully Pipelined Distributed Transformer, Yao et al., 2024, on one GPU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..calls.shapes import LAYOUTS
from ..problem.checks import as_array, is_device_array
from ..problem.mask import Mask
from ..problem.options import resolve_mask
from .compute import Scores
from .devices import boxes
from .forward import Forward
from .group import Move, Transport, Virtual
from .placement import Placement, Segment
from .schedule import Schedule
from .schemes import Maker
from .slices import Whole

_PIECE_BYTES = 128 << 20
_TO_DEVICE = 1  # cudaMemcpyHostToDevice


def flash_attention_from_host(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None, softcap: float | None = None, scale: float | None = None, alibi_slopes: Any = None,
    sink: Any = None, layout: str = "bhsd", algorithm: str = "auto", piece: int | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """:func:`cufa.flash_attention` of queries on a GPU over keys and values in host memory.

    Parameters
    ----------
    q : CuPy array, (batch, heads, seqlen_q, head_dim)
        (A NumPy array is computed on the CPU, to try the call out.)
    k, v : NumPy arrays, (batch, kv_heads, seqlen_k, head_dim), of q's dtype
        In pinned memory (``cupyx.empty_pinned``), else copies do not run beside kernels. They must not change until the
        call's work has ended on the GPU.
    piece : int, optional
        Keys of one piece; the GPU holds about four pieces. None: 128 MiB of keys and values.
    other arguments, results and errors
        As for :func:`cufa.flash_attention`; arrays of a mask are on the host. Pieces that the mask hides do not travel.

    A copy hides under the kernels of the previous piece if a piece takes longer to compute than to travel: from about
    16k queries on, over PCIe 5 and with as many key/value heads as heads.
    """
    arrays = {
        name: as_array(name, x).transpose(LAYOUTS[layout]) for name, x in (("q", q), ("k", k), ("v", v))
    }
    for name in ("k", "v"):
        if is_device_array(arrays[name]):
            raise TypeError(f"{name} is on a GPU: cufa.flash_attention takes it there")
        if arrays[name].dtype != arrays["q"].dtype or arrays[name].shape[:3] != arrays["k"].shape[:3]:
            raise ValueError(
                f"{name} is {arrays[name].dtype} {arrays[name].shape}, beside q of {arrays['q'].dtype} and k of shape "
                f"{arrays['k'].shape}: dtypes and all axes but the last must be equal"
            )
    batch, heads, seqlen_q, head_dim = arrays["q"].shape
    _, kv_heads, seqlen_k, v_dim = arrays["v"].shape
    whole = Whole.of(resolve_mask(causal, window, mask), seqlen_q, seqlen_k, alibi_slopes is not None)
    token_bytes = max(batch * kv_heads * (head_dim + v_dim) * arrays["k"].itemsize, 1)
    piece = max(_PIECE_BYTES // token_bytes // 1024 * 1024, 1024) if piece is None else piece
    if piece < 1:
        raise ValueError(f"piece={piece} must be 1 or more keys")
    slopes, sinks = ({} if x is None else {0: x} for x in (alibi_slopes, sink))
    scores = Scores(scale, softcap, slopes, sinks, algorithm)
    pieces = [[Segment(1, at, at, min(piece, seqlen_k - at))] for at in range(0, seqlen_k, piece)]
    queries, keys = Placement.of_lengths([seqlen_q, 0]), Placement.of_lengths([0, seqlen_k])
    maker = Maker(whole, queries, keys, heads, kv_heads, False, sink is not None)
    work = maker.work((0, heads), queries.segments(0), pieces)
    schedule = Schedule("from host", queries, keys, ((heads, kv_heads),) * 2, ((work,), ()))
    group: Any = _FromHost() if is_device_array(arrays["q"]) else Virtual(2)
    given = {"q": {0: arrays["q"]}, "k": {1: arrays["k"]}, "v": {1: arrays["v"]}}
    run = Forward(group, schedule, given, scores)
    run.run()
    out = run.out[0].transpose(LAYOUTS[layout])
    return (out, run.lse[0]) if return_lse else out


class _FromHost(Transport):
    """Rank 0 is the current GPU; rank 1, the host, has the keys."""

    def __init__(self) -> None:
        import cupy

        self.size, self.local = 2, (0,)
        self._cupy, self._stream = cupy, cupy.cuda.Stream(non_blocking=True)

    def start(self, moves: Sequence[Move]) -> Any:
        """Copies wait for the current stream's earlier work, which may still use the memory of the new arrays."""
        self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
        for move in moves:
            for target, source, pitches, width, height in boxes(move.target, move.source):
                for i in range(height):
                    at = target + i * pitches[0], source + i * pitches[1]
                    self._cupy.cuda.runtime.memcpyAsync(*at, width, _TO_DEVICE, self._stream.ptr)
        return self._stream.record(), moves

    def finish(self, started: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(started[0])
