"""Attention as a layer of thinc, spaCy's framework, and the small language model of ``cufa demo train``. A layer of
thinc is a forward call and a callback for gradients, over NumPy or CuPy arrays.

Needs thinc: in a checkout ``pip install '.[train]'``.
"""

from ..problem.checks import install

try:
    import thinc.api  # noqa: F401
except ImportError as error:
    raise ImportError(f"cufa.train needs thinc ({error}): {install('train')}") from error

from .attention import SelfAttention

__all__ = ["SelfAttention"]
