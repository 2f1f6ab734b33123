"""The contract of ``shared_prefix=``: the result is that of sequences whose block tables begin with the prefix's pages,
on a CPU and on a GPU, for prefixes of any number of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from backends import backends
from decode_support import make_case

import cufa


def shared_case(dtype, **made):
    """(case over whole sequences, options of the call with the prefix apart): sequences 0, 2 and 3 share 3 pages, 1 has
    none."""
    case = make_case([70, 21, 55, 49], page_size=16, head_dim=64, dtype=dtype, **made)
    table, numbers = case.options["block_table"], np.array([0, -1, 0, 0])
    for b in (2, 3):
        table[b, :3] = table[0, :3]
    own = np.where(numbers[:, None] < 0, table, np.roll(table, -3, axis=1))
    new = 0 if "k_new" not in case.options else case.options["k_new"].shape[2]
    lengths = np.array(case.lengths) - new - np.where(numbers < 0, 0, 48)
    options = {**case.options, "block_table": own.astype(np.int32), "cache_seqlens": lengths.astype(np.int32)}
    return case, options | {"shared_prefix": ([table[0, :3].copy()], numbers)}


MADE = [{}, {"tokens": 2, "new": 1, "sink": np.float32([0, 1, -1, 2])}, {"fp8": True}]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("made", MADE, ids=str)
@backends("cpu", "gpu")
def test_as_if_each_sequence_had_the_prefix(backend, made, layout):
    for dtype in ("float16", "bfloat16"):
        case, options = shared_case(dtype, **made)
        arrays, _ = case.arguments(layout)
        for name in ("k_new", "v_new"):
            if name in options and layout == "bshd":
                options[name] = np.ascontiguousarray(options[name].swapaxes(1, 2))
        given = {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        arrays = [backend.array(x.copy()) for x in arrays]
        out = backend.poisoned(arrays[0].shape, arrays[0].dtype)
        how = {"layout": layout, "device": backend.call_device, "return_lse": True}
        got, lse = cufa.flash_decode(*arrays, out=out, **given, **how)
        assert got is out
        case.__dict__["bound"] = 1.5 * case.bound  # a part is rounded once more
        case.check(backend.host(got), backend.host(lse), layout)


BAD = {
    "must be (pages, numbers)": {"shared_prefix": [[1]]},
    "block_table is missing": {"shared_prefix": ([[0]], [0, 0]), "block_table": None},
    "there are 1": {"shared_prefix": ([[0]], [0, 1])},
    "-1 for no prefix": {"shared_prefix": ([[0]], [0])},
    "full pages": {"shared_prefix": ([[]], [0, 0])},
    "with window": {"shared_prefix": ([[0]], [0, 0]), "window": (3, 0)},
    "with invariant": {"shared_prefix": ([[0]], [0, 0]), "invariant": True},
}


@pytest.mark.parametrize("words", BAD)
def test_errors_name_the_argument_and_the_cure(words):
    q, k = np.zeros((2, 1, 1, 16), np.float32), np.zeros((4, 1, 8, 16), np.float32)
    options = {"block_table": [[1], [2]], "cache_seqlens": [3, 4], **BAD[words]}
    with pytest.raises((TypeError, ValueError)) as raised:
        cufa.flash_decode(q, k, k, **options)
    assert words in str(raised.value)
