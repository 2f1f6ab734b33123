"""Parallel calls on GPUs: virtual ranks on one, several in one process, and a process for each."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from support import assert_attention, make_inputs

import cufa
import cufa.parallel as par
from cufa import masks
from cufa.parallel.launch import launch

pytestmark = pytest.mark.gpu

MASKS = {
    "causal": masks.causal(),
    "window": masks.window(300, 0),
    "prefix": masks.prefix(100),
    "documents": masks.documents([400, 30, 594]),
}


@pytest.fixture(params=["virtual", "devices"])
def group(request):
    cupy = pytest.importorskip("cupy")
    if request.param == "virtual":
        return par.Group(virtual=3)
    needs_two_gpus(cupy)
    return par.Group([0, 1])


def needs_two_gpus(cupy):
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs: there is {count}")


@pytest.mark.parametrize(
    ("placement", "scheme"),
    [
        ("zigzag", "zigzag"), ("zigzag", "allgather"), ("contiguous", "ulysses"), ("contiguous", "allgather"),
        ("documents", "auto"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranks_together_compute_attention(group, placement, scheme, mask, dtype):
    import cupy

    if placement == "documents":
        placement = par.Placement.documents([400, 30, 594], group.size)
    host = make_inputs(1, 6, 6, 1024, 1024, 64, dtype)
    dout = make_inputs(1, 6, 6, 1024, 1024, 64, dtype, seed=5)[0]
    q, k, v, dout = map(cupy.asarray, (*host, dout))
    cut = [par.distribute(x, group, placement) for x in (q, k, v, dout)]
    options = {"group": group, "placement": placement, "scheme": scheme, "mask": MASKS[mask]}
    for _ in range(2):  # the second call takes the short cut
        out, lse = par.flash_attention(*cut[:3], return_lse=True, **options)
        whole = [par.collect(x, group, placement) for x in (out, lse)]
        assert_attention(whole[0].get(), whole[1].get(), *host, mask=MASKS[mask])
        found = par.flash_attention_backward(cut[3], *cut[:3], out, lse, **options)
        expected = cufa.flash_attention_backward(dout, q, k, v, *whole, mask=MASKS[mask])
        for x, y in zip(found, expected, strict=True):
            x, y = (z.astype("float32").get() for z in (par.collect(x, group, placement), y))
            assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y)


@pytest.mark.parametrize("scheme", ["zigzag", "allgather"])
def test_the_error_of_gradients_is_that_of_one_gpu(group, scheme):
    import cupy

    arrays = [
        *make_inputs(1, 2, 2, 1024, 1024, 128, "bfloat16"),
        make_inputs(1, 2, 2, 1024, 8, 128, "bfloat16", seed=5)[0],
    ]
    q, k, v, dout = (x.astype(np.float64) for x in arrays)
    out, lse = cufa.flash_attention(q, k, v, causal=True, return_lse=True)
    exact = cufa.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    arrays = [
        cupy.asarray(x) for x in (arrays[3], *arrays[:3], out.astype(arrays[0].dtype), lse.astype(np.float32))
    ]
    parts = [par.distribute(x, group, "zigzag") for x in arrays]
    found = par.flash_attention_backward(*parts, group=group, placement="zigzag", scheme=scheme, causal=True)
    errors = [
        [np.linalg.norm(cupy.asnumpy(x).astype(np.float64) - y) for x, y in zip(results, exact, strict=True)]
        for results in (
            [par.collect(x, group, "zigzag") for x in found],
            cufa.flash_attention_backward(*arrays, causal=True),
        )
    ]
    assert np.all(np.array(errors[0]) < 1.03 * np.array(errors[1])), errors


def test_decoding_over_a_spread_cache(group):
    import cupy

    k, v = make_inputs(2, 8, 2, 1, 96 * group.size, 64, "bfloat16")[1:]
    q = make_inputs(2, 8, 2, 1, 1, 64, "bfloat16")[0]
    lengths = np.array([96 * group.size, 100], np.int32)
    expected = cufa.decode_reference(q, k, v, cache_seqlens=lengths)
    caches = [par.distribute(cupy.asarray(x), group) for x in (k, v)]
    queries = [par.distribute(cupy.asarray(q), group, par.Placement.of_lengths(
        [int(r == rank) for r in range(group.size)]))[rank] for rank in range(group.size)]  # fmt: skip
    for out in par.flash_decode(queries, *caches, group=group, cache_seqlens=lengths):
        np.testing.assert_allclose(out.get().astype(np.float32), expected, atol=0.02)


def compared(group):
    """Errors of this process's parts, relative to one GPU's."""
    import cupy

    host = make_inputs(1, 6, 6, 1024, 1024, 64, "bfloat16")
    q, k, v, dout = map(cupy.asarray, (*host, make_inputs(1, 6, 6, 1024, 1024, 64, "bfloat16", seed=5)[0]))
    out, lse = cufa.flash_attention(q, k, v, causal=True, return_lse=True)
    expected = out, lse, *cufa.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    virtual, errors = par.Group(virtual=group.size), {}
    for placement, scheme in (("zigzag", "zigzag"), ("contiguous", "ulysses"), ("contiguous", "allgather")):
        cut, here = (
            [par.distribute(x, virtual, placement)[group.rank] for x in xs]
            for xs in ((q, k, v, dout), expected)
        )
        options = {"group": group, "placement": placement, "scheme": scheme, "causal": True}
        found = par.flash_attention(*cut[:3], return_lse=True, **options)
        found += par.flash_attention_backward(cut[3], *cut[:3], *found, **options)
        group.synchronize()
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, here, strict=True):
            x, y = (z.astype("float32").get() for z in (x, y))
            errors[scheme, name] = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    caches = [par.distribute(x, virtual)[group.rank] for x in (k, v)]
    found = par.flash_decode(q[:, :, -1:], *caches, group=group).astype("float32")
    whole = out[:, :, -1:].astype("float32")
    errors["decode"] = float(abs(found - whole).max() / abs(whole).max())
    return errors


def of_cupyx(comm, port):
    from cupyx.distributed import init_process_group

    multiprocessing.set_start_method("fork", force=True)  # the server that rank 0 starts cannot be spawned
    backend = init_process_group(2, comm.Get_rank(), backend="nccl", host="127.0.0.1", port=port)
    try:
        return compared(par.Group(backend))
    finally:
        comm.allgather(None)
        backend.stop()


def of_nccl4py(comm, _):
    import nccl.core

    rank = comm.Get_rank()
    name = comm.bcast(bytes(nccl.core.get_unique_id()) if rank == 0 else None)
    return compared(par.Group(nccl.core.Communicator.init(2, rank, nccl.core.UniqueId.from_bytes(name))))


def of_messages(comm, _):
    return compared(par.Group(comm))


def in_process(comm, function, port):
    import cupy

    cupy.cuda.Device(comm.Get_rank()).use()
    return function(comm, port)


def nccl_or_skip():
    cupy = pytest.importorskip("cupy")
    needs_two_gpus(cupy)
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("needs NCCL, which CuPy did not find")


@pytest.mark.parametrize("function", [of_messages, of_cupyx, of_nccl4py])
def test_two_processes_compute_attention(function):
    nccl_or_skip()
    if function is of_nccl4py and importlib.util.find_spec("nccl") is None:
        pytest.skip("needs nccl4py, which is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for errors in launch(2, in_process, function, port, within=150):
        assert isinstance(errors, dict), errors
        assert max(errors.values()) < 0.01, errors


def test_two_processes_of_mpiexec_compute_attention():
    nccl_or_skip()
    if shutil.which("mpiexec") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpiexec and mpi4py: one of them is not installed")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }  # fmt: skip
    command = "mpiexec", "-n", "2", sys.executable, "-c", "import test_parallel_gpu as t; t.in_mpi()"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and done.stdout.count("as one GPU") == 2, done.stdout + done.stderr


def in_mpi():
    import cupy
    from mpi4py import MPI

    cupy.cuda.Device(par.local_rank()).use()
    errors = compared(par.Group(MPI.COMM_WORLD))
    assert max(errors.values()) < 0.01, errors
    print("as one GPU", flush=True)


def on_the_first_gpu(comm):
    par.Group(comm)


def test_two_processes_on_one_gpu_are_named():
    pytest.importorskip("cupy")
    for error in launch(2, on_the_first_gpu, within=100):
        assert "ranks 0 and 1 both use the GPU" in str(error)


def test_a_gpu_is_named_once():
    pytest.importorskip("cupy")
    with pytest.raises(ValueError, match=r"names a GPU twice.*virtual"):
        par.Group([0, 0])
