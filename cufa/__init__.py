"""FlashAttention for NumPy and CuPy: hand-written CUDA C kernels, compiled by NVRTC on first use."""

from .api import flash_attention, plan
from .reference import attention_reference

__all__ = ["__version__", "attention_reference", "flash_attention", "plan"]
__version__ = "0.1.0"
