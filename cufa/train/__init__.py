"""Training with thinc, spaCy's framework, whose layers are a forward call and a callback for gradients, over NumPy or
CuPy arrays: attention as such a layer, and the small language model of ``cufa demo train``.

Needs thinc: in a checkout ``pip install '.[train]'``.
"""

from ..problem.checks import install

try:
    import thinc.api  # noqa: F401
except ImportError as error:
    raise ImportError(f"cufa.train needs thinc ({error}): {install('train')}") from error

from .attention import SelfAttention

__all__ = ["SelfAttention"]
