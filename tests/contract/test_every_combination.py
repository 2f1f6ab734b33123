"""Every combination has a kernel: masks × lengths × changes of scores × elements × order of additions, forward and
backward. Calls are checked, and their kernels looked up for three GPUs; test_compositions.py computes."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import cufa
from cufa import masks
from cufa.calls import backward, forward, varlen
from cufa.gpu.architectures import Device
from cufa.plan.candidates import serving_kernels
from cufa.plan.operation import OPERATIONS

HEADS, KV_HEADS, ROWS, KEYS = 4, 2, 10, 13
RUNS = np.sort(np.random.default_rng(0).integers(0, ROWS + 1, (3, KV_HEADS, KEYS, 4)), axis=-1).astype(
    np.int32
)
SEEN = np.random.default_rng(1).random((3, HEADS, ROWS, KEYS)) < 0.5
FUNCTION = masks.where(lambda b, h, i, j: (i + j + b + h) % 3 != 0)
MASKS = [
    masks.full(), masks.causal(), masks.window(3, 2), masks.prefix([1, 2, 3]), masks.streaming(2, 5),
    masks.streaming([0, 1, 2], 5), masks.global_window(2, 4, 4), masks.global_window([0, 1, 2], 4, 4), masks.chunks(4),
    masks.from_flashmask(RUNS[..., :1], causal=True), masks.from_flashmask(RUNS, causal=False),
    masks.from_flashmask(RUNS[..., :1], causal=True) & masks.window(4, 4),
    masks.from_flashmask(RUNS[..., :1], causal=True) & masks.prefix(3), masks.from_dense(SEEN[0, 0]),
    SEEN, SEEN[:, :KV_HEADS], SEEN[:, :1, :1], np.tri(ROWS, KEYS, 3, dtype=bool),
    masks.window(2, 1) | masks.prefix(2), ~masks.window(2, 1), FUNCTION, FUNCTION & masks.global_window(2, 4, 4),
    FUNCTION | masks.from_flashmask(RUNS[:, :1, :, :1], causal=True),
]  # fmt: skip
SCORE = {"score": cufa.score(lambda s, b, h, i, j, table: s + table[h], table=np.ones(HEADS, np.float32))}
SCORES = [
    {}, {"softcap": 5.0}, {"alibi_slopes": np.ones(HEADS)}, {"sink": np.ones(HEADS)}, SCORE,
    {**SCORE, "gradients": ("table",)}, {"dropout": 0.5, "seed": 3},
]  # fmt: skip
ELEMENTS = [(np.float16, None), (ml_dtypes.bfloat16, None), (np.float32, "float32"), (np.float32, "tf32")]
LENGTHS = {
    "dense": {}, "padded": {"seqlens_q": [ROWS, 0, 4], "seqlens_k": [9, 2, KEYS]},
    "packed": {"cu_seqlens_q": [0, 4, 4, 14], "cu_seqlens_k": [0, 5, 8, 21]},
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mask", MASKS, ids=lambda x: str(x) if isinstance(x, masks.Mask) else f"{x.shape}")
def test_some_kernel_takes_it(monkeypatch, mask, lengths, head_dim):
    problems = []
    for module in (forward, backward, varlen):
        monkeypatch.setattr(module, "run", lambda call, *_: problems.append(call.check(on_gpu=True)[1]))
    packed = lengths == "packed"
    for scores, (dtype, precision), order in itertools.product(SCORES, ELEMENTS, (None, False, True)):
        q, k = (
            np.ones((21, h, head_dim) if packed else (3, h, n, head_dim), dtype)
            for h, n in ((HEADS, ROWS), (KV_HEADS, KEYS))
        )
        given = {**LENGTHS[lengths], **scores, "mask": mask, "precision": precision}
        if order is None:
            given.pop("gradients", None)
            (cufa.flash_attention_varlen if packed else cufa.flash_attention)(q, k, k, **given)
        else:
            call = cufa.flash_attention_varlen_backward if packed else cufa.flash_attention_backward
            lse = np.ones((HEADS, 21) if packed else q.shape[:3], np.float32)
            call(q, q, k, k, q, lse, deterministic=order, **given)
    assert len(problems) == len(SCORES) * len(ELEMENTS) * 3
    for problem, arch in itertools.product(problems, ("sm_80", "sm_90", "sm_100")):
        operation = OPERATIONS[problem.operation]
        assert serving_kernels(operation, problem, Device.typical(arch), "auto", None, {})[0]
