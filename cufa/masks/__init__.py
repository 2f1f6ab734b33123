"""Masks for :func:`cufa.flash_attention`: which keys each query sees.

A mask is a value: it can be compared, printed and kept, and one mask serves every call that it fits. A mask stores a
few integers, or two to four per key; only a matrix that has no such form is stored, as one bit for each score. A new
mask needs no compilation. ``a & b``, ``a | b`` and ``~a`` are masks.

>>> import cufa
>>> str(cufa.masks.window(1023, 0))
'window (1023, 0)'
>>> cufa.masks.causal().dense(2, 3).astype(int)
array([[1, 1, 0],
       [1, 1, 1]])
>>> cufa.masks.documents([2, 1]).dense(3, 3).astype(int)
array([[1, 0, 0],
       [1, 1, 0],
       [0, 0, 1]])
"""

from ..problem.mask_family import Mask
from .bands import causal, full, global_window, prefix, streaming, window
from .by_key import columns, evict, from_dense, from_flashmask, where
from .streams import chunks, documents, shared_question

__all__ = [
    "Mask", "causal", "chunks", "columns", "documents", "evict", "from_dense", "from_flashmask", "full",
    "global_window", "prefix", "shared_question", "streaming", "where",
    "window",
]  # fmt: skip
