"""Preset shapes: of the benchmark, and of common models."""

from __future__ import annotations

import dataclasses

from cufa.gpu.architectures import Device
from cufa.kernels import kernels_of
from cufa.measure import decode_cases
from cufa.measure.suites import SUITES
from cufa.problem.mask import CAUSAL, FULL, Band, Mask
from cufa.problem.problem import Problem, default_scale

_CARD = 90
"""Architecture whose suites are offered without a GPU."""

SUITE = "suite-"
"""Prefix of presets that are whole suites."""


@dataclasses.dataclass(frozen=True)
class Preset:
    words: str
    problem: Problem


def _model(
    words: str, heads: int, kv_heads: int, seqlen: int, head_dim: int, mask: Mask = CAUSAL,
    softcap: float | None = None,
) -> Preset:  # fmt: skip
    problem = Problem(
        1, heads, kv_heads, seqlen, seqlen, head_dim, "bfloat16", mask, default_scale(head_dim), softcap
    )
    return Preset(words, problem)


def presets(operation: str = "forward") -> dict[str, Preset]:
    """Presets of one operation by name in links; the first is for a CPU, the second for a GPU."""
    known = {**_forward(), **_decode()}
    chosen = {name: preset for name, preset in known.items() if preset.problem.operation == operation}
    return chosen or _suite_presets(operation)


def _suite_presets(operation: str) -> dict[str, Preset]:
    """Shapes of the benchmark: one for the CPU, then the shapes that a GPU kernel serves."""
    of_cpu: list[Problem] = []
    of_gpu: list[Problem] = []
    card = Device.typical(_CARD)
    for suite in (suite for suite in SUITES.values() if suite.operation == operation):
        if not suite.gpu_only:
            of_cpu += [case.problem for case in suite.cases(None)]
        of_gpu += [case.problem for case in suite.cases(card)]
    specs = kernels_of(operation).values()
    served = (p for p in of_gpu if any(spec.refuses(p, card.arch.capability) is None for spec in specs))
    problems = dict.fromkeys([*of_cpu[:1], *served])
    return {f"{operation}-{n}": Preset(_shape_words(p), p) for n, p in enumerate(problems)}


def _shape_words(p: Problem) -> str:
    return f"{p.batch} × {p.heads_text} heads, {p.seqlen_k:,} long, head dim {p.head_dim}, {p.dtype}, {p.scores_text}"


def _forward() -> dict[str, Preset]:
    small = Problem(1, 4, 4, 2048, 2048, 64, "float32", CAUSAL, default_scale(64), precision="float32")
    published = {}
    for case in SUITES["forward"].cases(None):
        p = case.problem
        length = f"{p.seqlen_k // 1024}k"
        words = f"16k tokens × 2048: head dim {p.head_dim}, {length}, {p.scores_text}"
        published[f"forward-{p.head_dim}-{length}-{p.mask}"] = Preset(words, p)
    models = {
        "gpt2": _model("GPT-2: 12 heads, head dim 64", 12, 12, 1024, 64),
        "bert": _model("BERT base: 12 heads, head dim 64, full", 12, 12, 512, 64, FULL),
        "vit": _model("ViT-B/16: 197 tokens, full", 12, 12, 197, 64, FULL),
        "llama-8b": _model("Llama 3 8B: 32/8 heads, head dim 128", 32, 8, 8192, 128),
        "llama-70b": _model("Llama 3 70B: 64/8 heads, head dim 128", 64, 8, 8192, 128),
        "qwen-7b": _model("Qwen2.5 7B: 28/4 heads, head dim 128", 28, 4, 8192, 128),
        "mistral-7b": _model("Mistral 7B: 32/8 heads, window of 4,096", 32, 8, 16384, 128, Band(4095, 0)),
        "gemma-9b": _model(
            "Gemma 2 9B: 16/8 heads, head dim 256, soft cap 50", 16, 8, 4096, 256, softcap=50.0
        ),
        "gemma-9b-local": _model(
            "Gemma 2 9B, local layers: window of 4,096, soft cap 50", 16, 8, 8192, 256, Band(4095, 0), 50.0
        ),
    }
    first = "forward-128-4k-causal"
    return (
        {"small": Preset("small: 2,048 tokens, seconds on a laptop", small), first: published.pop(first)}
        | models
        | published
    )


def _decode() -> dict[str, Preset]:
    small = decode_cases.make_decode(1, 8, 2, 1024, head_dim=64, dtype="float32")
    known = {"small-cache": Preset("small: 1,024 cached tokens, seconds on a laptop", small)}
    for batch, heads, kv_heads, capacity in sorted(decode_cases.PUBLISHED, key=lambda x: x[3] != 8 << 10):
        length = f"{capacity >> 10}k"
        problem = decode_cases.make_decode(batch, heads, kv_heads, capacity)
        words = f"{batch} × {heads}/{kv_heads} heads, {length} cached tokens"
        known[f"decode-{batch}-{heads}-{kv_heads}-{length}"] = Preset(words, problem)
    window = decode_cases.make_decode(1, 32, 8, 128 << 10, mask=Band(1023, 0))
    return known | {"decode-window": Preset("1 × 32/8 heads, window of 1,024 in 128k cached tokens", window)}


def suites(device: Device | None, operation: str = "forward") -> dict[str, str]:
    """Suites of one operation that can run on the device, as presets."""
    return {
        f"{SUITE}{name}": f"suite {name}: {suite.title.removeprefix(f'{operation}: ')}"
        for name, suite in SUITES.items()
        if suite.operation == operation and (device is not None or not suite.gpu_only)
    }
