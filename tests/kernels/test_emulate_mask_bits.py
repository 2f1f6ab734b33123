"""The kernels that make bits of masks, on the CPU executor: the same words as NumPy's."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cufa import masks
from cufa.build.score_text import change_text
from cufa.kernels import Launch, mask_bits
from cufa.problem.where import where_booleans
from cufa.run.emulate import build
from cufa.run.emulate.launch import Execution, execute
from cufa.run.emulate.memory import GlobalArray

RNG = np.random.default_rng(1)
IDS = np.sort(RNG.integers(0, 4, (2, 131)), axis=1)[:, ::-1]
SEEN = RNG.random((2, 1, 50, 67)) < 0.5
NEAR = masks.where(lambda b, h, i, j: abs(i // 8 - j // 8) + abs(i % 8 - j % 8) <= 2 + h)


def run(entry, text, arrays, by_row, out, sizes, edges=(), sequences=None):
    address = build.kernel(mask_bits.SOURCE, {}, [entry], True, (mask_bits.PARAMETER,), text)[entry]
    pointers = [x.ctypes.data for x in arrays]
    given = 0 if by_row is None else by_row.ctypes.data
    if sequences is None:
        sequences = len(edges[0]) - 1 if edges else 0
    places = [x.ctypes.data for x in edges]
    numbers = mask_bits.numbers(arrays, pointers, given, out.ctypes.data, sizes, places, sequences)
    members = (ctypes.c_int64 * mask_bits.NUM_MEMBERS)(*numbers)
    launch = Launch(entry, (mask_bits.blocks(sizes), 1, 1), mask_bits.WARPS * 32, 0)
    read = [x if x.base is None else x.base for x in arrays] + ([] if by_row is None else [by_row]) + [*edges]
    memory = [GlobalArray(f"array {n}", x, False) for n, x in enumerate(read)] + [
        GlobalArray("out", out, True)
    ]
    _, findings = execute(address, launch, [members], memory, Execution("checked"))
    assert not findings


@pytest.mark.emulate
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (masks.where(lambda b, h, i, j, ids: ids[b, i] == ids[b, j], ids=IDS), (2, 1, 131, 131)),
        (masks.where(lambda b, h, i, j, ids, delta: ids[b, j] + i + delta > j, ids=IDS), (2, 1, 33, 96)),
        (NEAR & masks.window(20, 5) | ~NEAR & masks.causal(), (1, 3, 65, 70)),
        (masks.where(lambda b, h, i, j: True, within=masks.documents([10, 20, 34])), (1, 1, 64, 64)),
        (where_booleans(SEEN[:, :, :1]), (2, 1, 50, 67)),
        (where_booleans(SEEN[..., ::-1]), (2, 1, 50, 67)),
        (NEAR, (1, 2, 1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_words_are_those_of_numpy(mask, sizes):
    batch, heads, rows, keys = sizes
    expected = mask.words(sizes)
    seen = np.unpackbits(expected.view(np.uint8), axis=-1, bitorder="little")[..., :keys].astype(bool)
    for b, h in np.ndindex(batch, heads):
        np.testing.assert_array_equal(seen[b, h], mask.dense(rows, keys, b, h))
    found = np.full_like(expected, -1)
    run("mask_bits", change_text(mask.change, *sizes), [*mask.arrays.values()], None, found, sizes)
    np.testing.assert_array_equal(found, expected)
    by_key = np.full((batch, heads, keys, -(-rows // 32)), -1, np.int32)
    run("transpose_bits", "", [], found, by_key, sizes)
    turned = np.unpackbits(by_key.view(np.uint8), axis=-1, bitorder="little")[..., :rows]
    np.testing.assert_array_equal(turned.swapaxes(2, 3), seen)


@pytest.mark.emulate
def test_words_of_packed_sequences_are_those_of_numpy():
    edges = [np.array(x, np.int32) for x in ([0, 40, 40, 100, 131], [0, 33, 50, 131, 131])]
    mask = masks.where(
        lambda b, h, i, j, ids, delta: ids[b, j] + i + delta > j - h, ids=np.vstack([IDS, IDS])
    )
    totals, sizes = (140, 150), (4, 3, 60, 81)
    expected = mask.packed(sizes, edges, totals).by_row.values
    found = np.full_like(expected, -1)
    matrix = 1, 3, *totals
    run(
        "mask_bits",
        change_text(mask.change, 4, 3, *totals),
        [*mask.arrays.values()],
        None,
        found,
        matrix,
        edges,
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.emulate
def test_words_of_each_packed_sequence_are_those_of_numpy():
    edges = [np.array(x, np.int32) for x in ([0, 40, 40, 100, 131], [0, 33, 50, 131, 131])]
    mask = masks.where(
        lambda b, h, i, j, ids, delta: ids[b, j] + i + delta > j - h, ids=np.vstack([IDS, IDS])
    )
    lengths, sizes = tuple(zip(*np.diff(edges).tolist(), strict=True)), (4, 3, 60, 81)
    expected = mask.by_sequence(lengths, sizes, edges).by_row.values
    found, text = np.full_like(expected, -1), change_text(mask.change, *sizes)
    run("mask_bits", text, [*mask.arrays.values()], None, found, sizes, edges, sequences=0)
    np.testing.assert_array_equal(found, expected)
