"""The contract of ``shared_prefix=``: the result is that of sequences whose block tables begin with the prefix's pages,
on a CPU and on a GPU, for prefixes of any number of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from backends import backends
from decode_support import make_case

import cufa
from cufa.calls import shared_prefix
from cufa.calls.forward import flash_attention as attend


def shared_case(dtype, other, size=16, **made):
    """(case over whole sequences, options of the call with prefixes apart): sequences 0, 2 and 3 share 3 pages of
    ``size`` keys; 1 has prefix 1, of a page, or none (``other`` = -1)."""
    lengths = [size * 4 + 6, size + 5, size * 3 + 7, size * 3 + 1]
    case = make_case(lengths, page_size=size, head_dim=64, dtype=dtype, **made)
    table, numbers = case.options["block_table"], np.array([0, other, 0, 0])
    for b in (2, 3):
        table[b, :3] = table[0, :3]
    pages = table[0, :3].copy(), table[1, :1].copy()
    shared = np.array([0 if x < 0 else len(pages[x]) for x in numbers])
    own = np.array([np.roll(row, -n) for row, n in zip(table, shared, strict=True)])
    new = 0 if "k_new" not in case.options else case.options["k_new"].shape[2]
    lengths = np.array(case.lengths) - new - size * shared
    options = {**case.options, "block_table": own.astype(np.int32), "cache_seqlens": lengths.astype(np.int32)}
    return case, options | {"shared_prefix": (pages, numbers)}


MADE = [{}, {"tokens": 2, "new": 1, "sink": np.float32([0, 1, -1, 2])}, {"fp8": True}]


@pytest.mark.parametrize("splits", [0, 1, 2], ids="{} splits".format)
@pytest.mark.parametrize(("layout", "other"), [("bhsd", -1), ("bshd", 1)])
@pytest.mark.parametrize("made", MADE, ids=str)
@backends("cpu", "gpu")
def test_as_if_each_sequence_had_the_prefix(backend, made, layout, other, splits, monkeypatch):
    """0 splits: few rows, which flash_decode takes. Else flash_attention takes them, if the cache has q's dtype. 2
    splits: of a prefix of 3 tiles."""
    calls = []
    if splits:
        monkeypatch.setattr(shared_prefix, "_FEW_ROWS", 0)
        monkeypatch.setattr(shared_prefix, "_num_splits", lambda *_: splits)
    monkeypatch.setattr(
        shared_prefix,
        "flash_attention",
        lambda q, *x, **y: calls.append((q.shape, y["num_splits"])) or attend(q, *x, **y),
    )
    for dtype in ("float16", "bfloat16"):
        case, options = shared_case(dtype, other, 128 if splits > 1 else 16, **made)
        arrays, _ = case.arguments(layout)
        for name in ("k_new", "v_new"):
            if name in options and layout == "bshd":
                options[name] = np.ascontiguousarray(options[name].swapaxes(1, 2))
        given = {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        pages, numbers = options["shared_prefix"]
        given["shared_prefix"] = [backend.array(x) if splits else x for x in pages], numbers
        arrays = [backend.array(x.copy()) for x in arrays]
        out = backend.poisoned(arrays[0].shape, arrays[0].dtype)
        how = {"layout": layout, "device": backend.call_device, "return_lse": True}
        got, lse = cufa.flash_decode(*arrays, out=out, **given, **how)
        assert got is out
        case.__dict__["bound"] = 1.5 * case.bound  # a part is rounded once more
        case.check(backend.host(got), backend.host(lse), layout)
    rows = 6 * made.get("tokens", 1)
    expected = [((1, 2, n, 64), splits) for n in (rows, rows // 3)[: 2 if other > 0 else 1]]
    assert calls == ([] if made.get("fp8") or not splits else 2 * expected)


def test_splits_fill_the_multiprocessors():
    """64 sequences of 32 query and 8 key/value heads have 16 query blocks: 8 splits for 132 SMs. Blocks that fill the
    SMs need no splits, nor does a CPU. A split has at least one tile."""
    found = [
        shared_prefix._num_splits(*x) for x in ((256, 16, 132), (256, 128, 132), (256, 16, 1), (5, 1, 132))
    ]
    assert found == [8, 1, 1, 5]


BAD = {
    "must be (pages, numbers)": {"shared_prefix": [[1]]},
    "block_table is missing": {"shared_prefix": ([[0]], [0, 0]), "block_table": None},
    "there are 1": {"shared_prefix": ([[0]], [0, 1])},
    "-1 for no prefix": {"shared_prefix": ([[0]], [0])},
    "pages from -1 to 0": {"shared_prefix": ([[0, -1]], [0, 0])},
    "pages from 4 to 4, but k_cache has 4": {"shared_prefix": ([[4]], [0, 0])},
    "pages of float64": {"shared_prefix": ([[1.0]], [0, 0])},
    "full pages": {"shared_prefix": ([[]], [0, 0])},
    "with window": {"shared_prefix": ([[0]], [0, 0]), "window": (3, 0)},
    "with invariant": {"shared_prefix": ([[0]], [0, 0]), "invariant": True},
}


@pytest.mark.parametrize("words", BAD)
def test_errors_name_the_argument_and_the_cure(words):
    q, k = np.zeros((2, 1, 1, 16), np.float32), np.zeros((4, 1, 8, 16), np.float32)
    new = np.ones((2, 1, 1, 16), np.float32)
    options = {"block_table": [[1], [2]], "cache_seqlens": [3, 4], "k_new": new, "v_new": new, **BAD[words]}
    with pytest.raises((TypeError, ValueError)) as raised:
        cufa.flash_decode(q, k, k.copy(), **options)
    assert words in str(raised.value)
    assert not k.any()  # nothing is appended
