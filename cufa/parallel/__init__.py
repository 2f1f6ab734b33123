"""Attention over several GPUs: sequences longer than one card, on NCCL and the driver's peer copies.

>>> import cupy, cufa.parallel as cp  # doctest: +SKIP
>>> group = cp.Group([0, 1])  # or Group(MPI.COMM_WORLD), one process per GPU  # doctest: +SKIP
>>> q, k, v = (cp.distribute(x, group, "zigzag") for x in (q, k, v))  # doctest: +SKIP
>>> out = cp.flash_attention(q, k, v, group=group, placement="zigzag", causal=True)  # doctest: +SKIP

Which scheme when (P ranks, S tokens, forward bytes that a rank receives; b bytes of an element):

| scheme | take it for | placement | bytes | result |
|---|---|---|---|---|
| heads | models that are split by heads | heads | 0 | the bits of one GPU |
| zigzag | long sequences, documents | zigzag, documents | (P − 1)/P · 2 S Hkv D b, beside kernels | float32 joins |
| ulysses | any mask, if P divides the key/value heads | any | (P − 1)/P² · S (2 Hq + 2 Hkv) D b | the bits of one GPU |
| allgather | windows, documents: only visible keys travel | any | at most zigzag's | bits of a call on its queries |
| 2d | P does not divide the key/value heads, a factor of P does | any | between the two | as allgather |

Causal documents in zigzag chunks give ranks unequal work. ``Placement.documents(lengths, P)`` gives each rank whole
documents with about the same work: only the keys of documents that are too long for one rank travel.

"The bits of one GPU" holds if the planner takes the same tiles for a rank's heads. Every scheme repeats its bits for
the same P; for another P only heads and ulysses do.

Partial results are joined in float32: on Hopper with 16-bit elements by fa3_forward itself, which starts from the
running result; elsewhere by their log-sum-exp in a separate pass. Where a gradient is the sum of several calls' shares,
kernels write each share in float32, and ranks send it in float32. Only the sum is rounded to q's dtype: errors are
those of one rank. Over links slower than NVLink the shares may take longer than the kernels: see :func:`plan`.

Without peer access the driver copies through host memory, one copy for each run of neighbouring bytes; only long
sequences hide that. Start processes with mpiexec or the like; to try several, `cufa parallel bench` starts its own. If
a rank does not make a call within the group's ``timeout``, the others raise a RuntimeError that names it. If a rank
stops during a call, the others raise a RuntimeError that names no rank. ``Group(comm, device="cpu")`` and
``Group(virtual=P)`` need no GPU.

In one process on two GPUs (NOTES.md; forward and backward together, relative to one GPU's rate): zigzag with 16/16
heads 94% on H100s and on H200s, with 32/4 98 and 105%; ulysses 95 and 94%; documents by their placement 100% (H200s),
as zigzag 88%. (The figures of H100s are from shares of gradients in 16 bits: float32 takes 1 to 2% of zigzag's
backward, 6% of documents as zigzag.) Decoding over 1M cached tokens is 1.9 times as fast as on one H100, 1.8 times as
on one H200. In two processes (NCCL, H100s) zigzag's forward reached 76%, its backward 79%.
"""

from .attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
)
from .decode import flash_decode
from .group import Group, local_rank
from .host_keys import flash_attention_from_host
from .placement import Placement
from .prediction import Prediction, plan
from .whole import collect, distribute

__all__ = [
    "Group", "Placement", "Prediction", "collect", "distribute", "flash_attention", "flash_attention_backward",
    "flash_attention_from_host", "flash_attention_varlen", "flash_attention_varlen_backward", "flash_decode",
    "local_rank", "plan",
]  # fmt: skip
