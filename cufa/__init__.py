"""FlashAttention for NumPy and CuPy: hand-written CUDA C kernels, compiled by NVRTC on first use."""

import importlib
from typing import TYPE_CHECKING, Any

from . import masks
from .calls.backward import flash_attention_backward, plan_backward
from .calls.decode import flash_decode, plan_decode
from .calls.forward import flash_attention, plan
from .calls.maximum import calibrate_softmax_max, key_norms
from .calls.merge import merge_attention_states
from .calls.quantize import QuantizedValues, dequantize, quantize
from .calls.varlen import flash_attention_varlen, flash_attention_varlen_backward
from .problem.dropout import dropout_mask
from .problem.score_function import Score, score
from .reference.decode import decode_reference
from .reference.dense import attention_reference, attention_reference_backward
from .reference.varlen import attention_varlen_reference, attention_varlen_reference_backward

if TYPE_CHECKING:
    from .build.ahead import compile
    from .run.emulate.calls import emulate, emulate_backward

__all__ = [
    "QuantizedValues", "Score", "__version__", "attention_reference", "attention_reference_backward",
    "attention_varlen_reference", "attention_varlen_reference_backward", "calibrate_softmax_max", "compile",
    "decode_reference", "dequantize", "dropout_mask", "emulate", "emulate_backward", "flash_attention",
    "flash_attention_backward", "flash_attention_varlen", "flash_attention_varlen_backward", "flash_decode",
    "key_norms", "masks", "merge_attention_states", "plan", "plan_backward", "plan_decode", "quantize", "score",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The executor and the compiler are imported when asked for: a call to attention does not need them."""
    module = {
        "emulate": "run.emulate.calls",
        "emulate_backward": "run.emulate.calls",
        "compile": "build.ahead",
    }
    if name in module:
        found = globals()[name] = getattr(importlib.import_module(f".{module[name]}", __name__), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
