"""Attention over keys that arrive in pieces: each call joins a running result, in float32, and finishes some rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backends import CPU, EMULATE, GPU
from support import assert_attention, make_inputs

from cufa import masks
from cufa.calls.dispatch import with_memory
from cufa.calls.running import RunningCall, attend
from cufa.gpu.architectures import Device
from cufa.parallel.slices import Whole
from cufa.plan.dense import FORWARD
from cufa.plan.planner import make_plan
from cufa.problem.options import Options

SEQLEN_Q, SEQLEN_K = 150, 200
MASKS = masks.causal(), masks.window(60, 0), masks.documents([90, 110])
BACKENDS = [
    pytest.param(CPU, id="cpu"),
    pytest.param(EMULATE, id="emulate", marks=pytest.mark.emulate),
    pytest.param(GPU, id="gpu", marks=pytest.mark.gpu),
]


def join(backend, q, k, v, out, running, lse, rows, mask):
    """One piece. The public way on a GPU and a CPU; the executor runs FA3's plan."""
    if backend is not EMULATE:
        attend(q, k, v, out, running, lse, rows, Options(mask), device=backend.call_device)
        return
    given = {"q": q, "k": k, "v": v, "out": out, "running": running, "running_lse": lse}
    call = RunningCall.read([given.get(x.name) for x in FORWARD.all_operands], ("out",), Options(mask))
    call, problem = dataclasses.replace(call, rows=rows).check(on_gpu=True)
    given = call.arrays(call.allocate(problem, np.empty))
    backend.run(make_plan(with_memory(problem, given), backend.device, "fa3"), given, False, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_pieces_are_the_whole(backend, mask):
    """Rows 0-69 are finished by the first piece; other rows go on. What must not be read is NaN."""
    if backend is GPU:
        import cupy

        if Device.typical("sm_90").arch != GPU.device.arch:
            pytest.skip(f"fa3_forward needs sm_90: {cupy.cuda.Device().compute_capability}")
    q, k, v = make_inputs(1, 2, 1, SEQLEN_Q, SEQLEN_K, 64, "bfloat16")
    whole = Whole.of(mask, SEQLEN_Q, SEQLEN_K)
    out = backend.poisoned(q.shape, q.dtype)
    running, lse = backend.poisoned(q.shape, np.float32), backend.poisoned(q.shape[:3], np.float32)
    on = [backend.array(x) for x in (q, k, v)]
    cut, done = 120, 70  # under these masks rows before 70 see no key from 120 on
    for keys, rows, (begin, end) in (((0, cut), (0, SEQLEN_Q, 0, done), (0, SEQLEN_Q)),
                                     ((cut, SEQLEN_K), (0, 0, 0, SEQLEN_Q - done), (done, SEQLEN_Q))):  # fmt: skip
        pieces = on[0][:, :, begin:end], *(x[:, :, slice(*keys)] for x in on[1:])
        results = (x[:, :, begin:end] for x in (out, running, lse))
        join(backend, *pieces, *results, rows, whole.part((begin, end), keys))
    assert_attention(backend.host(out), backend.host(lse), q, k, v, mask=mask)


def test_a_piece_without_keys_for_some_rows_changes_nothing():
    """A row that a piece hides keeps its running result, bit by bit."""
    q, k, v = make_inputs(1, 1, 1, 40, 40, 16, "float32")
    out, running = np.full_like(q, np.nan), np.full_like(q, 0.5)
    lse = np.full(q.shape[:3], 2.0, np.float32)
    nothing = masks.columns(np.zeros(40, int), np.full(40, 20))  # rows 0-19 see no key
    attend(q, k, v, out, running, lse, (0, 0, 0, 20), Options(nothing), device="cpu")
    assert (out[:, :, :20] == 0.5).all() and (lse[:, :, :20] == 2.0).all() and np.isnan(out[:, :, 20:]).all()


def test_shapes_are_checked():
    q, k, v = make_inputs(1, 1, 1, 8, 8, 16, "float32")
    with pytest.raises(ValueError, match=r"running_lse is float64 \(1, 1, 8\): it takes float32"):
        attend(q, k, v, q.copy(), q.copy(), np.zeros((1, 1, 8)), (0, 8, 0, 8), Options(), device="cpu")
