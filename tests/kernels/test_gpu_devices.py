"""Several GPUs in one process: arrays are computed where they lie, whatever device is current."""

from __future__ import annotations

import numpy as np
import pytest
from decode_support import make_case
from held_stream import hold
from support import assert_attention, forward_operands, in_threads, make_inputs, make_problem

import cufa
from cufa.plan.planner import make_plan

pytestmark = pytest.mark.gpu

ALGORITHMS = ("auto", "fa2", "fa1", "naive")


@pytest.fixture(scope="module")
def cp():
    cupy = pytest.importorskip("cupy")
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs: there is {count}")
    return cupy


@pytest.fixture(autouse=True)
def on_first_device(cp):
    with cp.cuda.Device(0):
        yield


def move(cp, device, arrays):
    with cp.cuda.Device(device):
        return [cp.asarray(x) for x in arrays]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arrays_of_another_device_than_the_current_one(cp, algorithm, dtype):
    host = make_inputs(2, 4, 2, 130, 200, 64, dtype)
    inputs = move(cp, 1, host)
    for _ in range(2):  # the second call takes the short cut
        out, lse = cufa.flash_attention(*inputs, causal=True, algorithm=algorithm, return_lse=True)
        assert (out.device.id, lse.device.id) == (1, 1)
        assert cp.cuda.runtime.getDevice() == 0
        assert_attention(out.get(), lse.get(), *host, causal=True)


def test_same_shapes_on_both_devices(cp):
    """Code, bindings and remembered calls of one device are never used on the other."""
    host = [make_inputs(1, 4, 2, 150, 150, 128, "float16", seed=seed) for seed in range(2)]
    inputs = [move(cp, device, host[device]) for device in range(2)]
    for current in (0, 1, 0):
        with cp.cuda.Device(current):
            for device in (0, 1):
                out = cufa.flash_attention(*inputs[device])
                assert out.device.id == device
                assert_attention(out.get(), None, *host[device])


def test_runs_on_the_stream_of_the_arrays_device(cp):
    """The current stream is a property of a device: the other one's is left alone."""
    host = make_inputs(1, 8, 8, 2048, 2048, 64, "float16")
    q, k, v = move(cp, 1, host)
    expected = cufa.flash_attention(q, k, v).get()
    with cp.cuda.Device(1):
        stream = cp.cuda.Stream(non_blocking=True)
        q[...] = 0
        ready = cp.asarray(host[0])
        cp.cuda.Device(1).synchronize()
        with stream:
            release = hold(cp)
            q[...] = ready
            with cp.cuda.Device(0):
                out = cufa.flash_attention(q, k, v)
            assert not stream.done, "flash_attention synchronised"
            release()
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), expected)


def test_operands_on_two_devices_are_refused(cp):
    host = make_inputs(1, 1, 1, 16, 16, 64, "float16")
    (q, k, _), (_, _, v) = move(cp, 0, host), move(cp, 1, host)
    with pytest.raises(ValueError, match=r"v is on GPU 1 but q is on GPU 0"):
        cufa.flash_attention(q, k, v)
    with pytest.raises(ValueError, match=r"out is on GPU 1 but q is on GPU 0"):
        cufa.flash_attention(q, k, k, out=v)


def test_numpy_goes_to_the_current_device(cp):
    host = make_inputs(1, 2, 2, 64, 64, 64, "float16")
    pool = cp.get_default_memory_pool()

    def held() -> list[int]:
        sizes = []
        for device in range(2):
            with cp.cuda.Device(device):
                sizes.append(pool.total_bytes())
        return sizes

    with cp.cuda.Device(1):
        pool.free_all_blocks()
        first, second = held()
        assert_attention(cufa.flash_attention(*host, device="cuda"), None, *host)
        assert cp.cuda.runtime.getDevice() == 1
        now_first, now_second = held()
    assert now_first == first and now_second > second


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_threads_on_two_devices(cp, algorithm):
    """Each thread with its own device, stream and shapes, compiling and launching at the same time."""

    def work(i: int) -> None:
        device = i % 2
        host = make_inputs(1, 4, 2, 100 + 16 * (i // 2), 130, 72, "bfloat16", seed=i)
        with cp.cuda.Device(device), cp.cuda.Stream(non_blocking=True) as stream:
            inputs = [cp.asarray(x) for x in host]
            for _ in range(20):
                out = cufa.flash_attention(*inputs, causal=True, algorithm=algorithm)
            stream.synchronize()
            assert out.device.id == device
            assert_attention(out.get(), None, *host, causal=True)

    in_threads(work, 8)


def test_one_thread_visits_both_devices_by_turns(cp):
    host = make_inputs(1, 2, 2, 64, 64, 64, "float16")
    inputs = [move(cp, device, host) for device in range(2)]
    outs = [cufa.flash_attention(*inputs[i % 2]) for i in range(40)]
    assert [out.device.id for out in outs] == [0, 1] * 20
    for out in outs[1:]:
        np.testing.assert_array_equal(out.get(), outs[0].get())


def test_prepared_plans_launch_on_their_device(cp):
    """What benchmarks and traces use: compiled, bound and launched while another device is current."""
    from cufa.run.cuda import backend as cuda

    host = make_inputs(1, 2, 2, 130, 130, 64, "float16")
    q, k, v = move(cp, 1, host)
    prepared = cuda.prepare(make_plan(make_problem(*host), cuda.device(1)), 1)
    with cp.cuda.Device(1):
        given = forward_operands(q, k, v, cp, lse=False)
    cuda.Binding(prepared, given).launch(cuda.addresses(given))
    assert_attention(given["out"].get(), None, *host)


@pytest.mark.parametrize("schedule", ["fixed", "balanced"])
def test_decoding_on_another_device(cp, schedule):
    case = make_case([300, 0, 1, 257], head_dim=64, page_size=16)
    arrays, options = case.arguments(schedule=schedule, num_splits=3)
    q, k, v, *rest = move(cp, 1, [*arrays, *(x for x in options.values() if isinstance(x, np.ndarray))])
    names = [name for name, x in options.items() if isinstance(x, np.ndarray)]
    options |= dict(zip(names, rest, strict=True))
    for _ in range(2):
        out, lse = cufa.flash_decode(q, k, v, **options, return_lse=True)
        assert (out.device.id, lse.device.id) == (1, 1)
        case.check(out.get(), lse.get())
