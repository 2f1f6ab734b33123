"""Shapes to start from: the benchmark's own, and those of models that people run."""

from __future__ import annotations

import dataclasses

from cufa.bench.suites import SUITES
from cufa.core.architectures import Device
from cufa.core.problem import Problem, default_scale

SUITE = "suite-"
"""Presets that are whole suites start with this."""
DECODE = f"{SUITE}decode"


@dataclasses.dataclass(frozen=True)
class Preset:
    words: str
    problem: Problem


def _model(words: str, heads: int, kv_heads: int, seqlen: int, head_dim: int, causal: bool = True) -> Preset:
    problem = Problem(
        1, heads, kv_heads, seqlen, seqlen, head_dim, "bfloat16", causal=causal, scale=default_scale(head_dim)
    )
    return Preset(words, problem)


def presets() -> dict[str, Preset]:
    """By their names in links; the first is for a CPU, the second for a GPU."""
    small = Problem(1, 4, 4, 512, 512, 64, "float32", True, default_scale(64), "float32")
    found = {"small": Preset("small: seconds on a laptop", small)}
    forward = {}
    for problem, _ in SUITES["forward"].cases(None):
        mask = "causal" if problem.causal else "full"
        length = f"{problem.seqlen_k // 1024}k"
        name = f"forward-{problem.head_dim}-{length}-{mask}"
        forward[name] = Preset(f"16k tokens × 2048: head dim {problem.head_dim}, {length}, {mask}", problem)
    models = {
        "gpt2": _model("GPT-2: 12 heads, head dim 64", 12, 12, 1024, 64),
        "bert": _model("BERT base: 12 heads, head dim 64, full", 12, 12, 512, 64, causal=False),
        "vit": _model("ViT-B/16: 197 tokens, full", 12, 12, 197, 64, causal=False),
        "llama-8b": _model("Llama 3 8B: 32/8 heads, head dim 128", 32, 8, 8192, 128),
        "llama-70b": _model("Llama 3 70B: 64/8 heads, head dim 128", 64, 8, 8192, 128),
        "qwen-7b": _model("Qwen2.5 7B: 28/4 heads, head dim 128", 28, 4, 8192, 128),
        "gemma-9b": _model("Gemma 2 9B: 16/8 heads, head dim 256", 16, 8, 4096, 256),
    }
    first = "forward-128-4k-causal"
    return found | {first: forward.pop(first)} | models | forward


def suites(device: Device | None) -> dict[str, str]:
    """Suites that can run on the device, as presets."""
    found = {
        f"{SUITE}{name}": f"suite {name}: {suite.title}"
        for name, suite in SUITES.items()
        if device is not None or not suite.gpu_only
    }
    return found if device is None else found | {DECODE: "suite decode: a query token against a long cache"}
