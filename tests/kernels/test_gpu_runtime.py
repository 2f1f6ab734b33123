"""How calls behave on a GPU: places, streams, graphs, threads, other libraries' arrays, host cost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from held_stream import hold
from support import assert_attention, in_threads, make_inputs, poisoned_like

import cufa

pytestmark = pytest.mark.gpu


@pytest.fixture
def small(cp):
    host = make_inputs(2, 4, 2, 130, 200, 64, "float16")
    return host, tuple(cp.asarray(x) for x in host)


def test_numpy_in_numpy_out_on_the_gpu(small):
    host, _ = small
    out, lse = cufa.flash_attention(*host, causal=True, return_lse=True, device="cuda")
    assert type(out) is np.ndarray and type(lse) is np.ndarray
    assert_attention(out, lse, *host, causal=True)
    given = poisoned_like(out)
    assert cufa.flash_attention(*host, causal=True, out=given) is given
    np.testing.assert_array_equal(given, out)


def test_device_cpu_forces_the_host_path(small):
    host, _ = small
    assert_attention(cufa.flash_attention(*host, device="cpu"), None, *host)


def test_numpy_float64_goes_to_the_cpu():
    q, k, v = make_inputs(1, 1, 1, 20, 20, 16, "float64")
    assert cufa.flash_attention(q, k, v).dtype == np.float64


def test_cupy_in_cupy_out(cp, small):
    host, (q, k, v) = small
    out, lse = cufa.flash_attention(q, k, v, return_lse=True)
    assert isinstance(out, cp.ndarray) and lse.dtype == cp.float32 and lse.shape == (2, 4, 130)
    assert_attention(cp.asnumpy(out), cp.asnumpy(lse), *host)


def test_bfloat16_travels(cp):
    host = make_inputs(1, 2, 2, 64, 64, 64, "bfloat16")
    assert_attention(cufa.flash_attention(*host), None, *host)


def test_float64_on_the_gpu_says_what_to_do(cp):
    q = cp.zeros((1, 1, 8, 8))
    with pytest.raises(TypeError, match=r"q is float64.*\.astype\(cupy\.float32\)"):
        cufa.flash_attention(q, q, q)


def test_mixed_places(cp, small):
    (q, k, v), (dq, dk, dv) = small
    with pytest.raises(TypeError, match=r"k is numpy.*but q is cupy.*cupy\.asarray"):
        cufa.flash_attention(dq, k, v)
    with pytest.raises(TypeError, match=r"out is numpy"):
        cufa.flash_attention(dq, dk, dv, out=q)
    with pytest.raises(ValueError, match=r"device='cpu' but q is on a GPU"):
        cufa.flash_attention(dq, dk, dv, device="cpu")


def test_out_overlap_is_found_on_repeated_calls_too(cp):
    buffer = cp.random.default_rng(0).standard_normal((1, 4, 64, 64), dtype=cp.float32)
    q, k, v = buffer[:, :1], buffer[:, 1:2], buffer[:, 2:3]
    separate = cp.empty_like(q)
    expected = cufa.flash_attention(q, k, v, out=separate)
    free = buffer[:, 3:]
    np.testing.assert_array_equal(cufa.flash_attention(q, k, v, out=free).get(), expected.get())
    for _ in range(2):
        with pytest.raises(ValueError, match="out overlaps q"):
            cufa.flash_attention(q, k, v, out=q)


@pytest.mark.parametrize("algorithm", ["fa1", "naive", "fa2"])
def test_fast_path_gives_the_same_as_the_first_call(cp, small, algorithm):
    _, (q, k, v) = small
    first = cufa.flash_attention(q, k, v, algorithm=algorithm)
    second, _ = cufa.flash_attention(q, k, v, algorithm=algorithm, return_lse=True)
    third = cufa.flash_attention(q.copy(), k.copy(), v.copy(), algorithm=algorithm)
    assert first.data.ptr != second.data.ptr
    np.testing.assert_array_equal(first.get(), second.get())
    np.testing.assert_array_equal(first.get(), third.get())


def test_runs_on_the_current_stream_in_order(cp):
    """The call waits for what is queued before it on the stream, and does not wait for the GPU itself."""
    q = cp.zeros((1, 8, 2048, 64), cp.float16)
    cufa.flash_attention(q, q, q)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        release = hold(cp)
        q[...] = 1
        out = cufa.flash_attention(q, q, q)
        done_at_return = stream.done
        release()
    stream.synchronize()
    assert not done_at_return, "flash_attention synchronised"
    assert bool((out == 1).all()), "ran before the work queued ahead of it"


@pytest.mark.parametrize("algorithm", ["auto", "naive"])
def test_graph_capture_and_replay(cp, small, algorithm):
    """naive has a workspace, the whole matrix of scores, which stays with the graph."""
    _, (q, k, v) = small
    out, options = poisoned_like(q, cp), {"causal": True, "algorithm": algorithm}
    cufa.flash_attention(q, k, v, out=out, **options)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cufa.flash_attention(q, k, v, out=out, **options)
        graph = stream.end_capture()
    for factor in (1, 2):
        q *= factor
        expected = cufa.flash_attention(q, k, v, **options).get()
        out[...] = cp.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), expected)


def test_workspaces_of_graphs_are_given_back(cp, small):
    """The first capture after a graph is gone finds its workspace in the pool."""
    _, (q, k, v) = small
    out = cp.empty_like(q)
    cufa.flash_attention(q, k, v, algorithm="naive", out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    pool, used = cp.get_default_memory_pool(), []
    for _ in range(20):
        cp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            cufa.flash_attention(q, k, v, algorithm="naive", out=out)
            graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
        del graph
        time.sleep(0.05)  # the driver says so from a thread of its own
        used.append(pool.used_bytes())
    assert used[-1] <= used[1]


def test_host_arrays_are_refused_while_another_stream_is_captured(cp, small):
    """The legacy stream, which is current, would wait for it."""
    host, (q, k, v) = small
    out = cp.empty_like(q)
    cufa.flash_attention(q, k, v, out=out)
    stream = cp.cuda.Stream()
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
    try:
        with pytest.raises(ValueError, match="q is a NumPy array, but another stream"):
            cufa.flash_attention(*host)
        with stream:
            cufa.flash_attention(q, k, v, out=out)
    finally:
        with stream:
            graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert_attention(out.get(), None, *host)


def test_threads(cp):
    """Many threads, own streams, same and different shapes: one compile each, right answers."""
    cases = [make_inputs(1, 2, 2, 64 + 16 * i, 100, 64, "float16", seed=i) for i in range(6)]

    def work(i: int) -> None:
        host = cases[i % len(cases)]
        with cp.cuda.Stream(non_blocking=True) as stream:
            device = [cp.asarray(x) for x in host]
            for _ in range(20):
                out = cufa.flash_attention(*device, causal=True)
            stream.synchronize()
            assert_attention(out.get(), None, *host, causal=True)

    in_threads(work, 12)


def test_a_threads_first_cuda_call(cp, small):
    """With out= nothing is allocated, so the launch itself may be the first thing a thread does."""
    _, (q, k, v) = small
    out = poisoned_like(q, cp)
    expected = cufa.flash_attention(q, k, v).get()
    cufa.flash_attention(q, k, v, out=cp.empty_like(q))
    in_threads(lambda _: cufa.flash_attention(q, k, v, out=out), 1)
    cp.cuda.Device().synchronize()
    np.testing.assert_array_equal(out.get(), expected)


def test_cuda_array_interface(cp, small):
    host, device = small

    class Wrapped:
        def __init__(self, x):
            self.__cuda_array_interface__ = x.__cuda_array_interface__

    out = cufa.flash_attention(*(Wrapped(x) for x in device))
    assert isinstance(out, cp.ndarray)
    assert_attention(out.get(), None, *host)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_tensors(cp, dtype):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
    out = cufa.flash_attention(q, k, v, causal=True)
    assert isinstance(out, cp.ndarray)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True
    )
    error = np.abs(out.astype(cp.float32).get() - expected.float().cpu().numpy()).max()
    assert error < {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]


def test_cupy_tf32_environment(cp, monkeypatch):
    host = make_inputs(1, 2, 2, 128, 128, 64, "float32")
    q, k, v = (cp.asarray(x) for x in host)
    exact = cufa.flash_attention(q, k, v).get()
    tf32 = cufa.flash_attention(q, k, v, precision="tf32").get()
    monkeypatch.setenv("CUPY_TF32", "1")
    np.testing.assert_array_equal(cufa.flash_attention(q, k, v).get(), tf32)
    assert (exact != tf32).any()
    monkeypatch.delenv("CUPY_TF32")
    np.testing.assert_array_equal(cufa.flash_attention(q, k, v).get(), exact)


@pytest.mark.alone
def test_memory_is_linear(cp):
    """Beyond the output, fa2 takes no device memory, however long the sequence."""
    q = cp.zeros((1, 1, 65536, 64), cp.float16)
    out = cp.empty_like(q)
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes(), pool.total_bytes()
    cufa.flash_attention(q, q, q, out=out)
    assert (pool.used_bytes(), pool.total_bytes()) == before


def test_a_tensor_map_pointed_elsewhere_is_as_if_encoded_there(cp):
    """Only the address is rewritten: the map's bytes are the driver's own."""
    from cufa.kernels import Box
    from cufa.problem.element import ELEMENTS
    from cufa.run.cuda.tensor_map import TensorMap

    def make() -> TensorMap:
        return TensorMap(ELEMENTS["bfloat16"], (3, 5, 300, 128), (384_000, 76_800, 256, 2), Box(64))

    array = cp.zeros(1 << 20, cp.uint8)
    moving = make()
    for offset in (0, 16, 4096, 512):
        moving.point_to(array.data.ptr + offset)
        fresh = make()
        fresh.point_to(array.data.ptr + offset)
        assert ctypes.string_at(moving.address, 128) == ctypes.string_at(fresh.address, 128)
        # Not through the shortcut at all:
        fresh._encode(array.data.ptr + offset)
        assert ctypes.string_at(moving.address, 128) == ctypes.string_at(fresh.address, 128)


def test_a_kernel_compiled_ahead_is_loaded_and_nothing_is_compiled(cp, small, tmp_path):
    """In a process of its own, whose folders are empty: CuPy's folder gets no file of the kernel."""
    host, device = small
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiles ahead of time")
    np.savez(tmp_path / "inputs.npz", *host)
    program = (
        "import cufa, cupy, numpy as np, sys\n"
        "q, k, v = map(cupy.asarray, np.load('inputs.npz').values())\n"
        "cufa.compile(cufa.plan(q, k, v, causal=True))\n"
        "np.save('out.npy', cufa.flash_attention(q, k, v, causal=True).get())\n"
    )
    folders = {"CUFA_CACHE_DIR": str(tmp_path / "cufa"), "CUPY_CACHE_DIR": str(tmp_path / "cupy")}
    path = os.pathsep.join([str(Path(cufa.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env={**os.environ, **folders, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cufa" / "kernels").exists()
    compiled = b"".join(x.read_bytes() for x in (tmp_path / "cupy").rglob("*.cubin"))
    assert b"fa2_forward" not in compiled and b"fa3_forward" not in compiled
    assert "is not used" not in done.stderr
    expected = cufa.flash_attention(*device, causal=True).get()
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
