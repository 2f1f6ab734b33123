"""Attention over several GPUs: sequences longer than one card, on NCCL and the driver's peer copies.

>>> import cupy, cufa.parallel as cp  # doctest: +SKIP
>>> group = cp.Group([0, 1])  # or Group(MPI.COMM_WORLD), one process per GPU  # doctest: +SKIP
>>> q, k, v = (cp.distribute(x, group, "zigzag") for x in (q, k, v))  # doctest: +SKIP
>>> out = cp.flash_attention(q, k, v, group=group, placement="zigzag", causal=True)  # doctest: +SKIP
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
