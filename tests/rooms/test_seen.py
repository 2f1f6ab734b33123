"""The short cut of repeated calls: what makes two calls alike, and overlaps that only addresses show.

Arrays here are CuPy's, over addresses that are never read: no GPU is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from support import changed

import cufa
from cufa.calls import arrays, dispatch
from cufa.calls import warm as seen
from cufa.calls.call import Call
from cufa.plan.operation import OPERATIONS, Operand
from cufa.problem.mask import CAUSAL, FULL
from cufa.problem.options import Options

cp = pytest.importorskip("cupy")


def array(address, shape=(2, 4, 8, 16), dtype=np.float16, device=0):
    memory = cp.cuda.UnownedMemory(address, 1 << 30, None, device)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))


Q, K, V, OUT = (array(n << 32) for n in range(1, 5))


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)


FORWARD, DECODE = OPERATIONS["forward"], OPERATIONS["decode"]
LENGTHS, TABLE = array(5 << 32, (2,), np.int32), array(6 << 32, (2, 3), np.int32)


def key(*given, options=("x",), operation=FORWARD):
    """Of a call on some of the operation's operands, the first ones."""
    _, found, addresses = seen.find(operation, pad(given, operation), options)
    assert (found is None) == (addresses == [])
    return found


def pad(given, operation=FORWARD):
    return (*given, *[None] * (len(operation.operands) - len(given)))


def test_only_calls_on_cupy_arrays_have_a_key():
    assert key(Q, K, None, V) is not None
    host = np.zeros((2, 4, 8, 16), np.float16)
    for given in ((host, K), (Q, host), (Q, K, V, host), (None, K), (Q, 3)):
        assert key(*given) is None
    assert key(Q, K, options=(["unhashable"],)) is None


def test_addresses_do_not_matter_but_alignment_does():
    same = key(Q, K, V, OUT)
    assert key(array(9 << 32), K, V, array(16)) == same
    for offset in (1, 2, 4, 8):
        moved = [array((9 << 32) + offset) if x is Q else x for x in (Q, K, V, OUT)]
        assert key(*moved) != same
        assert key(Q, K, V, array((9 << 32) + offset)) != same, "results are written in wide stores as well"


def test_small_arrays_do_not_hide_how_large_ones_are_aligned():
    """Lengths at 4 bytes past 16 used to share a key with queries there."""
    lengths = LENGTHS, array((5 << 32) + 4, (2,), np.int32)
    keys = [key(q, K, V, n, operation=DECODE) for q in (Q, array((9 << 32) + 4)) for n in lengths]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    for offset in (1, 2, 3):
        odd = key(Q, K, V, array((5 << 32) + offset, (2,), np.int32), operation=DECODE)
        assert odd not in keys, "refused: not taken for a call that was seen"
        assert odd != key(array((9 << 32) + offset), K, V, LENGTHS, operation=DECODE)


@pytest.mark.parametrize(
    "other",
    [
        (Q, K, V),
        (Q, K, None, OUT),
        (Q, K, None, V, OUT),
        (Q, None, K, V),
        (Q, K[:1], V, OUT),
        (Q, K, V[:, ::2], OUT),
        (Q, K.transpose(0, 2, 1, 3), V, OUT),
        (Q, array(2 << 32, dtype=np.int16), V, OUT),
        (Q, K, array(3 << 32, device=1), OUT),
        (Q, K, V, OUT[:, :, ::2]),
    ],
)
def test_calls_that_differ(other):
    assert key(*other) != key(Q, K, V, OUT)
    assert key(Q, K, V, OUT) != key(Q, K, V, OUT, options=("y",))
    assert key(Q, K, V, OUT, operation=changed(FORWARD, name="other")) != key(Q, K, V, OUT)


def test_the_wish_for_tf32_is_part_of_calls_on_float32(monkeypatch):
    wide = [array(n << 32, dtype=np.float32) for n in (1, 2, 3)]
    found = []
    for wish in ("0", "1"):
        monkeypatch.setenv("CUPY_TF32", wish)
        found.append((key(*wide), key(Q, K, V)))
    (one, half), (other, same) = found
    assert one != other and half == same


def test_strides_matter_where_the_shape_does_not_say_them():
    both = array(9 << 32, (2, 8, 8, 16))
    assert len({key(Q, x, V) for x in (K, both[:, :4], both[:, ::2], both[:, 1:5])}) == 3
    assert key(Q, both[:, :4], V) == key(Q, both[:, 4:], V)


def test_all_operands_of_an_operation_is_part_of_its_calls():
    """Nothing is listed by hand: another operand, or result, is one declaration."""
    bias = Operand("bias", stride="bias_stride")
    more = changed(FORWARD, operands=(FORWARD.operands[0], bias, *FORWARD.operands[1:]))
    without, given = (key(Q, x, K, V, OUT, operation=more) for x in (None, LENGTHS))
    assert without != given and key(Q, K, V, OUT) not in (without, given)


def test_what_is_forgotten_outlives_its_launches(monkeypatch):
    """Kernels that are queued read what the calls keep of masks."""
    monkeypatch.setattr(seen, "_calls", {})
    monkeypatch.setattr(seen, "_evicted", {})
    for i in range(seen._MAX_CALLS + 1):
        seen.remember((i,), i)
    assert list(seen._calls) == [(seen._MAX_CALLS,)] and len(seen._evicted) == seen._MAX_CALLS
    for i in range(seen._MAX_CALLS):
        seen.remember((-i - 1,), i)
    assert seen._MAX_CALLS in seen._evicted.values() and len(seen._evicted) == seen._MAX_CALLS


@pytest.fixture
def short_cut(monkeypatch):
    """How many calls of flash_attention were checked in full; nothing is launched."""
    checked = []

    def run_on_gpu(call, key, options):
        checked.append(call.check(on_gpu=True))
        seen.remember(key, lambda given, addresses: "short cut")
        return {"out": "long way"}

    monkeypatch.setattr(seen, "_calls", {})
    monkeypatch.setattr(dispatch, "run_on_gpu", run_on_gpu)
    return checked


@pytest.mark.parametrize("form", [int, np.bool_, np.array, np.int64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_in_other_words_takes_the_short_cut(short_cut, causal, form):
    cufa.flash_attention(Q, K, V, causal=form(causal))
    (_, problem), *_ = short_cut
    assert problem.mask is (CAUSAL if causal else FULL)
    assert cufa.flash_attention(Q, K, V, causal=causal) == "short cut"
    assert cufa.flash_attention(Q, K, V, causal=form(causal)) == "short cut"


NOT_FLAGS = (1.0, np.float32(1), 2, "True", None, [True], np.ones(1, bool), np.array(1.0), np.array(1))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        *(({"causal": True}, {"causal": x}) for x in NOT_FLAGS),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"scale": 1.0}, {"scale": 1 + 0j}),
    ],
    ids=str,
)
def test_what_equals_an_option_that_was_taken_is_refused_all_the_same(short_cut, good, bad):
    for _ in range(2):
        with pytest.raises(TypeError, match=next(iter(bad))):
            cufa.flash_attention(Q, K, V, **bad)
        cufa.flash_attention(Q, K, V, **good)
    assert len(short_cut) == 1


def test_masks_that_are_equal_take_the_short_cut(short_cut):
    for _ in range(2):
        cufa.flash_attention(Q, K, V, mask=cufa.masks.window(5, 0))
    assert len(short_cut) == 1
    cufa.flash_attention(Q, K, V, mask=cufa.masks.window(6, 0))
    cufa.flash_attention(Q, K, V, mask=cufa.masks.window(5, 0), softcap=2)
    assert len(short_cut) == 3


@dataclasses.dataclass(frozen=True)
class Toy(Call):
    """A call of as many inputs and results as are named, of which ``written`` are written to."""

    name = "toy"
    writes: tuple[str, ...] = ()
    log: list = dataclasses.field(default_factory=list)

    @property
    def written(self):
        return self.writes

    def check_memory(self, given):
        self.log.append(given)
        super().check_memory(given)


@pytest.fixture
def toy(monkeypatch, no_device):
    """seen_call(inputs, results, **more): a call of an operation with those operands that was checked, and the
    addresses that were launched. Arrays that it allocates stand at multiples of 1 << 50."""

    def seen_call(inputs, results, wanted=None, **more):
        operands = [Operand(name, stride="x_stride") for name in inputs]
        operands += [
            Operand(name, result=True, like=next(iter(inputs)), stride="o_stride") for name in results
        ]
        operation = changed(FORWARD, name="toy", operands=tuple(operands))
        monkeypatch.setitem(OPERATIONS, "toy", operation)
        call, launched = Toy(inputs, {n: results[n] for n in wanted or results}, Options(), **more), []
        problem = SimpleNamespace(v_dim=next(iter(inputs.values())).shape[-1])
        made = call.allocate(problem, lambda shape, dtype: array(1 << 49, shape, dtype))
        found, new = seen.WarmCall(launched.append, call, made), itertools.count(1)
        found._allocate = lambda shape, dtype: array(next(new) << 50, shape, dtype)

        def run(*given):
            _, _, addresses = seen.find(operation, given, ())
            return found(given, addresses)

        return run, launched, call.log

    return seen_call


def test_launch_takes_all_addresses(toy):
    run, launched, _ = toy({"q": Q, "k": K, "new": None, "v": V}, {"out": OUT, "lse": None}, wanted=["out"])
    elsewhere = array(77 << 32)
    assert run(Q, elsewhere, None, V, OUT, None) is OUT
    assert launched == [[1 << 32, 77 << 32, 0, 3 << 32, 4 << 32, 0]], "0: not there, or not asked for"


def test_results_of_any_number(toy):
    """As many as the operation has: given, allocated like their operand, or not asked for."""
    run, launched, _ = toy({"q": Q, "k": K}, {"dq": None, "dk": OUT, "dv": None})
    dq, dk, dv = run(Q, K, None, OUT, None)
    assert dk is OUT and dq.shape == dv.shape == Q.shape and dq.dtype == dv.dtype == Q.dtype
    assert launched == [[1 << 32, 2 << 32, 1 << 50, 4 << 32, 2 << 50]]
    assert [x.data.ptr for x in (dq, dv)] == [1 << 50, 2 << 50]
    run, launched, _ = toy({"q": Q, "k": K}, {"dq": None, "dk": None, "dv": None}, wanted=["dk"])
    assert run(Q, K, None, None, None).data.ptr == 1 << 50
    assert launched == [[1 << 32, 2 << 32, 0, 1 << 50, 0]]


def test_overlaps_are_checked_once_per_relative_offset(toy):
    run, _, checked = toy({"q": Q, "k": K, "v": V}, {"out": OUT}, writes=("k", "v"))
    run(Q, K, V, OUT)
    assert not checked, "apart"
    size = 2 * 4 * 8 * 16 * 2
    for distance in (size, -size, size + 2):
        run(Q, K, array((2 << 32) + distance), OUT)
    assert not checked, "side by side"
    for distance in (0, size - 2, 2 - size, 5):
        for base in (1 << 40, 1 << 41):
            mine = array(base + distance)
            run(Q, array(base), mine, OUT)
        assert len(checked) == 1 and checked.pop()["v"].data.ptr == (1 << 40) + distance
    with pytest.raises(ValueError, match="out overlaps q"):
        run(array((4 << 32) + 2), K, V, OUT)
    assert len(checked) == 1, "out is written to as well"


@pytest.mark.parametrize("given", [(Q, array((4 << 32) + 64), OUT, None), (Q, K, OUT, array((4 << 32) + 64))])
def test_an_overlap_that_is_refused_is_refused_again(toy, given):
    """Of a result with an input, or with another result."""
    run, launched, _ = toy({"q": Q, "k": K}, {"dk": OUT, "dv": V if given[3] is not None else None})
    for _ in range(3):
        with pytest.raises(ValueError, match=r"dk overlaps (k|dv)"):
            run(*given)
    assert not launched


def test_interleaved_views_are_apart(toy):
    both = array(1 << 40, (2, 2, 4, 8, 16))
    run, launched, _ = toy({"q": Q, "k": both[:, 0], "v": V}, {"out": both[:, 1]})
    run(Q, both[:, 0], V, both[:, 1])
    with pytest.raises(ValueError, match="out overlaps k"):
        run(Q, both[:, 0], V, both[:, 0])
    assert len(launched) == 1
    assert arrays.shares_memory(both, both[1:, :, 2])
    assert not arrays.shares_memory(both[:, 1], both[:, 0, ::2])


@pytest.mark.parametrize("given", [False, True])
def test_another_device_is_made_current(toy, monkeypatch, given):
    """For what is allocated and for the launch."""
    at = []

    @contextlib.contextmanager
    def device(number):
        at.append(number)
        yield
        at.append("left")

    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: at[-1] if at else 3)
    monkeypatch.setattr(cp.cuda, "Device", device)
    run, launched, _ = toy({"q": Q}, {"out": OUT if given else None})
    run(Q, OUT if given else None)
    assert len(launched) == 1 and at == [0, "left"]
