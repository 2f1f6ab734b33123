"""The CPU path's threads, and the memory that it takes. (Bounds on its time: `make bench-promises`.)"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import signal
import sys
import threading
import types

import numpy as np
import pytest
import threadpoolctl
from cpu_support import ALGORITHMS, SMALL, TILED, attend, check, plan_for
from interrupts import was_interrupted
from support import make_inputs, poisoned_like

import cufa
import cufa.run.cuda
from cufa.calls import dispatch, warm
from cufa.gpu.architectures import Device
from cufa.plan.dense import FORWARD
from cufa.run.cpu import blas
from cufa.run.cpu import forward as cpu
from cufa.run.cpu import tiles as cpu_tiles


@pytest.mark.sampled(fixed=3, dated=2)
@pytest.mark.parametrize("config", [SMALL, FORWARD.cpu_config], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 300, 300, 16), (2, 6, 3, 70, 90, 16), (1, 2, 2, 700, 600, 64)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bit_identical_whatever_the_threads(algorithm, shape, config):
    inputs = make_inputs(*shape, "float32")
    options = {"algorithm": algorithm, "causal": True, "config": config}
    expected, expected_lse = attend(*inputs, num_threads=1, **options)
    for num_threads in (1, 2, 3, 8, None):
        out, lse = attend(*inputs, num_threads=num_threads, **options)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)


def test_heads_are_computed_side_by_side(monkeypatch):
    """Two threads meet inside the loop nest; with one at a time the barrier would break."""
    meeting, fa2 = threading.Barrier(2, timeout=300), cpu._fa2

    def fa2_in_company(heads, q_blocks):
        meeting.wait()
        fa2(heads, q_blocks)

    monkeypatch.setattr(cpu, "_fa2", fa2_in_company)
    attend(*make_inputs(1, 2, 2, 16, 16, 8, "float32"), num_threads=2)


def test_calls_from_several_threads():
    inputs = make_inputs(1, 8, 8, 300, 300, 32, "float32")
    expected, _ = attend(*inputs, causal=True)
    plan = plan_for(*inputs[:2], causal=True)

    def call(_):
        out = poisoned_like(inputs[0])
        cpu.run(plan, *inputs, out, None)
        return out

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out in pool.map(call, range(12)):
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_error_in_a_thread_reaches_the_caller(num_threads):
    q, k, v = make_inputs(1, 8, 8, 40, 40, 8, "float32")
    out = poisoned_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cpu.run(plan_for(q, k), q, k, v, out, None, num_threads=num_threads)


@pytest.fixture
def blas_threads():
    """Read the number of threads of NumPy's BLAS; it is put to 2 before and back to what it was after."""
    if not blas._libraries():
        pytest.skip("threadpoolctl does not know NumPy's BLAS here: its threads are left alone")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield lambda: max(
            x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"
        )


def test_blas_is_single_threaded_inside_only(blas_threads):
    with blas.single_threaded_blas() as available:
        assert (available, blas_threads()) == (2, 1)
        with blas.single_threaded_blas() as nested:
            assert (nested, blas_threads()) == (2, 1), "a second call may use the threads of the first"
        assert blas_threads() == 1
    assert blas_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_of_a_process_that_used_a_gpu_says_so(monkeypatch):
    """In place of CUDA's "initialization error"; earlier calls are not repeated there."""
    backend = types.SimpleNamespace(current_device=lambda: Device.typical("sm_90"))
    monkeypatch.setitem(sys.modules, "cufa.run.cuda.backend", backend)
    monkeypatch.setattr(cufa.run.cuda, "backend", backend, raising=False)
    monkeypatch.setattr(dispatch, "gpu_available", lambda: True)
    monkeypatch.setattr(dispatch, "_gpu_process", os.getpid())
    monkeypatch.setattr(warm, "_calls", {(): None})
    assert dispatch.cuda_module() is backend
    x = np.ones((1, 1, 8, 8), np.float16)
    end, result = os.pipe()
    if os.fork() == 0:
        try:
            cufa.flash_attention(x, x, x)
        except RuntimeError as error:
            os.write(result, f"{len(warm._calls)} {error}".encode())
        finally:
            os._exit(0)
    os.close(result)
    os.wait()
    with open(end) as stream:
        told = stream.read()
    assert told.startswith(f"0 this process is a fork of process {os.getpid()}, which has used the GPU"), told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("locked", [False, True], ids=["inside a call", "inside a call, at its door"])
def test_a_child_forked_while_another_thread_is_inside_a_call_has_all_threads(blas_threads, locked):
    """That thread, which would have restored them, is not in the child; nor is one that holds the lock."""

    def inside():
        with blas.single_threaded_blas(), contextlib.ExitStack() as stack:
            if locked:
                stack.enter_context(blas._setting._lock)
            entered.set()
            forked.wait(60)

    entered, forked = threading.Event(), threading.Event()
    thread = threading.Thread(target=inside)
    thread.start()
    entered.wait(60)
    child = os.fork()
    if child == 0:  # no assertion may leave it: pytest would go on in two processes
        status = 1
        try:
            signal.alarm(60)  # rather than wait for ever
            before = blas_threads()
            with blas.single_threaded_blas() as available:
                inside_of_it = blas_threads()
            status = 0 if (before, available, inside_of_it, blas_threads()) == (2, 2, 1, 2) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert blas_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_inside_a_call_leaves_it(blas_threads):
    with blas.single_threaded_blas():
        child = os.fork()
        if child == 0:
            blas._setting.enter(call := blas._Call())
    if child == 0:
        blas._setting.leave(call)
        os._exit(0 if blas_threads() == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert blas_threads() == 2


def test_threads_change_while_a_call_is_counted_only(monkeypatch):
    """A process forked at any of these moments restores them: what it is not told of it could not."""
    counted = []
    library = types.SimpleNamespace(
        get_num_threads=lambda: 2, set_num_threads=lambda n: counted.append((n, len(blas._setting._calls)))
    )
    monkeypatch.setattr(blas, "_libraries", lambda: [library])
    with blas.single_threaded_blas():
        pass
    assert counted == [(1, 1), (2, 1)]


def test_blas_threads_are_restored_whatever_ctrl_c_interrupts(monkeypatch):
    """In the call or, where it ends, by the next call."""
    threads = [2]
    library = types.SimpleNamespace(
        get_num_threads=lambda: threads[0], set_num_threads=lambda n: threads.__setitem__(0, n)
    )
    monkeypatch.setattr(blas, "_libraries", lambda: [library])

    def call():
        with blas.single_threaded_blas() as available:
            assert (available, threads) == (2, [1])

    for at in itertools.count():
        if not was_interrupted(call, at, "run/cpu/blas.py"):
            break
        call()
        assert threads == [2], f"interrupted at line {at}"
    assert at > 10
    with pytest.raises(KeyError), blas.single_threaded_blas():
        raise KeyError
    assert threads == [2]


def test_with_an_unknown_blas_all_cores_are_used(monkeypatch):
    monkeypatch.setattr(blas, "_libraries", lambda: ())
    with blas.single_threaded_blas() as available:
        assert available == blas.usable_cores() >= 1
    check(*make_inputs(1, 8, 8, 300, 300, 64, "float32"), "fa2", causal=True, config=FORWARD.cpu_config)


def test_a_ctrl_c_while_threads_end_is_not_lost(monkeypatch):
    """Raised while Python frees a generator it is only printed."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 8, 900, 64), np.float32)
    out, lse = cufa.flash_attention(q, k, v, return_lse=True, device="cpu")
    shutdown = concurrent.futures.ThreadPoolExecutor.shutdown

    def interrupted(pool, **options):
        shutdown(pool, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(blas, "_libraries", lambda: ())  # OPENBLAS_NUM_THREADS=1 would leave one thread
    monkeypatch.setattr(blas, "usable_cores", lambda: 2)
    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cufa.flash_attention_backward(dout, q, k, v, out, lse, device="cpu")


# --- Memory -----------------------------------------------------------------------------------------------


def extra_memory(seqlen, algorithm="fa2", causal=False, dtype="float32"):
    inputs = make_inputs(1, 8, 8, seqlen, seqlen, 64, dtype)
    plan, out = plan_for(*inputs[:2], algorithm, causal, config=FORWARD.cpu_config), np.empty_like(inputs[0])
    return cpu_tiles.extra_memory(lambda: cpu.run(plan, *inputs, out, None, num_threads=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", TILED)
def test_memory_is_a_fraction_of_the_score_matrix(algorithm, dtype):
    seqlen = 1536
    scores = 8 * seqlen * seqlen * 4  # naive NumPy holds two or three of these
    assert extra_memory(seqlen, algorithm, causal=True, dtype=dtype) < scores / 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_grows_with_the_length_not_its_square(dtype):
    """Four times the length; converted keys and values may grow as much, tiles do not."""
    assert extra_memory(2048, dtype=dtype) < 4.2 * extra_memory(512, dtype=dtype)


def test_memory_of_naive_is_the_score_matrix():
    """The measurement sees what it should: S and P of a head at a time."""
    seqlen = 512
    assert extra_memory(seqlen, "naive") >= 2 * seqlen * seqlen * 4
